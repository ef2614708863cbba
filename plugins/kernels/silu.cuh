// SPDX-License-Identifier: Apache-2.0
//
// SiLU after the conv, the same bits wherever a conv is computed.
#pragma once

#include "fragment.cuh"

namespace treewy {

// kWide: of float32 results. 16-bit results do not see the error of the fast exponential and
// reciprocal, which are one instruction each; x below -88, whose result is less than 1e-36, gives
// 0.
template <bool kWide>
__device__ __forceinline__ float silu(float x) {
    if constexpr (kWide) {
        return x / (1.0f + expf(-x));
    } else {
        constexpr float kLog2E = 1.4426950408889634f;
        return x * fast_reciprocal(1.0f + fast_exp2(-kLog2E * x));
    }
}

}  // namespace treewy
