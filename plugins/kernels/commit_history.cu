// SPDX-License-Identifier: Apache-2.0
//
// Deferred commit: accepted paths are appended to a history of their slot, which is folded into the
// state when a path has no room behind it; and the flush of histories.
//
// A deferred commit is three launches: fold the histories that have no room, append the paths, and
// only then change the lengths, which the first two read in every layer.
//
// Threads. A block appends the path of one (layer, row) for some key heads and their value heads:
// it finds the path once; u by quads of neighbours, k by a warp a node, normalised.
//
// Bytes, a layer and row of Qwen3.5-35B-A3B at paths of 4 and a history of H = 16 (float32 u and k:
// 24 KiB an entry). Append: 4 * 20 KiB read and 4 * 24 KiB written. Fold, one step in four: the
// state in and out and 16 * 24 KiB. In microseconds at batch 64 and 4.28 TB/s, with a bfloat16
// state (float32 in brackets), verification of 16 nodes included:
//     reconstruct   verify 25.5 (41.2) + commit 32.6 (64)                               58 (105)
//     deferred      verify 25.5 (41.2) + history read 3.9 + append 2.7 + fold / 4 9.3 (17.2)
//                                                                                       41 (65)
// 0.71 and 0.62 of it. H = 32 folds one step in eight: 0.69 and 0.57. With bfloat16 u in the stash:
// 55 against 38.5, 0.70 at H = 16. Blocks of a row with nothing to fold leave after two reads; they
// are an eighth as many as items.

#include "commit_update.h"

