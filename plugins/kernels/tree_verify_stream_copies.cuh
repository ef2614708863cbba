// SPDX-License-Identifier: Apache-2.0
//
// Copies of keys, queries and values of a turn to a stage of tree_verify_stream.cuh, by the
// kThreads threads of a group or of a warp.
#pragma once

#include "tree_verify_columns.cuh"
#include "tree_verify_turns.cuh"

namespace treewy {

// Which chunks of which of 8 nodes a thread copies, 8 nodes after the other: every kAcross-th.
template <typename Types, int kThreads>
struct CopyPlace {
    static constexpr int kAcross = kThreads / 8;                 // chunks of 16 bytes at a time
    static constexpr int kTimes = Types::kKeyDim / 8 / kAcross;  // for a whole node
    static_assert(kAcross * kTimes * 8 == Types::kKeyDim && Types::kRows == Types::kKeyDim &&
                  sizeof(typename Types::Input) == 2);

    int node;
    int first;

    __device__ __forceinline__ explicit CopyPlace(int thread)
        : node(static_cast<int>(static_cast<unsigned>(thread) / kAcross)),
          first(static_cast<int>(static_cast<unsigned>(thread) % kAcross)) {}
    __device__ __forceinline__ int chunk(int i) const { return first + i * kAcross; }
};

// Starts the copies of keys, or of queries, of all nodes; zeros from node `nodes` on.
template <typename Types, int kThreads>
__device__ __forceinline__ void copy_turn_rows(unsigned char* to, const typename Types::Input* from,
                                               int stride, int nodes, int thread) {
    using At = CopyPlace<Types, kThreads>;
    const At at(thread);
    const typename Types::Input* source = from + at.node * stride + 8 * at.first;
    unsigned char* place[At::kTimes];
#pragma unroll
    for (int i = 0; i < At::kTimes; ++i) {
        const int chunk = at.chunk(i);
        place[i] = to + chunk / 8 * kPanelBytes<Types> + at.node * kSwappedRow +
                   16 * (chunk % 8 ^ at.node);
    }
#pragma unroll
    for (int h = 0; h < Types::kHalves; ++h) {
        const bool real = 8 * h + at.node < nodes;
#pragma unroll
        for (int i = 0; i < At::kTimes; ++i) {
            copy_async_or_zero(place[i] + node_row(8 * h) * kSwappedRow,
                               real ? source + 8 * i * At::kAcross : from, real);
        }
        source += 8 * stride;
    }
}

// The same of the keys and queries of a turn.
template <typename Types, int kThreads>
__device__ __forceinline__ void copy_turn(const VerifyArgs& args, const Shared& shared,
                                          const VerifyWork& work, int thread) {
    using Input = typename Types::Input;
    const treewy_tree_verify_params& p = args.params;
    copy_turn_rows<Types, kThreads>(
        shared.keys,
        static_cast<const Input*>(p.k) + work.row * p.k_stride[0] + work.key_head * args.k.head,
        args.k.node, work.nodes, thread);
    copy_turn_rows<Types, kThreads>(
        shared.queries,
        static_cast<const Input*>(p.q) + work.row * p.q_stride[0] + work.key_head * args.q.head,
        args.q.node, work.nodes, thread);
}

// Starts the copies of the values of the real nodes, to where `Values` has them.
template <typename Types, int kThreads>
__device__ __forceinline__ void copy_turn_values(const VerifyArgs& args, const Shared& shared,
                                                 const VerifyWork& work, int thread) {
    using Input = typename Types::Input;
    using At = CopyPlace<Types, kThreads>;
    constexpr int kNodeBytes = Types::kWarpRows * static_cast<int>(sizeof(Input));
    constexpr int kChunksOfWarp = kNodeBytes / 16;
    const treewy_tree_verify_params& p = args.params;
    const At at(thread);
    const int node = at.node % 2 * 4 + at.node / 2;  // 2 c + e lies at 4 e + c
    const Input* source = static_cast<const Input*>(p.v) +
                          at_head(p.v_stride[0], args.v, work, work.first_row) +
                          at.node * args.v.node + 8 * at.first;
#pragma unroll
    for (int h = 0; h < Types::kHalves; ++h) {
        if (8 * h + at.node >= work.nodes) break;
#pragma unroll
        for (int i = 0; i < At::kTimes; ++i) {
            const int chunk = at.chunk(i);
            unsigned char* place = shared.values +
                                   (chunk / kChunksOfWarp * kNodeBlock + node) * kNodeBytes +
                                   16 * (chunk % kChunksOfWarp);
            copy_async(place + (h / 2 * Types::kWarps * kNodeBlock + h % 2 * 8) * kNodeBytes,
                       source + 8 * i * At::kAcross);
        }
        source += 8 * args.v.node;
    }
}

}  // namespace treewy
