// SPDX-License-Identifier: Apache-2.0
//
// Weights of node blocks: made from Gram products, inverted (steps 1 and 2 of
// tree_verify_kernel.cuh), and applied.
#pragma once

#include "tree_verify_paths.cuh"
#include "tree_verify_rows.cuh"

namespace treewy {

// The weights of a pair of blocks, `kind` 0 for W (and T_d - I), 1 for C: terms of 32 lanes of 16
// bytes. Word 2 j + i of lane (g, c) holds row t = 8 j + g, columns 8 i + 2 c, + 1.
template <int kTerms>
__device__ __forceinline__ uint4* weights_at(const Shared& shared, int pair, int kind) {
    return shared.weights + (pair * 2 + kind) * kTerms * kWarp;
}

// Of queries: K^-1/2.
template <int kKeyDim>
__device__ __forceinline__ constexpr float key_scale() {
    return kKeyDim == 256 ? 0.0625f : kKeyDim == 64 ? 0.125f : 0.08838834764831845f;
}

// scale / |x| of a row's sum of squares.
__device__ __forceinline__ float inverse_norm(float sum, float scale) {
    const float square = sum + kNormEps, y = rsqrtf(square);
    const float inverse = y * fmaf(-0.5f * square * y, y, 1.5f);  // to the last place or so
    return scale * (square <= FLT_MAX ? inverse : y);
}

// The diagonal of a 16 by 16 product, rows 8 j + g by columns 8 j + 2 c + odd, makes norms.
__device__ __forceinline__ void store_norms(float* to, const float (&low)[4],
                                            const float (&high)[4], float scale, int lane) {
    const int g = lane / 4, c = lane % 4;
    if (g / 2 != c) return;
    to[g] = inverse_norm(g % 2 == 0 ? low[0] : low[1], scale);
    to[8 + g] = inverse_norm(g % 2 == 0 ? high[2] : high[3], scale);
}

// The key of a history's entry, normalised, by a warp: lane l has k = l, l + 32, ...
template <int kEach>
__device__ __forceinline__ void load_history_key(const treewy_tree_verify_params& p,
                                                 const VerifyWork& work, int entry, int lane,
                                                 float (&key)[kEach]) {
    const treewy_history& history = p.history;
    const int64_t at = work.slot * history.k_stride[0] +
                       (int64_t{entry} * p.state.key_heads + work.key_head) * (kEach * kWarp);
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        key[i] = load_as_float(history.k, history.k_dtype, at + kWarp * i + lane);
        square = fmaf(key[i], key[i], square);
    }
    if (history.k_dtype == TREEWY_FLOAT32) return;
    const float scale = inverse_norm(warp_sum(square), 1.0f);
#pragma unroll
    for (int i = 0; i < kEach; ++i) key[i] *= scale;
}

// scale / |x| of kRows rows of nodes, by one warp: 8 lanes a row.
template <typename Types, int kRows = kNodeBlock>
__device__ __forceinline__ void measure_rows(float* to, const unsigned char* rows, float scale,
                                             int lane) {
    using Input = typename Types::Input;
    constexpr int kPerChunk = kPer16Bytes<Input>;
    constexpr int kChunks = Types::kKeyDim / kPerChunk / 8;
    const unsigned char* from = rows + lane / 8 * Types::kInputRowBytes + lane % 8 * 16;
    constexpr int kTurns = kRows / 4;
    float sum[kTurns] = {};
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            const Vec<Input, kPerChunk> value = *reinterpret_cast<const Vec<Input, kPerChunk>*>(
                from + 4 * i * Types::kInputRowBytes + 128 * chunk);
#pragma unroll
            for (int at = 0; at < kPerChunk; ++at) {
                const float x = as_float(value.x[at]);
                sum[i] = fmaf(x, x, sum[i]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
#pragma unroll
        for (int step = 4; step > 0; step /= 2) {
            sum[i] += __shfl_xor_sync(kAllLanes, sum[i], step);
        }
    }
    if (lane % 8 != 0) return;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) to[4 * i + lane / 8] = inverse_norm(sum[i], scale);
}

