// SPDX-License-Identifier: Apache-2.0
//
// The inverse of a tree's whole matrix, for trees of up to four node blocks. The equations and the
// products are those of tree_verify_kernel.cuh; there U is solved block after block in the
// registers of every warp. Here a few warps invert I - W once, by the same steps with the identity
// in place of R, and what they get serves all rows of V:
//
//   U = R + (T - I) R, T = (I - W)^-1        o = S_0 part + M R, M = C T
//
// (With a float32 state U = T R, as R is the sum of its terms there, and need not be kept beside.)
// T and M are of N^2, know nothing of the state, and lie where W and C were. Products of
// (I - beta k k^T) are contractions, so that no entry of T exceeds 1, nor one of M K^-1/2.
//
// With kThroughU there is no M, and o = S_0 part + C U; the tree is of one node block, and T is
// made by substitution.
#pragma once

#include "tree_verify_columns.cuh"

namespace treewy {

__device__ __forceinline__ bool is_related(const Shared& shared, int d, int e) {
    return (shared.related[d] >> e) & 1u;
}

// Adds rows_a rows_b^T of two steps to two sums, which are added up in the end.
template <typename Input>
__device__ __forceinline__ void add_steps(float (&sum)[2][4], const FragmentA<Input> (&a)[2],
                                          const FragmentB<Input>& b) {
    constexpr bool kOneTerm = Operand<Input>::kTerms == 1;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
        multiply<0, 0>(sum[kOneTerm ? odd : 0], a[odd], b, odd);
        multiply<1, kMaxOrder>(sum[1], a[odd], b, odd);
    }
}

// Products of 8 nodes with 16 others: x[half][e] of the key, x[half][2 + e] of the query at row g
// of 8 h with the key of column 8 half + 2 c + e of block b.
struct PairProducts {
    float x[2][4];
};

template <typename Types>
__device__ __forceinline__ PairProducts multiply_nodes(const Shared& shared, int h, int b,
                                                       int lane) {
    using Input = typename Types::Input;
    float sum[2][2][4] = {};
#pragma unroll
    for (int pair = 0; pair < Types::kKeyDim / 32; ++pair) {
        const FragmentA<Input> a[2] = {load_node_rows<Types>(shared, h, 2 * pair, lane),
                                       load_node_rows<Types>(shared, h, 2 * pair + 1, lane)};
#pragma unroll
        for (int half = 0; half < 2; ++half)
            add_steps(sum[half], a,
                      load_node_columns<Types>(shared.keys, 2 * b + half, pair, lane));
    }
    PairProducts products;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        products.x[i / 4][i % 4] = sum[i / 4][0][i % 4] + sum[i / 4][1][i % 4];
    return products;
}

// 1 / |k| and K^-1/2 / |q| of the nodes 8 h .., by a warp: from the diagonals of their products
// with themselves.
template <typename Types>
__device__ __forceinline__ void measure_nodes(const Shared& shared, int h, int lane) {
    using Input = typename Types::Input;
    float keys[2][4] = {}, queries[2][4] = {};
#pragma unroll
    for (int pair = 0; pair < Types::kKeyDim / 32; ++pair) {
        const FragmentA<Input> a[2] = {load_node_rows<Types>(shared, h, 2 * pair, lane),
                                       load_node_rows<Types>(shared, h, 2 * pair + 1, lane)};
        FragmentB<Input> key, query;  // a row of A is a column of B
#pragma unroll
        for (int term = 0; term < Operand<Input>::kTerms; ++term) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                key.x[term][i / 2][i % 2] = a[i / 2].x[term][i % 2 * 2];
                query.x[term][i / 2][i % 2] = a[i / 2].x[term][i % 2 * 2 + 1];
            }
        }
        add_steps(keys, a, key);
        add_steps(queries, a, query);
    }
    const int g = lane / 4;
    if (g / 2 != lane % 4) return;
    const int odd = g % 2;
    const float key = odd == 0 ? keys[0][0] + keys[1][0] : keys[0][1] + keys[1][1];
    const float query = odd == 0 ? queries[0][2] + queries[1][2] : queries[0][3] + queries[1][3];
    shared.key_norm[8 * h + g] = inverse_norm(key, 1.0f);
    shared.query_norm[8 * h + g] = inverse_norm(query, key_scale<Types::kKeyDim>());
}

