// SPDX-License-Identifier: Apache-2.0
//
// Commit from the raw conv inputs and gates of the accepted path: conv, norms, gates and the delta
// rule again, for the few nodes of the path alone.
//
//   y_i = silu(bias + sum over j of weight[:, j] x[tap j of i])       channels of k and of v
//   u_i = beta_i (v_i - alpha_i S_(i-1) k_i / |k_i|),   S_i = alpha_i S_(i-1) + u_i k_i^T / |k_i|
//
// The conv takes its products and sums in the order of tree_conv and rounds as it does: the same
// bits. Decays stay out of the states: S_i = c A_i with c the product of the alphas, A += (u / c)
// k^T, and c is multiplied into A before it falls below 2^-20, so that no ratio is large and a
// strong decay costs one product an element. Two operations an element and node, and S_(i-1) k_i is
// summed over the lanes of a row so that each lane ends with one row's sum, and works out its u.
//
// Threads: see commit_rows.cuh; the state is on its way to registers, where it then stays as
// float32, while the block computes the conv, a thread a channel, 16 nodes at a time.
//
// Floor. Bytes: the state once in and once out, and for a path of 4 and a window of 3 the rows of
// k and v channels (84 KiB a layer and sequence of Qwen3.5-35B-A3B beside 2 MiB, or 4 in float32):
// 4%, or 2%. No u and no g are written by verification: 20 KiB a node less in float32, a third of
// its traffic at 16 nodes and a bfloat16 state. Operations at 4 nodes and a bfloat16 state: about
// 1,100 instructions a warp and 4 KiB of state (512 multiply-adds, 4 * 60 for the sums, 150 for the
// conv, 120 to convert), on four schedulers 35% of the time that 4 KiB in and out take at 4.28
// TB/s.
//
// Held by a multiprocessor (registers a thread, none spilled); a block of 256 threads has a thread
// for each of the 256 channels of a head of K = V = 128 in bfloat16:
//     threads by vectors     128 by 4   128 by 8   256 by 4   256 by 8
//     blocks                 6 (80)     4 (128)    3 (80)     2 (128)
//     state                  48 KiB     64 KiB     48 KiB     64 KiB
// An item takes about 2.2 us (2.8 where channels take two rounds): 36 to 45 KiB are needed.
// Prediction at batch 64: 1.2 to 1.3 times the floor of 32.7 us (64.1 in float32).

#include "commit_update.h"
#include "gates.cuh"
#include "silu.cuh"

namespace treewy {
namespace {

constexpr int kChunk = 16;  // nodes of the path in shared memory at a time
constexpr int kMaxThreads = 256;
constexpr int kAhead = 4;  // inputs of a channel that are asked for at once
constexpr float kSmallestFactor = 0x1p-20f;

struct InputsParams {
    treewy_commit_inputs_params commit;
    CommitCut cut;
};

// Shared memory of a block: keys as staged_quarter has them, values [kChunk][tile_rows], gates.
struct Staged {
    float* k;
    float* v;
    float* alpha;
    float* beta;
};

constexpr size_t shared_bytes(int key_dim, int tile_rows) {
    return sizeof(float) * kChunk * (static_cast<size_t>(key_dim) + tile_rows + 2);
}

__device__ __forceinline__ Staged staged_memory(int key_dim, int tile_rows) {
    Staged s;
    s.k = reinterpret_cast<float*>(shared_memory());
    s.v = s.k + kChunk * key_dim;
    s.alpha = s.v + kChunk * tile_rows;
    s.beta = s.alpha + kChunk;
    return s;
}

__device__ __forceinline__ float round_to(float x, int dtype) {
    if (dtype == TREEWY_BFLOAT16) return __bfloat162float(__float2bfloat16_rn(x));
    if (dtype == TREEWY_FLOAT16) return __half2float(__float2half_rn(x));
    return x;
}

// One item of one row, and its path, accepted node first.
struct Work {
    Item at;
    int row;
    int slot;
    int count;
    const int32_t* path;

    // The path's node, or window row, that lies `index` entries behind the root.
    __device__ __forceinline__ int node(int index) const { return path[count - 1 - index]; }
};

// Where a channel's raw inputs come from, entry by entry of (window, path).
struct Channel {
    const void* x;       // node 0
    const void* window;  // oldest
    int64_t x_stride;
    int64_t window_stride;
    int dtype;

