// SPDX-License-Identifier: Apache-2.0
//
// What the groups of tree_verify_stream.cuh work on, by two warps for each of them that fill its
// stages ahead: one copies keys, queries and values, the other follows the paths.
#pragma once

#include "tree_verify_columns.cuh"
#include "tree_verify_stream_paths.cuh"

namespace treewy {

// What a warp copies at a time: of 8 nodes 4 chunks of 16 bytes each, a quarter of a node.
template <typename Types>
struct WarpPlace {
    static constexpr int kTimes =
        Types::kKeyDim * static_cast<int>(sizeof(typename Types::Input)) / 64;  // for 8 whole nodes
    static constexpr int kElements = 64 / static_cast<int>(sizeof(typename Types::Input));
    static_assert(Types::kRows == Types::kKeyDim && kTimes == 4);

    int node;
    int chunk;

    __device__ __forceinline__ explicit WarpPlace(int lane) : node(lane / 4), chunk(lane % 4) {}
};

// Starts the copies of keys, or of queries, of all nodes; zeros from node `nodes` on.
template <typename Types>
__device__ __forceinline__ void copy_rows_by_warp(unsigned char* to,
                                                  const typename Types::Input* from, int stride,
                                                  int nodes, int lane) {
    using At = WarpPlace<Types>;
    const At at(lane);
    const typename Types::Input* source = from + at.node * stride + 8 * at.chunk;
    unsigned char* row = to + at.node * kSwappedRow;
    unsigned char* const place[2] = {row + 16 * (at.chunk ^ at.node),
                                     row + 16 * ((4 + at.chunk) ^ at.node)};
#pragma unroll
    for (int h = 0; h < Types::kHalves; ++h) {
        const bool real = 8 * h + at.node < nodes;
#pragma unroll
        for (int i = 0; i < At::kTimes; ++i) {
            copy_async_or_zero(
                place[i % 2] + i / 2 * kPanelBytes<Types> + node_row(8 * h) * kSwappedRow,
                real ? source + i * At::kElements : from, real);
        }
        source += 8 * stride;
    }
}

// The same of the keys and queries of a turn.
template <typename Types>
__device__ __forceinline__ void copy_nodes_by_warp(const VerifyArgs& args, const Shared& shared,
                                                   const VerifyWork& work, int lane) {
    using Input = typename Types::Input;
    const treewy_tree_verify_params& p = args.params;
    copy_rows_by_warp<Types>(
        shared.keys,
        static_cast<const Input*>(p.k) + work.row * p.k_stride[0] + work.key_head * args.k.head,
        args.k.node, work.nodes, lane);
    copy_rows_by_warp<Types>(
        shared.queries,
        static_cast<const Input*>(p.q) + work.row * p.q_stride[0] + work.key_head * args.q.head,
        args.q.node, work.nodes, lane);
}

// Starts the copies of the values of the real nodes, to where `Values` has them.
template <typename Types>
__device__ __forceinline__ void copy_values_by_warp(const VerifyArgs& args, const Shared& shared,
                                                    const VerifyWork& work, int lane) {
    using Input = typename Types::Input;
    using At = WarpPlace<Types>;
    constexpr int kNodeBytes = Types::kWarpRows * static_cast<int>(sizeof(Input));
    constexpr int kChunksOfWarp = kNodeBytes / 16;
    constexpr int kWarpsAtOnce = 4 / kChunksOfWarp;
    const treewy_tree_verify_params& p = args.params;
    const At at(lane);
    const int node = at.node % 2 * 4 + at.node / 2;  // 2 c + e lies at 4 e + c
    unsigned char* place = shared.values +
                           (at.chunk / kChunksOfWarp * kNodeBlock + node) * kNodeBytes +
                           16 * (at.chunk % kChunksOfWarp);
    const Input* source = static_cast<const Input*>(p.v) +
                          at_head(p.v_stride[0], args.v, work, work.first_row) +
                          at.node * args.v.node + 8 * at.chunk;
#pragma unroll
    for (int h = 0; h < Types::kHalves; ++h) {
        if (8 * h + at.node >= work.nodes) break;
#pragma unroll
        for (int i = 0; i < At::kTimes; ++i) {
            const int row = (h / 2 * Types::kWarps + i * kWarpsAtOnce) * kNodeBlock + h % 2 * 8;
            copy_async(place + row * kNodeBytes, source + i * At::kElements);
        }
        source += 8 * args.v.node;
    }
}

// Waits until the stage of turn `i` has been read, if it was in use.
template <typename Types>
__device__ __forceinline__ void wait_free(int i, int stage, int group) {
    if (i >= Types::kStages) sync_at<Types::kReadThreads>(Types::read_barrier(stage, group));
}

// Copies keys, queries and values of a turn.
template <typename Types>
__device__ __forceinline__ void copy_inputs(const VerifyArgs& args, VerifyWork work, int i,
                                            int stage, int group, int lane) {
    settle_row(args.params, load_row(args.params, work), work);
    wait_free<Types>(i, stage, group);
    const Shared shared = place_stage<Types>(stage);
    copy_nodes_by_warp<Types>(args, shared, work, lane);
    copy_values_by_warp<Types>(args, shared, work, lane);
    commit_copies();
    wait_copies<0>();
    show_to_products();
}

// Follows the paths of a turn.
template <typename Types>
__device__ __forceinline__ void follow_inputs(const VerifyArgs& args, VerifyWork work, int i,
                                              int stage, int group, int lane) {
    TurnPaths<Types> paths;
    paths.follow(args, work, lane);
    wait_free<Types>(i, stage, group);
    const Shared shared = place_stage<Types>(stage);
    paths.store(shared, lane);
    if (lane == 0) *shared.nodes = work.nodes;
}

// What the warps beside rows and groups do: the first of each group follow paths, the others copy.
template <typename Types>
__device__ __forceinline__ void fill_stages(const VerifyArgs& args, int warp, int lane) {
    lower_registers<Types::kInputRegisters>();
    const int count = count_turns(args), group = warp % Types::kGroups;
    Turn turn = first_turn(args);
    for (int i = 0; i < group; ++i) next_turn(args, turn);
    for (int i = group, stage = group; i < count; i += Types::kGroups) {
        const VerifyWork work = work_of<Types>(args, turn);
        if (warp < Types::kGroups) {
            follow_inputs<Types>(args, work, i, stage, group, lane);
        } else {
            copy_inputs<Types>(args, work, i, stage, group, lane);
        }
        arrive_at<Types::kReadyThreads>(Types::kReadyBarrier + stage);
        stage = (stage + Types::kGroups) % Types::kStages;
        for (int j = 0; j < Types::kGroups; ++j) next_turn(args, turn);
    }
}

}  // namespace treewy