// Norms of node blocks: of the keys of all `blocks` where `keys`, of the queries of the group.
template <typename Types>
__device__ __forceinline__ void measure_norms(const Shared& shared, const Group& group, bool keys,
                                              int blocks, int warp, int lane) {
    constexpr int kBlockBytes = kNodeBlock * Types::kInputRowBytes;
    const int key_blocks = keys ? blocks : 0;
    for (int i = warp; i < key_blocks + group.count; i += Types::kWarps) {
        const int r = i - key_blocks;
        if (r < 0) {
            measure_rows<Types>(shared.key_norm + i * kNodeBlock, shared.keys + i * kBlockBytes,
                                1.0f, lane);
        } else {
            measure_rows<Types>(shared.query_norm + (group.first + r) * kNodeBlock,
                                shared.queries + r * kBlockBytes, key_scale<Types::kKeyDim>(),
                                lane);
        }
    }
}

// dot[half] = rows_a rows_b^T for 16 rows and 8 columns, kHalves times.
template <typename A, typename B, int kKeyDim, int kHalves>
__device__ __forceinline__ void dot_rows(float (&dot)[kHalves][4], const unsigned char* rows_a,
                                         const unsigned char* rows_b, int lane) {
    constexpr int kRowA = kKeyDim * static_cast<int>(sizeof(A));
    constexpr int kRowB = kKeyDim * static_cast<int>(sizeof(B));
    constexpr bool kOneTerm = Operand<A>::kTerms * Operand<B>::kTerms == 1;
    float part[kHalves][2][4] = {};
#pragma unroll 4
    for (int pair = 0; pair < kKeyDim / 32; ++pair) {
        FragmentB<B> b[kHalves];
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
            b[half] = load_b<B, kRowB>(rows_b + 8 * half * kRowB, pair, lane);
        }
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const auto a = load_a<A, kRowA, 8 * kRowA>(rows_a, 2 * pair + odd, lane);
#pragma unroll
            for (int half = 0; half < kHalves; ++half) {
                // The second sum takes the small terms, or every other step: shorter chains.
                multiply<0, 0>(part[half][kOneTerm ? odd : 0], a, b[half], odd);
                multiply<1, kMaxOrder>(part[half][1], a, b[half], odd);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 4 * kHalves; ++i) {
        dot[i / 4][i % 4] = part[i / 4][0][i % 4] + part[i / 4][1][i % 4];
    }
}

// Rows 8 j + g, j from `first` to 1, of 8 columns.
template <int kTerms>
__device__ __forceinline__ void store_terms(uint4* place, const float (&value)[4], int half,
                                            int first, int lane) {
    uint32_t* words = reinterpret_cast<uint32_t*>(place + lane) + half;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        if (j < first) continue;
        uint32_t terms[kTerms];
        split(value[2 * j], value[2 * j + 1], terms);
#pragma unroll
        for (int term = 0; term < kTerms; ++term) words[term * kWarp * 4 + 2 * j] = terms[term];
    }
}

// W of a node block with itself: the halves' own parts go to `invert`, the rest is a weight.
template <int kTerms>
__device__ __forceinline__ void store_own(uint4* place, float* dense, const float (&value)[4],
                                          int half, int lane) {
    const int g = lane / 4, c = lane % 4;
    const float low = half == 0 ? value[0] : value[2], high = half == 0 ? value[1] : value[3];
    *reinterpret_cast<float2*>(dense + half * 64 + 8 * g + 2 * c) = make_float2(low, high);
    if (half == 0) store_terms<kTerms>(place, value, 0, 1, lane);
}