// W and C of 8 nodes with 16 others, as a lane has their products.
struct PairCoefficients {
    float w[2][2];
    float c[2][2];
};

// Of the nodes 8 h .. with those of block b, from their products.
template <typename Types>
__device__ __forceinline__ PairCoefficients weigh_products(const Shared& shared, int h, int b,
                                                           const PairProducts& products, int lane) {
    const int t = 8 * h + lane / 4, first = b * kNodeBlock + 2 * (lane % 4);
    const float2 to = shared.path_sum[t];
    const float key = -shared.beta[t] * shared.key_norm[t], query = shared.query_norm[t];
    const uint32_t mask = shared.ancestors[t * shared.mask_words + first / 32] >> (first % 32);
    PairCoefficients pair;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int i = first + 8 * half;
        const float4 from = *reinterpret_cast<const float4*>(shared.path_sum + i);
        const float2 norm = *reinterpret_cast<const float2*>(shared.key_norm + i);
        const float decay[2] = {norm.x * decay_between(to, make_float2(from.x, from.y)),
                                norm.y * decay_between(to, make_float2(from.z, from.w))};
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const bool above = (mask >> (8 * half + e) & 1u) != 0;
            pair.w[half][e] = above && t != i + e ? key * decay[e] * products.x[half][e] : 0.0f;
            pair.c[half][e] = above ? query * decay[e] * products.x[half][2 + e] : 0.0f;
        }
    }
    return pair;
}

// Stores them; W within 8 nodes is inverted first.
template <typename Types>
__device__ __forceinline__ void store_pair(const Shared& shared, int h, int b,
                                           const PairCoefficients& pair, int lane) {
    const PairWeights<Types> solving(shared, h / 2, b, 0), reading(shared, h / 2, b, 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (Types::kThroughU) {
            float* row = solving.dense_row(8 * h + lane / 4) + 8 * half + 2 * (lane % 4);
            *reinterpret_cast<float2*>(row) = make_float2(pair.w[half][0], pair.w[half][1]);
        } else if (h == 2 * b + half) {
            float* dense = solving.dense(half) + 8 * (lane / 4) + 2 * (lane % 4);
            *reinterpret_cast<float2*>(dense) = make_float2(pair.w[half][0], pair.w[half][1]);
        } else if (h > 2 * b) {
            solving.store(h % 2, half, pair.w[half][0], pair.w[half][1], lane);
        }
        reading.store(h % 2, half, pair.c[half][0], pair.c[half][1], lane);
    }
}

// W and C of the nodes 8 h .. with those of block b, by a warp; zero where none of them has an
// ancestor there.
template <typename Types>
__device__ __forceinline__ void weigh_nodes(const Shared& shared, int h, int b, int lane) {
    PairCoefficients pair{};
    if (h < Types::kHalves && is_related(shared, h / 2, b))
        pair = weigh_products<Types>(shared, h, b, multiply_nodes<Types>(shared, h, b, lane), lane);
    store_pair<Types>(shared, h, b, pair, lane);
}

// Row r = 2 g + half is 1 at node r, else 0.
__device__ __forceinline__ Tile<1> identity_tile(int lane) {
    Tile<1> tile;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int row = 2 * (lane / 4) + i / 2 % 2, node = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        tile.x[0][i / 4][i % 4] = row == node ? 1.0f : 0.0f;
    }
    return tile;
}

__device__ __forceinline__ void subtract(Tile<1>& from, const Tile<1>& other) {
#pragma unroll
    for (int i = 0; i < 8; ++i) from.x[0][i / 4][i % 4] -= other.x[0][i / 4][i % 4];
}

