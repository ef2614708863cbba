// SPDX-License-Identifier: Apache-2.0
//
// Tree verification of float32 inputs.

#include "tree_verify_launch.cuh"

namespace treewy {

treewy_status verify_float32(int tile, const treewy_tree_verify_params& p,
                             const VerifyLayout& layout, treewy_stream stream) {
    return launch_state<float>(tile, p, layout, stream);
}

}  // namespace treewy
