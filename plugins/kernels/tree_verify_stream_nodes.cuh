// SPDX-License-Identifier: Apache-2.0
//
// What the groups of tree_verify_stream.cuh do: the nodes of a turn, from the copies of keys,
// queries and values to T and M in a stage.
#pragma once

#include "tree_verify_products.cuh"
#include "tree_verify_turns.cuh"

namespace treewy {

// Which chunk of which of 8 nodes a thread of a group copies, 8 nodes after the other.
template <typename Types>
struct CopyPlace {
    static constexpr int kChunks = Types::kKeyDim / 8;  // of 16 bytes, of a node
    static_assert(Types::kGroupThreads == 8 * kChunks && Types::kRows == Types::kKeyDim &&
                  sizeof(typename Types::Input) == 2);

    int node;
    int chunk;

    __device__ __forceinline__ explicit CopyPlace(int thread)
        : node(static_cast<int>(static_cast<unsigned>(thread) / kChunks)),
          chunk(static_cast<int>(static_cast<unsigned>(thread) % kChunks)) {}
};

// Starts the copies of keys, or of queries, of all nodes; zeros from node `nodes` on.
template <typename Types>
__device__ __forceinline__ void copy_turn_rows(unsigned char* to, const typename Types::Input* from,
                                               int stride, int nodes, int thread) {
    const CopyPlace<Types> at(thread);
    unsigned char* place = to + at.chunk / 8 * kPanelBytes<Types> + at.node * kSwappedRow +
                           16 * (at.chunk % 8 ^ at.node);
    const typename Types::Input* source = from + at.node * stride + 8 * at.chunk;
#pragma unroll
    for (int h = 0; h < Types::kHalves; ++h) {
        const bool real = 8 * h + at.node < nodes;
        copy_async_or_zero(place + node_row(8 * h) * kSwappedRow,
                           real ? source + 8 * h * stride : from, real);
    }
}

// The same of the keys and queries of a turn.
template <typename Types>
__device__ __forceinline__ void copy_turn(const VerifyArgs& args, const Shared& shared,
                                          const VerifyWork& work, int thread) {
    using Input = typename Types::Input;
    const treewy_tree_verify_params& p = args.params;
    copy_turn_rows<Types>(
        shared.keys,
        static_cast<const Input*>(p.k) + work.row * p.k_stride[0] + work.key_head * args.k.head,
        args.k.node, work.nodes, thread);
    copy_turn_rows<Types>(
        shared.queries,
        static_cast<const Input*>(p.q) + work.row * p.q_stride[0] + work.key_head * args.q.head,
        args.q.node, work.nodes, thread);
}

// Starts the copies of the values of the real nodes, to where `Values` has them.
template <typename Types>
__device__ __forceinline__ void copy_turn_values(const VerifyArgs& args, const Shared& shared,
                                                 const VerifyWork& work, int thread) {
    using Input = typename Types::Input;
    constexpr int kNodeBytes = Types::kWarpRows * static_cast<int>(sizeof(Input));
    constexpr int kChunksOfWarp = kNodeBytes / 16;
    const treewy_tree_verify_params& p = args.params;
    const CopyPlace<Types> at(thread);
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
        copy_async(place + (h / 2 * Types::kWarps * kNodeBlock + h % 2 * 8) * kNodeBytes,
                   source + 8 * h * args.v.node);
    }
}

// Where a thread of a group stands.
struct GroupPlace {
    int group;
    int thread;
    int warp;
    int lane;
};

// What a group needs of a turn before anything else, asked for a turn ahead.
template <typename Types>
struct TurnInputs {
    RowInputs row;
    NodeInputs nodes[Types::kNodesPerHelper];  // of the warp that follows the paths
    float2 head;

    __device__ __forceinline__ void load(const VerifyArgs& args, const VerifyWork& work, int warp,
                                         int lane) {
        const treewy_tree_verify_params& p = args.params;
        row = load_row(p, work);
        if (warp != Types::kPathWarp) return;
        read_nodes<Types>(p, work, lane, nodes);
        head = make_float2(p.A_log[work.head], p.dt_bias[work.head]);
    }
};

