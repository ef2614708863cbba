// SPDX-License-Identifier: Apache-2.0
//
// Causal conv with SiLU along paths of a tree, and over packed sequences; commit of its windows.
//
//   y_t = silu(bias + sum over j < W of weight[:, j] x[tap j of t]),  channel by channel
//
// Tap W-1 is the node itself, the one before it its parent, and so on up the path; before the root
// come the rows of the window, newest first. Products are rounded, then added from the oldest tap
// to the node: one order, so that a path gives the same bits in whatever tree it lies, and
// the bits of the torch reference up to SiLU.
//
// Threads. A thread owns the channels of 16 bytes and keeps their weights in registers, over a run
// of nodes (or tokens) of one row. Which rows the taps are is worked out once a block. Where
// pointers or strides are not multiples of 16 bytes, a thread owns one channel.
//
// Floor. Bytes: x in and y out once; the taps of neighbours come from L1. At 16 nodes and 8,192
// channels of 16 bits that is 512 KiB a row. Operations: 2 W + one exponential a value.

#include "device.cuh"
#include "silu.cuh"

namespace treewy {
namespace {

constexpr int kThreads = 128;
constexpr int kMaxNodesOfBlock = 16;
constexpr int kTokensOfBlock = 32;
constexpr int64_t kEnoughBlocks = 1024;  // several for every multiprocessor

template <int kVec>
struct Channels {
    float x[kVec];
};

template <int kVec, typename T>
__device__ __forceinline__ Channels<kVec> load_channels(const T* from) {
    const Vec<T, kVec> raw = load_vec<kVec>(from);
    Channels<kVec> out;
#pragma unroll
    for (int i = 0; i < kVec; ++i) out.x[i] = as_float(raw.x[i]);
    return out;
}

template <int kVec, typename T>
__device__ __forceinline__ void store_channels(T* to, const Channels<kVec>& value) {
    Vec<T, kVec> raw;
#pragma unroll
    for (int i = 0; i < kVec; ++i) raw.x[i] = from_float<T>(value.x[i]);
    store_vec<kVec>(to, raw);
}

// Weights and bias of a thread's channels. kWidth is W, or 0 where it is known at run time only.
template <int kVec, int kWidth>
struct Filter {
    static constexpr int kMaxWidth = kWidth > 0 ? kWidth : TREEWY_MAX_CONV_WIDTH;
    float tap[kMaxWidth][kVec];
    float bias[kVec];
    bool has_bias;
    int run_time_width;

    __device__ __forceinline__ int width() const { return kWidth > 0 ? kWidth : run_time_width; }

    template <typename W>
    __device__ __forceinline__ void load_vectors(const W* from) {
        constexpr int kCount = kVec * kMaxWidth, kPer = kPer16Bytes<W>;
#pragma unroll
        for (int at = 0; at < kCount; at += kPer) {
            const Vec<W, kPer> raw = load_vec<kPer>(from + at);
#pragma unroll
            for (int i = 0; i < kPer; ++i) {
                tap[(at + i) % kMaxWidth][(at + i) / kMaxWidth] = as_float(raw.x[i]);
            }
        }
    }

