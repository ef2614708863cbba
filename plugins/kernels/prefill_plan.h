// SPDX-License-Identifier: Apache-2.0
//
// Which kernel a prefill gets, and how it is cut into blocks: pure functions of shape and GPU,
// which are tested without one.
#pragma once

#include <cstdint>

namespace treewy {

inline constexpr int kChunkStages = 3;   // of keys, queries and values in shared memory
inline constexpr int kWeightStages = 2;  // of weights and factors
inline constexpr int kChunkTerms = 2;    // of bfloat16 that R, U and the weights are cut into
inline constexpr int64_t kMaxTokenStride = 1 << 24;  // elements

struct PrefillShape {
    int key_dim;
    int value_dim;
    int input_terms;  // of bfloat16 that q, k and v are sums of: 1 bfloat16, 2 float16, 3 float32
    int state_bytes;  // of an element
    int64_t heads;    // of V, of all sequences
    int64_t length;   // mean tokens of a sequence
};

struct PrefillPlan {
    int tokens;     // of a chunk; 0: the general kernel
    int row_warps;  // of a block
};

// Terms of bfloat16 that S is cut into where it is multiplied by k and q: one where the state is
// kept in bfloat16 and so are the inputs, else two, which leave 2^-17.
constexpr int state_terms(int input_terms, int state_bytes) {
    return input_terms == 1 && state_bytes == 2 ? 1 : 2;
}

// At most how many warps of a block have 16 rows of V each, and how many others load, and prepare
// weights: together few enough for the registers that a chunk takes.
constexpr int most_row_warps(int tokens) { return tokens == 64 ? 4 : 8; }
constexpr int helper_warps(int tokens, int row_warps) { return tokens == 64 ? 8 - row_warps : 4; }

// Byte offsets into a block's shared memory.
struct ChunkLayout {
    int keys;
    int queries;
    int weights;
    int factors;
    int whole;
    int path_sum;
    int beta;
    int key_norm;
    int query_norm;
    int dense;
    int values;
    int total;
};

// Bytes between tokens of v: a half-warp reads 32 bytes of four of them without a bank conflict.
constexpr int value_pitch(int row_warps) { return 32 * row_warps + 32; }

constexpr int block_pairs(int tokens) { return tokens / 16 * (tokens / 16 + 1) / 2; }

constexpr ChunkLayout chunk_layout(int key_dim, int tokens, int row_warps) {
    ChunkLayout at{};
    at.queries = at.keys + kChunkStages * tokens * key_dim * 2;
    at.weights = at.queries + kChunkStages * tokens * key_dim * 2;
    at.factors = at.weights + kWeightStages * block_pairs(tokens) * 2 * kChunkTerms * 512;
    at.whole = at.factors + kWeightStages * tokens * 16;
    at.path_sum = at.whole + 16;
    at.beta = at.path_sum + tokens * 8;
    at.key_norm = at.beta + tokens * 4;
    at.query_norm = at.key_norm + tokens * 4;
    at.dense = at.query_norm + tokens * 4;
    at.values = at.dense + tokens / 16 * 16 * 20 * 4;
    at.total = at.values + kChunkStages * tokens * value_pitch(row_warps);
    return at;
}

// As many rows of V a block as leave a block for nearly every multiprocessor, so that one prompt
// uses the whole GPU: its heads' rows are independent. Where the multiprocessors are full, chunks
// of 32 tokens, which take fewer operations; else what waits for what counts, and chunks are of 64
// tokens if that is compiled (K = 128 in bfloat16), they are mostly filled, and shared memory holds
// them.
constexpr PrefillPlan choose_prefill(const PrefillShape& shape, bool aligned, int multiprocessors,
                                     int shared_bytes) {
    const bool dims = (shape.key_dim == 64 || shape.key_dim == 128) && shape.value_dim % 16 == 0;
    if (!dims || !aligned || shape.input_terms > 2) return {0, 0};
    int warps = most_row_warps(32);
    while (shape.value_dim % (16 * warps) != 0) warps /= 2;
    while (warps > 2 &&
           16 * shape.heads * (shape.value_dim / (16 * warps)) < 15 * multiprocessors) {
        warps /= 2;
    }
    if (warps <= most_row_warps(64) && shape.key_dim == 128 && shape.input_terms == 1 &&
        shape.length > 32 && chunk_layout(128, 64, warps).total <= shared_bytes) {
        return {64, warps};
    }
    if (chunk_layout(shape.key_dim, 32, warps).total <= shared_bytes) return {32, warps};
    return {0, 0};
}

}  // namespace treewy
