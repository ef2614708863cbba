// SPDX-License-Identifier: Apache-2.0
//
// What launchers ask of the current device.
#pragma once

#include "common.cuh"

namespace treewy {

struct Gpu {
    int major;  // of its compute capability
    int multiprocessors;
    int shared_bytes;  // that a block may have
};

inline treewy_status find_gpu(const char* name, Gpu* gpu) noexcept {
    int device = 0;
    cudaError_t status = cudaGetDevice(&device);
    const auto ask = [&](int* value, cudaDeviceAttr what) {
        if (status == cudaSuccess) status = cudaDeviceGetAttribute(value, what, device);
    };
    ask(&gpu->major, cudaDevAttrComputeCapabilityMajor);
    ask(&gpu->multiprocessors, cudaDevAttrMultiProcessorCount);
    ask(&gpu->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    return status == cudaSuccess ? TREEWY_OK : fail_cuda(name, status);
}

}  // namespace treewy