namespace treewy {
namespace {

constexpr int kAppendThreads = 256;
constexpr float kNormEps = 1e-6f;

struct AppendParams {
    treewy_commit_params commit;
    treewy_history history;
    int units;  // key heads of a block
    int parts;  // blocks of a (layer, row)
    bool u_aligned;
    bool k_aligned;
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
    float* target = history.u + to.layer * history.u_stride[0] + to.slot * history.u_stride[1];
    const bool whole = reinterpret_cast<uintptr_t>(target) % 16 == 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < to.length * of_node; i += kAppendThreads) {
        const int back = i / of_node, head = head0 + i % of_node / quads, q = i % quads;
        const int64_t from =
            source + path[back] * stash.u_stride[2] + head * stash.u_stride[3] + q * 4;
        const RawFour raw =
            load_four(element_at(stash.u, stash.u_dtype, from), stash.u_dtype, p.u_aligned);
        const int64_t entry = to.start + to.length - 1 - back;
        float* at = target + (entry * pool.value_heads + head) * pool.value_dim + q * 4;
        const Vec<float, 4> x = four_as_float(raw, stash.u_dtype);
        if (whole) {
            store_vec<4>(at, x);
        } else {
#pragma unroll
            for (int c = 0; c < 4; ++c) at[c] = x.x[c];
        }
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

// The keys of the unit range, normalised if they were not: a warp each.
__device__ __forceinline__ void append_k(const AppendParams& p, const Destination& to,
                                         const int32_t* path) {
    constexpr int kQuads = TREEWY_MAX_HEAD_DIM / 4 / kWarp;
    const treewy_stash& stash = p.commit.stash;
    const treewy_history& history = p.history;
    const treewy_state_pool& pool = p.commit.state;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int units = to.stop_unit - to.first_unit, key_dim = pool.key_dim;
    const int64_t source = to.layer * stash.k_stride[0] + to.row * stash.k_stride[1];
    float* target = history.k + to.layer * history.k_stride[0] + to.slot * history.k_stride[1];
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
        const float scale = stash.k_normalized != 0 ? 1.0f : rsqrtf(warp_sum(square) + kNormEps);
        const int64_t entry = to.start + to.length - 1 - back;
        float* at = target + (entry * pool.key_heads + unit) * key_dim;
#pragma unroll
        for (int j = 0; j < kQuads; ++j) {
            const int q = j * kWarp + lane;
            if (4 * q >= key_dim) continue;
#pragma unroll
            for (int c = 0; c < 4; ++c) at[4 * q + c] = scale * x[j].x[c];
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
    const CommitRow row = read_row(tree, p.commit.accepted, to.row);
    if (row.action != RowAction::kMove) return;
    const int held = p.history.length[row.slot];
    to.slot = row.slot;
    to.length = find_path(row, &path);
    const HistoryPlan plan = plan_history(held, to.length, p.history.capacity);
    if (to.length == 0 || !plan.fits) return;
    to.start = plan.start;
    to.first_unit = part * p.units;
    to.stop_unit = min(to.first_unit + p.units, pool.key_heads);
    append_u(p, to, path.node);
    append_k(p, to, path.node);
    append_g(p, to, path.node);
}

// Lengths after a deferred commit, and the count of rows that could not be moved: a block a row, so
// that a wrong tree is walked as everywhere else.
__global__ void __launch_bounds__(TREEWY_MAX_NODES)
    advance_history(const __grid_constant__ AppendParams p) {
    __shared__ PathMemory path;
    const CommitRow row = read_row(p.commit.tree, p.commit.accepted, static_cast<int>(blockIdx.x));
    if (row.action == RowAction::kBad && threadIdx.x == 0) count_error(p.commit.errors);
    if (row.action != RowAction::kMove) return;
    const int length = find_path(row, &path);
    if (threadIdx.x != 0) return;
    int32_t* held = p.history.length + row.slot;
    const HistoryPlan plan = plan_history(*held, length, p.history.capacity);
    if (length == 0 || !plan.fits) {
        count_error(p.commit.errors);
    } else {
        *held = plan.start + length;
    }
}

// Lengths after a flush, and the count of slots out of range.
__global__ void __launch_bounds__(kWarp)
    clear_history(const __grid_constant__ treewy_flush_history_params p) {
    const int row = static_cast<int>(blockIdx.x) * kWarp + static_cast<int>(threadIdx.x);
    if (row >= p.batch) return;
    const int64_t slot = p.slot[row];
    if (is_live_slot(slot, p.num_slots)) {
        p.history.length[slot] = 0;
    } else if (slot != -1) {
        count_error(p.errors);
    }
}

// ------------------------------------------------------------------ host

treewy_status check_history(const char* name, const treewy_history& history) {
    if (history.u == nullptr || history.k == nullptr || history.g == nullptr ||
        history.length == nullptr) {
        return fail(TREEWY_INVALID_ARGUMENT,
                    "%s: the history's u, k, g and length must not be null", name);
    }
    if (history.capacity < 1) {
        return fail(TREEWY_INVALID_ARGUMENT, "%s: history.capacity must be at least 1, got %d",
                    name, history.capacity);
    }
    return TREEWY_OK;
}

treewy_status append(const char* name, const treewy_commit_deferred_params& params,
                     treewy_stream stream) {
    constexpr int64_t kEnoughBlocks = 2048;
    const treewy_stash& stash = params.commit.stash;
    const treewy_state_pool& pool = params.commit.state;
    AppendParams p{params.commit, params.history, 0, 0, false, false};
    p.u_aligned = is_quad_layout(stash.u, stash.u_dtype, stash.u_stride);
    p.k_aligned = is_quad_layout(stash.k, stash.k_dtype, stash.k_stride);
    const int64_t pairs = int64_t{pool.layers} * params.commit.tree.batch;
    const int64_t units = pairs * pool.key_heads / kEnoughBlocks;
    p.units = static_cast<int>(units < 1 ? 1 : (units < pool.key_heads ? units : pool.key_heads));
    p.parts = static_cast<int>(ceil_div(pool.key_heads, p.units));
    const treewy_status status =
        launch(name, append_paths, pairs * p.parts, kAppendThreads, 0, stream, p);
    if (status != TREEWY_OK) return status;
    return launch(name, advance_history, params.commit.tree.batch, TREEWY_MAX_NODES, 0, stream, p);
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
    if (status == TREEWY_OK) status = treewy::check_history(name, params->history);
    if (status != TREEWY_OK) return status;
    treewy::UpdateParams update{};
    update.commit = commit;
    update.history = params->history;
    update.source = treewy::Source::kFullHistory;
    status = treewy::launch_update(name, update, stream);
    return status == TREEWY_OK ? treewy::append(name, *params, stream) : status;
}

extern "C" treewy_status treewy_flush_history(const treewy_flush_history_params* params,
                                              treewy_stream stream) {
    const char* name = "flush_history";
    if (params == nullptr) return treewy::fail_null(name);
    const treewy_flush_history_params& p = *params;
    if (treewy::is_empty(p.state, p.batch)) return TREEWY_OK;
    treewy_status status = treewy::check_state_pool(name, p.state);
    if (status == TREEWY_OK) status = treewy::check_history(name, p.history);
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
    status = treewy::launch_update(name, update, stream);
    if (status != TREEWY_OK) return status;
    return treewy::launch(name, treewy::clear_history, treewy::ceil_div(p.batch, treewy::kWarp),
                          treewy::kWarp, 0, stream, p);
}
