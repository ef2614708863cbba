// SPDX-License-Identifier: Apache-2.0
//
// From a type of the inputs to the kernel: state, head dim, tile, nodes.
#pragma once

#include "tree_verify_launch.h"
#include "tree_verify_small.cuh"
#include "tree_verify_whole.cuh"

namespace treewy {

// 0 where they are not known, which is only a hint missed.
inline int count_multiprocessors() {
#if defined(TREEWY_ON_HOST)
    return 1;
#else
    int device = 0, count = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return 0;
    static_cast<void>(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    return count;
#endif
}

inline NodeStrides node_strides(const int64_t (&stride)[3]) {
    return {static_cast<int>(stride[1]), static_cast<int>(stride[2])};
}

template <typename Types>
treewy_status launch_kernel(void (*kernel)(VerifyArgs), const treewy_tree_verify_params& p,
                            const VerifyLayout& layout, treewy_stream stream) {
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
                    static_cast<uint32_t>(count_multiprocessors() * Types::kMinBlocks)};
    // treewy_history is of all layers: of its strides the slot's counts here.
    args.params.history.u_stride[0] = p.history.u_stride[1];
    args.params.history.k_stride[0] = p.history.k_stride[1];
    args.params.history.g_stride[0] = p.history.g_stride[1];
    const Grid grid(int64_t{p.state.value_heads} * tiles, p.tree.batch);
    return launch(kVerifyName, kernel, grid, Types::kThreads, static_cast<size_t>(layout.total),
                  stream, args, Start::kOverlapping);
}

template <typename Types>
treewy_status launch_types(const treewy_tree_verify_params& p, const VerifyLayout& layout,
                           treewy_stream stream) {
    return launch_kernel<Types>(tree_verify_kernel<Types>, p, layout, stream);
}

template <typename Input>
treewy_status launch_whole(const treewy_tree_verify_params& p, const VerifyLayout& layout,
                           treewy_stream stream) {
    if (layout.node_blocks == 2) {
        using Types = WholeTypes<Input, 2>;
        return launch_kernel<Types>(tree_verify_whole_kernel<Types>, p, layout, stream);
    }
    using Types = WholeTypes<Input, 3>;
    return launch_kernel<Types>(tree_verify_whole_kernel<Types>, p, layout, stream);
}

template <typename Types>
treewy_status launch_small(const treewy_tree_verify_params& p, const VerifyLayout& layout,
                           treewy_stream stream) {
    return launch_kernel<Types>(tree_verify_small_kernel<Types>, p, layout, stream);
}

// At most 16 nodes, none or a short history: for the head dim of the models there are.
template <typename Input, typename State, int kKeyDim, int kTiles, int kWarps>
treewy_status launch_blocks(const treewy_tree_verify_params& p, const VerifyLayout& layout,
                            treewy_stream stream) {
    if constexpr (kKeyDim == 128 && sizeof(Input) == 2) {
        const bool few = small_rows(p.tree.max_nodes) < kNodeBlock;
        if constexpr (sizeof(State) == 2 || kWarps == 4) {
            if (layout.short_history) {
                using Few = VerifyTypes<Input, State, kKeyDim, kTiles, kWarps, Nodes::kEightAfter>;
                using Types =
                    VerifyTypes<Input, State, kKeyDim, kTiles, kWarps, Nodes::kSixteenAfter>;
                return few ? launch_small<Few>(p, layout, stream)
                           : launch_small<Types>(p, layout, stream);
            }
        }
        if (layout.node_blocks == 1 && layout.history_blocks == 0) {
            using Few = VerifyTypes<Input, State, kKeyDim, kTiles, kWarps, Nodes::kEight>;
            using Types = VerifyTypes<Input, State, kKeyDim, kTiles, kWarps, Nodes::kSixteen>;
            return few ? launch_small<Few>(p, Few::kLayout, stream)
                       : launch_small<Types>(p, Types::kLayout, stream);
        }
    }
    return launch_types<VerifyTypes<Input, State, kKeyDim, kTiles, kWarps, Nodes::kAny>>(p, layout,
                                                                                         stream);
}

template <typename Input, typename State, int kKeyDim>
treewy_status launch_tile(int tile, const treewy_tree_verify_params& p, const VerifyLayout& layout,
                          treewy_stream stream) {
    if (!all_aligned(p, tile)) {
        return launch_types<VerifyTypes<Input, State, kKeyDim, 1, 4, Nodes::kUnaligned>>(p, layout,
                                                                                         stream);
    }
    if constexpr (sizeof(Input) == 2) {
        if constexpr (kKeyDim == 128 && sizeof(State) == 4) {
            if (layout.whole) return launch_whole<Input>(p, layout, stream);
        }
        if (tile == TREEWY_VERIFY_ROWS_128) {
            constexpr int kTiles = sizeof(State) == 2 ? 2 : 1;
            return launch_blocks<Input, State, kKeyDim, kTiles, 8 / kTiles>(p, layout, stream);
        }
    }
    return launch_blocks<Input, State, kKeyDim, 1, 4>(p, layout, stream);
}

template <typename Input, typename State>
treewy_status launch_dim(int tile, const treewy_tree_verify_params& p, const VerifyLayout& layout,
                         treewy_stream stream) {
    switch (p.state.key_dim) {
        case 64:
            return launch_tile<Input, State, 64>(tile, p, layout, stream);
        case 128:
            return launch_tile<Input, State, 128>(tile, p, layout, stream);
        default:
            return launch_tile<Input, State, 256>(tile, p, layout, stream);
    }
}

template <typename Input>
treewy_status launch_state(int tile, const treewy_tree_verify_params& p, const VerifyLayout& layout,
                           treewy_stream stream) {
    return p.state.dtype == TREEWY_FLOAT32
               ? launch_dim<Input, float>(tile, p, layout, stream)
               : launch_dim<Input, __nv_bfloat16>(tile, p, layout, stream);
}

}  // namespace treewy
