// SPDX-License-Identifier: Apache-2.0
//
// Products of warpgroups (wgmma, sm_90a): four warps multiply 64 rows, which they have in registers
// as they have them for mma.sync, with columns in shared memory that they read once together. A
// product is under way until it is waited for.
//
// Columns lie in one of two ways, named by their descriptor:
//     Swapped    rows of 128 bytes, 16-byte chunks of row r at chunk ^ r % 8; 8 rows are 1,024
//                bytes at a multiple of that; a step of 16 elements is 32 bytes
//     Matrices   of 8 rows of 16 bytes: two beside each other, 128 bytes apart, are the step; those
//                of the next 8 rows come 256 bytes later
//
// With other targets the same columns are read by ldmatrix, for mma.sync.
#pragma once

#include "fragment.cuh"

namespace treewy {

enum class Columns { kSwapped, kMatrices };

inline constexpr int kSwappedRow = 128;  // bytes
inline constexpr int kMatrix = 128;      // bytes of 8 rows of 16

#if defined(TREEWY_ON_HOST)

// The machine on the host plays both ways.
inline bool has_warpgroups() { return host_cuda::warpgroups; }

#else

// Whether this is code for a target that has them.
__device__ __forceinline__ constexpr bool has_warpgroups() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    return true;
#else
    return false;
#endif
}

#endif

// What says where 16 elements of columns lie, from `at` in shared memory on.
template <Columns kColumns>
__device__ __forceinline__ uint64_t describe(const unsigned char* at) {
    constexpr uint32_t kSwapped = kColumns == Columns::kSwapped;
    constexpr uint32_t kAcross = kSwapped ? 1 : kMatrix / 16;
    constexpr uint32_t kDown = (kSwapped ? 8 * kSwappedRow : 2 * kMatrix) / 16;
    const uint32_t low = shared_address(at) >> 4 | kAcross << 16;
    return uint64_t{kDown | kSwapped << 30} << 32 | low;
}

#if defined(TREEWY_ON_HOST)

inline unsigned char* column_memory() { return shared_memory(); }

#else

// As shared_memory, where columns that lie swapped may begin.
__device__ __forceinline__ unsigned char* column_memory() {
    extern __shared__ __align__(1024) unsigned char treewy_columns[];
    uint32_t base = shared_address(treewy_columns);
    asm volatile("" : "+r"(base));
    return static_cast<unsigned char*>(__cvta_shared_to_generic(base));
}

// Products may begin: registers and shared memory are as this thread has written them.
__device__ __forceinline__ void open_products() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
#endif
}

// Ends a group of products.
__device__ __forceinline__ void close_products() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
#endif
}

// Waits for all groups but the last kLater.
template <int kLater>
__device__ __forceinline__ void wait_products() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kLater) : "memory");
#endif
}

// What this thread wrote to shared memory is there for products, once the others have met it at a
// barrier.
__device__ __forceinline__ void show_to_products() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
#endif
}

// Registers of the calling thread from now on; its warpgroup calls it together. A launch has so
// many for all: who needs fewer comes first.
template <int kCount>
__device__ __forceinline__ void lower_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kCount));
#endif
}
template <int kCount>
__device__ __forceinline__ void raise_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kCount));
#endif
}

#define TREEWY_EIGHT(i)                                                                         \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])

// d += A B, or d = A B (kFresh): 16 elements of the rows and of kCount columns. Of columns 8 j .. a
// lane has d[4 j ..] as mma.sync would give it.
template <int kCount, bool kFresh, int kSums>
__device__ __forceinline__ void start_product(float (&d)[kSums], const uint32_t (&a)[4],
                                              uint64_t b) {
    static_assert((kCount == 16 || kCount == 32) && kCount / 2 <= kSums);
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if constexpr (kCount == 16) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, "
            "%7}, {%8, %9, %10, %11}, %12, %13, 1, 1, 0;\n"
            : TREEWY_EIGHT(0)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kFresh ? 0 : 1));
    } else {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, "
            "%7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, %21, 1, 1, 0;\n"
            : TREEWY_EIGHT(0), TREEWY_EIGHT(8)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kFresh ? 0 : 1));
    }
#endif
}

#undef TREEWY_EIGHT

#endif  // TREEWY_ON_HOST

}  // namespace treewy
