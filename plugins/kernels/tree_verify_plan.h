// SPDX-License-Identifier: Apache-2.0
//
// How tree verification is cut into blocks, and where things lie in a block's shared memory. Pure
// functions of shapes and of what the GPU has, tested without one.
#pragma once

#include <cstdint>

#include "../include/treewy.h"

namespace treewy {

inline constexpr int kNodeBlock = 16;     // nodes that are solved at a time
inline constexpr int kShortHistory = 32;  // entries that the kernel of small trees takes
inline constexpr int kWide = TREEWY_VERIFY_ROWS_128;
inline constexpr int kMaxGroup = 4;  // node blocks whose weights lie in shared memory at a time

// Of the kernel whose blocks take head after head (tree_verify_stream.cuh).
inline constexpr int kMaxStream = 3;              // node blocks
inline constexpr int kMaxStreamGroups = 4;        // the same with products of warpgroups
inline constexpr int kPartRowBytes = 128;         // of a row of the state that are copied at a time
inline constexpr int kStreamRows = 128;           // of V of a block
inline constexpr int kStreamShared = 227 * 1024;  // bytes of shared memory of its block, at most
inline constexpr int kEightRows = 1024;           // bytes of 8 nodes' halves of keys in a stage
inline constexpr int kMaxStages = 3;
inline constexpr int kMaxStagesAhead = 4;  // where warps of their own fill them ahead

// What the shared memory of a block depends on.
struct VerifyShape {
    int key_dim;
    int value_dim;
    int max_nodes;
    int history_capacity;     // 0: no history
    int input_bytes;          // of an element of q and k
    int state_bytes;          // of an element of the state
    int weight_terms;         // bfloat16 terms of a coefficient
    int history_u_bytes = 4;  // of an element of the history's pseudo-values
    int history_k_bytes = 4;  // of its keys
};

struct VerifyTile {
    int rows;            // of V that a block owns
    int warps;           // of the block, without its helpers
    int tiles_per_warp;  // of 16 rows
};

// Offsets in bytes, all multiples of 16.
struct VerifyLayout {
    int state;            // [rows, K]
    int keys;             // [node_blocks * 16, K]
    int queries;          // [group * 16, K], those of the group at hand
    int values;           // [1 or 2 node blocks, warps, 16, rows of a warp]
    int weights;          // [pairs of a group, 2, terms, 32 lanes, 16 bytes]
    int dense;            // float [group, 2, 8, 8]: W within 8 nodes, before it is inverted
    int known_u;          // [node_blocks - 1, terms, rows / 16, 32 lanes, 16 bytes]
    int history_keys;     // float [history_blocks * 16, K]
    int history_sum;      // float2 [history_blocks * 16]
    int history_u;        // of a short history: [history_blocks, warps, 16, rows of a warp]
    int history_weights;  // of a short history: [history_blocks, units, terms, 32 lanes, 16 bytes]
    int path_sum;    // float2 [node_blocks * 16]: log2 decay from S_0 to the node, and its low part
    int factors;     // float4 [node_blocks * 16]: see NodeFactors; sums and jumps before
    int beta;        // float
    int key_norm;    // float: 1 / |k|
    int query_norm;  // float: K^-1/2 / |q|
    int ancestors;   // uint32 [node_blocks * 16, mask_words]: ancestors and self
    int related;     // uint32 [node_blocks]: bit e: a node has an ancestor in node block e
    int not_finite;  // int: whether any result is not; and the helpers' votes, int [2]
    int history_count;  // int: entries of a short history in use
    int mask_words;
    int node_blocks;
    int history_blocks;
    int group;  // node blocks
    bool stream;
    bool ahead;  // of a stream: with warps that fill its stages ahead
    bool short_history;
    int total;
};

inline constexpr int ceil_blocks(int count, int size) { return (count + size - 1) / size; }

// Whether the history is one for the kernel of small trees (tree_verify_history.cuh); `shape` is of
// aligned tensors.
inline constexpr bool has_short_history(const VerifyShape& shape, int tile) {
    return shape.key_dim == 128 && shape.input_bytes == 2 && shape.max_nodes <= kNodeBlock &&
           shape.history_capacity > 0 && shape.history_capacity <= kShortHistory &&
           shape.history_k_bytes == shape.input_bytes && (shape.state_bytes == 2 || tile != kWide);
}

// A warp has 32 rows of a bfloat16 state where the tile is wide, else 16.
inline VerifyTile verify_tile(int tile, int state_bytes) {
    if (tile != TREEWY_VERIFY_ROWS_128) return {64, 4, 1};
    return state_bytes == 2 ? VerifyTile{128, 4, 2} : VerifyTile{128, 8, 1};
}

// Whether the kernel was compiled for the tile: inputs of float32 take more registers.
inline bool tile_exists(int tile, int value_dim, int input_terms) {
    if (tile == TREEWY_VERIFY_ROWS_64) return value_dim % 64 == 0;
    return tile == TREEWY_VERIFY_ROWS_128 && value_dim % 128 == 0 && input_terms < 3;
}

// The tile of AUTO. Few blocks: 64 rows, so that more multiprocessors have something to do. Many:
// 128, so that less work is done twice. A float32 state of 128 rows leaves too little shared
// memory, except where there is little to compute or blocks take head after head.
inline int choose_tile(const VerifyShape& shape, int input_terms, bool stream, int64_t batch_heads,
                       int multiprocessors) {
    if (!tile_exists(kWide, shape.value_dim, input_terms)) return TREEWY_VERIFY_ROWS_64;
    const bool little = shape.max_nodes <= kNodeBlock / 2 && shape.history_capacity == 0;
    if (shape.state_bytes == 4 && !little && !stream) {
        return TREEWY_VERIFY_ROWS_64;
    }
    const int64_t blocks = batch_heads * (shape.value_dim / 128);
    return blocks >= multiprocessors ? kWide : TREEWY_VERIFY_ROWS_64;
}

// Whether there are heads enough for blocks that stay: with a bfloat16 state or few nodes other
// blocks are faster until each has some.
inline bool enough_turns(const VerifyShape& shape, int64_t batch_heads, int multiprocessors) {
    const int64_t turns = batch_heads * (shape.value_dim / kStreamRows);
    const int each = shape.state_bytes == 4 && shape.max_nodes > kNodeBlock ? 1 : 4;
    return turns >= int64_t{multiprocessors} * each;
}

// Pairs (node block of a group, block before it or itself), history blocks counted.
inline constexpr int group_pairs(int group, int node_blocks, int history_blocks) {
    return group * (history_blocks + node_blocks) - group * (group - 1) / 2;
}

// Gives places in shared memory one after the other.
struct Places {
    int end = 0;

