// SPDX-License-Identifier: Apache-2.0
//
// The rows of V of a lane at 16 nodes: in registers, as an operand, and to and from memory.
#pragma once

#include "tree_verify_block.cuh"

namespace treewy {

// Values of the rows of V of a lane at 16 nodes: x[tile][j][2 half + e] is row
// (2 kTiles) g + 2 tile + half of the warp's, node 8 j + 2 c + e.
template <int kTiles>
struct Tile {
    float x[kTiles][2][4];
};

template <int kTiles>
__device__ __forceinline__ Tile<kTiles> zero_tile() {
    Tile<kTiles> tile;
#pragma unroll
    for (int i = 0; i < kTiles * 8; ++i) tile.x[i / 8][i / 4 % 2][i % 4] = 0.0f;
    return tile;
}

template <int kTiles>
__device__ __forceinline__ void add(Tile<kTiles>& to, const Tile<kTiles>& other) {
#pragma unroll
    for (int i = 0; i < kTiles * 8; ++i)
        to.x[i / 8][i / 4 % 2][i % 4] += other.x[i / 8][i / 4 % 2][i % 4];
}

template <int kTiles>
__device__ __forceinline__ bool is_finite(const Tile<kTiles>& tile) {
    float sum = 0.0f;  // of zeros, unless there is NaN or Inf
#pragma unroll
    for (int i = 0; i < kTiles * 8; ++i) {
        sum = fmaf(tile.x[i / 8][i / 4 % 2][i % 4], 0.0f, sum);
    }
    return sum == 0.0f;
}

// A tile as operand A of a product over its 16 nodes.
template <int kTerms, int kTiles>
struct TileTerms {
    uint32_t x[kTerms][kTiles][4];
};

template <int kTerms, int kTiles>
__device__ __forceinline__ TileTerms<kTerms, kTiles> split_tile(const Tile<kTiles>& tile) {
    TileTerms<kTerms, kTiles> terms;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            const int j = word / 2, half = word % 2;
            uint32_t pair[kTerms];
            split(tile.x[i][j][2 * half], tile.x[i][j][2 * half + 1], pair);
#pragma unroll
            for (int term = 0; term < kTerms; ++term) terms.x[term][i][word] = pair[term];
        }
    }
    return terms;
}

// ------------------------------------------------------------------ memory

// Values of a lane's 2 kTiles neighbouring rows at node j, e of block d, as they lie in memory.
template <typename Types>
using LaneRows = Vec<typename Types::Input, 2 * Types::kTiles>;

__device__ __forceinline__ int node_of(int d, int j, int c, int e) {
    return d * kNodeBlock + 8 * j + 2 * c + e;
}

template <typename T, int kCount>
__device__ __forceinline__ Vec<T, kCount> load_lane(const T* from, bool aligned) {
    if (aligned) return load_vec<kCount>(from);
    Vec<T, kCount> value;
#pragma unroll
    for (int i = 0; i < kCount; ++i) value.x[i] = from[i];
    return value;
}

template <typename T, int kCount>
__device__ __forceinline__ void store_lane(T* to, const Vec<T, kCount>& value, bool aligned) {
    if (aligned) {
        store_vec(to, value);
        return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = value.x[i];
}

template <typename T>
__device__ __forceinline__ T zero() {
    return from_float<T>(0.0f);
}

// Where node t of `head` lies, at row `first` of V.
__device__ __forceinline__ int64_t at_node(const int64_t (&stride)[3], const VerifyWork& work,
                                           int t, int first) {
    return work.row * stride[0] + t * stride[1] + work.head * stride[2] + first;
}

// Stores out and u of one node; zeros for padding.
template <typename Types>
__device__ __forceinline__ void store_node(const VerifyArgs& args, const VerifyWork& work, int t,
                                           int first, const Vec<float, 2 * Types::kTiles>& out,
                                           const Vec<float, 2 * Types::kTiles>& u) {
    using Input = typename Types::Input;
    const treewy_tree_verify_params& p = args.params;
    if (t >= p.tree.max_nodes) return;
    constexpr int kCount = 2 * Types::kTiles;
    Vec<Input, kCount> rounded;
    Vec<float, kCount> kept;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        rounded.x[i] = t < work.nodes ? from_float<Input>(out.x[i]) : zero<Input>();
        kept.x[i] = t < work.nodes ? u.x[i] : 0.0f;
    }
    store_lane(static_cast<Input*>(p.out) + at_node(p.out_stride, work, t, first), rounded,
               args.aligned);
    store_lane(static_cast<float*>(p.u) + at_node(p.u_stride, work, t, first), kept, args.aligned);
}

template <typename Types>
__device__ __forceinline__ void store_tile(const VerifyArgs& args, const VerifyWork& work, int d,
                                           int first, const Tile<Types::kTiles>& out,
                                           const Tile<Types::kTiles>& u, int c) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            Vec<float, 2 * Types::kTiles> out_rows, u_rows;
#pragma unroll
            for (int i = 0; i < 2 * Types::kTiles; ++i) {
                out_rows.x[i] = out.x[i / 2][j][i % 2 * 2 + e];
                u_rows.x[i] = u.x[i / 2][j][i % 2 * 2 + e];
            }
            store_node<Types>(args, work, node_of(d, j, c, e), first, out_rows, u_rows);
        }
    }
}

// U of the 16 history entries from `block` on.
template <typename Types>
__device__ __forceinline__ Tile<Types::kTiles> load_history(const VerifyArgs& args,
                                                            const VerifyWork& work, int block,
                                                            int first, int c) {
    constexpr int kCount = 2 * Types::kTiles;
    const treewy_tree_verify_params& p = args.params;
    const int64_t heads = p.state.value_heads, dim = p.state.value_dim;
    const float* from = p.history.u + work.slot * p.history.u_stride[0] + work.head * dim + first;
    Tile<Types::kTiles> tile = zero_tile<Types::kTiles>();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int entry = node_of(block, j, c, e);
            if (entry >= work.history) continue;
            const Vec<float, kCount> rows = load_vec<kCount>(from + entry * heads * dim);
#pragma unroll
            for (int i = 0; i < kCount; ++i) tile.x[i / 2][j][i % 2 * 2 + e] = rows.x[i];
        }
    }
    return tile;
}

// U of earlier node blocks, which every thread keeps for itself alone.
template <typename Types>
__device__ __forceinline__ float4* known_u_at(const Shared& shared, int block, int thread) {
    return shared.known_u + block * Types::kTiles * 2 * Types::kThreads + thread;
}

}  // namespace treewy
