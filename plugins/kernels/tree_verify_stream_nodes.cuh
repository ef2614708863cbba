// SPDX-License-Identifier: Apache-2.0
//
// What the groups of tree_verify_stream.cuh do: the nodes of a turn, from the copies of keys,
// queries and values to T and M in a stage.
#pragma once

#include "tree_verify_products.cuh"
#include "tree_verify_stream_copies.cuh"

namespace treewy {

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

// What TurnProducts are, by each warp: norms first, products as weights are made of them.
template <typename Types>
struct WarpProducts {
    __device__ __forceinline__ void multiply(const Shared& shared, int warp, int lane) {
#pragma unroll 1
        for (int h = warp; h < Types::kHalves; h += Types::kGroupWarps)
            measure_nodes<Types>(shared, h, lane);
    }
    __device__ __forceinline__ void weigh(const Shared& shared, int warp, int lane) const {
#pragma unroll 1
        for (int n = warp; n < 2 * Types::kPairs; n += Types::kGroupWarps) {
            const NodePair pair = nth_pair<Types>(n);
            weigh_nodes<Types>(shared, pair.h, pair.b, lane);
        }
    }
};

// W and C of all nodes, and their factors.
template <typename Types>
__device__ __forceinline__ void couple_turn(const Shared& shared, const GroupPlace& at) {
    std::conditional_t<Types::kAhead, TurnProducts<Types>, WarpProducts<Types>> products;
    products.multiply(shared, at.warp, at.lane);
    sync_at<Types::kGroupThreads>(kGroupBarrier + at.group);
    if (at.thread < Types::kHalves * 8) make_factor(shared, at.thread);
    products.weigh(shared, at.warp, at.lane);
    sync_at<Types::kGroupThreads>(kGroupBarrier + at.group);
}

// Begins turn `i` of the block: its stage is waited for, then copied to.
template <typename Types>
__device__ __forceinline__ void enter_turn(const VerifyArgs& args, const VerifyWork& work, int i,
                                           int stage, const GroupPlace& at) {
    const Shared shared = place_stage<Types>(stage);
    wait_free<Types>(i, stage, at.group);
    copy_turn<Types, Types::kGroupThreads>(args, shared, work, at.thread);
    commit_copies();
    copy_turn_values<Types, Types::kGroupThreads>(args, shared, work, at.thread);
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
    skip_turns(args, turn, at.group);
    VerifyWork work = work_of<Types>(args, turn);
    TurnInputs<Types> inputs;
    if (at.group < count) inputs.load(args, work, at.warp, at.lane);
    for (int i = at.group, stage = at.group; i < count; i += Types::kGroups) {
        const Shared shared = place_stage<Types>(stage);
        settle_row(args.params, inputs.row, work);
        enter_turn<Types>(args, work, i, stage, at);
        follow_turn<Types>(args, work, stage, inputs, at);
        const int nodes = work.nodes;
        skip_turns(args, turn, Types::kGroups);
        work = work_of<Types>(args, turn);
        if (i + Types::kGroups < count) inputs.load(args, work, at.warp, at.lane);
        wait_copies<1>();                                         // all but the values
        sync_at<Types::kGroupThreads>(kGroupBarrier + at.group);  // keys, queries, paths are there
        couple_turn<Types>(shared, at);
        if (at.warp < Types::kNodeBlocks)
            invert_tree<Types>(shared, nodes, at.warp, at.lane, Types::kInvertBarrier + at.group);
        wait_copies<0>();
        show_to_products();
        arrive_at<Types::kStageThreads>(Types::kFilledBarrier + stage);
        stage = next_stage<Types>(stage);
    }
}

// The same where other warps fill the stages.
template <typename Types>
__device__ __forceinline__ void prepare_ahead(const VerifyArgs& args, const GroupPlace& at) {
    lower_registers<Types::kGroupRegisters>();
    const int count = count_turns(args);
    for (int i = at.group, stage = at.group; i < count; i += Types::kGroups) {
        const Shared shared = place_stage<Types>(stage);
        sync_at<Types::kReadyThreads>(Types::kReadyBarrier + stage);
        couple_turn<Types>(shared, at);
        if constexpr (Types::kThroughU) {
            if (at.warp == 0) invert_block<Types>(shared, at.lane);
        } else {
            invert_tree<Types>(shared, *shared.nodes, at.warp, at.lane,
                               Types::kInvertBarrier + at.group);
        }
        show_to_products();
        arrive_at<Types::kStageThreads>(Types::kFilledBarrier + stage);
        stage = next_stage<Types>(stage);
    }
}

}  // namespace treewy
