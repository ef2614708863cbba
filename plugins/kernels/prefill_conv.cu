// SPDX-License-Identifier: Apache-2.0
//
// Causal conv with SiLU over packed sequences, from the windows in their slots, which end up behind
// their last tokens: conv.cuh has the equation and its bits.
//
// Floor. Bytes: x in, y out, windows in and out: 31 us for 4,096 tokens of 8,192 channels of 16
// bits at 4.33 TB/s. Operations, for each result of 16 bits: 1 to unpack, 4 multiply-adds, 5 for
// SiLU, half for packing and one for the rest: 11.5 instructions, 13 us of all issue slots, and 2
// on the unit of special functions, which takes them for 17.6 us.
//
// Columns (the kernel for width 4 and 16-byte addresses; one launch). A warp owns 32 columns of 16
// bytes over a run of tokens, wherever sequences begin in it. A lane copies its own columns of the
// next 12 tokens to a ring in shared memory while it computes 4: no barrier, and 6 KiB a warp, 120
// KiB a multiprocessor on their way. The last 3 rows slide by in registers, so that each is
// unpacked once. Runs need no window and no slot: the first 3 tokens of a sequence, whose taps are
// in the window, belong to a warp of their own (the sequence's edge), which also writes the window
// when it has read it. Nobody else touches it, so there is nothing to wait for.
//
// General. A thread owns a channel, or those of 16 bytes, over a tile of tokens; windows are
// written by a second launch, when all have read them.

#include "conv.cuh"