    __device__ __forceinline__ uint32_t load(const Work& work, int entry, int width) const {
        const bool inside = entry >= 0;
        const int64_t at = inside ? work.node(entry) * x_stride
                                  : int64_t{window_index(entry, width)} * window_stride;
        return load_raw(element_at(inside ? x : window, dtype, at), dtype);
    }
};

__device__ __forceinline__ Channel find_channel(const treewy_commit_inputs_params& p,
                                                const Work& work, int channel) {
    Channel c;
    c.dtype = p.dtype;
    c.x = element_at(p.x, p.dtype,
                     work.at.layer * p.x_stride[0] + work.row * p.x_stride[1] + channel);
    c.window = element_at(
        p.conv_state, p.dtype,
        work.at.layer * p.conv_state_stride[0] + work.slot * p.conv_state_stride[1] + channel);
    c.x_stride = p.x_stride[2];
    c.window_stride = p.conv_state_stride[2];
    return c;
}

// What tree_conv does after the last product.
__device__ __forceinline__ float finish_conv(float sum, bool has_bias, float bias, int dtype) {
    if (has_bias) sum = __fadd_rn(sum, bias);
    return round_to(dtype == TREEWY_FLOAT32 ? silu<true>(sum) : silu<false>(sum), dtype);
}

// The conv of one channel for `count` entries of the path from `first` on, to `to`, entries
// `stride` floats apart.
struct ConvTask {
    Channel inputs;
    const void* weight;  // [W] of the channel
    float* to;
    int stride;
    int first;
    int count;
    int weight_dtype;
    int width;
    bool has_bias;
    uint32_t bias;
};

__device__ __forceinline__ ConvTask find_conv(const treewy_commit_inputs_params& p,
                                              const Work& work, int channel) {
    const treewy_conv_weights& w = p.weights;
    ConvTask task;
    task.inputs = find_channel(p, work, channel);
    task.weight_dtype = w.dtype;
    task.width = w.width;
    task.weight =
        element_at(w.weight, w.dtype, work.at.layer * p.weight_stride + int64_t{channel} * w.width);
    task.has_bias = w.bias != nullptr;
    task.bias = 0;
    if (task.has_bias) {
        task.bias =
            load_raw(element_at(w.bias, w.dtype, work.at.layer * p.bias_stride + channel), w.dtype);
    }
    return task;
}

// Width 4: weights and taps in registers, all first loads begun before the first is waited for.
__device__ __forceinline__ void conv_of_4(const ConvTask& task, const Work& work) {
    constexpr int kWidth = 4;
    const int dtype = task.inputs.dtype;
    uint32_t raw_weight[kWidth], raw_tap[kWidth - 1];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
        raw_weight[j] = load_raw(element_at(task.weight, task.weight_dtype, j), task.weight_dtype);
    }
#pragma unroll
    for (int j = 0; j < kWidth - 1; ++j) {
        raw_tap[j] = task.inputs.load(work, task.first - (kWidth - 1) + j, kWidth);
    }
    float tap[kWidth] = {};
    for (int start = 0; start < task.count; start += kAhead) {
        uint32_t raw[kAhead] = {};
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (start + i < task.count) {
                raw[i] = task.inputs.load(work, task.first + start + i, kWidth);
            }
        }
        if (start == 0) {
#pragma unroll
            for (int j = 1; j < kWidth; ++j) tap[j] = raw_as_float(raw_tap[j - 1], dtype);
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (start + i >= task.count) break;
#pragma unroll
            for (int j = 0; j + 1 < kWidth; ++j) tap[j] = tap[j + 1];
            tap[kWidth - 1] = raw_as_float(raw[i], dtype);
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
                const float product =
                    __fmul_rn(tap[j], raw_as_float(raw_weight[j], task.weight_dtype));
                sum = j == 0 ? product : __fadd_rn(sum, product);
            }
            task.to[(start + i) * task.stride] =
                finish_conv(sum, task.has_bias, raw_as_float(task.bias, task.weight_dtype), dtype);
        }
    }
}