// Products of 16 keys or queries, `rows`, with 8 kHalves keys from column `first` on (of the
// history).
template <typename Types, bool kHistory, int kHalves>
__device__ __forceinline__ void dot_keys(const Shared& shared, const unsigned char* rows, int first,
                                         int lane, float (&dot)[kHalves][4]) {
    using Column = std::conditional_t<kHistory, float, typename Types::Input>;
    const unsigned char* columns = (kHistory ? shared.history_keys : shared.keys) +
                                   first * Types::kKeyDim * static_cast<int>(sizeof(Column));
    dot_rows<typename Types::Input, Column, Types::kKeyDim>(dot, rows, columns, lane);
}

// Where a pair's weights go.
struct Target {
    uint4* place;
    float* dense;  // of the node block's own, within 8 nodes
};

// Makes `value`, those products for node block d and columns 8 (first + half) .. of block `at`,
// weights; `kind` 0 for W, 1 for C.
template <typename Types, bool kHistory, int kHalves>
__device__ __forceinline__ void weigh(const Shared& shared, int d, int at, int kind, int first,
                                      int history, float (&value)[kHalves][4], const Target& target,
                                      int lane) {
    constexpr int kTerms = Types::kWeightTerms;
    const int g = lane / 4, column = at * kNodeBlock + 8 * first + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int t = d * kNodeBlock + 8 * j + g;
        const float2 to = shared.path_sum[t];
        const float factor =
            kind == 0 ? -shared.beta[t] * shared.key_norm[t] : shared.query_norm[t];
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
            const int i = column + 8 * half;
            const float4 from = *reinterpret_cast<const float4*>(kHistory ? shared.history_sum + i
                                                                          : shared.path_sum + i);
            const float2 norm = kHistory ? make_float2(1.0f, 1.0f)
                                         : *reinterpret_cast<const float2*>(shared.key_norm + i);
            uint32_t mask;
            if (kHistory) {
                mask = (i < history ? 1u : 0u) | (i + 1 < history ? 2u : 0u);
            } else {
                mask = shared.ancestors[t * shared.mask_words + i / 32] >> (i % 32);
                if (kind == 0 && (t >> 1) == (i >> 1)) mask &= ~(1u << (t & 1));
            }
            float (&x)[4] = value[half];
            const float low = factor * norm.x * decay_between(to, make_float2(from.x, from.y));
            const float high = factor * norm.y * decay_between(to, make_float2(from.z, from.w));
            x[2 * j] = mask & 1u ? low * x[2 * j] : 0.0f;
            x[2 * j + 1] = mask & 2u ? high * x[2 * j + 1] : 0.0f;
        }
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
        if (!kHistory && kind == 0 && at == d) {
            store_own<kTerms>(target.place, target.dense, value[half], first + half, lane);
        } else {
            store_terms<kTerms>(target.place, value[half], first + half, 0, lane);
        }
    }
}

// The only pair of at most 16 nodes, a half of one kind a warp: products, which wait for nothing
// but the rows, and weights.
template <typename Types>
__device__ __forceinline__ void dot_one_block(const Shared& shared, int warp, int lane,
                                              float (&dot)[1][4]) {
    if (warp >= 4) return;
    dot_keys<Types, false>(shared, warp / 2 == 0 ? shared.keys : shared.queries, 8 * (warp % 2),
                           lane, dot);
}

template <typename Types>
__device__ __forceinline__ void weigh_one_block(const Shared& shared, int warp, int lane,
                                                float (&dot)[1][4]) {
    if (warp >= 4) return;
    const int kind = warp / 2;
    const Target target{weights_at<Types::kWeightTerms>(shared, 0, kind), shared.dense};
    weigh<Types, false>(shared, 0, 0, kind, warp % 2, 0, dot, target, lane);
}

