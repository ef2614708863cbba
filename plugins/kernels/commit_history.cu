// SPDX-License-Identifier: Apache-2.0
//
// Deferred commit: accepted paths are appended to a history of their slot, which is folded into the
// state when a path has no room behind it; and the flush of histories.
//
// A deferred commit is three launches: fold the histories that have no room (commit_fold.cu),
// append the paths, and only then change the lengths, which the first two read in every layer.
//
// Verification may have folded a history in some layers or in all (treewy_history). Its slot then
// folds, room or not: the first launch does what is left, by flags, and the last clears these.
// Where all is done already, blocks leave after the slot, its length and the flags that they would
// serve.
//
// Threads. A block appends the path of one (layer, row) for some key heads and their value heads:
// it finds the path once. Where the stash's rows can be copied as they are, a thread moves the same
// 16 bytes of four nodes at once; else u goes by quads of neighbours, k by a warp a node,
// normalised.
//
// A history keeps what the stash has, to the bit: u in its type (bfloat16 from float32 rounds) and,
// in a type of 16 bits, raw keys, normalised where they are used; keys in float32 are normalised.
//
// Bytes, a layer and row of Qwen3.5-35B-A3B, with u in bfloat16 (float32): 12 (20) KiB an entry,
// read by every verification that finds it, moved once to append it, read once to fold it.
// Predicted microseconds of a step at batch 64, 16 nodes, paths of 4, 4.28 TB/s, beyond
// verification's own:
//     H     entries found   reads        append      fold / period   all
//     16    10              1.8 (3.1)    1.4 (2.4)   10  (20)        13  (25)
//     24    14              2.6 (4.3)    1.4 (2.4)   7   (14)        11  (20)
//     32    18              3.3 (5.5)    1.4 (2.4)   5.5 (10.5)      10  (18)
// bfloat16 (float32) state; a fold, by the commit, is taken at 1.2 times the bytes of state and
// entries, which has not been measured yet. Beyond 32 the reads grow as fast as the folds get
// fewer, and verification would leave the kernel of short histories.
//
// Folds are looked for in every layer by few blocks: a row whose history has room for the nodes up
// to the accepted one leaves after three reads.

#include "commit_update.h"

