// SPDX-License-Identifier: Apache-2.0
//
// Tree verification of bfloat16 inputs.

#include "tree_verify_launch.cuh"

namespace treewy {

treewy_status verify_bfloat16(const treewy_tree_verify_params& p, const VerifyPlan& plan,
                              treewy_stream stream) {
    return launch_state<__nv_bfloat16>(p, plan, stream);
}

}  // namespace treewy