// Column `column` of (I - W)^-1 - I of a node block: four rows at a time, of which each has what
// the rows before these add before it waits for them.
template <typename Types>
__device__ __forceinline__ void invert_column(const PairWeights<Types>& own, int column,
                                              float (&x)[kNodeBlock]) {
#pragma unroll
    for (int first = 0; first < kNodeBlock; first += 4) {
        float sum[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) sum[r] = own.dense_row(first + r)[column];
#pragma unroll
        for (int i = 0; i <= first; i += 4) {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int t = first + r;
                const float4 row = *reinterpret_cast<const float4*>(own.dense_row(t) + i);
                if (i + 0 < t) sum[r] = fmaf(row.x, x[i], sum[r]);
                if (i + 1 < t) sum[r] = fmaf(row.y, x[i + 1], sum[r]);
                if (i + 2 < t) sum[r] = fmaf(row.z, x[i + 2], sum[r]);
                if (i + 3 < t) sum[r] = fmaf(row.w, x[i + 3], sum[r]);
                if (i == first) x[t] = t > column ? sum[r] : 0.0f;
            }
        }
    }
}

// T of a tree of one node block in place of W, by a warp: by substitution, a column a lane.
template <typename Types>
__device__ __forceinline__ void invert_block(const Shared& shared, int lane) {
    const PairWeights<Types> own(shared, 0, 0, 0);
    const int column = lane % kNodeBlock;
    float x[kNodeBlock];
    invert_column(own, column, x);
    __syncwarp();
    if (lane >= kNodeBlock) return;
#pragma unroll
    for (int t = 0; t < kNodeBlock; ++t) x[t] = t == column ? 1.0f : x[t];
    own.store_column(x, column);
}

// The columns of node block e of T and M, by warp e of those that meet at `barrier`, in place of W
// and C; warps beyond the last block have none.
template <typename Types>
__device__ __forceinline__ void invert_tree(const Shared& shared, int nodes, int e, int lane,
                                            int barrier) {
    constexpr int kTerms = Types::kWeightTerms, kBlocks = Types::kNodeBlocks;
    constexpr bool kApart = Types::kSumApart;
    if (e < kBlocks) PairWeights<Types>(shared, e, e, 0).invert(lane);
    sync_at<Types::kInvertThreads>(barrier);
    TileTerms<kTerms, 1> known[kBlocks];
#pragma unroll
    for (int d = 0; d < kBlocks; ++d) {
        const bool mine = d >= e && (d == e || is_related(shared, d, e));
        Tile<1> inverse = d == e ? identity_tile(lane) : zero_tile<1>(), read = zero_tile<1>();
        if (mine) {
            uint4 words[kTerms];
#pragma unroll
            for (int f = 0; f < d; ++f) {
                if (f < e || !is_related(shared, d, f) || (f > e && !is_related(shared, f, e)))
                    continue;
                PairWeights<Types>(shared, d, f, 0).load(words, lane);
                apply<kApart>(inverse, known[f], words);
                PairWeights<Types>(shared, d, f, 1).load(words, lane);
                apply<kApart>(read, known[f], words);
            }
            const bool two = nodes - d * kNodeBlock > kNodeBlock / 2;
            PairWeights<Types>(shared, d, d, 0).load(words, lane);
            known[d] = solve_own<kApart>(inverse, words, two);
            PairWeights<Types>(shared, d, d, 1).load(words, lane);
            apply<kApart>(read, known[d], words);
        }
        sync_at<Types::kInvertThreads>(barrier);  // nobody reads W and C of d any more
        if (!mine) continue;
        if (d == e && !Types::kWholeInverse) subtract(inverse, identity_tile(lane));
        PairWeights<Types>(shared, d, e, 0).store_transposed(inverse, lane);
        PairWeights<Types>(shared, d, e, 1).store_transposed(read, lane);
    }
}

// 8 nodes h and a node block b that may have their ancestors: (0, 0), (1, 0), (2, 0), (2, 1) ..
struct NodePair {
    int h;
    int b;
};

template <typename Types>
__device__ __forceinline__ NodePair nth_pair(int n) {
    int d = 0;
#pragma unroll
    for (int next = 1; next < Types::kNodeBlocks; ++next) d += n >= next * (next + 1);
    const int at = n - d * (d + 1), second = at > d;
    return {2 * d + second, at - second * (d + 1)};
}

}  // namespace treewy
