// SPDX-License-Identifier: Apache-2.0
//
// Launches of tree verification, one a type of the inputs: each is compiled in a file of its own,
// as compiling them takes long. tree_verify.cu has checked everything and chosen the tile.
#pragma once

#include "device.cuh"
#include "tree_verify_plan.h"

namespace treewy {

// How a call is cut into blocks, and what it runs on.
struct VerifyPlan {
    int tile;
    VerifyLayout layout;
    int multiprocessors;
};

inline constexpr const char* kVerifyName = "tree_verify";

// Whether addresses and strides allow vectors of `bytes` bytes.
template <int kStrides>
bool moves_in(int bytes, const void* data, const int64_t (&stride)[kStrides], int element_bytes) {
    bool fits = is_aligned(data, static_cast<size_t>(bytes));
    for (const int64_t step : stride) fits = fits && step * element_bytes % bytes == 0;
    return fits;
}

inline bool all_aligned(const treewy_tree_verify_params& p, int tile) {
    const int size = dtype_bytes(p.dtype),
              lane_rows = 2 * verify_tile(tile, dtype_bytes(p.state.dtype)).tiles_per_warp;
    return moves_in(16, p.q, p.q_stride, size) && moves_in(16, p.k, p.k_stride, size) &&
           moves_in(16, p.v, p.v_stride, size) &&
           moves_in(lane_rows * size, p.out, p.out_stride, size) &&
           (p.u == nullptr ||
            moves_in(lane_rows * dtype_bytes(p.u_dtype), p.u, p.u_stride, dtype_bytes(p.u_dtype)));
}

treewy_status verify_bfloat16(const treewy_tree_verify_params& p, const VerifyPlan& plan,
                              treewy_stream stream);
treewy_status verify_float16(const treewy_tree_verify_params& p, const VerifyPlan& plan,
                             treewy_stream stream);
treewy_status verify_float32(const treewy_tree_verify_params& p, const VerifyPlan& plan,
                             treewy_stream stream);

}  // namespace treewy
