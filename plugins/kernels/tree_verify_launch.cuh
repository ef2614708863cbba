// SPDX-License-Identifier: Apache-2.0
//
// From a type of the inputs to the kernel: state, head dim, tile, nodes.
#pragma once

#include <algorithm>

#include "tree_verify_kernel.cuh"
#include "tree_verify_launch.h"
#include "tree_verify_small.cuh"
#include "tree_verify_stream.cuh"

namespace treewy {

inline NodeStrides node_strides(const int64_t (&stride)[3]) {
    return {static_cast<int>(stride[1]), static_cast<int>(stride[2])};
}

inline TurnSteps turn_steps(int across, const Grid& grid) {
    const int blocks = static_cast<int>(grid.x);
    return {across, blocks / across, blocks % across};
}

template <typename Types>
treewy_status launch_kernel(void (*kernel)(VerifyArgs), const treewy_tree_verify_params& p,
                            const VerifyPlan& plan, const VerifyLayout& layout, const Grid& grid,
                            treewy_stream stream) {
    prefer_shared_memory(kernel);
    const int tiles = p.state.value_dim / Types::kRows;
    const int ratio = p.state.value_heads / p.state.key_heads;
    VerifyArgs args{p,
                    node_strides(p.q_stride),
                    node_strides(p.k_stride),
                    node_strides(p.v_stride),
                    node_strides(p.out_stride),
                    node_strides(p.u_stride),
                    layout,
                    inverse_of(tiles),
                    inverse_of(ratio),
                    static_cast<uint32_t>(plan.multiprocessors * Types::kMinBlocks),
                    turn_steps(p.state.value_heads * tiles, grid)};
    // treewy_history is of all layers: of its strides the slot's counts here.
    args.params.history.u_stride[0] = p.history.u_stride[1];
    args.params.history.k_stride[0] = p.history.k_stride[1];
    args.params.history.g_stride[0] = p.history.g_stride[1];
    args.params.history.folded_stride[0] = p.history.folded_stride[1];
    return launch(kVerifyName, kernel, grid, Types::kThreads, static_cast<size_t>(layout.total),
                  stream, args, Start::kOverlapping);
}

// A block a value head of a row and Types::kRows of V.
template <typename Types>
Grid grid_of(const treewy_tree_verify_params& p) {
    return {int64_t{p.state.value_heads} * (p.state.value_dim / Types::kRows), p.tree.batch};
}

template <typename Types>
treewy_status launch_types(const treewy_tree_verify_params& p, const VerifyPlan& plan,
                           treewy_stream stream) {
    return launch_kernel<Types>(tree_verify_kernel<Types>, p, plan, plan.layout, grid_of<Types>(p),
                                stream);
}

template <typename Types>
treewy_status launch_small(const treewy_tree_verify_params& p, const VerifyPlan& plan,
                           const VerifyLayout& layout, treewy_stream stream) {
    return launch_kernel<Types>(tree_verify_small_kernel<Types>, p, plan, layout, grid_of<Types>(p),
                                stream);
}

// A block a multiprocessor, where there is so much to do.
template <typename Input, typename State, int kHalves, bool kAhead = false>
treewy_status launch_stream(const treewy_tree_verify_params& p, const VerifyPlan& plan,
                            treewy_stream stream) {
    using Types = StreamTypes<Input, State, kHalves, kAhead>;
    if constexpr (Types::kFits &&
                  (Types::kProducts || (!kAhead && Types::kNodeBlocks <= kMaxStream))) {
        const Grid all = grid_of<Types>(p);
        const int64_t blocks = std::min(all.x * all.y, int64_t{plan.multiprocessors});
        return launch_kernel<Types>(tree_verify_stream_kernel<Types>, p, plan, plan.layout,
                                    Grid(blocks), stream);
    } else {
        return fail(TREEWY_UNSUPPORTED, "%s: blocks that stay do not take %d nodes", kVerifyName,
                    p.tree.max_nodes);  // as `streams` has said
    }
}

// The same with warps that fill stages ahead.
template <typename Input, typename State>
treewy_status launch_ahead(const treewy_tree_verify_params& p, const VerifyPlan& plan,
                           treewy_stream stream) {
    if constexpr (sizeof(State) == 2) {
        if (p.tree.max_nodes > 24) return launch_stream<Input, State, 4, true>(p, plan, stream);
        if (p.tree.max_nodes > 16) return launch_stream<Input, State, 3, true>(p, plan, stream);
    }
    return launch_stream<Input, State, 2, true>(p, plan, stream);
}

template <typename Input, typename State>
treewy_status launch_streams(const treewy_tree_verify_params& p, const VerifyPlan& plan,
                             treewy_stream stream) {
    if (plan.layout.ahead) return launch_ahead<Input, State>(p, plan, stream);
    switch ((p.tree.max_nodes + 7) / 8) {
        case 3:
            return launch_stream<Input, State, 3>(p, plan, stream);
        case 4:
            return launch_stream<Input, State, 4>(p, plan, stream);
        case 5:
            return launch_stream<Input, State, 5>(p, plan, stream);
        case 6:
            return launch_stream<Input, State, 6>(p, plan, stream);
        case 7:  // of warpgroups, from here on
            return launch_stream<Input, State, 7>(p, plan, stream);
        default:
            return launch_stream<Input, State, 2 * kMaxStreamGroups>(p, plan, stream);
    }
}

// At most 16 nodes, none or a short history: for the head dim of the models there are.
template <typename Input, typename State, int kKeyDim, int kTiles, int kWarps>
treewy_status launch_blocks(const treewy_tree_verify_params& p, const VerifyPlan& plan,
                            treewy_stream stream) {
    if constexpr (kKeyDim == 128 && sizeof(Input) == 2) {
        const bool few = small_rows(p.tree.max_nodes) < kNodeBlock;
        if constexpr (sizeof(State) == 2 || kWarps == 4) {
            if (plan.layout.short_history) {
                using Few = VerifyTypes<Input, State, kKeyDim, kTiles, kWarps, Nodes::kEightAfter>;
                using Types =
                    VerifyTypes<Input, State, kKeyDim, kTiles, kWarps, Nodes::kSixteenAfter>;
                return few ? launch_small<Few>(p, plan, plan.layout, stream)
                           : launch_small<Types>(p, plan, plan.layout, stream);
            }
        }
        if (plan.layout.node_blocks == 1 && plan.layout.history_blocks == 0) {
            using Few = VerifyTypes<Input, State, kKeyDim, kTiles, kWarps, Nodes::kEight>;
            using Types = VerifyTypes<Input, State, kKeyDim, kTiles, kWarps, Nodes::kSixteen>;
            return few ? launch_small<Few>(p, plan, Few::kLayout, stream)
                       : launch_small<Types>(p, plan, Types::kLayout, stream);
        }
    }
    return launch_types<VerifyTypes<Input, State, kKeyDim, kTiles, kWarps, Nodes::kAny>>(p, plan,
                                                                                         stream);
}

template <typename Input, typename State, int kKeyDim>
treewy_status launch_tile(const treewy_tree_verify_params& p, const VerifyPlan& plan,
                          treewy_stream stream) {
    if (!all_aligned(p, plan.tile)) {
        return launch_types<VerifyTypes<Input, State, kKeyDim, 1, 4, Nodes::kUnaligned>>(p, plan,
                                                                                         stream);
    }
    if constexpr (sizeof(Input) == 2) {
        if constexpr (kKeyDim == 128) {
            if (plan.layout.stream) return launch_streams<Input, State>(p, plan, stream);
        }
        if (plan.tile == TREEWY_VERIFY_ROWS_128) {
            constexpr int kTiles = sizeof(State) == 2 ? 2 : 1;
            return launch_blocks<Input, State, kKeyDim, kTiles, 8 / kTiles>(p, plan, stream);
        }
    }
    return launch_blocks<Input, State, kKeyDim, 1, 4>(p, plan, stream);
}

template <typename Input, typename State>
treewy_status launch_dim(const treewy_tree_verify_params& p, const VerifyPlan& plan,
                         treewy_stream stream) {
    switch (p.state.key_dim) {
        case 64:
            return launch_tile<Input, State, 64>(p, plan, stream);
        case 128:
            return launch_tile<Input, State, 128>(p, plan, stream);
        default:
            return launch_tile<Input, State, 256>(p, plan, stream);
    }
}

template <typename Input>
treewy_status launch_state(const treewy_tree_verify_params& p, const VerifyPlan& plan,
                           treewy_stream stream) {
    return p.state.dtype == TREEWY_FLOAT32 ? launch_dim<Input, float>(p, plan, stream)
                                           : launch_dim<Input, __nv_bfloat16>(p, plan, stream);
}

}  // namespace treewy