namespace treewy {

// ------------------------------------------------------------------ columns

namespace prefill_columns {

constexpr int kWarpsOfBlock = 4;
constexpr int kBlocksOfProcessor = 4;
constexpr int kStageTokens = 4;
constexpr int kAhead = 3;            // stages on their way
constexpr int kRing = kAhead + 1;    // and the one that is being computed
constexpr int kMaxTokensOfRun = 32;  // a bit each
constexpr int kMinTokensOfRun = 8;
constexpr int64_t kEnoughWarps = 2560;

struct PrefillColumnsWork {
    treewy_prefill_conv_params conv;
    int columns;  // warps side by side
    int run;      // tokens of a run, a multiple of kStageTokens
    int64_t runs;
    int x_step;  // bytes from token to token
    int y_step;
    int window_step;
};

// Which tokens of a run get a result, and which zeros: a bit each. The first of a sequence get
// theirs from its edge.
struct RunMasks {
    uint32_t results;
    uint32_t zeros;
};

__device__ __forceinline__ RunMasks find_masks(const treewy_packed& packed, int64_t first,
                                               int count, int lane) {
    bool result = false, zero = false;
    if (lane < count) {
        const int64_t token = first + lane;
        const int sequence = find_sequence(packed.cu_seqlens, packed.batch, token);
        zero = sequence < 0 || !is_live_slot(packed.slot[sequence], packed.num_slots);
        if (!zero) {
            const Span span = sequence_span(packed.cu_seqlens, sequence, packed.tokens);
            result = token - span.start >= kWindowRows;
        }
    }
    return {__ballot_sync(kAllLanes, result), __ballot_sync(kAllLanes, zero)};
}

// Tokens [first, first + count), `count` at most kMaxTokensOfRun; x and y are those of the first.
template <typename T>
__device__ __forceinline__ void conv_run(const treewy_packed& packed, const ColumnFilter<T>& filter,
                                         const ColumnRows& x, const ColumnRows& y, int64_t first,
                                         int count, bool works, unsigned char* ring) {
    const auto copy_stage = [&](int stage) {
        unsigned char* to = ring + stage % kRing * kStageTokens * kRowBytes;
#pragma unroll
        for (int i = 0; i < kStageTokens; ++i) {
            const int token = stage * kStageTokens + i;
            if (works && token < count) copy_async(to + i * kRowBytes, x[token]);
        }
        commit_copies();
    };
#pragma unroll
    for (int stage = 0; stage < kAhead; ++stage) copy_stage(stage);
    // The rows before the run, of whatever sequence: results use those of their own alone.
    SlidingTaps<T> taps{};
#pragma unroll
    for (int j = 1; j < kColumnWidth; ++j) {
        const int token = j - kColumnWidth;
        if (works && first + token >= 0) taps.tap[j] = unpack<T>(load_column(x[token]));
    }
    const RunMasks masks = find_masks(packed, first, count, static_cast<int>(threadIdx.x) % kWarp);
    for (int stage = 0; stage * kStageTokens < count; ++stage) {
        wait_copies<kAhead - 1>();
        copy_stage(stage + kAhead);  // where the stage before this one was
        const unsigned char* from = ring + stage % kRing * kStageTokens * kRowBytes;
#pragma unroll
        for (int i = 0; i < kStageTokens; ++i) {
            const int token = stage * kStageTokens + i;
            if (!works || token >= count) break;
            taps.push(unpack<T>(load_column(from + i * kRowBytes)));
            if (masks.results >> token & 1) {
                store_column(y[token], taps.conv(filter));
            } else if (masks.zeros >> token & 1) {
                store_column(y[token], make_uint4(0, 0, 0, 0));
            }
        }
    }
}

// The first tokens of a sequence and its window; x, y and window are its first rows.
template <typename T>
__device__ __forceinline__ void conv_edge(const ColumnFilter<T>& filter, const ColumnRows& x,
                                          const ColumnRows& y, const ColumnRows& window,
                                          int64_t length) {
    uint4 before[kWindowRows], own[kWindowRows], kept[kWindowRows];
    const int count = static_cast<int>(min(length, int64_t{kWindowRows}));
    // Row i of the new window is row length + i of (old window, tokens).
    unsigned char* last = x.row0 + (length - kWindowRows) * x.step;
#pragma unroll
    for (int i = 0; i < kWindowRows; ++i) {
        before[i] = load_column(window[i]);
        own[i] = i < count ? load_column(x[i]) : make_uint4(0, 0, 0, 0);
        kept[i] = load_column(count + i < kWindowRows ? window[count + i] : last + i * x.step);
    }
    SlidingTaps<T> taps{};
#pragma unroll
    for (int i = 0; i < kWindowRows; ++i) taps.push(unpack<T>(before[i]));
#pragma unroll
    for (int i = 0; i < kWindowRows; ++i) {
        if (i >= count) break;
        taps.push(unpack<T>(own[i]));
        store_column(y[i], taps.conv(filter));
    }
#pragma unroll
    for (int i = 0; i < kWindowRows; ++i) store_column(window[i], kept[i]);
}

template <typename T>
__global__ void __launch_bounds__(kWarpsOfBlock* kWarp, kBlocksOfProcessor)
    prefill_conv_columns(const __grid_constant__ PrefillColumnsWork p) {
    constexpr int kVec = kPer16Bytes<T>;
    __shared__ __align__(16) unsigned char ring_s[kWarpsOfBlock][kRing * kStageTokens * kRowBytes];
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int64_t task = static_cast<int64_t>(blockIdx.x) * kWarpsOfBlock + warp;
    const int channel = (static_cast<int>(task % p.columns) * kWarp + lane) * kVec;
    const int64_t edges = p.conv.packed.batch, index = task / p.columns;
    if (index >= edges + p.runs) return;
    const bool works = channel < p.conv.channels;
    ColumnWeights weights{};
    if (works) {
        weights.load(static_cast<const T*>(p.conv.weights.weight) +
                     static_cast<int64_t>(channel) * kColumnWidth);
    }
    ColumnFilter<T> filter;
    filter.set(weights, p.conv.weights.bias, channel);
    const treewy_packed& packed = p.conv.packed;
    const bool is_edge = index < edges;
    const int sequence = is_edge ? static_cast<int>(index) : 0;
    Span span = {(index - edges) * p.run, packed.tokens};
    if (is_edge) span = sequence_span(packed.cu_seqlens, sequence, packed.tokens);
    const ColumnRows x(static_cast<const T*>(p.conv.x) + span.start * p.conv.x_stride + channel,
                       p.x_step);
    const ColumnRows y(static_cast<T*>(p.conv.y) + span.start * p.conv.y_stride + channel,
                       p.y_step);
    const int64_t length = span.stop - span.start;
    if (is_edge) {
        const int64_t slot = packed.slot[sequence];
        if (!works || length == 0 || !is_live_slot(slot, packed.num_slots)) return;
        const T* window =
            static_cast<T*>(p.conv.conv_state) + slot * p.conv.state_stride[0] + channel;
        conv_edge(filter, x, y, ColumnRows(window, p.window_step), length);
    } else {
        conv_run(packed, filter, x, y, span.start, static_cast<int>(min(length, int64_t{p.run})),
                 works, ring_s[warp] + 16 * lane);
    }
}

template <typename T>
treewy_status run_columns(const char* name, const treewy_prefill_conv_params& p,
                          treewy_stream stream) {
    constexpr int kBytes = static_cast<int>(sizeof(T));
    PrefillColumnsWork work{p,
                            channel_blocks(p.channels, kWarp, kPer16Bytes<T>),
                            0,
                            0,
                            static_cast<int>(p.x_stride) * kBytes,
                            static_cast<int>(p.y_stride) * kBytes,
                            static_cast<int>(p.state_stride[1]) * kBytes};
    const int64_t tokens = p.packed.tokens * work.columns / kEnoughWarps;
    work.run = static_cast<int>(tokens < kMinTokensOfRun
                                    ? kMinTokensOfRun
                                    : (tokens < kMaxTokensOfRun ? tokens : kMaxTokensOfRun));
    work.run -= work.run % kStageTokens;
    work.runs = ceil_div(p.packed.tokens, work.run);
    const int64_t warps = (p.packed.batch + work.runs) * work.columns;
    return launch(name, prefill_conv_columns<T>, ceil_div(warps, kWarpsOfBlock),
                  kWarpsOfBlock * kWarp, 0, stream, work);
}

}  // namespace prefill_columns

// ------------------------------------------------------------------ general

namespace {

constexpr int kThreads = 128;
constexpr int kTokensOfBlock = 32;

struct PrefillConvWork {
    treewy_prefill_conv_params conv;
    int channel_blocks;
};

// Outputs of a tile of tokens; reads the windows, which save_windows changes in a later launch.
template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads)
    prefill_conv(const __grid_constant__ PrefillConvWork p) {
    constexpr int kMaxWidth = TREEWY_MAX_CONV_WIDTH;
    __shared__ int64_t start_s[kTokensOfBlock];
    __shared__ int64_t slot_s[kTokensOfBlock];
    const treewy_packed& packed = p.conv.packed;
    const int channel_block = static_cast<int>(blockIdx.x % p.channel_blocks);
    const int64_t first = static_cast<int64_t>(blockIdx.x / p.channel_blocks) * kTokensOfBlock;
    const int count = static_cast<int>(min(packed.tokens - first, int64_t{kTokensOfBlock}));
    for (int i = threadIdx.x; i < count; i += kThreads) {
        const int sequence = find_sequence(packed.cu_seqlens, packed.batch, first + i);
        slot_s[i] = -1;
        start_s[i] = 0;
        if (sequence >= 0) {
            const int64_t slot = packed.slot[sequence];
            if (is_live_slot(slot, packed.num_slots)) slot_s[i] = slot;
            start_s[i] = sequence_span(packed.cu_seqlens, sequence, packed.tokens).start;
        }
    }
    __syncthreads();
    const int channel = (channel_block * kThreads + static_cast<int>(threadIdx.x)) * kVec;
    if (channel >= p.conv.channels) return;

    const int width = p.conv.weights.width;
    const T* x = static_cast<const T*>(p.conv.x) + channel;
    T* y = static_cast<T*>(p.conv.y) + channel;
    Filter<kVec> filter;
    filter.load(p.conv.weights, 0, 0, channel);
    Channels<kVec> taps[kMaxWidth];  // oldest first; the token's own at width - 1
    bool follows = false;            // taps hold the token before this one and its own taps
    for (int i = 0; i < count; ++i) {
        const int64_t token = first + i, slot = slot_s[i], start = start_s[i];
        Channels<kVec> sum{};
        if (slot < 0) {
            follows = false;
        } else {
            if (follows && token != start) {
#pragma unroll
                for (int j = 0; j + 1 < kMaxWidth; ++j) taps[j] = taps[j + 1];
            } else {
                const T* window = static_cast<const T*>(p.conv.conv_state) +
                                  slot * p.conv.state_stride[0] + channel;
#pragma unroll
                for (int j = 0; j + 1 < kMaxWidth; ++j) {
                    if (j + 1 >= width) break;
                    const int64_t from = token - (width - 1) + j;
                    const int64_t before = from - start;  // negative: a row of the window
                    taps[j] = load_channels<kVec>(
                        before >= 0 ? x + from * p.conv.x_stride
                                    : window + (width - 1 + before) * p.conv.state_stride[1]);
                }
            }
            follows = true;
            const Channels<kVec> own = load_channels<kVec>(x + token * p.conv.x_stride);
#pragma unroll
            for (int j = 0; j < kMaxWidth; ++j) {
                if (j == width - 1) taps[j] = own;
            }
#pragma unroll
            for (int j = 0; j < kMaxWidth; ++j) {
                if (j < width) filter.add(j, taps[j], &sum);
            }
            filter.template finish<T>(&sum);
        }
        store_channels(y + token * p.conv.y_stride, sum);
    }
}

// Windows after the last tokens: rows of (old window, tokens), all read before any is written.
template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads)
    save_windows(const __grid_constant__ PrefillConvWork p) {
    constexpr int kMaxWidth = TREEWY_MAX_CONV_WIDTH;
    const treewy_packed& packed = p.conv.packed;
    const int channel_block = static_cast<int>(blockIdx.x % p.channel_blocks);
    const int sequence = static_cast<int>(blockIdx.x / p.channel_blocks);
    const int channel = (channel_block * kThreads + static_cast<int>(threadIdx.x)) * kVec;
    const int64_t slot = packed.slot[sequence];
    if (channel >= p.conv.channels || !is_live_slot(slot, packed.num_slots)) return;
    const Span span = sequence_span(packed.cu_seqlens, sequence, packed.tokens);
    if (span.stop == span.start) return;

    const int width = p.conv.weights.width;
    const T* x = static_cast<const T*>(p.conv.x) + channel;
    T* window = static_cast<T*>(p.conv.conv_state) + slot * p.conv.state_stride[0] + channel;
    Vec<T, kVec> kept[kMaxWidth - 1];
#pragma unroll
    for (int j = 0; j < kMaxWidth - 1; ++j) {
        if (j >= width - 1) break;
        const int64_t from = span.stop - (width - 1) + j;
        const int64_t before = from - span.start;
        kept[j] =
            load_vec<kVec>(before >= 0 ? x + from * p.conv.x_stride
                                       : window + (width - 1 + before) * p.conv.state_stride[1]);
    }
#pragma unroll
    for (int j = 0; j < kMaxWidth - 1; ++j) {
        if (j >= width - 1) break;
        store_vec<kVec>(window + j * p.conv.state_stride[1], kept[j]);
    }
}

