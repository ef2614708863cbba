// SPDX-License-Identifier: Apache-2.0
//
// SiLU after the conv, the same bits wherever a conv is computed.
#pragma once

#include "common.cuh"

namespace treewy {

// kWide: of float32 results; 16-bit results do not see the error of the fast exponential.
template <bool kWide>
__device__ __forceinline__ float silu(float x) {
    if constexpr (kWide) {
        return x / (1.0f + expf(-x));
    } else {
        return __fdividef(x, 1.0f + __expf(-x));
    }
}

}  // namespace treewy