// W and C of all nodes, and their factors.
template <typename Types>
__device__ __forceinline__ void couple_turn(const Shared& shared, const GroupPlace& at) {
    sync_at<Types::kGroupThreads>(kGroupBarrier + at.group);  // keys, queries and paths are there
#pragma unroll 1
    for (int h = at.warp; h < Types::kHalves; h += Types::kGroupWarps)
        measure_nodes<Types>(shared, h, at.lane);
    sync_at<Types::kGroupThreads>(kGroupBarrier + at.group);
    if (at.thread < Types::kHalves * 8) make_factor(shared, at.thread);
#pragma unroll 1
    for (int n = at.warp; n < 2 * Types::kPairs; n += Types::kGroupWarps) {
        const NodePair pair = nth_pair<Types>(n);
        weigh_nodes<Types>(shared, pair.h, pair.b, at.lane);
    }
    sync_at<Types::kGroupThreads>(kGroupBarrier + at.group);
}

// Begins turn `i` of the block: its stage is waited for, then copied to.
template <typename Types>
__device__ __forceinline__ void enter_turn(const VerifyArgs& args, const VerifyWork& work, int i,
                                           int stage, const GroupPlace& at) {
    const Shared shared = place_stage<Types>(stage);
    if (i >= Types::kStages) sync_at<Types::kReadThreads>(Types::read_barrier(stage, at.group));
    copy_turn<Types>(args, shared, work, at.thread);
    commit_copies();
    copy_turn_values<Types>(args, shared, work, at.thread);
    commit_copies();
    if (at.thread == 0) *shared.nodes = work.nodes;
}

template <typename Types>
__device__ __forceinline__ void follow_turn(const VerifyArgs& args, const VerifyWork& work,
                                            int stage, const TurnInputs<Types>& inputs,
                                            const GroupPlace& at) {
    if (at.warp != Types::kPathWarp) return;
    follow_paths<Types>(args, place_stage<Types>(stage), work, inputs.nodes, inputs.head.x,
                        inputs.head.y, at.lane);
}

// What a group does: the nodes of every kGroups-th turn.
template <typename Types>
__device__ __forceinline__ void prepare_turns(const VerifyArgs& args, const GroupPlace& at) {
    lower_registers<Types::kGroupRegisters>();
    const int count = count_turns(args);
    Turn turn = first_turn(args);
    for (int i = 0; i < at.group; ++i) next_turn(args, turn);
    VerifyWork work = work_of<Types>(args, turn);
    TurnInputs<Types> inputs;
    if (at.group < count) inputs.load(args, work, at.warp, at.lane);
    for (int i = at.group, stage = at.group; i < count; i += Types::kGroups) {
        const Shared shared = place_stage<Types>(stage);
        settle_row(args.params, inputs.row, work);
        enter_turn<Types>(args, work, i, stage, at);
        follow_turn<Types>(args, work, stage, inputs, at);
        const int nodes = work.nodes;
        for (int j = 0; j < Types::kGroups; ++j) next_turn(args, turn);
        work = work_of<Types>(args, turn);
        if (i + Types::kGroups < count) inputs.load(args, work, at.warp, at.lane);
        wait_copies<1>();  // all but the values
        couple_turn<Types>(shared, at);
        if (at.warp < Types::kNodeBlocks)
            invert_tree<Types>(shared, nodes, at.warp, at.lane, Types::kInvertBarrier + at.group);
        wait_copies<0>();
        show_to_products();
        arrive_at<Types::kStageThreads>(Types::kFilledBarrier + stage);
        stage += stage + Types::kGroups < Types::kStages ? Types::kGroups
                                                         : Types::kGroups - Types::kStages;
    }
}

// The same where other warps fill the stages, by products of warpgroups.
template <typename Types>
__device__ __forceinline__ void couple_ahead(const Shared& shared, const GroupPlace& at) {
    TurnProducts<Types> products;
    products.multiply(shared, at.warp, at.lane);
    sync_at<Types::kGroupThreads>(kGroupBarrier + at.group);
    if (at.thread < Types::kHalves * 8) make_factor(shared, at.thread);
    products.weigh(shared, at.warp, at.lane);
    sync_at<Types::kGroupThreads>(kGroupBarrier + at.group);
}

template <typename Types>
__device__ __forceinline__ void prepare_ahead(const VerifyArgs& args, const GroupPlace& at) {
    lower_registers<Types::kGroupRegisters>();
    const int count = count_turns(args);
    for (int i = at.group, stage = at.group; i < count; i += Types::kGroups) {
        const Shared shared = place_stage<Types>(stage);
        sync_at<Types::kReadyThreads>(Types::kReadyBarrier + stage);
        couple_ahead<Types>(shared, at);
        invert_tree<Types>(shared, *shared.nodes, at.warp, at.lane,
                           Types::kInvertBarrier + at.group);
        show_to_products();
        arrive_at<Types::kStageThreads>(Types::kFilledBarrier + stage);
        stage = (stage + Types::kGroups) % Types::kStages;
    }
}

}  // namespace treewy