    __device__ __forceinline__ void load(const treewy_conv_weights& w, int channel) {
        run_time_width = w.width;
        has_bias = w.bias != nullptr;
        const int64_t first = static_cast<int64_t>(channel) * w.width;
        // Weights of several channels in a row are whole vectors; see can_use_vectors.
        if constexpr (kWidth == 4 && kVec > 1) {
            if (w.dtype == TREEWY_FLOAT32) {
                load_vectors(static_cast<const float*>(w.weight) + first);
            } else if (w.dtype == TREEWY_BFLOAT16) {
                load_vectors(static_cast<const __nv_bfloat16*>(w.weight) + first);
            } else {
                load_vectors(static_cast<const __half*>(w.weight) + first);
            }
        } else {
#pragma unroll
            for (int i = 0; i < kVec; ++i) {
#pragma unroll
                for (int j = 0; j < kMaxWidth; ++j) {
                    tap[j][i] = 0.0f;
                    if (j < w.width)
                        tap[j][i] = load_as_float(w.weight, w.dtype, first + i * w.width + j);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
            bias[i] = has_bias ? load_as_float(w.bias, w.dtype, channel + i) : 0.0f;
        }
    }

    // One more tap: rounded product, then sum, in the reference's order. Tap 0 starts the sum.
    __device__ __forceinline__ void add(int j, const Channels<kVec>& x, Channels<kVec>* sum) const {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
            const float product = __fmul_rn(x.x[i], tap[j][i]);
            sum->x[i] = j == 0 ? product : __fadd_rn(sum->x[i], product);
        }
    }

    template <typename T>
    __device__ __forceinline__ void finish(Channels<kVec>* sum) const {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
            if (has_bias) sum->x[i] = __fadd_rn(sum->x[i], bias[i]);
            sum->x[i] = silu<sizeof(T) == 4>(sum->x[i]);
        }
    }
};

// ------------------------------------------------------------------ trees

struct TreeConvWork {
    treewy_tree_conv_params conv;
    int channel_blocks;
    int node_blocks;
    int nodes_of_block;
};

template <typename T, int kVec, int kWidth>
__global__ void __launch_bounds__(kThreads) tree_conv(const __grid_constant__ TreeConvWork p) {
    using F = Filter<kVec, kWidth>;
    __shared__ int32_t parents_s[TREEWY_MAX_NODES];
    __shared__ int32_t taps_s[kMaxNodesOfBlock][TREEWY_MAX_CONV_WIDTH];
    const treewy_tree& tree = p.conv.tree;
    unsigned block = blockIdx.x;
    const int channel_block = static_cast<int>(block % p.channel_blocks);
    block /= p.channel_blocks;
    const int first = static_cast<int>(block % p.node_blocks) * p.nodes_of_block;
    const int row = static_cast<int>(block / p.node_blocks);
    const int stop = min(first + p.nodes_of_block, tree.max_nodes);
    const int channel = (channel_block * kThreads + static_cast<int>(threadIdx.x)) * kVec;
    const bool works = channel < p.conv.channels;

    const int64_t slot = tree.slot[row];
    const int real = is_live_slot(slot, tree.num_slots) ? min(tree.num_nodes[row], stop) : 0;
    const int width = p.conv.weights.width;
    const int32_t* parents = tree.parents + static_cast<int64_t>(row) * tree.max_nodes;
    for (int i = threadIdx.x; i < real; i += kThreads) parents_s[i] = parents[i];
    __syncthreads();
    for (int node = first + threadIdx.x; node < real; node += kThreads) {
        tap_rows(parents_s, node, width, taps_s[node - first]);
    }
    __syncthreads();
    if (!works) return;

    const T* x = static_cast<const T*>(p.conv.x) + row * p.conv.x_stride[0] + channel;
    T* y = static_cast<T*>(p.conv.y) + row * p.conv.y_stride[0] + channel;
    F filter;
    const T* window = nullptr;
    if (first < real) {
        filter.load(p.conv.weights, channel);
        window = static_cast<const T*>(p.conv.conv_state) + slot * p.conv.state_stride[0] + channel;
    }
    for (int node = first; node < stop; ++node) {
        Channels<kVec> sum{};
        if (node < real) {
#pragma unroll
            for (int j = 0; j < F::kMaxWidth; ++j) {
                if (j >= width) break;
                const int tap = taps_s[node - first][j];
                const T* from = tap >= 0
                                    ? x + tap * p.conv.x_stride[1]
                                    : window + window_index(tap, width) * p.conv.state_stride[1];
                filter.add(j, load_channels<kVec>(from), &sum);
            }
            filter.template finish<T>(&sum);
        }
        store_channels(y + node * p.conv.y_stride[1], sum);
    }
}

// ------------------------------------------------------------------ commit of windows

struct ConvCommitWork {
    treewy_conv_commit_params conv;
    int channel_blocks;
};

// A block owns some channels of one (layer, row): it reads all of the new window, old rows
// included, before it writes any of it.
template <typename T, int kVec, int kWidth>
__global__ void __launch_bounds__(kThreads) conv_commit(const __grid_constant__ ConvCommitWork p) {
    constexpr int kMaxWidth = kWidth > 0 ? kWidth : TREEWY_MAX_CONV_WIDTH;
    __shared__ int32_t parents_s[TREEWY_MAX_NODES];
    __shared__ int32_t taps_s[TREEWY_MAX_CONV_WIDTH];
    __shared__ bool ordered_s;
    const treewy_tree& tree = p.conv.tree;
    unsigned block = blockIdx.x;
    const int channel_block = static_cast<int>(block % p.channel_blocks);
    block /= p.channel_blocks;
    const int row = static_cast<int>(block % tree.batch);
    const int layer = static_cast<int>(block / tree.batch);
    const bool reports = channel_block == 0 && layer == 0 && threadIdx.x == 0;

    const int64_t slot = tree.slot[row];
    const int accepted = p.conv.accepted[row];
    const RowAction action =
        commit_action(slot, tree.num_slots, accepted, tree.num_nodes[row], tree.max_nodes);
    if (action == RowAction::kBad && reports && p.conv.errors != nullptr) {
        atomicAdd(p.conv.errors, 1);
    }
    if (action != RowAction::kMove) return;
    const int width = p.conv.width;
    const int32_t* parents = tree.parents + static_cast<int64_t>(row) * tree.max_nodes;
    for (int i = threadIdx.x; i < tree.max_nodes; i += kThreads) parents_s[i] = parents[i];
    __syncthreads();
    if (threadIdx.x == 0) {
        // The state's commit leaves a row of such a tree alone; so must this one.
        ordered_s = path_length(parents_s, accepted) > 0;
        tap_rows(parents_s, accepted, width, taps_s);
    }
    __syncthreads();
    if (!ordered_s) {
        if (reports && p.conv.errors != nullptr) atomicAdd(p.conv.errors, 1);
        return;
    }
    const int channel = (channel_block * kThreads + static_cast<int>(threadIdx.x)) * kVec;
    if (channel >= p.conv.channels) return;

    const T* x = static_cast<const T*>(p.conv.x) + layer * p.conv.x_stride[0] +
                 row * p.conv.x_stride[1] + channel;
    T* window = static_cast<T*>(p.conv.conv_state) + layer * p.conv.state_stride[0] +
                slot * p.conv.state_stride[1] + channel;
    Vec<T, kVec> kept[kMaxWidth - 1];
#pragma unroll
    for (int j = 1; j < kMaxWidth; ++j) {
        if (j >= width) break;
        const int tap = taps_s[j];
        const T* from = tap >= 0 ? x + tap * p.conv.x_stride[2]
                                 : window + window_index(tap, width) * p.conv.state_stride[2];
        kept[j - 1] = load_vec<kVec>(from);
    }
#pragma unroll
    for (int j = 1; j < kMaxWidth; ++j) {
        if (j >= width) break;
        store_vec<kVec>(window + (j - 1) * p.conv.state_stride[2], kept[j - 1]);
    }
}

// ------------------------------------------------------------------ packed sequences

struct PrefillConvWork {
    treewy_prefill_conv_params conv;
    int channel_blocks;
};

// Outputs of a tile of tokens; reads the windows, which save_windows changes in a later launch.
template <typename T, int kVec, int kWidth>
__global__ void __launch_bounds__(kThreads)
    prefill_conv(const __grid_constant__ PrefillConvWork p) {
    using F = Filter<kVec, kWidth>;
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
    F filter;
    filter.load(p.conv.weights, channel);
    Channels<kVec> taps[F::kMaxWidth];  // oldest first; the token's own at width - 1
    bool follows = false;               // taps hold the token before this one and its own taps
    for (int i = 0; i < count; ++i) {
        const int64_t token = first + i, slot = slot_s[i], start = start_s[i];
        Channels<kVec> sum{};
        if (slot < 0) {
            follows = false;
        } else {
            if (follows && token != start) {
#pragma unroll
                for (int j = 0; j + 1 < F::kMaxWidth; ++j) taps[j] = taps[j + 1];
            } else {
                const T* window = static_cast<const T*>(p.conv.conv_state) +
                                  slot * p.conv.state_stride[0] + channel;
#pragma unroll
                for (int j = 0; j + 1 < F::kMaxWidth; ++j) {
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
            for (int j = 0; j < F::kMaxWidth; ++j) {
                if (j == width - 1) taps[j] = own;
            }
#pragma unroll
            for (int j = 0; j < F::kMaxWidth; ++j) {
                if (j < width) filter.add(j, taps[j], &sum);
            }
            filter.template finish<T>(&sum);
        }
        store_channels(y + token * p.conv.y_stride, sum);
    }
}

// Windows after the last tokens: rows of (old window, tokens), all read before any is written.
template <typename T, int kVec, int kWidth>
__global__ void __launch_bounds__(kThreads)
    save_windows(const __grid_constant__ PrefillConvWork p) {
    constexpr int kMaxWidth = kWidth > 0 ? kWidth : TREEWY_MAX_CONV_WIDTH;
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

// ------------------------------------------------------------------ host

// Types and vector widths that a kernel template is compiled for, chosen at run time:
// `run` is called with a T, std::integral_constant of the vector and of the width.
template <int kValue>
struct Constant {
    static constexpr int value = kValue;
};

template <typename T, typename Run>
treewy_status with_vector(bool vectors, int width, const Run& run) {
    if (vectors && width == 4) return run(T{}, Constant<kPer16Bytes<T>>{}, Constant<4>{});
    if (vectors) return run(T{}, Constant<kPer16Bytes<T>>{}, Constant<0>{});
    return run(T{}, Constant<1>{}, Constant<0>{});
}

template <typename Run>
treewy_status with_types(int dtype, bool vectors, int width, const Run& run) {
    if (dtype == TREEWY_FLOAT32) return with_vector<float>(vectors, width, run);
    if (dtype == TREEWY_BFLOAT16) return with_vector<__nv_bfloat16>(vectors, width, run);
    return with_vector<__half>(vectors, width, run);
}

// Whether rows at all multiples of the strides can be read 16 bytes at a time.
template <int kCount>
bool is_vector_layout(const void* data, int dtype, const int64_t (&strides)[kCount]) {
    const int64_t per_vector = 16 / dtype_bytes(dtype);
    for (const int64_t stride : strides) {
        if (stride % per_vector != 0) return false;
    }
    return is_aligned(data, 16);
}

treewy_status check_conv(const char* name, int dtype, int channels, int width) {
    if (!is_float_dtype(dtype)) {
        return fail(TREEWY_UNSUPPORTED, "%s: dtype must be float32, bfloat16 or float16, got %d",
                    name, dtype);
    }
    if (channels < 1) {
        return fail(TREEWY_INVALID_ARGUMENT, "%s: channels must be at least 1, got %d", name,
                    channels);
    }
    if (width < 2 || width > TREEWY_MAX_CONV_WIDTH) {
        return fail(TREEWY_UNSUPPORTED, "%s: the conv's width must be in [2, %d], got %d", name,
                    TREEWY_MAX_CONV_WIDTH, width);
    }
    return TREEWY_OK;
}

treewy_status check_weights(const char* name, const treewy_conv_weights& weights) {
    if (weights.weight == nullptr) {
        return fail(TREEWY_INVALID_ARGUMENT, "%s: weight must not be null", name);
    }
    if (!is_float_dtype(weights.dtype)) {
        return fail(TREEWY_UNSUPPORTED,
                    "%s: weights.dtype must be float32, bfloat16 or float16, got %d", name,
                    weights.dtype);
    }
    return TREEWY_OK;
}

treewy_status check_pointers(const char* name, const void* x, const void* y,
                             const void* conv_state) {
    if (x != nullptr && y != nullptr && conv_state != nullptr) return TREEWY_OK;
    return fail(TREEWY_INVALID_ARGUMENT, "%s: inputs, outputs and conv_state must not be null",
                name);
}

int channel_blocks(int channels, int vec) {
    return static_cast<int>(ceil_div(channels, int64_t{kThreads} * vec));
}

treewy_status run_tree_conv(const char* name, const treewy_tree_conv_params& p,
                            treewy_stream stream) {
    const bool vectors =
        p.channels % (16 / dtype_bytes(p.dtype)) == 0 &&
        is_vector_layout(p.x, p.dtype, p.x_stride) && is_vector_layout(p.y, p.dtype, p.y_stride) &&
        is_vector_layout(p.conv_state, p.dtype, p.state_stride) && is_aligned(p.weights.weight, 16);
    return with_types(p.dtype, vectors, p.weights.width, [&](auto t, auto vec, auto width) {
        TreeConvWork work{p, channel_blocks(p.channels, vec.value), 1, 1};
        const int64_t all = int64_t{p.tree.batch} * p.tree.max_nodes * work.channel_blocks;
        const int64_t nodes = all / kEnoughBlocks;
        work.nodes_of_block =
            static_cast<int>(nodes < 1 ? 1 : (nodes < kMaxNodesOfBlock ? nodes : kMaxNodesOfBlock));
        work.node_blocks = static_cast<int>(ceil_div(p.tree.max_nodes, work.nodes_of_block));
        const int64_t blocks = int64_t{p.tree.batch} * work.node_blocks * work.channel_blocks;
        return launch(name, tree_conv<decltype(t), decltype(vec)::value, decltype(width)::value>,
                      blocks, kThreads, 0, stream, work);
    });
}

treewy_status run_conv_commit(const char* name, const treewy_conv_commit_params& p,
                              treewy_stream stream) {
    const bool vectors = p.channels % (16 / dtype_bytes(p.dtype)) == 0 &&
                         is_vector_layout(p.x, p.dtype, p.x_stride) &&
                         is_vector_layout(p.conv_state, p.dtype, p.state_stride);
    return with_types(p.dtype, vectors, p.width, [&](auto t, auto vec, auto width) {
        const ConvCommitWork work{p, channel_blocks(p.channels, vec.value)};
        const int64_t blocks = int64_t{p.layers} * p.tree.batch * work.channel_blocks;
        return launch(name, conv_commit<decltype(t), decltype(vec)::value, decltype(width)::value>,
                      blocks, kThreads, 0, stream, work);
    });
}

treewy_status run_prefill_conv(const char* name, const treewy_prefill_conv_params& p,
                               treewy_stream stream) {
    const int64_t strides[] = {p.x_stride}, y_strides[] = {p.y_stride};
    const bool vectors =
        p.channels % (16 / dtype_bytes(p.dtype)) == 0 && is_vector_layout(p.x, p.dtype, strides) &&
        is_vector_layout(p.y, p.dtype, y_strides) &&
        is_vector_layout(p.conv_state, p.dtype, p.state_stride) && is_aligned(p.weights.weight, 16);
    return with_types(p.dtype, vectors, p.weights.width, [&](auto t, auto vec, auto width) {
        using T = decltype(t);
        constexpr int kVec = decltype(vec)::value, kWidth = decltype(width)::value;
        const PrefillConvWork work{p, channel_blocks(p.channels, kVec)};
        const int64_t tiles = ceil_div(p.packed.tokens, kTokensOfBlock);
        const treewy_status status = launch(name, prefill_conv<T, kVec, kWidth>,
                                            tiles * work.channel_blocks, kThreads, 0, stream, work);
        if (status != TREEWY_OK) return status;
        return launch(name, save_windows<T, kVec, kWidth>,
                      int64_t{p.packed.batch} * work.channel_blocks, kThreads, 0, stream, work);
    });
}

}  // namespace
}  // namespace treewy

extern "C" treewy_status treewy_tree_conv(const treewy_tree_conv_params* params,
                                          treewy_stream stream) {
    const char* name = "tree_conv";
    if (params == nullptr) return treewy::fail_null(name);
    if (params->tree.batch == 0 || params->tree.max_nodes == 0) return TREEWY_OK;
    const treewy_tree_conv_params& p = *params;
    treewy_status status = treewy::check_tree(name, p.tree);
    if (status == TREEWY_OK) {
        status = treewy::check_conv(name, p.dtype, p.channels, p.weights.width);
    }
    if (status == TREEWY_OK) status = treewy::check_weights(name, p.weights);
    if (status == TREEWY_OK) status = treewy::check_pointers(name, p.x, p.y, p.conv_state);
    return status == TREEWY_OK ? treewy::run_tree_conv(name, p, stream) : status;
}

extern "C" treewy_status treewy_conv_commit(const treewy_conv_commit_params* params,
                                            treewy_stream stream) {
    const char* name = "conv_commit";
    if (params == nullptr) return treewy::fail_null(name);
    if (params->tree.batch == 0 || params->layers == 0) return TREEWY_OK;
    const treewy_conv_commit_params& p = *params;
    treewy_status status = treewy::check_tree(name, p.tree);
    if (status == TREEWY_OK) status = treewy::check_conv(name, p.dtype, p.channels, p.width);
    if (status == TREEWY_OK) status = treewy::check_pointers(name, p.x, p.accepted, p.conv_state);
    return status == TREEWY_OK ? treewy::run_conv_commit(name, p, stream) : status;
}

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