// Any width, one product after the other.
__device__ __forceinline__ void conv_of_any(const ConvTask& task, const Work& work) {
    const int dtype = task.inputs.dtype;
#pragma unroll 1
    for (int i = 0; i < task.count; ++i) {
        float sum = 0.0f;
#pragma unroll 1
        for (int j = 0; j < task.width; ++j) {
            const uint32_t x =
                task.inputs.load(work, task.first + i - (task.width - 1) + j, task.width);
            const uint32_t w =
                load_raw(element_at(task.weight, task.weight_dtype, j), task.weight_dtype);
            const float product =
                __fmul_rn(raw_as_float(x, dtype), raw_as_float(w, task.weight_dtype));
            sum = j == 0 ? product : __fadd_rn(sum, product);
        }
        task.to[i * task.stride] =
            finish_conv(sum, task.has_bias, raw_as_float(task.bias, task.weight_dtype), dtype);
    }
}

// Conv outputs and gates of `count` entries from `first` on.
template <int kVec>
__device__ __forceinline__ void stage_entries(const InputsParams& p, const Work& work, int first,
                                              int count, const Staged& to) {
    const treewy_commit_inputs_params& commit = p.commit;
    const treewy_state_pool& pool = commit.state;
    const int key_dim = pool.key_dim, tile_rows = p.cut.tile_rows;
    const int keys = pool.key_heads * key_dim;
    const int rows = min(tile_rows, pool.value_dim - work.at.row0);
    const int key_head = work.at.head / (pool.value_heads / pool.key_heads);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < count) {
        const int64_t node = work.node(first + thread), layer = work.at.layer;
        const int64_t a = layer * commit.a_stride[0] + work.row * commit.a_stride[1] +
                          node * commit.a_stride[2] + work.at.head;
        const int64_t b = layer * commit.b_stride[0] + work.row * commit.b_stride[1] +
                          node * commit.b_stride[2] + work.at.head;
        const uint32_t raw_a =
            load_raw(element_at(commit.a, commit.gate_dtype, a), commit.gate_dtype);
        const uint32_t raw_b =
            load_raw(element_at(commit.b, commit.gate_dtype, b), commit.gate_dtype);
        const float A_log = commit.A_log[layer * commit.A_log_stride + work.at.head];
        const float dt_bias = commit.dt_bias[layer * commit.dt_bias_stride + work.at.head];
        const float g = log_decay(raw_as_float(raw_a, commit.gate_dtype), A_log, dt_bias);
        to.alpha[thread] = expf(g);
        to.beta[thread] = 1.0f / (1.0f + expf(-raw_as_float(raw_b, commit.gate_dtype)));
    }
    for (int c = thread; c < key_dim + rows; c += blockDim.x) {
        const bool is_key = c < key_dim;
        const int channel =
            is_key ? keys + key_head * key_dim + c
                   : 2 * keys + work.at.head * pool.value_dim + work.at.row0 + c - key_dim;
        ConvTask task = find_conv(commit, work, channel);
        task.to = is_key ? to.k + staged_quarter<kVec>(c / 4, key_dim) + c % 4 : to.v + c - key_dim;
        task.stride = is_key ? key_dim : tile_rows;
        task.first = first;
        task.count = count;
        if (task.width == 4) {
            conv_of_4(task, work);
        } else {
            conv_of_any(task, work);
        }
    }
}

// Sums over a row's lanes: of kRows values a lane, that of row (lane / (kLanes / kRows)) is
// returned. Half of the values go to the other half of the lanes at every step.
template <int kRows, int kLanes>
__device__ __forceinline__ float row_sum(float (&x)[kRows], int lane) {
    int mask = kLanes / 2;
#pragma unroll
    for (int half = kRows / 2; half > 0; half /= 2, mask /= 2) {
        const bool upper = (lane & mask) != 0;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float send = upper ? x[i] : x[i + half];
            const float keep = upper ? x[i + half] : x[i];
            x[i] = keep + __shfl_xor_sync(kAllLanes, send, mask);
        }
    }
    float sum = x[0];
#pragma unroll
    for (; mask > 0; mask /= 2) sum += __shfl_xor_sync(kAllLanes, sum, mask);
    return sum;
}

// A state in float32: `factor` times `value`.
template <int kRows, int kColumns>
struct Scaled {
    float value[kRows][kColumns];
    float factor;
};

