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
// With other targets the same columns are read by mma.sync: by ldmatrix, 16 columns at a time.
#pragma once

#include "fragment.cuh"

namespace treewy {

enum class Columns { kSwapped, kMatrices };

inline constexpr int kSwappedRow = 128;   // bytes
inline constexpr int kMatrix = 128;       // bytes of 8 rows of 16
inline constexpr int kColumnsAtOnce = 8;  // of which there are 128 or 256 bytes in a row

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

#if !defined(TREEWY_ON_HOST)

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

#define TREEWY_NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TREEWY_NAMES_1 TREEWY_NAMES_0 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TREEWY_NAMES_2 TREEWY_NAMES_1 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define TREEWY_NAMES_3 TREEWY_NAMES_2 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define TREEWY_NAMES_4 TREEWY_NAMES_3 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define TREEWY_NAMES_5 TREEWY_NAMES_4 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define TREEWY_NAMES_6 TREEWY_NAMES_5 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define TREEWY_NAMES_7 TREEWY_NAMES_6 ", %56, %57, %58, %59, %60, %61, %62, %63"

#define TREEWY_EIGHT(i)                                                                         \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define TREEWY_SUMS_0 TREEWY_EIGHT(0)
#define TREEWY_SUMS_1 TREEWY_SUMS_0, TREEWY_EIGHT(8)
#define TREEWY_SUMS_2 TREEWY_SUMS_1, TREEWY_EIGHT(16)
#define TREEWY_SUMS_3 TREEWY_SUMS_2, TREEWY_EIGHT(24)
#define TREEWY_SUMS_4 TREEWY_SUMS_3, TREEWY_EIGHT(32)
#define TREEWY_SUMS_5 TREEWY_SUMS_4, TREEWY_EIGHT(40)
#define TREEWY_SUMS_6 TREEWY_SUMS_5, TREEWY_EIGHT(48)
#define TREEWY_SUMS_7 TREEWY_SUMS_6, TREEWY_EIGHT(56)

// A product of `columns` columns, whose sums are the registers up to those of `last`; the numbers
// of the registers that come after them.
#define TREEWY_PRODUCT(columns, last, i0, i1, i2, i3, i4, i5)                                  \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns                                  \
                 "k16.f32.bf16.bf16 {" TREEWY_NAMES_##last                                     \
                 "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", %" #i5 ", 1, 1, 0;\n" \
                 : TREEWY_SUMS_##last                                                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kFresh ? 0 : 1))

// d += A B, or d = A B (kFresh): 16 elements of the rows and of kCount columns. Of columns 8 j .. a
// lane has d[4 j ..] as mma.sync would give it.
template <int kCount, bool kFresh, int kSums>
__device__ __forceinline__ void start_product(float (&d)[kSums], const uint32_t (&a)[4],
                                              uint64_t b) {
    static_assert(kCount / 2 <= kSums);
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if constexpr (kCount == 16) {
        TREEWY_PRODUCT(16, 0, 8, 9, 10, 11, 12, 13);
    } else if constexpr (kCount == 32) {
        TREEWY_PRODUCT(32, 1, 16, 17, 18, 19, 20, 21);
    } else if constexpr (kCount == 48) {
        TREEWY_PRODUCT(48, 2, 24, 25, 26, 27, 28, 29);
    } else if constexpr (kCount == 64) {
        TREEWY_PRODUCT(64, 3, 32, 33, 34, 35, 36, 37);
    } else if constexpr (kCount == 80) {
        TREEWY_PRODUCT(80, 4, 40, 41, 42, 43, 44, 45);
    } else if constexpr (kCount == 96) {
        TREEWY_PRODUCT(96, 5, 48, 49, 50, 51, 52, 53);
    } else if constexpr (kCount == 112) {
        TREEWY_PRODUCT(112, 6, 56, 57, 58, 59, 60, 61);
    } else {
        static_assert(kCount == 128);
        TREEWY_PRODUCT(128, 7, 64, 65, 66, 67, 68, 69);
    }
#endif
}

#undef TREEWY_PRODUCT
#undef TREEWY_EIGHT

#endif  // TREEWY_ON_HOST

// The operands B of mma.sync for a step of 16 columns, those of the first 8 in words 0 and 1.
template <Columns kColumns>
__device__ __forceinline__ void load_columns(uint32_t (&words)[4], const unsigned char* rows,
                                             int step, int lane) {
    const int g = lane % 8, eighth = lane / 8 % 2, group = lane / 16;
    if constexpr (kColumns == Columns::kSwapped) {
        load_matrices(words, rows + (8 * group + g) * kSwappedRow + 16 * ((2 * step + eighth) ^ g));
    } else {
        load_matrices(words, rows + (2 * group + eighth) * kMatrix + 16 * g);
    }
}

}  // namespace treewy
