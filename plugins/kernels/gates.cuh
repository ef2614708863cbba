// SPDX-License-Identifier: Apache-2.0
//
// The decay gate, the same in every kernel: g = -exp(A_log) * softplus(a + dt_bias), in float32.
#pragma once

#include <cfloat>

#include "common.cuh"

namespace treewy {

// exp() of this is zero; it keeps g finite, so that differences of path sums are defined.
inline constexpr float kMinLogDecay = -1e4f;

__device__ __forceinline__ float at_most(float x, float largest) {
    return x > largest ? largest : x;  // keeps a NaN
}

// Both factors stay finite, as Inf * 0 is NaN; a NaN that comes in comes out.
__device__ __forceinline__ float log_decay(float a, float A_log, float dt_bias) {
    const float x = a + dt_bias;
    const float softplus = at_most(x > 20.0f ? x : log1pf(expf(x)), FLT_MAX);
    const float g = -at_most(expf(A_log), FLT_MAX) * softplus;
    return g < kMinLogDecay ? kMinLogDecay : g;
}

}  // namespace treewy
