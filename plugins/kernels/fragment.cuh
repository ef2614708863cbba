// SPDX-License-Identifier: Apache-2.0
//
// Float32-accurate products on bfloat16 tensor cores: rows in shared memory, their fragments, and
// mma.sync.m16n8k16 over sums of bfloat16 terms.
//
// A value is a sum of bfloat16 terms: one for bfloat16, two for float16, three for float32, all of
// them exact (8 bits of significand a term). A product of two values is the sum over the pairs of
// terms (i, j) with i + j <= 2; what is left out is below 2^-24 of the product.
//
// The order of k inside a dot product is free if both operands have the same one. Here a lane of
// the group of four takes 8 neighbours, k = 32 m + 8 c + {0..7}, for two steps of the instruction:
//     step s, slot 2c + e     <-  k = 32 m + 8 c + 4 s + e
//     step s, slot 2c + 8 + e <-  k = 32 m + 8 c + 4 s + 2 + e       c = lane % 4, e = 0, 1
// so that fragments of A and of B alike are 16 (32 for float32) contiguous bytes of a row.
//
// Banks: the 8 lanes that a 16-byte access serves at a time read two rows, g = lane / 4 even and
// odd, at four chunks each. Rows are multiples of 128 bytes, so chunks of odd rows are swapped
// within 8 (16-bit types: by 4; float32, whose lanes read every other chunk: by 1).
#pragma once

#include "device.cuh"

namespace treewy {

template <typename T>
struct Operand;

template <>
struct Operand<__nv_bfloat16> {
    static constexpr int kTerms = 1;
    static constexpr int kSwap = 4;
};
template <>
struct Operand<__half> {
    static constexpr int kTerms = 2;
    static constexpr int kSwap = 4;
};
template <>
struct Operand<float> {
    static constexpr int kTerms = 3;
    static constexpr int kSwap = 1;
};

inline constexpr int kMaxOrder =
    2;  // of the pairs of terms (i, j) those with i + j up to this count

// 16 bytes at `chunk` of a row with `odd` g, in a row that starts at `row`.
template <typename T>
__device__ __forceinline__ int swapped_chunk(int chunk, int odd) {
    return chunk ^ (odd ? Operand<T>::kSwap : 0);
}

// ------------------------------------------------------------------ the machine

#if !defined(TREEWY_ON_HOST)

// 16 bytes from global to shared memory, past registers and L1.
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n" ::"r"(to), "l"(global)
                 : "memory");
}

__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// Waits for this thread's copies, but for those of the `kLater` groups committed last.
template <int kLater>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(kLater) : "memory");
}

// What depends on x is not computed before this.
__device__ __forceinline__ void keep_order(int& x) { asm volatile("" : "+r"(x)); }

// sum += A B for A [16, 16] and B [16, 8]. With g = lane / 4 and c = lane % 4:
//     a: (row g, k 2c..), (row g + 8, k 2c..), (row g, k 2c + 8..), (row g + 8, k 2c + 8..)
//     b: (k 2c.., column g), (k 2c + 8.., column g)
//     sum: (row g, columns 2c, 2c + 1), (row g + 8, columns 2c, 2c + 1)
__device__ __forceinline__ void mma(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                    uint32_t a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

#endif  // TREEWY_ON_HOST

// ------------------------------------------------------------------ terms

__device__ __forceinline__ float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(uint32_t pair) {
    return __uint_as_float(pair & 0xffff0000u);
}

__device__ __forceinline__ uint32_t pack_bfloat16(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return uint32_t{__bfloat16_as_ushort(pair.x)} | (uint32_t{__bfloat16_as_ushort(pair.y)} << 16);
}

// Terms of two values, the greatest first; `low` lies in the low halves.
template <int kTerms>
__device__ __forceinline__ void split(float low, float high, uint32_t (&terms)[kTerms]) {
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
        terms[term] = pack_bfloat16(low, high);
        low -= low_half(terms[term]);
        high -= high_half(terms[term]);
    }
}

// 8 neighbours of a row as terms of the two steps: word 0 for slots 2c.., word 1 for 2c + 8.
template <typename T>
struct Fragment {
    uint32_t x[Operand<T>::kTerms][2][2];
};