template <typename T, int kVec>
treewy_status run_general(const char* name, const treewy_prefill_conv_params& p,
                          treewy_stream stream) {
    const PrefillConvWork work{p, channel_blocks(p.channels, kThreads, kVec)};
    const int64_t tiles = ceil_div(p.packed.tokens, kTokensOfBlock);
    const treewy_status status =
        launch(name, prefill_conv<T, kVec>, tiles * work.channel_blocks, kThreads, 0, stream, work);
    if (status != TREEWY_OK) return status;
    return launch(name, save_windows<T, kVec>, int64_t{p.packed.batch} * work.channel_blocks,
                  kThreads, 0, stream, work);
}

treewy_status run_prefill_conv(const char* name, const treewy_prefill_conv_params& p,
                               treewy_stream stream) {
    const int64_t strides[] = {p.x_stride}, y_strides[] = {p.y_stride};
    const bool vectors = p.channels % (16 / dtype_bytes(p.dtype)) == 0 &&
                         is_vector_layout(p.x, p.dtype, strides) &&
                         is_vector_layout(p.y, p.dtype, y_strides) &&
                         is_vector_layout(p.conv_state, p.dtype, p.state_stride);
    return with_type(p.dtype, [&](auto type) {
        using T = decltype(type);
        if (!vectors) return run_general<T, 1>(name, p, stream);
        if (!is_column_filter(p.weights, p.dtype) ||
            !has_short_rows(p.x_stride, p.dtype, prefill_columns::kMaxTokensOfRun) ||
            !has_short_rows(p.y_stride, p.dtype, prefill_columns::kMaxTokensOfRun) ||
            !has_short_rows(p.state_stride[1], p.dtype, kWindowRows)) {
            return run_general<T, kPer16Bytes<T>>(name, p, stream);
        }
        return prefill_columns::run_columns<T>(name, p, stream);
    });
}

}  // namespace
}  // namespace treewy

extern "C" treewy_status treewy_prefill_conv(const treewy_prefill_conv_params* params,
                                             treewy_stream stream) {
    const char* name = "prefill_conv";
    if (params == nullptr) return treewy::fail_null(name);
    const treewy_prefill_conv_params& p = *params;
    if (p.packed.batch == 0 || p.packed.tokens == 0) return TREEWY_OK;
    treewy_status status = treewy::check_packed(name, p.packed);
    if (status == TREEWY_OK) {
        status = treewy::check_conv(name, p.dtype, p.channels, p.weights.width);
    }
    if (status == TREEWY_OK) status = treewy::check_weights(name, p.weights);
    if (status == TREEWY_OK) status = treewy::check_pointers(name, p.x, p.y, p.conv_state);
    return status == TREEWY_OK ? treewy::run_prefill_conv(name, p, stream) : status;
}
