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

inline constexpr int kMaxGridY = 65535;

// Blocks of a launch.
struct Grid {
    int64_t x;
    int64_t y;
    Grid(int64_t along_x, int64_t along_y = 1) : x(along_x), y(along_y) {}
};

// Whether a kernel may be launched before the one ahead of it has ended (kOverlapping: it calls
// wait_for_previous() before it reads or writes what others may have to do with).
enum class Start { kAfterPrevious, kOverlapping };

inline treewy_status check_grid(const char* name, const Grid& grid) {
    if (grid.x <= INT32_MAX && grid.y <= kMaxGridY) return TREEWY_OK;
    return fail(TREEWY_UNSUPPORTED, "%s: %lld by %lld blocks, at most %d by %d can be launched",
                name, static_cast<long long>(grid.x), static_cast<long long>(grid.y), INT32_MAX,
                kMaxGridY);
}

}  // namespace treewy
