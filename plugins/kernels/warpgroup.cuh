// SPDX-License-Identifier: Apache-2.0
//
// Products of warpgroups (wgmma, sm_90a): four warps multiply 64 rows, which they have in registers
// as they have them for mma.sync or in shared memory, with columns in shared memory that they read
// once together. A product is under way until it is waited for.
//
// What is in shared memory lies in one of these ways, named by its descriptor:
//     Swapped      rows of 128 bytes, 16-byte chunks of row r at chunk ^ r % 8; 8 rows are 1,024
//                  bytes at a multiple of that; a step of 16 elements is 32 bytes
//     EveryOther   8 such rows, then the second 8 behind them, and so on
//     Matrices     of 8 rows of 16 bytes: two beside each other, 128 bytes apart, are the step;
//                  those of the next 8 rows come 256 bytes later, or (EveryOther) 512
//
// With other targets the same columns are read by ldmatrix, for mma.sync.
#pragma once

#include "fragment.cuh"

namespace treewy {

enum class Columns { kSwapped, kEveryOther, kMatrices, kEveryOtherMatrices };

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

// What says where 16 elements of rows or columns lie, from `at` in shared memory on.
template <Columns kColumns>
__device__ __forceinline__ uint64_t describe(const unsigned char* at) {
    constexpr uint32_t kSwapped = kColumns < Columns::kMatrices;
    constexpr uint32_t kAcross = kSwapped ? 1 : kMatrix / 16;
    constexpr uint32_t kEach =
        kColumns == Columns::kEveryOther || kColumns == Columns::kEveryOtherMatrices ? 2 : 1;
    constexpr uint32_t kDown = kEach * (kSwapped ? 8 * kSwappedRow : 2 * kMatrix) / 16;
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

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The sums of 8 columns, as operands of an instruction and in its text.
#define TREEWY_SUMS(j)                                                                             \
    "+f"(d[kFirst + j * kStep]), "+f"(d[kFirst + j * kStep + 1]), "+f"(d[kFirst + j * kStep + 2]), \
        "+f"(d[kFirst + j * kStep + 3])
#define TREEWY_TO_8 "%0, %1, %2, %3"
#define TREEWY_TO_16 TREEWY_TO_8 ", %4, %5, %6, %7"
#define TREEWY_TO_24 TREEWY_TO_16 ", %8, %9, %10, %11"
#define TREEWY_TO_32 TREEWY_TO_24 ", %12, %13, %14, %15"
#define TREEWY_TO_40 TREEWY_TO_32 ", %16, %17, %18, %19"
#define TREEWY_TO_48 TREEWY_TO_40 ", %20, %21, %22, %23"
#define TREEWY_TO_56 TREEWY_TO_48 ", %24, %25, %26, %27"
#define TREEWY_TO_64 TREEWY_TO_56 ", %28, %29, %30, %31"
#define TREEWY_SUMS_8 TREEWY_SUMS(0)
#define TREEWY_SUMS_16 TREEWY_SUMS_8, TREEWY_SUMS(1)
#define TREEWY_SUMS_24 TREEWY_SUMS_16, TREEWY_SUMS(2)
#define TREEWY_SUMS_32 TREEWY_SUMS_24, TREEWY_SUMS(3)
#define TREEWY_SUMS_40 TREEWY_SUMS_32, TREEWY_SUMS(4)
#define TREEWY_SUMS_48 TREEWY_SUMS_40, TREEWY_SUMS(5)
#define TREEWY_SUMS_56 TREEWY_SUMS_48, TREEWY_SUMS(6)
#define TREEWY_SUMS_64 TREEWY_SUMS_56, TREEWY_SUMS(7)

// `a` of the instruction is four registers, or a descriptor; the numbers are of its operands.
#define TREEWY_ROWS_PRODUCT(count, a0, a1, a2, a3, columns, adds)                                \
    if constexpr (kCount == count) {                                                             \
        asm volatile(                                                                            \
            "wgmma.mma_async.sync.aligned.m64n" #count "k16.f32.bf16.bf16 {" TREEWY_TO_##count   \
            "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #columns ", %" #adds ", 1, 1, 0;\n" \
            : TREEWY_SUMS_##count                                                                \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kFresh ? 0 : 1));          \
    }
#define TREEWY_SHARED_PRODUCT(count, rows, columns, adds)                                  \
    if constexpr (kCount == count) {                                                       \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #count                            \
                     "k16.f32.bf16.bf16 {" TREEWY_TO_##count "}, %" #rows ", %" #columns   \
                                                             ", %" #adds ", 1, 1, 0, 0;\n" \
                     : TREEWY_SUMS_##count                                                 \
                     : "l"(a), "l"(b), "n"(kFresh ? 0 : 1));                               \
    }

#else

#define TREEWY_ROWS_PRODUCT(count, a0, a1, a2, a3, columns, adds)
#define TREEWY_SHARED_PRODUCT(count, rows, columns, adds)

#endif

// d += A B, or d = A B (kFresh): 16 elements of the rows and of kCount columns, a multiple of 16.
// Of columns 8 j .. a lane has d[kFirst + j kStep ..] as mma.sync would give it.
template <int kCount, bool kFresh, int kFirst = 0, int kStep = 4, int kSums>
__device__ __forceinline__ void start_product(float (&d)[kSums], const uint32_t (&a)[4],
                                              uint64_t b) {
    static_assert(kCount % 16 == 0 && kCount <= 64 && kFirst + (kCount / 8 - 1) * kStep < kSums);
    TREEWY_ROWS_PRODUCT(16, 8, 9, 10, 11, 12, 13);
    TREEWY_ROWS_PRODUCT(32, 16, 17, 18, 19, 20, 21);
    TREEWY_ROWS_PRODUCT(48, 24, 25, 26, 27, 28, 29);
    TREEWY_ROWS_PRODUCT(64, 32, 33, 34, 35, 36, 37);
}

// The same of rows in shared memory, `a`: warp w of the four has sums of the rows 16 w ..
template <int kCount, bool kFresh, int kFirst = 0, int kStep = 4, int kSums>
__device__ __forceinline__ void start_product(float (&d)[kSums], uint64_t a, uint64_t b) {
    static_assert(kCount % 16 == 0 && kCount <= 64 && kFirst + (kCount / 8 - 1) * kStep < kSums);
    TREEWY_SHARED_PRODUCT(16, 8, 9, 10);
    TREEWY_SHARED_PRODUCT(32, 16, 17, 18);
    TREEWY_SHARED_PRODUCT(48, 24, 25, 26);
    TREEWY_SHARED_PRODUCT(64, 32, 33, 34);
}

#undef TREEWY_ROWS_PRODUCT
#undef TREEWY_SHARED_PRODUCT
#undef TREEWY_SUMS
#undef TREEWY_TO_8
#undef TREEWY_SUMS_8
#undef TREEWY_TO_16
#undef TREEWY_SUMS_16
#undef TREEWY_TO_24
#undef TREEWY_SUMS_24
#undef TREEWY_TO_32
#undef TREEWY_SUMS_32
#undef TREEWY_TO_40
#undef TREEWY_SUMS_40
#undef TREEWY_TO_48
#undef TREEWY_SUMS_48
#undef TREEWY_TO_56
#undef TREEWY_SUMS_56
#undef TREEWY_TO_64
#undef TREEWY_SUMS_64

#endif  // TREEWY_ON_HOST

}  // namespace treewy
