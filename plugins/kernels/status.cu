// SPDX-License-Identifier: Apache-2.0
//
// Status texts and the version of the interface. Host code alone.
#include <cstdarg>
#include <cstdio>

#include "common.cuh"

namespace treewy {
namespace {

thread_local char last_error[512] = "no error";

}  // namespace

treewy_status fail(treewy_status status, const char* format, ...) noexcept {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(last_error, sizeof(last_error), format, arguments);
    va_end(arguments);
    return status;
}

treewy_status fail_cuda(const char* operation, cudaError_t error) noexcept {
    cudaGetLastError();  // so that a later launch does not report this error once more
    return fail(TREEWY_CUDA_ERROR, "%s: %s (%s)", operation, cudaGetErrorString(error),
                cudaGetErrorName(error));
}

}  // namespace treewy

const char* treewy_last_error(void) { return treewy::last_error; }

int32_t treewy_version(void) { return TREEWY_VERSION; }