namespace treewy {
namespace {

constexpr int kAppendThreads = 256;

struct AppendParams {
    treewy_commit_params commit;
    treewy_history history;
    int units;       // key heads of a block
    int parts;       // blocks of a (layer, row)
    bool u_aligned;  // four neighbours of the stash's u, or k, can be read at once
    bool k_aligned;
    bool u_whole;  // four neighbours of the history's u, or k, can be written at once
    bool k_whole;
    bool u_copied;  // rows of all heads move as they are, in 16 bytes
    bool k_copied;
};

// Where a block's path goes.
struct Destination {
    int layer;
    int row;
    int64_t slot;
    int length;
    int start;  // entry of the path's first node
    int first_unit;
    int stop_unit;
};

// Four neighbours to element `at` of a history's tensor, in its type.
__device__ __forceinline__ void store_four(void* data, int dtype, int64_t at, bool whole,
                                           const Vec<float, 4>& x) {
    if (dtype == TREEWY_FLOAT32) {
        float* to = static_cast<float*>(data) + at;
        if (whole) {
            store_vec<4>(to, x);
            return;
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) to[c] = x.x[c];
        return;
    }
    Vec<uint16_t, 4> bits;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        bits.x[c] = dtype == TREEWY_BFLOAT16 ? __bfloat16_as_ushort(__float2bfloat16_rn(x.x[c]))
                                             : __half_as_ushort(__float2half_rn(x.x[c]));
    }
    uint16_t* to = static_cast<uint16_t*>(data) + at;
    if (whole) {
        store_vec<4>(to, bits);
        return;
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) to[c] = bits.x[c];
}

// A stretch of the path's rows as it is, `vectors` of 16 bytes: `from` of node 0, `to` of entry 0,
// strides in bytes.
__device__ __forceinline__ void copy_path(const void* from, int64_t node_stride, void* to,
                                          int64_t entry_stride, int vectors, const Destination& at,
                                          const int32_t* path) {
    constexpr int kAtOnce = 4;
    const int last = at.start + at.length - 1;
    for (int i = static_cast<int>(threadIdx.x); i < vectors; i += kAppendThreads) {
        const char* source = static_cast<const char*>(from) + 16 * i;
        char* target = static_cast<char*>(to) + 16 * i;
        for (int back = 0; back < at.length; back += kAtOnce) {
            uint4 x[kAtOnce];
#pragma unroll
            for (int a = 0; a < kAtOnce; ++a) {
                if (back + a < at.length) x[a] = load_once(source + path[back + a] * node_stride);
            }
#pragma unroll
            for (int a = 0; a < kAtOnce; ++a) {
                if (back + a >= at.length) continue;
                *reinterpret_cast<uint4*>(target + (last - back - a) * entry_stride) = x[a];
            }
        }
    }
}

// u of a unit range's value heads, quad by quad.
__device__ __forceinline__ void append_u(const AppendParams& p, const Destination& to,
                                         const int32_t* path) {
    const treewy_stash& stash = p.commit.stash;
    const treewy_history& history = p.history;
    const treewy_state_pool& pool = p.commit.state;
    const int group = pool.value_heads / pool.key_heads;
    const int head0 = to.first_unit * group, quads = pool.value_dim / 4;
    const int of_node = (to.stop_unit - to.first_unit) * group * quads;
    const int64_t source = to.layer * stash.u_stride[0] + to.row * stash.u_stride[1];
    const int64_t target = to.layer * history.u_stride[0] + to.slot * history.u_stride[1];
    if (p.u_copied) {
        const int bytes = history.u_dtype == TREEWY_FLOAT32 ? 4 : 2, first = head0 * pool.value_dim;
        copy_path(element_at(stash.u, stash.u_dtype, source + first), stash.u_stride[2] * bytes,
                  static_cast<char*>(history.u) + (target + first) * bytes,
                  int64_t{pool.value_heads} * pool.value_dim * bytes, of_node * 4 * bytes / 16, to,
                  path);
        return;
    }
#pragma unroll 4
    for (int i = threadIdx.x; i < to.length * of_node; i += kAppendThreads) {
        const int back = i / of_node, head = head0 + i % of_node / quads, q = i % quads;
        const int64_t from =
            source + path[back] * stash.u_stride[2] + head * stash.u_stride[3] + q * 4;
        const RawFour raw =
            load_four(element_at(stash.u, stash.u_dtype, from), stash.u_dtype, p.u_aligned);
        const int64_t entry = to.start + to.length - 1 - back;
        const int64_t at = target + (entry * pool.value_heads + head) * pool.value_dim + q * 4;
        store_four(history.u, history.u_dtype, at, p.u_whole, four_as_float(raw, stash.u_dtype));
    }
}

__device__ __forceinline__ void append_g(const AppendParams& p, const Destination& to,
                                         const int32_t* path) {
    const treewy_stash& stash = p.commit.stash;
    const treewy_history& history = p.history;
    const int heads = p.commit.state.value_heads;
    const int group = heads / p.commit.state.key_heads;
    const int head0 = to.first_unit * group, of_node = (to.stop_unit - to.first_unit) * group;
    const int64_t source = to.layer * stash.g_stride[0] + to.row * stash.g_stride[1];
    float* target = history.g + to.layer * history.g_stride[0] + to.slot * history.g_stride[1];
    for (int i = threadIdx.x; i < to.length * of_node; i += kAppendThreads) {
        const int back = i / of_node, head = head0 + i % of_node;
        const int64_t entry = to.start + to.length - 1 - back;
        target[entry * heads + head] = stash.g[source + path[back] * stash.g_stride[2] + head];
    }
}

// The keys of the unit range: a warp each. Keys of 16 bits stay as they are, others are normalised
// if they were not.
__device__ __forceinline__ void append_k(const AppendParams& p, const Destination& to,
                                         const int32_t* path) {
    constexpr int kQuads = TREEWY_MAX_HEAD_DIM / 4 / kWarp;
    const treewy_stash& stash = p.commit.stash;
    const treewy_history& history = p.history;
    const treewy_state_pool& pool = p.commit.state;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int units = to.stop_unit - to.first_unit, key_dim = pool.key_dim;
    const int64_t source = to.layer * stash.k_stride[0] + to.row * stash.k_stride[1];
    const int64_t target = to.layer * history.k_stride[0] + to.slot * history.k_stride[1];
    if (p.k_copied) {
        const int first = to.first_unit * key_dim;
        copy_path(element_at(stash.k, stash.k_dtype, source + first), stash.k_stride[2] * 2,
                  static_cast<char*>(history.k) + (target + first) * 2,
                  int64_t{pool.key_heads} * key_dim * 2, units * key_dim * 2 / 16, to, path);
        return;
    }
    const bool normalize = stash.k_normalized == 0 && history.k_dtype == TREEWY_FLOAT32;
    for (int i = static_cast<int>(threadIdx.x) / kWarp; i < to.length * units;
         i += kAppendThreads / kWarp) {
        const int back = i / units, unit = to.first_unit + i % units;
        const int64_t from = source + path[back] * stash.k_stride[2] + unit * stash.k_stride[3];
        RawFour raw[kQuads];
#pragma unroll
        for (int j = 0; j < kQuads; ++j) {
            const int q = j * kWarp + lane;
            raw[j] = RawFour{};
            if (4 * q < key_dim) {
                raw[j] = load_four(element_at(stash.k, stash.k_dtype, from + 4 * q), stash.k_dtype,
                                   p.k_aligned);
            }
        }
        Vec<float, 4> x[kQuads];
        float square = 0.0f;
#pragma unroll
        for (int j = 0; j < kQuads; ++j) {
            x[j] = four_as_float(raw[j], stash.k_dtype);
#pragma unroll
            for (int c = 0; c < 4; ++c) square += x[j].x[c] * x[j].x[c];
        }
        const float scale = normalize ? rsqrtf(warp_sum(square) + kNormEps) : 1.0f;
        const int64_t entry = to.start + to.length - 1 - back;
        const int64_t at = target + (entry * pool.key_heads + unit) * key_dim;
#pragma unroll
        for (int j = 0; j < kQuads; ++j) {
            const int q = j * kWarp + lane;
            if (4 * q >= key_dim) continue;
#pragma unroll
            for (int c = 0; c < 4; ++c) x[j].x[c] *= scale;
            store_four(history.k, history.k_dtype, at + 4 * q, p.k_whole, x[j]);
        }
    }
}

// Reads the lengths as they were before the commit.
__global__ void __launch_bounds__(kAppendThreads)
    append_paths(const __grid_constant__ AppendParams p) {
    __shared__ PathMemory path;
    const treewy_tree& tree = p.commit.tree;
    const treewy_state_pool& pool = p.commit.state;
    const int block = static_cast<int>(blockIdx.x);
    const int part = block % p.parts;
    Destination to;
    to.layer = block / p.parts % pool.layers;
    to.row = block / p.parts / pool.layers;
    const CommitRow row = read_row(tree, p.commit.accepted, to.row, &path);
    if (row.action != RowAction::kMove) return;
    const int held = p.history.length[row.slot];
    const bool folding = is_folding(p.history, row.slot);
    to.slot = row.slot;
    to.length = find_path(row, &path);
    const HistoryPlan plan = plan_history(held, to.length, p.history.capacity, folding);
    if (to.length == 0 || !plan.fits) return;
    to.start = plan.start;
    to.first_unit = part * p.units;
    to.stop_unit = min(to.first_unit + p.units, pool.key_heads);
    append_u(p, to, path.node);
    append_k(p, to, path.node);
    append_g(p, to, path.node);
}

// What verification has folded is forgotten, as the history it was of; for all threads of a block.
__device__ __forceinline__ void forget_folds(const treewy_history& history,
                                             const treewy_state_pool& pool, int64_t slot) {
    const int of_layer = pool.value_heads * flags_of_head(pool);
    for (int layer = 0; layer < pool.layers; ++layer) {
        uint8_t* const flags = folded_flag(history, pool, slot, layer, 0, 0);
        for (int i = static_cast<int>(threadIdx.x); i < of_layer; i += kCommitThreads) flags[i] = 0;
    }
    if (threadIdx.x == 0) history.folding[slot] = 0;
}

// Lengths after a deferred commit, and the count of rows that could not be moved: a block a row, so
// that a wrong tree is walked as everywhere else.
__global__ void __launch_bounds__(kCommitThreads)
    advance_history(const __grid_constant__ AppendParams p) {
    __shared__ PathMemory path;
    const CommitRow row =
        read_row(p.commit.tree, p.commit.accepted, static_cast<int>(blockIdx.x), &path);
    if (row.action == RowAction::kBad && threadIdx.x == 0) count_error(p.commit.errors);
    if (row.action != RowAction::kMove) return;
    int32_t* const held = p.history.length + row.slot;
    const int before = *held;
    const bool folding = is_folding(p.history, row.slot);
    const int length = find_path(row, &path);  // all have read length and folding behind it
    const HistoryPlan plan = plan_history(before, length, p.history.capacity, folding);
    const bool moves = length > 0 && plan.fits;
    if (moves && folding) forget_folds(p.history, p.commit.state, row.slot);
    if (threadIdx.x != 0) return;
    if (moves) {
        *held = plan.start + length;
    } else {
        count_error(p.commit.errors);
    }
}

// Lengths after a flush, and the count of slots out of range: a block a row.
__global__ void __launch_bounds__(kCommitThreads)
    clear_history(const __grid_constant__ treewy_flush_history_params p) {
    const int64_t slot = p.slot[blockIdx.x];
    if (is_live_slot(slot, p.num_slots)) {
        const bool folding = is_folding(p.history, slot);
        __syncthreads();  // all have read it
        if (folding) forget_folds(p.history, p.state, slot);
        if (threadIdx.x == 0) p.history.length[slot] = 0;
    } else if (slot != -1 && threadIdx.x == 0) {
        count_error(p.errors);
    }
}

// ------------------------------------------------------------------ host

treewy_status check_history(const char* name, const treewy_history& history,
                            const treewy_state_pool& pool) {
    if (history.u == nullptr || history.k == nullptr || history.g == nullptr ||
        history.length == nullptr) {
        return fail(TREEWY_INVALID_ARGUMENT,
                    "%s: the history's u, k, g and length must not be null", name);
    }
    if (history.capacity < 1) {
        return fail(TREEWY_INVALID_ARGUMENT, "%s: history.capacity must be at least 1, got %d",
                    name, history.capacity);
    }
    if (history.u_dtype != TREEWY_FLOAT32 &&
        (history.u_dtype != TREEWY_BFLOAT16 || pool.dtype != TREEWY_BFLOAT16)) {
        return fail(TREEWY_UNSUPPORTED,
                    "%s: the history's u_dtype must be float32, or bfloat16 where the state is, "
                    "got %d",
                    name, history.u_dtype);
    }
    if ((history.folded == nullptr) != (history.folding == nullptr)) {
        return fail(TREEWY_INVALID_ARGUMENT,
                    "%s: history.%s is null: folded and folding are given both or neither", name,
                    history.folded == nullptr ? "folded" : "folding");
    }
    if (!is_float_dtype(history.k_dtype)) {
        return fail(TREEWY_UNSUPPORTED,
                    "%s: the history's k_dtype must be float32, bfloat16 or float16, got %d", name,
                    history.k_dtype);
    }
    return TREEWY_OK;
}

// Keys of 16 bits are kept as the stash has them.
treewy_status check_keys(const char* name, const treewy_stash& stash,
                         const treewy_history& history) {
    if (history.k_dtype == TREEWY_FLOAT32) return TREEWY_OK;
    if (stash.k_dtype == history.k_dtype && stash.k_normalized == 0) return TREEWY_OK;
    return fail(TREEWY_UNSUPPORTED,
                "%s: the history's k_dtype is %d, which takes raw keys of that type, the stash's "
                "are of type %d%s",
                name, history.k_dtype, stash.k_dtype,
                stash.k_normalized == 0 ? "" : " and normalised");
}

// Whether rows of all heads of `dim` elements can be copied as they are, in 16 bytes.
template <int kStrides>
bool is_copied(const void* from, int from_dtype, const int64_t (&stride)[kStrides], const void* to,
               int to_dtype, const int64_t (&to_stride)[2], int dim) {
    const int bytes = dtype_bytes(to_dtype);
    bool whole = from_dtype == to_dtype && stride[kStrides - 1] == dim && dim * bytes % 16 == 0 &&
                 is_aligned(from, 16) && is_aligned(to, 16);
    for (const int64_t step : stride) whole = whole && step * bytes % 16 == 0;
    for (const int64_t step : to_stride) whole = whole && step * bytes % 16 == 0;
    return whole;
}

treewy_status append(const char* name, const treewy_commit_deferred_params& params,
                     treewy_stream stream) {
    constexpr int64_t kEnoughBlocks = 2048;
    const treewy_stash& stash = params.commit.stash;
    const treewy_state_pool& pool = params.commit.state;
    const treewy_history& history = params.history;
    AppendParams p{};
    p.commit = params.commit;
    p.history = history;
    p.u_whole = is_quad_layout(history.u, history.u_dtype, history.u_stride);
    p.k_whole = is_quad_layout(history.k, history.k_dtype, history.k_stride);
    p.u_aligned = is_quad_layout(stash.u, stash.u_dtype, stash.u_stride);
    p.k_aligned = is_quad_layout(stash.k, stash.k_dtype, stash.k_stride);
    p.u_copied = is_copied(stash.u, stash.u_dtype, stash.u_stride, history.u, history.u_dtype,
                           history.u_stride, pool.value_dim);
    p.k_copied = history.k_dtype != TREEWY_FLOAT32 &&  // others are normalised
                 is_copied(stash.k, stash.k_dtype, stash.k_stride, history.k, history.k_dtype,
                           history.k_stride, pool.key_dim);
    const int64_t pairs = int64_t{pool.layers} * params.commit.tree.batch;
    const int64_t units = pairs * pool.key_heads / kEnoughBlocks;
    const int64_t most = units < 1 ? 1 : (units < pool.key_heads ? units : pool.key_heads);
    p.parts = static_cast<int>(ceil_div(pool.key_heads, most));
    p.units = static_cast<int>(ceil_div(pool.key_heads, p.parts));  // alike
    const treewy_status status =
        launch(name, append_paths, pairs * p.parts, kAppendThreads, 0, stream, p);
    if (status != TREEWY_OK) return status;
    return launch(name, advance_history, params.commit.tree.batch, kCommitThreads, 0, stream, p);
}

}  // namespace
}  // namespace treewy

