// SPDX-License-Identifier: Apache-2.0
//
// What every kernel file includes: CUDA's types, the C interface, and how a launcher reports.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "../include/treewy.h"

namespace treewy {

// Keeps the text for treewy_last_error() of this thread and returns `status`:
//     return fail(TREEWY_UNSUPPORTED, "tree_verify: N is %d, at most %d", n, TREEWY_MAX_NODES);
__attribute__((format(printf, 2, 3))) treewy_status fail(treewy_status status, const char* format,
                                                         ...) noexcept;

// TREEWY_CUDA_ERROR with CUDA's own text; clears the error where CUDA does not keep it.
treewy_status fail_cuda(const char* operation, cudaError_t error) noexcept;

}  // namespace treewy
