// SPDX-License-Identifier: Apache-2.0
//
// The update of states by known pseudo-values, behind commits, deferred commits and flushes; and
// what the launchers of all commits check and choose.
#pragma once

#include "commit_rows.cuh"

namespace treewy {

constexpr int kCommitThreads = TREEWY_MAX_NODES;  // of a block: see read_row
constexpr int kPathChunk = 16;                    // entries of a path in shared memory at a time

// Where the entries of an update come from.
enum class Source : int {
    kPath,          // commit: the accepted path
    kFullHistory,   // deferred commit: the history, where the path does not fit behind it
    kWholeHistory,  // flush
};

// Parameters of the kernels; a flush leaves `tree` without parents and `accepted` null.
struct UpdateParams {
    treewy_commit_params commit;
    treewy_history history;
    CommitCut cut;
    Source source;
    bool u_aligned;  // four neighbours of u, or of k, can be read at once
    bool k_aligned;
};

// What verification has folded already (treewy_history), flag by flag.
__device__ __forceinline__ int flags_of_head(const treewy_state_pool& pool) {
    return (pool.value_dim + TREEWY_FOLD_ROWS - 1) / TREEWY_FOLD_ROWS;
}

__device__ __forceinline__ uint8_t* folded_flag(const treewy_history& history,
                                                const treewy_state_pool& pool, int64_t slot,
                                                int layer, int head, int row) {
    return history.folded + layer * history.folded_stride[0] + slot * history.folded_stride[1] +
           head * flags_of_head(pool) + row / TREEWY_FOLD_ROWS;
}

// Number `index` of a slot's [L, HV, flags of a head].
__device__ __forceinline__ uint8_t* folded_flag(const treewy_history& history,
                                                const treewy_state_pool& pool, int64_t slot,
                                                int64_t index) {
    const int of_layer = pool.value_heads * flags_of_head(pool);
    return history.folded + index / of_layer * history.folded_stride[0] +
           slot * history.folded_stride[1] + index % of_layer;
}

__device__ __forceinline__ bool is_folding(const treewy_history& history, int64_t slot) {
    return history.folding != nullptr && history.folding[slot] != 0;
}

struct FlagRange {
    int64_t first;
    int64_t stop;
};

// Whether all flags of a range are set; for all threads of a block.
__device__ __forceinline__ bool is_folded(const UpdateParams& p, int64_t slot,
                                          const FlagRange& range) {
    int left = 0;
    for (int64_t i = range.first + threadIdx.x; i < range.stop; i += kCommitThreads) {
        if (*folded_flag(p.history, p.commit.state, slot, i) == 0) left = 1;
    }
    return __syncthreads_or(left) == 0;
}

// Entries of the row's history that are to be folded in; 0 if it stays, or if verification has
// folded all that is in `range`. For all threads of a block.
__device__ __forceinline__ int history_to_fold(const UpdateParams& p, int row, int slot,
                                               const FlagRange& range, PathMemory* path) {
    const treewy_tree& tree = p.commit.tree;
    const int capacity = p.history.capacity;
    if (p.source == Source::kWholeHistory) {
        if (!is_live_slot(slot, tree.num_slots)) return 0;
        const int held = clamp_length(p.history.length[slot], capacity);
        return is_folding(p.history, slot) && is_folded(p, slot, range) ? 0 : held;
    }
    const CommitRow found = read_row(tree, p.commit.accepted, row, path);
    if (found.action != RowAction::kMove) return 0;
    const bool folding = is_folding(p.history, slot);
    const int held = clamp_length(p.history.length[slot], capacity);
    // Most rows, most steps: no path to a node is longer than the nodes up to it.
    if (held == 0 || (!folding && held + found.accepted < capacity)) return 0;
    if (folding && is_folded(p, slot, range)) return 0;  // before the walk: so are most that fold
    const int added = find_path(found, path);
    const HistoryPlan plan = plan_history(held, added, capacity, folding);
    return added > 0 && plan.fits && plan.fold ? held : 0;
}

treewy_status launch_update(const char* name, UpdateParams params, treewy_stream stream);

// Commits of paths of at most kPathChunk nodes by states that stream (commit_stream.cu).
treewy_status launch_stream(const char* name, const UpdateParams& params, treewy_stream stream);

// Folds of histories by tensor cores where they can be (commit_fold.cu), or as any update.
treewy_status launch_fold(const char* name, const UpdateParams& params, treewy_stream stream);

// Whether quads at all multiples of the strides can be read at once.
template <int kCount>
bool is_quad_layout(const void* data, int dtype, const int64_t (&strides)[kCount]) {
    for (const int64_t stride : strides) {
        if (stride % 4 != 0) return false;
    }
    return is_aligned(data, static_cast<size_t>(4 * dtype_bytes(dtype)));
}

treewy_status check_tile(const char* name, int32_t tile, int32_t last_tile, int32_t items);
treewy_status check_commit(const char* name, const treewy_commit_params& params);

constexpr int64_t kMaxItemsOfBlock = 8;

// The cut of states into items of `tile_rows` rows of V; `items` of a block, 0 for auto, which
// takes at most `most_items`.
treewy_status cut_states(const char* name, const treewy_state_pool& pool, int batch, int tile_rows,
                         int32_t items, CommitCut* cut, int64_t most_items = kMaxItemsOfBlock);

inline int vectors_of_thread(int32_t tile) {
    return tile == TREEWY_COMMIT_VECTORS_4 ? 4 : (tile == TREEWY_COMMIT_VECTORS_16 ? 16 : 8);
}

// How a row of K values is shared out: kLanes threads of kVecs vectors.
template <int kLanes, int kVecs>
struct RowShape {
    static constexpr int lanes = kLanes;
    static constexpr int vecs = kVecs;
};

// Calls run(State, RowShape) for the pool's type and K.
template <typename Run>
treewy_status with_row_shape(const treewy_state_pool& pool, const Run& run) {
    if (pool.dtype == TREEWY_FLOAT32) {
        if (pool.key_dim <= 64) return run(float{}, RowShape<8, 2>{});
        if (pool.key_dim <= 128) return run(float{}, RowShape<16, 2>{});
        return run(float{}, RowShape<16, 4>{});
    }
    if (pool.key_dim <= 64) return run(__nv_bfloat16{}, RowShape<8, 1>{});
    if (pool.key_dim <= 128) return run(__nv_bfloat16{}, RowShape<16, 1>{});
    return run(__nv_bfloat16{}, RowShape<16, 2>{});
}

inline bool is_empty(const treewy_state_pool& pool, int batch) {
    return batch == 0 || pool.layers == 0;
}

}  // namespace treewy
