// SPDX-License-Identifier: Apache-2.0
//
// The rules that several kernels share: which rows move, how a path is walked, where conv taps lie.
// Plain functions of integers, for host and device, so that they are tested without a GPU too.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define TREEWY_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TREEWY_HOST_DEVICE inline
#endif

namespace treewy {

// What a commit does with a row.
enum class RowAction { kSkip, kMove, kBad };

// A padded row (slot -1) and a row with nothing accepted are skipped; whatever is out of range is
// bad and is left alone as well.
// Without branches: behind one, num_nodes would be asked for only once the slot had come.
TREEWY_HOST_DEVICE RowAction commit_action(int64_t slot, int64_t num_slots, int accepted,
                                           int num_nodes, int max_nodes) {
    const int bound = num_nodes < max_nodes ? num_nodes : max_nodes;
    const bool live = static_cast<uint64_t>(slot) < static_cast<uint64_t>(num_slots);
    const bool inside = static_cast<int64_t>(static_cast<uint32_t>(accepted)) < bound;
    const RowAction moves = inside && live ? RowAction::kMove : RowAction::kBad;
    const bool skips = slot == -1 || (accepted == -1 && live);
    return skips ? RowAction::kSkip : moves;
}

TREEWY_HOST_DEVICE bool is_live_slot(int64_t slot, int64_t num_slots) {
    return slot >= 0 && slot < num_slots;
}

// Nodes from the root to `node`, both counted; 0 if a parent does not come before its child. A
// parent before its child makes the walk end, whatever the array holds.
TREEWY_HOST_DEVICE int path_length(const int32_t* parents, int node) {
    int length = 0;
    while (node >= 0) {
        ++length;
        const int parent = parents[node];
        if (parent >= node) return 0;
        node = parent;
    }
    return length;
}

// Fills path with the nodes from `node` up to the root and returns their number; 0 if a parent does
// not come before its child.
TREEWY_HOST_DEVICE int walk_up(const int32_t* parents, int node, int32_t* path) {
    int length = 0;
    while (node >= 0) {
        path[length++] = node;
        const int parent = parents[node];
        if (parent >= node) return 0;
        node = parent;
    }
    return length;
}

// Rows that conv taps come from: a node's index, or -1, -2, ... for the window's rows, newest
// first. The row before a root is the window's newest.
TREEWY_HOST_DEVICE int row_before(const int32_t* parents, int row) {
    if (row < 0) return row - 1;
    const int parent = parents[row];
    return parent >= 0 && parent < row ? parent : -1;
}

// The window's index (oldest first, `width` - 1 rows) of a negative row of row_before.
TREEWY_HOST_DEVICE int window_index(int row, int width) { return width - 1 + row; }

// taps[0, width) of a node, oldest first; the last is the node itself.
TREEWY_HOST_DEVICE void tap_rows(const int32_t* parents, int node, int width, int32_t* taps) {
    int row = node;
    for (int tap = width - 1; tap >= 0; --tap) {
        taps[tap] = row;
        row = row_before(parents, row);
    }
}

// Where a path of `added` nodes goes in a history that holds `length` of `capacity` entries.
struct HistoryPlan {
    bool fits;  // false: longer than the history can ever hold, so nothing moves
    bool fold;  // the entries held go into the state first
    int start;  // entry of the path's first node
};

TREEWY_HOST_DEVICE int clamp_length(int length, int capacity) {
    if (length < 0) return 0;
    return length < capacity ? length : capacity;
}

// `folding`: verification has begun to fold it.
TREEWY_HOST_DEVICE HistoryPlan plan_history(int length, int added, int capacity, bool folding) {
    const int held = clamp_length(length, capacity);
    const bool full = folding || held + added > capacity;
    return {added <= capacity, full && held > 0, full ? 0 : held};
}

// The sequence that a packed token belongs to: its index, or -1 if none; `cu_seqlens` rises and has
// batch + 1 entries. Sequences without tokens are passed over.
TREEWY_HOST_DEVICE int find_sequence(const int32_t* cu_seqlens, int batch, int64_t token) {
    int low = 0, high = batch;  // the last sequence with cu_seqlens[s] <= token lies in [low, high)
    while (high - low > 1) {
        const int middle = low + (high - low) / 2;
        if (cu_seqlens[middle] <= token) {
            low = middle;
        } else {
            high = middle;
        }
    }
    if (batch < 1 || token < cu_seqlens[low] || token >= cu_seqlens[low + 1]) return -1;
    return low;
}

// Tokens [start, stop) of a sequence, within [0, tokens) whatever cu_seqlens holds.
struct Span {
    int64_t start;
    int64_t stop;
};

TREEWY_HOST_DEVICE Span sequence_span(const int32_t* cu_seqlens, int sequence, int64_t tokens) {
    int64_t start = cu_seqlens[sequence], stop = cu_seqlens[sequence + 1];
    if (start < 0) start = 0;
    if (stop > tokens) stop = tokens;
    return {start, stop < start ? start : stop};
}

}  // namespace treewy
