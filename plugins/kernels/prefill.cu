// SPDX-License-Identifier: Apache-2.0
//
// The gated delta rule over packed token sequences: the algebra of tree verification over chunks of
// a chain, the state carried from chunk to chunk. With G the sum of g from the chunk's start on:
//
//   (I + B) U = R,  B[t,i] = beta_t exp(G_t - G_i) (k_t . k_i)  for i < t
//                   R[t]   = beta_t (v_t - exp(G_t) S k_t)
//   o_t = exp(G_t) S q_t + sum over i <= t of exp(G_t - G_i) (k_i . q_t) u_i
//   S  <- exp(G_last) S + sum over i of exp(G_last - G_i) u_i k_i^T
//
// This file checks a call and chooses its kernel: prefill_chunks.cuh on tensor cores for what
// prefill_plan.h says, prefill_general.cuh for the rest.

#include "gpu.h"
#include "prefill_general.cuh"
#include "prefill_launch.h"

namespace treewy {
namespace {

treewy_status check_prefill(const char* name, const treewy_prefill_params& p) {
    treewy_status status = check_packed(name, p.packed);
    if (status == TREEWY_OK) status = check_state_pool(name, p.state);
    if (status != TREEWY_OK) return status;
    if (p.state.layers != 1) {
        return fail(TREEWY_INVALID_ARGUMENT, "%s: state.layers must be 1, got %d", name,
                    p.state.layers);
    }
    for (const void* pointer :
         {p.q, p.k, p.v, p.a, p.b, static_cast<const void*>(p.A_log),
          static_cast<const void*>(p.dt_bias), static_cast<const void*>(p.out)}) {
        if (pointer == nullptr) {
            return fail(TREEWY_INVALID_ARGUMENT,
                        "%s: q, k, v, a, b, A_log, dt_bias and out must not be null", name);
        }
    }
    if (!is_float_dtype(p.dtype) || !is_float_dtype(p.gate_dtype)) {
        return fail(TREEWY_UNSUPPORTED,
                    "%s: dtype and gate_dtype must be float32, bfloat16 or float16, got %d and %d",
                    name, p.dtype, p.gate_dtype);
    }
    return TREEWY_OK;
}

// Whether addresses and strides allow the vectors that the kernel on tensor cores moves, and 32-bit
// offsets within a chunk.
bool suits_chunks(const treewy_prefill_params& p) {
    const struct {
        const void* data;
        const int64_t (&stride)[2];
        int64_t bytes;
    } all[] = {{p.q, p.q_stride, 16},
               {p.k, p.k_stride, 16},
               {p.v, p.v_stride, 16},
               {p.out, p.out_stride, 8}};
    for (const auto& one : all) {
        if (!is_aligned(one.data, static_cast<size_t>(one.bytes))) return false;
        for (const int64_t step : one.stride) {
            if (step * dtype_bytes(p.dtype) % one.bytes != 0) return false;
        }
        if (one.stride[0] < 0 || one.stride[0] > kMaxTokenStride) return false;
    }
    return true;
}

treewy_status plan_prefill(const char* name, const treewy_prefill_params& p, PrefillPlan* plan) {
    Gpu gpu;
    const treewy_status status = find_gpu(name, &gpu);
    if (status != TREEWY_OK) return status;
    const PrefillShape shape{p.state.key_dim,
                             p.state.value_dim,
                             p.dtype == TREEWY_FLOAT32   ? 3
                             : p.dtype == TREEWY_FLOAT16 ? 2
                                                         : 1,
                             dtype_bytes(p.state.dtype),
                             int64_t{p.packed.batch} * p.state.value_heads,
                             p.packed.tokens / p.packed.batch};
    *plan = choose_prefill(shape, suits_chunks(p), gpu.multiprocessors, gpu.shared_bytes);
    return TREEWY_OK;
}

treewy_status prefill(const char* name, const treewy_prefill_params& p, treewy_stream stream) {
    PrefillPlan plan;
    const treewy_status status = plan_prefill(name, p, &plan);
    if (status != TREEWY_OK) return status;
    if (plan.tokens == 0) return general::run_prefill(name, p, stream);
    return p.dtype == TREEWY_FLOAT16 ? prefill_float16(name, p, plan, stream)
                                     : prefill_bfloat16(name, p, plan, stream);
}

}  // namespace
}  // namespace treewy

extern "C" treewy_status treewy_prefill(const treewy_prefill_params* params, treewy_stream stream) {
    const char* name = "prefill";
    if (params == nullptr) return treewy::fail_null(name);
    if (params->packed.batch == 0 || params->packed.tokens == 0) return TREEWY_OK;
    const treewy_status status = treewy::check_prefill(name, *params);
    return status == TREEWY_OK ? treewy::prefill(name, *params, stream) : status;
}
