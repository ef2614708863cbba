// SPDX-License-Identifier: Apache-2.0
//
// Tree verification of float32 inputs.

#include "tree_verify_launch.cuh"

namespace treewy {

treewy_status verify_float32(const treewy_tree_verify_params& p, const VerifyPlan& plan,
                             treewy_stream stream) {
    return launch_state<float>(p, plan, stream);
}

}  // namespace treewy
