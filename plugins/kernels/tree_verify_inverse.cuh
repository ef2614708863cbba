// SPDX-License-Identifier: Apache-2.0
//
// The inverse of a tree's whole matrix, for trees of up to three node blocks. The equations and the
// products are those of tree_verify_kernel.cuh; there U is solved block after block in the
// registers of every warp. Here a few warps invert I - W once, by the same steps with the identity
// in place of R, and what they get serves all rows of V:
//
//   U = R + (T - I) R, T = (I - W)^-1        o = S_0 part + M R, M = C T
//
// T and M are of N^2, know nothing of the state, and lie where W and C were. Products of
// (I - beta k k^T) are contractions, so that no entry of T exceeds 1, nor one of M K^-1/2.
#pragma once

#include "tree_verify_columns.cuh"

namespace treewy {

__device__ __forceinline__ bool is_related(const Shared& shared, int d, int e) {
    return (shared.related[d] >> e) & 1u;
}

// Products of a pair of node blocks (d, e): 16 keys and 16 queries of d with the 16 keys of e, as
// the sums come.
struct PairProducts {
    float x[2][2][4];  // kind (keys, queries), half of e
};

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

// The products of a pair, in the place of its weights.
template <typename Types>
__device__ __forceinline__ void keep_products(const Shared& shared, int d, int e, int lane,
                                              const PairProducts& products) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float (&x)[4] = products.x[i / 2][i % 2];
        *products_at<Types>(shared, d, e, i, lane) = make_float4(x[0], x[1], x[2], x[3]);
    }
}

template <typename Types>
__device__ __forceinline__ void take_products(const Shared& shared, int d, int e, int lane,
                                              PairProducts& products) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float4 x = *products_at<Types>(shared, d, e, i, lane);
        float (&to)[4] = products.x[i / 2][i % 2];
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    }
    __syncwarp();  // weights take their place
}

// The products of a pair, and of a node block with itself its norms. By one warp.
template <typename Types>
__device__ __forceinline__ void multiply_nodes(const Shared& shared, int d, int e, int lane,
                                               PairProducts& products) {
    using Input = typename Types::Input;
    float sum[2][2][2][4] = {}, square[2][2][4] = {};
#pragma unroll
    for (int pair = 0; pair < Types::kKeyDim / 32; ++pair) {
        FragmentA<Input> key[2], query[2];
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            key[odd] = load_node_rows<Types>(shared.keys, d, 2 * pair + odd, lane);
            query[odd] = load_node_rows<Types>(shared.queries, d, 2 * pair + odd, lane);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const auto b = load_node_columns<Types>(shared.keys, 2 * e + half, pair, lane);
            add_steps(sum[0][half], key, b);
            add_steps(sum[1][half], query, b);
            if (d == e) {
                const auto own = load_node_columns<Types>(shared.queries, 2 * d + half, pair, lane);
                add_steps(square[half], query, own);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        products.x[i / 8][i / 4 % 2][i % 4] =
            sum[i / 8][i / 4 % 2][0][i % 4] + sum[i / 8][i / 4 % 2][1][i % 4];
    }
    if (d != e) return;
    float low[4], high[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        low[i] = square[0][0][i] + square[0][1][i];
        high[i] = square[1][0][i] + square[1][1][i];
    }
    store_norms(shared.query_norm + d * kNodeBlock, low, high, key_scale<Types::kKeyDim>(), lane);
    store_norms(shared.key_norm + d * kNodeBlock, products.x[0][0], products.x[0][1], 1.0f, lane);
}

// Makes a pair's products its weights: W from the keys', C from the queries'.
template <typename Types>
__device__ __forceinline__ void weigh_pair(const Shared& shared, int d, int e,
                                           PairProducts& products, int lane) {
    const int g = lane / 4, column = e * kNodeBlock + 2 * (lane % 4);
    float (&w)[2][4] = products.x[0];
    float (&c)[2][4] = products.x[1];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int t = d * kNodeBlock + 8 * j + g;
        const float2 to = shared.path_sum[t];
        const float key = -shared.beta[t] * shared.key_norm[t], query = shared.query_norm[t];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = column + 8 * half;
            const float4 from = *reinterpret_cast<const float4*>(shared.path_sum + i);
            const float2 norm = *reinterpret_cast<const float2*>(shared.key_norm + i);
            const uint32_t mask = shared.ancestors[t * shared.mask_words + i / 32] >> (i % 32);
            const float low = norm.x * decay_between(to, make_float2(from.x, from.y));
            const float high = norm.y * decay_between(to, make_float2(from.z, from.w));
            const bool first = mask & 1u, second = mask & 2u;
            w[half][2 * j] = first && t != i ? key * low * w[half][2 * j] : 0.0f;
            w[half][2 * j + 1] = second && t != i + 1 ? key * high * w[half][2 * j + 1] : 0.0f;
            c[half][2 * j] = first ? query * low * c[half][2 * j] : 0.0f;
            c[half][2 * j + 1] = second ? query * high * c[half][2 * j + 1] : 0.0f;
        }
    }
    const PairWeights<Types> solving(shared, d, e, 0), reading(shared, d, e, 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (d == e) {
            solving.store_own(shared.dense + d * 128, w[half], half, lane);
        } else {
            solving.store(w[half], half, 0, lane);
        }
        reading.store(c[half], half, 0, lane);
    }
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

// The columns of node block e of T and M, by warp e of those that meet at `barrier`, in place of W
// and C.
template <typename Types>
__device__ __forceinline__ void invert_tree(const Shared& shared, int nodes, int e, int lane,
                                            int barrier) {
    constexpr int kTerms = Types::kWeightTerms, kBlocks = Types::kNodeBlocks;
    constexpr bool kApart = Types::kSumApart;
    if (e < kBlocks) PairWeights<Types>(shared, e, e, 0).invert(shared.dense + e * 128, lane);
    sync_at<Types::kGroupThreads>(barrier);
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
        sync_at<Types::kGroupThreads>(barrier);  // nobody reads W and C of d any more
        if (!mine) continue;
        if (d == e) subtract(inverse, identity_tile(lane));
        PairWeights<Types>(shared, d, e, 0).store_transposed(inverse, lane);
        PairWeights<Types>(shared, d, e, 1).store_transposed(read, lane);
    }
}

// Pairs of node blocks (d, e) of a tree, e <= d: (0, 0), (1, 0), (1, 1), (2, 0) ..
struct NodePair {
    int d;
    int e;
};
static_assert(kMaxStream <= 3);  // node blocks
__device__ __forceinline__ NodePair nth_pair(int n) {
    const int d = n < 1 ? 0 : n < 3 ? 1 : 2;
    return {d, n - d * (d + 1) / 2};
}

}  // namespace treewy
