// SPDX-License-Identifier: Apache-2.0
//
// How tree verification is cut into blocks, and where things lie in a block's shared memory. Pure
// functions of shapes and of what the GPU has, tested without one.
#pragma once

#include <cstdint>

#include "../include/treewy.h"

namespace treewy {

inline constexpr int kNodeBlock = 16;  // nodes that are solved at a time

// What the shared memory of a block depends on.
struct VerifyShape {
    int key_dim;
    int value_dim;
    int max_nodes;
    int history_capacity;  // 0: no history
    int input_bytes;       // of an element of q and k
    int state_bytes;       // of an element of the state
    int weight_terms;      // bfloat16 terms of a coefficient
};

struct VerifyTile {
    int rows;            // of V that a block owns
    int warps;           // of the block
    int tiles_per_warp;  // of 16 rows
};

// Offsets in bytes, all multiples of 16.
struct VerifyLayout {
    int state;    // [rows, K]
    int keys;     // [node_blocks * 16, K]
    int queries;  // [16, K], those of the node block at hand
    int weights;  // [history_blocks + node_blocks, 2, terms, 32 lanes, 16 bytes]; path sums before
    int known_u;  // [node_blocks - 1, rows / 16 * 2, 32 lanes of float4]
    int history_keys;  // float [history_blocks * 16, K]
    int history_sum;   // float2 [history_blocks * 16]
    int path_sum;    // float2 [node_blocks * 16]: log decay from S_0 to the node, and its low part
    int from_root;   // float [node_blocks * 16]: its exponential
    int beta;        // float
    int key_norm;    // float: 1 / |k|
    int query_norm;  // float: K^-1/2 / |q|
    int ancestors;   // uint32 [node_blocks * 16, mask_words]: ancestors and self
    int not_finite;  // int: whether any result is not
    int mask_words;
    int node_blocks;
    int history_blocks;
    int total;
};

inline int ceil_blocks(int count, int size) { return (count + size - 1) / size; }

inline VerifyTile verify_tile(int tile) {
    switch (tile) {
        case TREEWY_VERIFY_ROWS_128:
            return {128, 4, 2};
        case TREEWY_VERIFY_ROWS_128_WARPS_8:
            return {128, 8, 1};
        default:
            return {64, 4, 1};
    }
}

// Whether the kernel was compiled for the tile: 128 rows of a float32 state would fill the shared
// memory with one or two blocks, and inputs other than bfloat16 take more registers.
inline bool tile_exists(int tile, int value_dim, int state_bytes, int input_terms) {
    if (tile == TREEWY_VERIFY_ROWS_64) return value_dim % 64 == 0;
    if (tile != TREEWY_VERIFY_ROWS_128 && tile != TREEWY_VERIFY_ROWS_128_WARPS_8) return false;
    return value_dim % 128 == 0 && state_bytes == 2 && input_terms < 3;
}

// The tile of AUTO. Many blocks: as much state in flight as the shared memory holds, with as little
// repeated work as can be. Few: 64 rows, so that more multiprocessors have something to do. More
// than one node block leaves room for three blocks a multiprocessor; they hide more with 8 warps.
inline int choose_tile(int value_dim, int state_bytes, int input_terms, int max_nodes,
                       int64_t batch_heads, int multiprocessors) {
    const int wide =
        max_nodes <= kNodeBlock ? TREEWY_VERIFY_ROWS_128 : TREEWY_VERIFY_ROWS_128_WARPS_8;
    if (!tile_exists(wide, value_dim, state_bytes, input_terms)) return TREEWY_VERIFY_ROWS_64;
    const int64_t blocks = batch_heads * (value_dim / 128);
    return blocks >= 4 * int64_t{multiprocessors} ? wide : TREEWY_VERIFY_ROWS_64;
}

inline VerifyLayout verify_layout(const VerifyShape& shape, int rows) {
    VerifyLayout at{};
    at.node_blocks = ceil_blocks(shape.max_nodes, kNodeBlock);
    at.history_blocks = ceil_blocks(shape.history_capacity, kNodeBlock);
    at.mask_words = ceil_blocks(at.node_blocks * kNodeBlock, 32);
    const int nodes = at.node_blocks * kNodeBlock, entries = at.history_blocks * kNodeBlock;
    int end = 0;
    const auto place = [&end](int bytes) {
        const int offset = end;
        end += ceil_blocks(bytes, 16) * 16;
        return offset;
    };
    at.state = place(rows * shape.key_dim * shape.state_bytes);
    at.keys = place(nodes * shape.key_dim * shape.input_bytes);
    at.queries = place(kNodeBlock * shape.key_dim * shape.input_bytes);
    const int weights = (at.history_blocks + at.node_blocks) * 2 * shape.weight_terms * 512;
    const int path_scratch = 2 * nodes * (8 + 4 + 4 * at.mask_words);
    at.weights = place(weights > path_scratch ? weights : path_scratch);
    at.known_u = place((at.node_blocks - 1) * rows * kNodeBlock * 4);
    at.history_keys = place(entries * shape.key_dim * 4);
    at.history_sum = place(entries * 8);
    at.path_sum = place(nodes * 8);
    at.from_root = place(nodes * 4);
    at.beta = place(nodes * 4);
    at.key_norm = place(nodes * 4);
    at.query_norm = place(nodes * 4);
    at.ancestors = place(nodes * 4 * at.mask_words);
    at.not_finite = place(4);
    at.total = end;
    return at;
}

}  // namespace treewy
