// SPDX-License-Identifier: Apache-2.0
//
// Gates and paths of a turn of tree_verify_stream.cuh, by one warp in its registers, as the stage
// that they go to still serves another.
#pragma once

#include "tree_verify_paths.cuh"
#include "tree_verify_turns.cuh"

namespace treewy {

// What a lane has of its node.
template <typename Types>
struct TurnPaths {
    static_assert(Types::kNodesPerHelper == 1 && Types::kMaskWords == 1);

    PathEnd<1> path;
    float beta;

    // Follows it, once it is known from the row whether there is such a node.
    __device__ __forceinline__ void follow(const VerifyArgs& args, VerifyWork& work, int lane) {
        const treewy_tree_verify_params& p = args.params;
        const RowInputs row = load_row(p, work);
        NodeInputs inputs[1];
        read_nodes<Types>(p, work, lane, inputs);
        const float A_log = p.A_log[work.head], dt_bias = p.dt_bias[work.head];
        settle_row(p, row, work);
        path = open_path<1>(args, work, inputs[0], A_log, dt_bias, lane, beta);
        while (__any_sync(kAllLanes, path.jump >= 0)) jump();
    }

    // Pointer jumping: every path goes on by the one that it ends at.
    __device__ __forceinline__ void jump() {
        const int from = max(path.jump, 0);
        const double sum = __shfl_sync(kAllLanes, path.sum, from);
        const int next = __shfl_sync(kAllLanes, path.jump, from);
        const uint32_t mask = __shfl_sync(kAllLanes, path.mask[0], from);
        if (path.jump < 0) return;
        path.sum += sum;
        path.jump = next;
        path.mask[0] |= mask;
    }

    __device__ __forceinline__ void store(const Shared& shared, int lane) const {
        const uint32_t related = related_blocks(path.mask);
        if (lane >= Types::kNodeBlocks * kNodeBlock) return;
        shared.path_sum[lane] = two_floats(path.sum);
        shared.beta[lane] = beta;
        shared.ancestors[lane] = path.mask[0];
        if (lane % kNodeBlock == 0) shared.related[lane / kNodeBlock] = related;
    }
};

}  // namespace treewy
