// SPDX-License-Identifier: Apache-2.0
//
// Keys, queries and weights of a stage (tree_verify_stream.cuh), as columns of the rows' products:
// of a state with keys and queries, of R with T and M.
//
// Keys and queries come in panels of half their elements: rows of 128 bytes, chunks swapped, of 8
// keys, then of the queries of the same nodes, then of the next 8 keys.
//
// Weights are bfloat16 terms, a plane each: for each 16 nodes e that they are applied to, and each
// 8 nodes j from these on that they are for, four matrices of 8 rows of 16 bytes: T of the first 8
// and of the other 8 nodes of e, M of both.
#pragma once

#include "tree_verify_weights.cuh"
#include "warpgroup.cuh"

namespace treewy {

inline constexpr int kPairBytes = 8 * kMatrix;  // of a plane, of a pair of node blocks

// Where the row of node t lies in a panel of keys, or of queries.
__device__ __forceinline__ constexpr int node_row(int t) { return t / 8 * 16 + t % 8; }

template <typename Types>
inline constexpr int kPanelBytes = 2 * Types::kNodeBlocks* kNodeBlock* kSwappedRow;

// The operand A of a step of the 16 nodes of block d.
template <typename Types>
__device__ __forceinline__ FragmentA<typename Types::Input> load_node_rows(
    const unsigned char* rows, int d, int step, int lane) {
    constexpr int kSteps = kSwappedRow / 32;  // of a panel
    const unsigned char* panel =
        rows + step / kSteps * kPanelBytes<Types> + node_row(d * kNodeBlock) * kSwappedRow;
    return load_a<typename Types::Input, kSwappedRow, 16 * kSwappedRow>(panel, step % kSteps, lane);
}

// The operand B of two steps of the nodes 8 j ..
template <typename Types>
__device__ __forceinline__ FragmentB<typename Types::Input> load_node_columns(
    const unsigned char* rows, int j, int pair, int lane) {
    constexpr int kPairs = kSwappedRow / 64;
    const unsigned char* panel =
        rows + pair / kPairs * kPanelBytes<Types> + node_row(8 * j) * kSwappedRow;
    return load_b<typename Types::Input, kSwappedRow>(panel, pair % kPairs, lane);
}

// T (W before it is inverted) or M (C) of a pair of node blocks (d, e), e <= d.
template <typename Types>
struct PairWeights {
    static constexpr int kTerms = Types::kWeightTerms;
    static constexpr int kPlaneBytes = Types::kPairs * kPairBytes;

    unsigned char* at;  // four matrices: 8 j rows of d, 8 i columns of e

    __device__ __forceinline__ PairWeights(const Shared& shared, int d, int e, int kind)
        : at(reinterpret_cast<unsigned char*>(shared.weights) + offset(d, e) + kind * 2 * kMatrix) {
    }
    static __device__ __forceinline__ constexpr int offset(int d, int e) {
        return (e * Types::kNodeBlocks - e * (e - 1) / 2 + d - e) * kPairBytes;
    }

    // Row 8 j + g, columns 8 i + 2 c and the next, of a term.
    __device__ __forceinline__ uint32_t* word(int term, int j, int i, int g, int c) const {
        return reinterpret_cast<uint32_t*>(at + term * kPlaneBytes + (4 * j + i) * kMatrix +
                                           16 * g + 4 * c);
    }
    // As operands B of a product over the nodes of e.
    __device__ __forceinline__ void load(uint4 (&words)[kTerms], int lane) const {
        const unsigned char* row = at + (lane / 16 * 4 + lane / 8 % 2) * kMatrix + lane % 8 * 16;
#pragma unroll
        for (int term = 0; term < kTerms; ++term) {
            uint32_t x[4];
            load_matrices(x, row + term * kPlaneBytes);
            words[term] = make_uint4(x[0], x[1], x[2], x[3]);
        }
    }
    // Rows 8 j + g, j from `first` on, of columns 8 i ..: as sums come.
    __device__ __forceinline__ void store(const float (&value)[4], int i, int first,
                                          int lane) const {
#pragma unroll
        for (int j = first; j < 2; ++j) {
            uint32_t terms[kTerms];
            split(value[2 * j], value[2 * j + 1], terms);
#pragma unroll
            for (int term = 0; term < kTerms; ++term)
                *word(term, j, i, lane / 4, lane % 4) = terms[term];
        }
    }
    // W of a node block with itself: the halves' own parts go to `dense`, the rest is a weight.
    __device__ __forceinline__ void store_own(float* dense, const float (&value)[4], int i,
                                              int lane) const {
        const int g = lane / 4, c = lane % 4;
        const float low = i == 0 ? value[0] : value[2], high = i == 0 ? value[1] : value[3];
        *reinterpret_cast<float2*>(dense + i * 64 + 8 * g + 2 * c) = make_float2(low, high);
        if (i == 0) store(value, 0, 1, lane);
    }
    // (I - W)^-1 - I within each 8 nodes of a block, from `dense`.
    __device__ __forceinline__ void invert(const float* dense, int lane) const {
        const int half = lane / 8 % 2, column = lane % 8;
        float x[8];
        invert_column(dense + half * 64, column, x);
        if (lane >= 16) return;
#pragma unroll
        for (int t = 0; t < 8; ++t) {
            uint32_t terms[kTerms];
            split(x[t], 0.0f, terms);
#pragma unroll
            for (int term = 0; term < kTerms; ++term) {
                reinterpret_cast<unsigned short*>(word(term, half, half, t, 0))[column] =
                    static_cast<unsigned short>(terms[term]);
            }
        }
    }
    // Of a tile whose rows are the columns of e and whose nodes are those of d: its transpose.
    __device__ __forceinline__ void store_transposed(const Tile<1>& tile, int lane) const {
        const int g = lane / 4, c = lane % 4;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                uint32_t terms[kTerms];
                split(tile.x[0][j][e], tile.x[0][j][2 + e], terms);
#pragma unroll
                for (int term = 0; term < kTerms; ++term)
                    *word(term, j, g / 4, 2 * c + e, g % 4) = terms[term];
            }
        }
    }
    __device__ __forceinline__ void clear(int lane) const {
#pragma unroll
        for (int i = 0; i < 4 * kTerms; ++i)
            *word(i / 4, i / 2 % 2, i % 2, lane / 4, lane % 4) = 0;
    }
};

// The products of a pair of node blocks as they come, four words a lane, kept in the place of its
// weights.
template <typename Types>
__device__ __forceinline__ float4* products_at(const Shared& shared, int d, int e, int i,
                                               int lane) {
    using Weights = PairWeights<Types>;
    static_assert(Weights::kTerms >= 2);
    const int at = Weights::offset(d, e) + i / 2 * Weights::kPlaneBytes + i % 2 * kWarp * 16;
    return reinterpret_cast<float4*>(reinterpret_cast<unsigned char*>(shared.weights) + at) + lane;
}

}  // namespace treewy