// All weights of a group. A warp takes one kind of every pair it comes to.
template <typename Types>
__device__ __forceinline__ void couple_group(const Shared& shared, const Group& group, int history,
                                             int warp, int lane) {
    constexpr int kTerms = Types::kWeightTerms, kBlockBytes = kNodeBlock * Types::kInputRowBytes;
    constexpr int kTurns = Types::kWarps / 2;
    const int kind = warp % 2;
    int turn = warp / 2;
    for (int r = 0; r < group.count; ++r) {
        const int d = group.first + r, base = group.pairs_before(r);
        const unsigned char* rows =
            kind == 0 ? shared.keys + d * kBlockBytes : shared.queries + r * kBlockBytes;
        float dot[2][4];
        for (int at = 0; Types::kHistory && at < group.history_blocks; ++at) {
            if (turn++ % kTurns != 0) continue;
            const Target target{weights_at<kTerms>(shared, base + at, kind), nullptr};
            dot_keys<Types, true>(shared, rows, at * kNodeBlock, lane, dot);
            weigh<Types, true>(shared, d, at, kind, 0, history, dot, target, lane);
        }
        const uint32_t related = shared.related[d];
        for (int e = 0; e <= d; ++e) {
            if (!((related >> e) & 1u)) continue;
            if (turn++ % kTurns != 0) continue;
            const int pair = base + group.history_blocks + e;
            const Target target{weights_at<kTerms>(shared, pair, kind), shared.dense + r * 128};
            dot_keys<Types, false>(shared, rows, e * kNodeBlock, lane, dot);
            weigh<Types, false>(shared, d, e, kind, 0, history, dot, target, lane);
        }
    }
}

// A column of (I - W)^-1 - I for W within 8 nodes of a block. Products of (I - beta k k^T) are
// contractions, so that no entry exceeds 1.
__device__ __forceinline__ void invert_column(const float* w, int column, float (&x)[8]) {
#pragma unroll
    for (int t = 0; t < 8; ++t) {
        const float4 low = *reinterpret_cast<const float4*>(w + 8 * t);
        const float4 high = *reinterpret_cast<const float4*>(w + 8 * t + 4);
        const float row[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        float sum[2] = {w[8 * t + column], 0.0f};
#pragma unroll
        for (int i = 0; i < t; ++i) sum[i % 2] = fmaf(row[i], x[i], sum[i % 2]);
        x[t] = t > column ? sum[0] + sum[1] : 0.0f;
    }
}

// The terms of such a column, each to the 16 bits that `place(term, row)` gives.
template <int kTerms, typename Place>
__device__ __forceinline__ void store_column(const float (&x)[8], const Place& place) {
#pragma unroll
    for (int t = 0; t < 8; ++t) {
        uint32_t terms[kTerms];
        split(x[t], 0.0f, terms);
#pragma unroll
        for (int term = 0; term < kTerms; ++term)
            *place(term, t) = static_cast<unsigned short>(terms[term]);
    }
}

// The same of kHalves at once, `dense`, to the block's own place: lane 8 half + j has column j.
template <int kTerms, int kHalves = 2>
__device__ __forceinline__ void invert(uint4* place, const float* dense, int lane) {
    const int half = lane / 8 % kHalves, column = lane % 8;
    float x[8];
    invert_column(dense + half * 64, column, x);
    if (lane >= 8 * kHalves) return;
    // Row 8 half + t, column 8 half + 2 c + e: half e of word 3 half of lane 4 t + c.
    uint32_t* words = reinterpret_cast<uint32_t*>(place) + 3 * half + column / 2 * 4;
    store_column<kTerms>(x, [&](int term, int t) {
        return reinterpret_cast<unsigned short*>(words + (term * kWarp + 4 * t) * 4) + column % 2;
    });
}

// Columns j of `to` += weights applied to the 8 nodes `half` of `nodes`: words `word` of the
// weights. As `apply` below.
template <bool kApart, int kTerms, int kTiles>
__device__ __forceinline__ void apply_half(Tile<kTiles>& to, int j, const uint32_t (&words)[kTerms],
                                           const TileTerms<kTerms, kTiles>& nodes, int half) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
        float sum[4];
#pragma unroll
        for (int at = 0; at < 4; ++at) sum[at] = kApart ? 0.0f : to.x[i][j][at];
#pragma unroll
        for (int order = kTerms - 1; order >= 0; --order) {
#pragma unroll
            for (int term = 0; term <= order; ++term) {
                mma_half(sum, nodes.x[term][i][2 * half], nodes.x[term][i][2 * half + 1],
                         words[order - term]);
            }
        }
#pragma unroll
        for (int at = 0; at < 4; ++at) to.x[i][j][at] = kApart ? to.x[i][j][at] + sum[at] : sum[at];
    }
}

