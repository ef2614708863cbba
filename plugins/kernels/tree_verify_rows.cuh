// SPDX-License-Identifier: Apache-2.0
//
// The rows of V of a lane at 16 nodes: in registers, as an operand, and to and from memory.
#pragma once

#include <type_traits>

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

// Whether the lane's rows of V are finite at every node that the products brought together: what is
// not finite at one node has made all 16 columns of its row so (zero times it is NaN).
template <int kTiles>
__device__ __forceinline__ bool is_finite(const Tile<kTiles>& out) {
    float sum = 0.0f;  // of zeros, unless there is NaN or Inf
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) sum = fmaf(out.x[i / 2][0][i % 2 * 2], 0.0f, sum);
    return sum == 0.0f;
}

// A tile as operand A of a product over its 16 nodes.
template <int kTerms, int kTiles>
struct TileTerms {
    uint32_t x[kTerms][kTiles][4];
};

// Of the 8 nodes `j`.
template <int kTerms, int kTiles>
__device__ __forceinline__ void split_half(const Tile<kTiles>& tile, int j,
                                           TileTerms<kTerms, kTiles>& terms) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t pair[kTerms];
            split(tile.x[i][j][2 * half], tile.x[i][j][2 * half + 1], pair);
#pragma unroll
            for (int term = 0; term < kTerms; ++term) terms.x[term][i][2 * j + half] = pair[term];
        }
    }
}

template <int kTerms, int kTiles>
__device__ __forceinline__ TileTerms<kTerms, kTiles> split_tile(const Tile<kTiles>& tile) {
    TileTerms<kTerms, kTiles> terms;
    split_half(tile, 0, terms);
    split_half(tile, 1, terms);
    return terms;
}

// ------------------------------------------------------------------ memory

// Values of v, or of a history's u, in shared memory: a warp's rows at the 16 nodes of a block,
// those of nodes 8 j + 2 c + e, c = 0 .. 3, side by side, so that lanes that read them meet in no
// bank.
template <typename Types, typename Value = typename Types::Input, int kNodes = Types::kNodeRows>
struct Values {
    using Input = Value;
    static constexpr bool kZeroed = false;  // beyond the real nodes
    static constexpr int kNodeBytes = Types::kWarpRows * static_cast<int>(sizeof(Input));
    static constexpr int kChunks = kNodeBytes / 16;

    unsigned char* base;  // the warp's of this node block

    __device__ __forceinline__ Values(const Shared& shared, int d, int warp)
        : base(shared.values +
               ((Types::kOneBlock ? 0 : d & 1) * Types::kWarps + warp) * kNodes * kNodeBytes) {}
    __device__ __forceinline__ Values(unsigned char* blocks, int block, int warp)
        : base(blocks + (block * Types::kWarps + warp) * kNodes * kNodeBytes) {}

    // Starts the copies of block d; `from` is row 0 of the warp's at node 0. What is beyond the
    // tensor is a copy of the last node and not used, or (kZero) zero.
    template <bool kZero = false>
    __device__ __forceinline__ void copy(const Input* from, int stride, int d, int max_nodes,
                                         int lane) const {
#pragma unroll
        for (int start = 0; start < kNodes * kChunks; start += kWarp) {
            const int index = start + lane, node = index / kChunks, chunk = index % kChunks;
            if (kNodes * kChunks < kWarp && index >= kNodes * kChunks) continue;
            const int place = (node & 8) + node % 2 * 4 + node / 2 % 4;
            unsigned char* to = base + place * kNodeBytes + 16 * chunk;
            if (kZero && d * kNodeBlock + node >= max_nodes) {
                *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
                continue;
            }
            const Input* at = from + min(d * kNodeBlock + node, max_nodes - 1) * stride +
                              chunk * kPer16Bytes<Input>;
            if constexpr (Types::kAligned) {
                copy_async(to, at);
            } else {
#pragma unroll
                for (int i = 0; i < kPer16Bytes<Input>; ++i)
                    reinterpret_cast<Input*>(to)[i] = at[i];
            }
        }
    }

    // The lane's rows at node 8 j + 2 c + e.
    __device__ __forceinline__ Vec<Input, 2 * Types::kTiles> at(int j, int e, int lane) const {
        constexpr int kBytes = 2 * Types::kTiles * static_cast<int>(sizeof(Input));
        return *reinterpret_cast<const Vec<Input, 2 * Types::kTiles>*>(
            base + (8 * j + 4 * e + lane % 4) * kNodeBytes + lane / 4 * kBytes);
    }
};

__device__ __forceinline__ int node_of(int d, int j, int c, int e) {
    return d * kNodeBlock + 8 * j + 2 * c + e;
}

template <bool kAligned, typename T, int kCount>
__device__ __forceinline__ void store_lane(T* to, const Vec<T, kCount>& value) {
    if constexpr (kAligned) {
        store_vec(to, value);
    } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i) to[i] = value.x[i];
    }
}

// Where row `first` of V of `head` lies, at node 0.
__device__ __forceinline__ int64_t at_head(int64_t row_stride, const NodeStrides& stride,
                                           const VerifyWork& work, int first) {
    return work.row * row_stride + (work.head * stride.head + first);
}