// `row` starts a row in shared memory; `group` is m.
template <typename T>
__device__ __forceinline__ Fragment<T> load_fragment(const unsigned char* row, int group, int c,
                                                     int odd) {
    Fragment<T> fragment;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            const int chunk = swapped_chunk<T>(8 * group + 2 * c + step, odd);
            const float4 value = *reinterpret_cast<const float4*>(row + 16 * chunk);
            uint32_t first[3], second[3];
            split(value.x, value.y, first);
            split(value.z, value.w, second);
#pragma unroll
            for (int term = 0; term < 3; ++term) {
                fragment.x[term][step][0] = first[term];
                fragment.x[term][step][1] = second[term];
            }
        }
    } else {
        const int chunk = swapped_chunk<T>(4 * group + c, odd);
        const uint4 value = *reinterpret_cast<const uint4*>(row + 16 * chunk);
        const uint32_t words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            if constexpr (Operand<T>::kTerms == 1) {
                fragment.x[0][word / 2][word % 2] = words[word];
            } else {
                const __half low = __ushort_as_half(static_cast<unsigned short>(words[word]));
                const __half high =
                    __ushort_as_half(static_cast<unsigned short>(words[word] >> 16));
                uint32_t terms[2];
                split(__half2float(low), __half2float(high), terms);
                fragment.x[0][word / 2][word % 2] = terms[0];
                fragment.x[1][word / 2][word % 2] = terms[1];
            }
        }
    }
    return fragment;
}

// sum += A B over one step, of the pairs of terms with kFirst <= i + j <= kLast; `a0` and `a1` are
// rows g and g + 8.
template <int kFirst, int kLast, typename A, typename B>
__device__ __forceinline__ void multiply(float (&sum)[4], const Fragment<A>& a0,
                                         const Fragment<A>& a1, const Fragment<B>& b, int step) {
#pragma unroll
    for (int i = 0; i < Operand<A>::kTerms; ++i) {
#pragma unroll
        for (int j = 0; j < Operand<B>::kTerms; ++j) {
            if (i + j < kFirst || i + j > kLast) continue;
            mma(sum, a0.x[i][step][0], a1.x[i][step][0], a0.x[i][step][1], a1.x[i][step][1],
                b.x[j][step][0], b.x[j][step][1]);
        }
    }
}

// ------------------------------------------------------------------ rows

// Copies rows [0, valid) of `from` (rows `stride` elements apart) and zeroes rows [valid, kRows);
// asynchronously where `aligned`: 16-byte aligned rows. kShift: the bit of a row's index that is
// the lowest of its g. The threads take the chunks in turn.
template <typename T, int kDim, int kRows, int kThreads, int kShift>
__device__ __forceinline__ void load_rows(unsigned char* to, const T* from, int64_t stride,
                                          int valid, bool aligned, int thread) {
    constexpr int kPerChunk = kPer16Bytes<T>, kChunks = kDim / kPerChunk, kAll = kRows * kChunks;
#pragma unroll
    for (int start = 0; start < kAll; start += kThreads) {
        const int index = start + thread;
        if (kAll % kThreads != 0 && index >= kAll) break;
        const int row = index / kChunks, chunk = index % kChunks;
        unsigned char* place =
            to + (row * kChunks + swapped_chunk<T>(chunk, (row >> kShift) & 1)) * 16;
        const T* source = from + row * stride + chunk * kPerChunk;
        if (row >= valid) {
            *reinterpret_cast<uint4*>(place) = make_uint4(0, 0, 0, 0);
        } else if (aligned) {
            copy_async(place, source);
        } else {
            Vec<T, kPerChunk> value;
#pragma unroll
            for (int i = 0; i < kPerChunk; ++i) value.x[i] = source[i];
            *reinterpret_cast<Vec<T, kPerChunk>*>(place) = value;
        }
    }
}

// Zeroes rows [first, kRows) of what load_rows copied, each thread the chunks that it copied
// itself.
template <typename T, int kDim, int kRows, int kThreads, int kShift>
__device__ __forceinline__ void zero_rows(unsigned char* to, int first, int thread) {
    constexpr int kChunks = kDim / kPer16Bytes<T>;
    if (first >= kRows) return;
    for (int index = thread; index < kRows * kChunks; index += kThreads) {
        const int row = index / kChunks, chunk = index % kChunks;
        if (row < first) continue;
        const int place = row * kChunks + swapped_chunk<T>(chunk, (row >> kShift) & 1);
        *reinterpret_cast<uint4*>(to + place * 16) = make_uint4(0, 0, 0, 0);
    }
}

// Element `at` of a row in shared memory; for what need not be fast.
template <typename T>
__device__ __forceinline__ float row_element(const unsigned char* row, int at, int odd) {
    const int chunk = swapped_chunk<T>(at / kPer16Bytes<T>, odd);
    return as_float(reinterpret_cast<const T*>(row + 16 * chunk)[at % kPer16Bytes<T>]);
}

}  // namespace treewy