// U of a node block from R in `rhs`, by the block's own weights: eight nodes, then the other eight.
template <bool kApart, int kTerms, int kTiles>
__device__ __forceinline__ TileTerms<kTerms, kTiles> solve_own(Tile<kTiles>& rhs,
                                                               const uint4 (&words)[kTerms],
                                                               bool two) {
    uint32_t first[kTerms], across[kTerms], second[kTerms];
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
        first[term] = words[term].x, across[term] = words[term].z, second[term] = words[term].w;
    }
    TileTerms<kTerms, kTiles> terms;
    split_half(rhs, 0, terms);
    apply_half<kApart>(rhs, 0, first, terms, 0);
    split_half(rhs, 0, terms);
    if (two) {
        apply_half<kApart>(rhs, 1, across, terms, 0);
        split_half(rhs, 1, terms);
        apply_half<kApart>(rhs, 1, second, terms, 1);
    }
    split_half(rhs, 1, terms);
    return terms;
}

// The operands B of a pair, as they lie in shared memory.
template <int kTerms>
__device__ __forceinline__ void load_words(uint4 (&words)[kTerms], const uint4* weights, int lane) {
#pragma unroll
    for (int term = 0; term < kTerms; ++term) words[term] = weights[term * kWarp + lane];
}

template <bool kApart, int kTerms, int kTiles>
__device__ __forceinline__ TileTerms<kTerms, kTiles> solve_own(Tile<kTiles>& rhs,
                                                               const uint4* weights, bool two,
                                                               int lane) {
    uint4 words[kTerms];
    load_words(words, weights, lane);
    return solve_own<kApart>(rhs, words, two);
}

// to += (weights applied to the 16 nodes of `nodes`), the small terms first. Tensor cores cut sums
// off: where float32 counts (kApart) the product is summed apart.
template <bool kApart, int kTerms, int kTiles, int kWeightTerms>
__device__ __forceinline__ void apply(Tile<kTiles>& to, const TileTerms<kTerms, kTiles>& nodes,
                                      const uint4 (&words)[kWeightTerms]) {
    Tile<kTiles> sum = kApart ? zero_tile<kTiles>() : to;
#pragma unroll
    for (int order = kWeightTerms - 1; order >= 0; --order) {
#pragma unroll
        for (int term = 0; term <= order && term < kTerms; ++term) {
            const uint4 b = words[order - term];
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                const uint32_t (&a)[4] = nodes.x[term][i];
                mma(sum.x[i][0], a[0], a[1], a[2], a[3], b.x, b.y);
                mma(sum.x[i][1], a[0], a[1], a[2], a[3], b.z, b.w);
            }
        }
    }
    if constexpr (kApart) {
        add(to, sum);
    } else {
        to = sum;
    }
}

template <bool kApart, int kTerms, int kTiles, int kWeightTerms = kTerms>
__device__ __forceinline__ void apply(Tile<kTiles>& to, const TileTerms<kTerms, kTiles>& nodes,
                                      const uint4* weights, int lane) {
    uint4 words[kWeightTerms];
    load_words(words, weights, lane);
    apply<kApart>(to, nodes, words);
}

}  // namespace treewy