extern "C" treewy_status treewy_commit_deferred(const treewy_commit_deferred_params* params,
                                                treewy_stream stream) {
    const char* name = "commit_deferred";
    if (params == nullptr) return treewy::fail_null(name);
    const treewy_commit_params& commit = params->commit;
    if (treewy::is_empty(commit.state, commit.tree.batch)) return TREEWY_OK;
    treewy_status status = treewy::check_commit(name, commit);
    if (status == TREEWY_OK) status = treewy::check_history(name, params->history, commit.state);
    if (status == TREEWY_OK) status = treewy::check_keys(name, commit.stash, params->history);
    if (status != TREEWY_OK) return status;
    treewy::UpdateParams update{};
    update.commit = commit;
    update.history = params->history;
    update.source = treewy::Source::kFullHistory;
    status = treewy::launch_fold(name, update, stream);
    return status == TREEWY_OK ? treewy::append(name, *params, stream) : status;
}

extern "C" treewy_status treewy_flush_history(const treewy_flush_history_params* params,
                                              treewy_stream stream) {
    const char* name = "flush_history";
    if (params == nullptr) return treewy::fail_null(name);
    const treewy_flush_history_params& p = *params;
    if (treewy::is_empty(p.state, p.batch)) return TREEWY_OK;
    treewy_status status = treewy::check_state_pool(name, p.state);
    if (status == TREEWY_OK) status = treewy::check_history(name, p.history, p.state);
    if (status == TREEWY_OK && (p.batch < 0 || p.slot == nullptr)) {
        status =
            treewy::fail(TREEWY_INVALID_ARGUMENT,
                         "%s: batch must be >= 0 and slot not null, got batch %d", name, p.batch);
    }
    if (status != TREEWY_OK) return status;
    treewy::UpdateParams update{};
    update.commit.tree.batch = p.batch;
    update.commit.tree.num_slots = p.num_slots;
    update.commit.tree.slot = p.slot;
    update.commit.state = p.state;
    update.history = p.history;
    update.source = treewy::Source::kWholeHistory;
    status = treewy::launch_fold(name, update, stream);
    if (status != TREEWY_OK) return status;
    return treewy::launch(name, treewy::clear_history, p.batch, treewy::kCommitThreads, 0, stream,
                          p);
}