// Moves a tile's rows by one node, whose staged key and values are `k_s` and `v_s`.
template <typename Tile>
__device__ __forceinline__ void step(const Tile& tile,
                                     Scaled<Tile::kRowsOfThread, Tile::kColumns>* state,
                                     const float* k_s, const float* v_s, float alpha, float beta) {
    constexpr int kRows = Tile::kRowsOfThread, kColumns = Tile::kColumns;
    constexpr int kLanes = Tile::kLanesOfRow, kShare = kLanes / kRows;
    state->factor *= alpha;
    if (!(state->factor >= kSmallestFactor)) {  // a NaN goes into the state
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) state->value[r][c] *= state->factor;
        }
        state->factor = 1.0f;
    }
    float k[kColumns], dot[kRows];
    read_staged(k_s, tile, k);
    float square = 0.0f;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) square = fmaf(k[c], k[c], square);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        dot[r] = 0.0f;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) dot[r] = fmaf(state->value[r][c], k[c], dot[r]);
    }
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
        square += __shfl_xor_sync(kAllLanes, square, mask);
    }
    const float scale = rsqrtf(square + kNormEps);
    const float sum = row_sum<kRows, kLanes>(dot, tile.lane());
    const int own = tile.lane() / kShare;
    const float v = v_s[tile.first_row() + own];
    const float u = beta * (v - state->factor * (scale * sum));
    const float added = u * scale / state->factor;
    const int first_lane = static_cast<int>(threadIdx.x) % kWarp / kLanes * kLanes;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const float of_row = __shfl_sync(kAllLanes, added, first_lane + r * kShare);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            state->value[r][c] = fmaf(of_row, k[c], state->value[r][c]);
        }
    }
}

// Moves an item whose state has been asked for.
template <bool kLong, typename Tile>
__device__ __forceinline__ void move_item(const InputsParams& p, const Tile& tile,
                                          const Work& work) {
    constexpr int kRows = Tile::kRowsOfThread;
    const int key_dim = tile.key_dim, tile_rows = p.cut.tile_rows;
    const Staged staged = staged_memory(key_dim, tile_rows);
    Scaled<kRows, Tile::kColumns> state;
    state.factor = 1.0f;
    const auto stage = [&](int first, int count) {
        __syncthreads();  // all are done with what was staged before
        stage_entries<Tile::kVec>(p, work, first, count, staged);
        __syncthreads();
    };
    const auto follow = [&](int count) {
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            step(tile, &state, staged.k + i * key_dim, staged.v + i * tile_rows, staged.alpha[i],
                 staged.beta[i]);
        }
    };
    if constexpr (kLong) {
        tile.template read<kRows>(0, 1.0f, state.value);
#pragma unroll 1
        for (int first = 0; first < work.count; first += kChunk) {
            const int count = min(kChunk, work.count - first);
            stage(first, count);
            follow(count);
        }
    } else {
        stage(0, work.count);
        tile.template read<kRows>(0, 1.0f, state.value);
        follow(work.count);
    }
    tile.template store<kRows>(0, state.value, state.factor);
}

// Paths of one chunk, or (kLong) those of more: the others' blocks leave.
template <typename Tile, bool kLong>
__global__ void __launch_bounds__(kMaxThreads, !kLong && Tile::kVectorsOfThread == 4 ? 3 : 2)
    commit_inputs(const __grid_constant__ InputsParams p) {
    __shared__ PathMemory path;
    const treewy_commit_inputs_params& commit = p.commit;
    const int block = static_cast<int>(blockIdx.x) % p.cut.blocks_of_row;
    const int first = block * p.cut.items_of_block;
    const int stop = min(first + p.cut.items_of_block, p.cut.items);
    Work work;
    work.row = static_cast<int>(blockIdx.x) / p.cut.blocks_of_row;
    work.at = find_item(p.cut, first);
    work.path = path.node;
    const CommitRow found = read_row(commit.tree, commit.accepted, work.row, &path);
    const bool reports = !kLong && block == 0 && threadIdx.x == 0;
    if (found.action == RowAction::kBad && reports) count_error(commit.errors);
    if (found.action != RowAction::kMove) return;
    work.slot = found.slot;
    Tile tile;
    tile.find(commit.state, work.at, found.slot, p.cut.tile_rows);
    if constexpr (!kLong) tile.load();  // in vain for a long path: it is rare
    work.count = find_path(found, &path);
    if (work.count == 0 && reports) count_error(commit.errors);
    if (work.count == 0 || (work.count > kChunk) != kLong) return;
    if constexpr (kLong) tile.load();
#pragma unroll 1
    for (int item = first;;) {
        move_item<kLong>(p, tile, work);
        if (++item == stop) break;
        work.at = find_item(p.cut, item);
        tile.find(commit.state, work.at, found.slot, p.cut.tile_rows);
        tile.load();
    }
}

