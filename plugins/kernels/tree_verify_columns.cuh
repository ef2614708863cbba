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
inline constexpr int kPanelBytes = 2 * 8 * Types::kHalves * kSwappedRow;

// The operand A of a step of the nodes 8 h ..: their keys, then their queries.
template <typename Types>
__device__ __forceinline__ FragmentA<typename Types::Input> load_node_rows(const Shared& shared,
                                                                           int h, int step,
                                                                           int lane) {
    constexpr int kSteps = kSwappedRow / 32;  // of a panel
    const unsigned char* panel =
        shared.keys + step / kSteps * kPanelBytes<Types> + 16 * h * kSwappedRow;
    return load_a<typename Types::Input, kSwappedRow, 8 * kSwappedRow>(panel, step % kSteps, lane);
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
    // Row 8 j + g, columns 8 i + 2 c and the next.
    __device__ __forceinline__ void store(int j, int i, float low, float high, int lane) const {
        uint32_t terms[kTerms];
        split(low, high, terms);
#pragma unroll
        for (int term = 0; term < kTerms; ++term)
            *word(term, j, i, lane / 4, lane % 4) = terms[term];
    }
    // W within 8 nodes of a block, float [8, 8], before it is inverted: in the place of the first
    // 8 rows of two planes.
    __device__ __forceinline__ float* dense(int half) const {
        return reinterpret_cast<float*>(at + half * kPlaneBytes);
    }
    // Row t of W of a node block, before it is inverted whole: 16 floats, in the place of two
    // planes.
    __device__ __forceinline__ float* dense_row(int t) const {
        return reinterpret_cast<float*>(at + t / 8 * kPlaneBytes + t / 4 % 2 * 4 * kMatrix +
                                        t % 4 * 64);
    }
    // (I - W)^-1 - I within each 8 nodes of a block, in place of W.
    __device__ __forceinline__ void invert(int lane) const {
        const int half = lane / 8 % 2, column = lane % 8;
        float x[8];
        invert_column(dense(half), column, x);
        __syncwarp();
        if (lane >= 16) return;
        treewy::store_column<kTerms>(x, [&](int term, int t) {
            return reinterpret_cast<unsigned short*>(word(term, half, half, t, 0)) + column;
        });
    }
    // Column `column` of the 16 rows.
    __device__ __forceinline__ void store_column(const float (&x)[kNodeBlock], int column) const {
#pragma unroll
        for (int t = 0; t < kNodeBlock; t += 2) {
            uint32_t terms[kTerms];
            split(x[t], x[t + 1], terms);
#pragma unroll
            for (int term = 0; term < kTerms; ++term) {
                uint32_t* const words = word(term, t / 8, column / 8, t % 8, column % 8 / 2);
                unsigned short* const to = reinterpret_cast<unsigned short*>(words) + column % 2;
                to[0] = static_cast<unsigned short>(terms[term]);
                to[kMatrix / 16] = static_cast<unsigned short>(terms[term] >> 16);
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
};

}  // namespace treewy