    constexpr int next(int bytes) {
        const int offset = end;
        end += ceil_blocks(bytes, 16) * 16;
        return offset;
    }
};

// What there is of every node beside its rows.
inline constexpr void place_nodes(VerifyLayout& at, Places& places) {
    const int nodes = at.node_blocks * kNodeBlock;
    at.path_sum = places.next(nodes * 8);
    at.factors = places.next(nodes * 16);
    at.beta = places.next(nodes * 4);
    at.key_norm = places.next(nodes * 4);
    at.query_norm = places.next(nodes * 4);
    at.ancestors = places.next(nodes * 4 * at.mask_words);
}

inline constexpr VerifyLayout verify_layout(const VerifyShape& shape, int rows, int group) {
    VerifyLayout at{};
    at.node_blocks = ceil_blocks(shape.max_nodes, kNodeBlock);
    at.history_blocks = ceil_blocks(shape.history_capacity, kNodeBlock);
    at.mask_words = ceil_blocks(at.node_blocks * kNodeBlock, 32);
    at.group = group < at.node_blocks ? group : at.node_blocks;
    const int nodes = at.node_blocks * kNodeBlock, entries = at.history_blocks * kNodeBlock;
    Places places;
    at.state = places.next(rows * shape.key_dim * shape.state_bytes);
    at.keys = places.next(nodes * shape.key_dim * shape.input_bytes);
    at.queries = places.next(at.group * kNodeBlock * shape.key_dim * shape.input_bytes);
    const int value_blocks = at.node_blocks > 1 ? 2 : 1;
    at.values = places.next(value_blocks * kNodeBlock * rows * shape.input_bytes);
    const int pairs = group_pairs(at.group, at.node_blocks, at.history_blocks);
    const int weights = pairs * 2 * shape.weight_terms * 512;
    if (at.node_blocks == 1 && at.history_blocks == 0 && weights <= at.values - at.queries) {
        at.weights = at.queries;  // see work_rows
    } else {
        at.weights = places.next(weights);
    }
    at.dense = places.next(at.group * 2 * 64 * 4);
    at.known_u = places.next((at.node_blocks - 1) * shape.weight_terms * rows * kNodeBlock * 2);
    at.history_keys = places.next(entries * shape.key_dim * 4);
    at.history_sum = places.next(entries * 8);
    place_nodes(at, places);
    at.related = places.next(at.node_blocks * 4);
    at.not_finite = places.next(12);
    at.total = places.end;
    return at;
}

// The layout of a tree of at most 16 nodes, with `node_rows` 8 or 16 rows of nodes, where the
// compiler knows it (tree_verify_small.cuh); after a short history, or none. Queries lie behind the
// keys. The weights of a history take the place of both, and its u comes last, so that all else is
// the same for all capacities.
inline constexpr VerifyLayout small_layout(const VerifyShape& shape, int rows, int node_rows) {
    VerifyLayout at{};
    at.node_blocks = at.group = at.mask_words = 1;
    at.short_history = shape.history_capacity > 0;
    Places places;
    at.state = places.next(rows * shape.key_dim * shape.state_bytes);
    at.keys = at.history_weights = places.next(node_rows * shape.key_dim * shape.input_bytes);
    at.queries = places.next(node_rows * shape.key_dim * shape.input_bytes);
    at.values = places.next(node_rows * rows * shape.input_bytes);
    at.weights = places.next(2 * shape.weight_terms * 512);
    at.dense = places.next(2 * 64 * 4);
    place_nodes(at, places);
    at.not_finite = places.next(4);
    if (at.short_history) {
        at.history_blocks = ceil_blocks(shape.history_capacity, kNodeBlock);
        at.history_sum = places.next(kShortHistory * 16);  // or the squares of a fold's keys
        at.history_count = places.next(4);
        at.history_u = places.next(at.history_blocks * kNodeBlock * rows * shape.history_u_bytes);
    }
    at.total = places.end;
    return at;
}

// What a block that takes head after head has: the parts of a state, then stages. Keys and queries
// of a stage come in two panels, a half of their elements each, in rows of 128 bytes: those of 8
// keys, of the queries of the same nodes, of the next 8 keys.
struct StreamLayout {
    VerifyLayout stage;  // from the stage's beginning
    int stage_bytes;
    int stages;
    int first_stage;
    int total;
};

inline constexpr VerifyLayout stage_layout(const VerifyShape& shape) {
    VerifyLayout at{};
    at.stream = true;
    at.node_blocks = at.group = ceil_blocks(shape.max_nodes, kNodeBlock);
    at.mask_words = ceil_blocks(at.node_blocks * kNodeBlock, 32);
    const int rows = ceil_blocks(shape.max_nodes, 8) * 8 * shape.key_dim * shape.input_bytes;
    Places places;
    at.keys = places.next(2 * rows);  // and queries, by turns of 8 nodes
    at.queries = at.keys + kEightRows;
    at.values = places.next(at.node_blocks * kNodeBlock * kStreamRows * shape.input_bytes);
    at.weights =
        places.next(group_pairs(at.group, at.node_blocks, 0) * 2 * shape.weight_terms * 512);
    place_nodes(at, places);
    at.related = places.next(at.node_blocks * 4);
    at.not_finite = places.next(4);  // the number of nodes
    at.total = places.end;
    return at;
}

// Three stages (four where warps of their own fill them ahead) where they leave room for the state,
// else two. With room for more states it is slower (docs/kernels.md).
inline constexpr StreamLayout stream_layout(const VerifyShape& shape, bool ahead = false) {
    StreamLayout at{};
    at.stage = stage_layout(shape);
    at.stage_bytes = ceil_blocks(at.stage.total, kEightRows) * kEightRows;
    at.first_stage = kStreamRows * shape.key_dim * shape.state_bytes;
    at.stages = ahead ? kMaxStagesAhead : kMaxStages;
    if (at.first_stage + at.stages * at.stage_bytes > kStreamShared) at.stages = 2;
    at.total = at.first_stage + at.stages * at.stage_bytes;
    return at;
}

// Whether blocks that take head after head have warps that fill their stages ahead. With more nodes
// groups that do all themselves are faster (docs/kernels.md).
inline constexpr bool fills_ahead(const VerifyShape& shape, bool warpgroups) {
    return warpgroups && shape.max_nodes <= (shape.state_bytes == 4 ? 1 : 2) * kNodeBlock;
}

// Whether blocks take head after head (tree_verify_stream.cuh), with the wide tile; `shape` is of
// aligned tensors, `warpgroups` says whether these have products of their own.
inline constexpr bool streams(const VerifyShape& shape, int shared_bytes, bool warpgroups) {
    const bool ahead = fills_ahead(shape, warpgroups);
    return shape.key_dim == 128 && shape.value_dim % kStreamRows == 0 && shape.input_bytes == 2 &&
           shape.history_capacity == 0 && shape.max_nodes > kNodeBlock / (ahead ? 2 : 1) &&
           shape.max_nodes <= (warpgroups ? kMaxStreamGroups : kMaxStream) * kNodeBlock &&
           stream_layout(shape, ahead).total <= shared_bytes;
}

// Rows of nodes of the small layout.
inline constexpr int small_rows(int max_nodes) {
    return max_nodes <= kNodeBlock / 2 ? kNodeBlock / 2 : kNodeBlock;
}

// The largest group that leaves room for as many blocks on a multiprocessor as a single node block
// does: fewer barriers, but not for fewer blocks. A block takes 1 KiB of its own; a multiprocessor
// has that much more than `shared_bytes`, the most of a block.
inline VerifyLayout best_layout(const VerifyShape& shape, int rows, int shared_bytes) {
    constexpr int kOwn = 1024;
    VerifyLayout best = verify_layout(shape, rows, 1);
    const int blocks = (shared_bytes + kOwn) / (best.total + kOwn);
    if (blocks < 1) return best;  // it does not fit at all
    for (int group = 2; group <= kMaxGroup && group <= best.node_blocks; ++group) {
        const VerifyLayout layout = verify_layout(shape, rows, group);
        if ((shared_bytes + kOwn) / (layout.total + kOwn) >= blocks) best = layout;
    }
    return best;
}

// The layout of a tile; `stream`: blocks take head after head where the tile is wide; `aligned`:
// the tensors allow what the short history's kernel takes for granted; `ahead`: see fills_ahead.
inline VerifyLayout choose_layout(const VerifyShape& shape, int tile, bool stream, bool aligned,
                                  int shared_bytes, bool ahead = false) {
    const int rows = verify_tile(tile, shape.state_bytes).rows;
    if (tile == kWide && stream) {
        const StreamLayout all = stream_layout(shape, ahead);
        VerifyLayout layout = all.stage;
        layout.ahead = ahead;
        layout.total = all.total;
        return layout;
    }
    if (aligned && has_short_history(shape, tile)) {
        const VerifyLayout layout = small_layout(shape, rows, small_rows(shape.max_nodes));
        if (layout.total <= shared_bytes) return layout;
    }
    return best_layout(shape, rows, shared_bytes);
}

}  // namespace treewy