// ------------------------------------------------------------------ host

treewy_status check(const char* name, const treewy_commit_inputs_params& p) {
    treewy_status status = check_tree(name, p.tree);
    if (status == TREEWY_OK) status = check_state_pool(name, p.state);
    if (status == TREEWY_OK)
        status = check_tile(name, p.tile, TREEWY_COMMIT_INPUTS_256_BY_8, p.items);
    if (status != TREEWY_OK) return status;
    const void* pointers[] = {p.weights.weight, p.x,       p.conv_state, p.a, p.b,
                              p.A_log,          p.dt_bias, p.accepted};
    for (const void* pointer : pointers) {
        if (pointer != nullptr) continue;
        return fail(TREEWY_INVALID_ARGUMENT,
                    "%s: weight, x, conv_state, a, b, A_log, dt_bias and accepted must not be null",
                    name);
    }
    if (!is_float_dtype(p.dtype) || !is_float_dtype(p.gate_dtype) ||
        !is_float_dtype(p.weights.dtype)) {
        return fail(TREEWY_UNSUPPORTED,
                    "%s: dtype, gate_dtype and weights.dtype must be float32, bfloat16 or float16, "
                    "got %d, %d and %d",
                    name, p.dtype, p.gate_dtype, p.weights.dtype);
    }
    if (p.weights.width < 2 || p.weights.width > TREEWY_MAX_CONV_WIDTH) {
        return fail(TREEWY_UNSUPPORTED, "%s: the conv's width must be in [2, %d], got %d", name,
                    TREEWY_MAX_CONV_WIDTH, p.weights.width);
    }
    return TREEWY_OK;
}

}  // namespace
}  // namespace treewy

extern "C" treewy_status treewy_commit_inputs(const treewy_commit_inputs_params* params,
                                              treewy_stream stream) {
    using namespace treewy;
    const char* name = "commit_inputs";
    if (params == nullptr) return fail_null(name);
    if (is_empty(params->state, params->tree.batch)) return TREEWY_OK;
    const treewy_status checked = check(name, *params);
    if (checked != TREEWY_OK) return checked;
    const treewy_state_pool& pool = params->state;
    return with_row_shape(pool, [&](auto state, auto shape) {
        using State = decltype(state);
        constexpr int kLanes = decltype(shape)::lanes, kVecs = decltype(shape)::vecs;
        using Tile4 = StateTile<State, kLanes, kVecs, 4 / kVecs>;
        using Tile8 = StateTile<State, kLanes, kVecs, 8 / kVecs>;
        InputsParams p{*params, {}};
        const auto run = [&](void (*kernel)(InputsParams), int threads, int vectors) {
            const int rows = threads / kLanes * (vectors / kVecs);
            const treewy_status status =
                cut_states(name, pool, params->tree.batch, rows, params->items, &p.cut);
            if (status != TREEWY_OK) return status;
            return launch(name, kernel, int64_t{p.cut.blocks_of_row} * params->tree.batch, threads,
                          shared_bytes(pool.key_dim, rows), stream, p);
        };
        // All rows of a thread stay in float32 registers: at most 8 vectors of them.
        const int tile = params->tile == TREEWY_COMMIT_INPUTS_AUTO
                             ? int{TREEWY_COMMIT_INPUTS_256_BY_8}
                             : params->tile;
        const bool small =
            tile == TREEWY_COMMIT_INPUTS_128_BY_4 || tile == TREEWY_COMMIT_INPUTS_256_BY_4;
        const bool narrow =
            tile == TREEWY_COMMIT_INPUTS_128_BY_4 || tile == TREEWY_COMMIT_INPUTS_128_BY_8;
        const treewy_status status =
            run(small ? commit_inputs<Tile4, false> : commit_inputs<Tile8, false>,
                narrow ? 128 : 256, small ? 4 : 8);
        if (status != TREEWY_OK || params->tree.max_nodes <= kChunk) return status;
        return run(commit_inputs<Tile4, true>, kMaxThreads, 4);
    });
}
