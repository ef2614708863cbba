// SPDX-License-Identifier: Apache-2.0
//
// Gates and paths of a turn of tree_verify_stream.cuh, by one warp in its registers, as the stage
// that they go to still serves another.
#pragma once

#include "tree_verify_paths.cuh"
#include "tree_verify_turns.cuh"

namespace treewy {

// What a lane has of its nodes, l and 32 + l.
template <typename Types>
struct TurnPaths {
    static constexpr int kEach = Types::kNodesPerHelper;
    static constexpr int kWords = Types::kMaskWords;
    using Path = PathEnd<kWords>;

    Path paths[kEach];
    float beta[kEach];

    // All of them, once it is known from the row what there is of them.
    __device__ __forceinline__ void follow(const VerifyArgs& args, VerifyWork& work, int lane) {
        const treewy_tree_verify_params& p = args.params;
        const RowInputs row = load_row(p, work);
        NodeInputs inputs[kEach];
        read_nodes<Types>(p, work, lane, inputs);
        const float A_log = p.A_log[work.head], dt_bias = p.dt_bias[work.head];
        settle_row(p, row, work);
#pragma unroll
        for (int i = 0; i < kEach; ++i)
            paths[i] =
                open_path<kWords>(args, work, inputs[i], A_log, dt_bias, kWarp * i + lane, beta[i]);
        while (__any_sync(kAllLanes, is_open())) jump();
    }

    // Whether any of the lane's paths goes on above where it ends.
    __device__ __forceinline__ bool is_open() const {
        bool open = false;
#pragma unroll
        for (int i = 0; i < kEach; ++i) open = open || paths[i].jump >= 0;
        return open;
    }

    // The path of a node, of whichever lane has it.
    __device__ __forceinline__ Path path_of(int node) const {
        Path path;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const double sum = __shfl_sync(kAllLanes, paths[i].sum, node % kWarp);
            const int next = __shfl_sync(kAllLanes, paths[i].jump, node % kWarp);
            const bool mine = i == 0 || node / kWarp == i;
            if (mine) path.sum = sum;
            if (mine) path.jump = next;
#pragma unroll
            for (int word = 0; word < kWords; ++word) {
                const uint32_t mask = __shfl_sync(kAllLanes, paths[i].mask[word], node % kWarp);
                if (mine) path.mask[word] = mask;
            }
        }
        return path;
    }

    // Pointer jumping: every path goes on by the one that it ends at.
    __device__ __forceinline__ void jump() {
        Path above[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) above[i] = path_of(max(paths[i].jump, 0));
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            if (paths[i].jump < 0) continue;
            paths[i].sum += above[i].sum;
            paths[i].jump = above[i].jump;
#pragma unroll
            for (int word = 0; word < kWords; ++word) paths[i].mask[word] |= above[i].mask[word];
        }
    }

    __device__ __forceinline__ void store(const Shared& shared, int lane) const {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int node = kWarp * i + lane;
            const uint32_t related = related_blocks(paths[i].mask);
            if (node >= Types::kNodeBlocks * kNodeBlock) continue;
            shared.path_sum[node] = two_floats(paths[i].sum);
            shared.beta[node] = beta[i];
#pragma unroll
            for (int word = 0; word < kWords; ++word)
                shared.ancestors[node * kWords + word] = paths[i].mask[word];
            if (node % kNodeBlock == 0) shared.related[node / kNodeBlock] = related;
        }
    }
};

}  // namespace treewy
