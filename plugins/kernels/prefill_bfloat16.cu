// SPDX-License-Identifier: Apache-2.0
//
// Prefill of bfloat16 inputs on tensor cores.

#include "prefill_chunks.cuh"

namespace treewy {
namespace {

template <typename State>
treewy_status launch_state(const char* name, const treewy_prefill_params& p,
                           const PrefillPlan& plan, treewy_stream stream) {
    if (p.state.key_dim == 64) {
        return launch_chunks<ChunkTypes<__nv_bfloat16, State, 64, 2>>(name, p, plan, stream);
    }
    if (plan.tokens == 64) {
        return launch_chunks<ChunkTypes<__nv_bfloat16, State, 128, 4>>(name, p, plan, stream);
    }
    return launch_chunks<ChunkTypes<__nv_bfloat16, State, 128, 2>>(name, p, plan, stream);
}

}  // namespace

treewy_status prefill_bfloat16(const char* name, const treewy_prefill_params& p,
                               const PrefillPlan& plan, treewy_stream stream) {
    return p.state.dtype == TREEWY_FLOAT32 ? launch_state<float>(name, p, plan, stream)
                                           : launch_state<__nv_bfloat16>(name, p, plan, stream);
}

}  // namespace treewy
