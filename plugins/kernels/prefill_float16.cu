// SPDX-License-Identifier: Apache-2.0
//
// Prefill of float16 inputs on tensor cores.

#include "prefill_chunks.cuh"

namespace treewy {
namespace {

template <typename State>
treewy_status launch_state(const char* name, const treewy_prefill_params& p,
                           const PrefillPlan& plan, treewy_stream stream) {
    return p.state.key_dim == 64
               ? launch_chunks<ChunkTypes<__half, State, 64, 2>>(name, p, plan, stream)
               : launch_chunks<ChunkTypes<__half, State, 128, 2>>(name, p, plan, stream);
}

}  // namespace

treewy_status prefill_float16(const char* name, const treewy_prefill_params& p,
                              const PrefillPlan& plan, treewy_stream stream) {
    return p.state.dtype == TREEWY_FLOAT32 ? launch_state<float>(name, p, plan, stream)
                                           : launch_state<__nv_bfloat16>(name, p, plan, stream);
}

}  // namespace treewy