// Stores a lane's rows of a tile at its two nodes of each of the first kHalves 8, rounded to T;
// zeros for nodes from `nodes` on.
template <bool kAligned, int kHalves, typename T, int kTiles>
__device__ __forceinline__ void store_tile(T* to, int node_stride, const Tile<kTiles>& tile,
                                           int first_node, int nodes, int max_nodes) {
    T* at = to + first_node * node_stride;
#pragma unroll
    for (int j = 0; j < kHalves; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int t = first_node + 8 * j + e;
            if (t >= max_nodes) continue;
            Vec<T, 2 * kTiles> rows{};
            if (t < nodes) {
#pragma unroll
                for (int i = 0; i < 2 * kTiles; ++i)
                    rows.x[i] = from_float<T>(tile.x[i / 2][j][i % 2 * 2 + e]);
            }
            store_lane<kAligned>(at + (8 * j + e) * node_stride, rows);
        }
    }
}

// Stores out and u of node block d.
template <typename Types>
__device__ __forceinline__ void store_block(const VerifyArgs& args, const VerifyWork& work, int d,
                                            int first, const Tile<Types::kTiles>& out,
                                            const Tile<Types::kTiles>& u, int c) {
    using Input = typename Types::Input;
    constexpr bool kAligned = Types::kAligned;
    constexpr int kHalves = Types::kNodeRows / 8;
    const treewy_tree_verify_params& p = args.params;
    const int node = d * kNodeBlock + 2 * c, nodes = work.nodes, most = p.tree.max_nodes;
    store_tile<kAligned, kHalves>(
        static_cast<Input*>(p.out) + at_head(p.out_stride[0], args.out, work, first), args.out.node,
        out, node, nodes, most);
    if (p.u == nullptr) return;
    const int64_t u_at = at_head(p.u_stride[0], args.u, work, first);
    if (p.u_dtype == TREEWY_FLOAT32) {
        store_tile<kAligned, kHalves>(static_cast<float*>(p.u) + u_at, args.u.node, u, node, nodes,
                                      most);
    } else {
        store_tile<kAligned, kHalves>(static_cast<__nv_bfloat16*>(p.u) + u_at, args.u.node, u, node,
                                      nodes, most);
    }
}

// kCount neighbours of a history's u, of which there is one type for a float32 state.
template <typename Types, int kCount>
__device__ __forceinline__ Vec<float, kCount> load_history_u(const treewy_history& history,
                                                             int64_t at) {
    if (sizeof(typename Types::State) == 4 || history.u_dtype == TREEWY_FLOAT32) {
        return load_vec<kCount>(static_cast<const float*>(history.u) + at);
    }
    const auto raw = load_vec<kCount>(static_cast<const __nv_bfloat16*>(history.u) + at);
    Vec<float, kCount> rows;
#pragma unroll
    for (int i = 0; i < kCount; ++i) rows.x[i] = as_float(raw.x[i]);
    return rows;
}

// U of the 16 history entries from `block` on.
template <typename Types>
__device__ __forceinline__ Tile<Types::kTiles> load_history(const VerifyArgs& args,
                                                            const VerifyWork& work, int block,
                                                            int first, int c) {
    constexpr int kCount = 2 * Types::kTiles;
    const treewy_tree_verify_params& p = args.params;
    const int64_t heads = p.state.value_heads, dim = p.state.value_dim;
    const int64_t from = work.slot * p.history.u_stride[0] + work.head * dim + first;
    Tile<Types::kTiles> tile = zero_tile<Types::kTiles>();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int entry = node_of(block, j, c, e);
            if (entry >= work.history) continue;
            const Vec<float, kCount> rows =
                load_history_u<Types, kCount>(p.history, from + entry * heads * dim);
#pragma unroll
            for (int i = 0; i < kCount; ++i) tile.x[i / 2][j][i % 2 * 2 + e] = rows.x[i];
        }
    }
    return tile;
}

// U of earlier node blocks as operands, which every lane keeps for itself alone.
template <typename Types>
__device__ __forceinline__ uint4* known_u_at(const Shared& shared, int block, int thread) {
    constexpr int kWords = Types::kWeightTerms * Types::kTiles;
    return shared.known_u + block * kWords * Types::kRowThreads + thread;
}

template <typename Types>
__device__ __forceinline__ TileTerms<Types::kWeightTerms, Types::kTiles> load_known(
    const Shared& shared, int block, int thread) {
    TileTerms<Types::kWeightTerms, Types::kTiles> terms;
    const uint4* from = known_u_at<Types>(shared, block, thread);
#pragma unroll
    for (int i = 0; i < Types::kWeightTerms * Types::kTiles; ++i) {
        const uint4 words = from[i * Types::kRowThreads];
        uint32_t (&x)[4] = terms.x[i / Types::kTiles][i % Types::kTiles];
        x[0] = words.x, x[1] = words.y, x[2] = words.z, x[3] = words.w;
    }
    return terms;
}

template <typename Types>
__device__ __forceinline__ void keep_known(
    const Shared& shared, int block, int thread,
    const TileTerms<Types::kWeightTerms, Types::kTiles>& terms) {
    uint4* to = known_u_at<Types>(shared, block, thread);
#pragma unroll
    for (int i = 0; i < Types::kWeightTerms * Types::kTiles; ++i) {
        const uint32_t (&x)[4] = terms.x[i / Types::kTiles][i % Types::kTiles];
        to[i * Types::kRowThreads] = make_uint4(x[0], x[1], x[2], x[3]);
    }
}

}  // namespace treewy
