// SPDX-License-Identifier: Apache-2.0
//
// What the groups of tree_verify_stream.cuh work on, by two warps for each of them that fill its
// stages ahead: one copies keys, queries and values, the other follows the paths.
#pragma once

#include "tree_verify_stream_copies.cuh"
#include "tree_verify_stream_paths.cuh"

namespace treewy {

// Copies keys, queries and values of a turn.
template <typename Types>
__device__ __forceinline__ void copy_inputs(const VerifyArgs& args, VerifyWork work, int i,
                                            int stage, int group, int lane) {
    settle_row(args.params, load_row(args.params, work), work);
    wait_free<Types>(i, stage, group);
    const Shared shared = place_stage<Types>(stage);
    copy_turn<Types, kWarp>(args, shared, work, lane);
    copy_turn_values<Types, kWarp>(args, shared, work, lane);
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
    skip_turns(args, turn, group);
    for (int i = group, stage = group; i < count; i += Types::kGroups) {
        const VerifyWork work = work_of<Types>(args, turn);
        if (warp < Types::kGroups) {
            follow_inputs<Types>(args, work, i, stage, group, lane);
        } else {
            copy_inputs<Types>(args, work, i, stage, group, lane);
        }
        arrive_at<Types::kReadyThreads>(Types::kReadyBarrier + stage);
        stage = next_stage<Types>(stage);
        skip_turns(args, turn, Types::kGroups);
    }
}

}  // namespace treewy
