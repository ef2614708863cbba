// SPDX-License-Identifier: Apache-2.0
//
// Float32-accurate products on bfloat16 tensor cores: rows in shared memory, their fragments, and
// mma.sync.m16n8k16 over sums of bfloat16 terms.
//
// A value is a sum of bfloat16 terms: one for bfloat16, two for float16, three for float32, all of
// them exact (8 bits of significand a term). A product of two values is the sum over the pairs of
// terms (i, j) with i + j <= 2; what is left out is below 2^-24 of the product.
//
// With g = lane / 4 and c = lane % 4, a step of the instruction takes of a row its 16 elements
// 16 s .., a lane the pairs 2 c and 8 + 2 c of them. 16-bit rows come by ldmatrix, straight into
// the registers of the instruction; float32 rows by loads of pairs, which are then split.
//
// Banks: rows are multiples of 128 bytes, so the 16-byte chunks of a row lie swapped by its index
// g: 16-bit types by g, as ldmatrix reads one chunk of 8 rows at a time; float32 by 2 (g % 4), as
// half a warp reads two chunks of 4 rows.
#pragma once

#include <type_traits>

#include "device.cuh"

namespace treewy {

template <typename T>
struct Operand;

template <>
struct Operand<__nv_bfloat16> {
    static constexpr int kTerms = 1;
};
template <>
struct Operand<__half> {
    static constexpr int kTerms = 2;
};
template <>
struct Operand<float> {
    static constexpr int kTerms = 3;
};

inline constexpr int kMaxOrder =
    2;  // of the pairs of terms (i, j) those with i + j up to this count

// Where 16 bytes at `chunk` of a row with index `g` lie.
template <typename T>
__device__ __forceinline__ int swapped_chunk(int chunk, int g) {
    return chunk ^ (sizeof(T) == 4 ? (g & 3) << 1 : g & 7);
}

// ------------------------------------------------------------------ the machine

#if !defined(TREEWY_ON_HOST)

// 16 bytes from global to shared memory, past registers and L1.
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n" ::"r"(to), "l"(global)
                 : "memory");
}

// The same, or zeros where it is not `real`.
__device__ __forceinline__ void copy_async_or_zero(void* shared, const void* global, bool real) {
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(to), "l"(global),
                 "r"(real ? 16 : 0)
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

// Four matrices of 8 rows of 16 bytes: lane l gives the address of row l % 8 of matrix l / 8, and
// gets of matrix i the 4 bytes at 4 c of row g as words[i].
__device__ __forceinline__ void load_matrices(uint32_t (&words)[4], const unsigned char* row) {
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}

// The same, of matrix i the elements at column g of rows 2 c and 2 c + 1.
__device__ __forceinline__ void load_transposed(uint32_t (&words)[4], const unsigned char* row) {
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}

// Of an 8 by 8 matrix, a lane with columns 2 c and 2 c + 1 of row g, to rows 2 c and 2 c + 1 of
// column g.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t word) {
    uint32_t out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(word));
    return out;
}

// 2^x to two units in the last place; zero where the result would be subnormal.
__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x to one unit in the last place; zero where it would be subnormal.
__device__ __forceinline__ float fast_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Barrier `id` (1 to 15; 0 is the whole block's) of kThreads threads: waits for them all, or only
// says that this one was here.
template <int kThreads>
__device__ __forceinline__ void sync_at(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ __forceinline__ void arrive_at(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// Of so many threads as the launch has.
__device__ __forceinline__ void sync_at(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive_at(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

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

// The same for A [16, 8] and B [8, 8]: a0 and a1, b0 alone.
__device__ __forceinline__ void mma_half(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(b0));
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

// The 16-bit value in the low half.
template <typename T>
__device__ __forceinline__ float half_value(uint32_t bits) {
    static_assert(sizeof(T) == 2);
    if constexpr (std::is_same_v<T, __nv_bfloat16>) return low_half(bits);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
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

// Operand A of a step: 16 rows, 16 elements.
template <typename T>
struct FragmentA {
    uint32_t x[Operand<T>::kTerms][4];
};

// Operand B of two steps: 8 rows, 32 elements.
template <typename T>
struct FragmentB {
    uint32_t x[Operand<T>::kTerms][2][2];
};

// Terms of two neighbours of a 16-bit type.
template <typename T>
__device__ __forceinline__ void split_word(uint32_t word, uint32_t (&terms)[Operand<T>::kTerms]) {
    if constexpr (Operand<T>::kTerms == 1) {
        terms[0] = word;
    } else {
        const __half low = __ushort_as_half(static_cast<unsigned short>(word));
        const __half high = __ushort_as_half(static_cast<unsigned short>(word >> 16));
        split(__half2float(low), __half2float(high), terms);
    }
}

// Terms of the pair at 2 c of eight float32 elements of a row with index g.
__device__ __forceinline__ void load_pair(const unsigned char* row, int eighth, int g, int c,
                                          uint32_t (&terms)[3]) {
    const int chunk = swapped_chunk<float>(2 * eighth + c / 2, g);
    const float2 pair = *reinterpret_cast<const float2*>(row + 16 * chunk + c % 2 * 8);
    split(pair.x, pair.y, terms);
}

// Step `step` of 16 rows: row i < 8 at i kStep bytes, row 8 + i at kHalf bytes more, both with
// index i.
template <typename T, int kStep, int kHalf>
__device__ __forceinline__ FragmentA<T> load_a(const unsigned char* rows, int step, int lane) {
    FragmentA<T> a;
    if constexpr (sizeof(T) == 4) {
        const int g = lane / 4, c = lane % 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t terms[3];
            load_pair(rows + g * kStep + i % 2 * kHalf, 2 * step + i / 2, g, c, terms);
#pragma unroll
            for (int term = 0; term < 3; ++term) a.x[term][i] = terms[term];
        }
    } else {
        const int g = lane % 8, half = lane / 8 % 2, eighth = lane / 16;
        const unsigned char* row = rows + g * kStep + half * kHalf;
        uint32_t words[4];
        load_matrices(words, row + 16 * swapped_chunk<T>(2 * step + eighth, g));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t terms[Operand<T>::kTerms];
            split_word<T>(words[i], terms);
#pragma unroll
            for (int term = 0; term < Operand<T>::kTerms; ++term) a.x[term][i] = terms[term];
        }
    }
    return a;
}

// Steps 2 pair and 2 pair + 1 of 8 rows, kStep bytes apart.
template <typename T, int kStep>
__device__ __forceinline__ FragmentB<T> load_b(const unsigned char* rows, int pair, int lane) {
    FragmentB<T> b;
    uint32_t words[4];
    if constexpr (sizeof(T) == 2) {
        const int g = lane % 8;
        load_matrices(words, rows + g * kStep + 16 * swapped_chunk<T>(4 * pair + lane / 8, g));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t terms[Operand<T>::kTerms];
        if constexpr (sizeof(T) == 4) {
            load_pair(rows + lane / 4 * kStep, 4 * pair + i, lane / 4, lane % 4, terms);
        } else {
            split_word<T>(words[i], terms);
        }
#pragma unroll
        for (int term = 0; term < Operand<T>::kTerms; ++term) b.x[term][i / 2][i % 2] = terms[term];
    }
    return b;
}

// sum += A B over a step, `odd` the second of B's, of the pairs of terms with
// kFirst <= i + j <= kLast.
template <int kFirst, int kLast, typename A, typename B>
__device__ __forceinline__ void multiply(float (&sum)[4], const FragmentA<A>& a,
                                         const FragmentB<B>& b, int odd) {
#pragma unroll
    for (int i = 0; i < Operand<A>::kTerms; ++i) {
#pragma unroll
        for (int j = 0; j < Operand<B>::kTerms; ++j) {
            if (i + j < kFirst || i + j > kLast) continue;
            mma(sum, a.x[i][0], a.x[i][1], a.x[i][2], a.x[i][3], b.x[j][odd][0], b.x[j][odd][1]);
        }
    }
}

// The same of the pairs of terms with i + j = order.
template <typename A, typename B>
__device__ __forceinline__ void multiply_order(float (&sum)[4], const FragmentA<A>& a,
                                               const FragmentB<B>& b, int odd, int order) {
#pragma unroll
    for (int i = 0; i < Operand<A>::kTerms; ++i) {
        const int j = order - i;
        if (j < 0 || j >= Operand<B>::kTerms) continue;
        mma(sum, a.x[i][0], a.x[i][1], a.x[i][2], a.x[i][3], b.x[j][odd][0], b.x[j][odd][1]);
    }
}

// ------------------------------------------------------------------ rows

// How threads share the 16-byte chunks of rows: all chunks of kPerPass rows at a time.
template <typename T, int kDim, int kRows, int kThreads>
struct RowCopy {
    static constexpr int kChunks = kDim / kPer16Bytes<T>;
    static constexpr int kAcross = kChunks < kThreads ? kChunks : kThreads;  // threads of a row
    static constexpr int kSteps = kChunks / kAcross;
    static constexpr int kPerPass = kThreads / kAcross < kRows ? kThreads / kAcross : kRows;
    static constexpr int kPasses = kRows / kPerPass;
    static constexpr int kActive = kPerPass * kAcross;  // threads that have something to do
};

// Copies rows [0, valid) of `from` (rows `stride` elements apart) and zeroes rows [valid, kRows);
// asynchronously where kAligned: 16-byte aligned rows. kShift: the bit of a row's number that is
// the lowest of its index g.
template <typename T, int kDim, int kRows, int kThreads, int kShift, bool kAligned>
__device__ __forceinline__ void load_rows(unsigned char* to, const T* from, int stride, int valid,
                                          int thread) {
    using Copy = RowCopy<T, kDim, kRows, kThreads>;
    if (Copy::kActive < kThreads && thread >= Copy::kActive) return;
    const int first = thread / Copy::kAcross;
    const T* source = from + first * stride + thread % Copy::kAcross * kPer16Bytes<T>;
#pragma unroll
    for (int pass = 0; pass < Copy::kPasses; ++pass) {
        const int above = pass * Copy::kPerPass, row = above + first;
        // Passes are powers of two.
        const int g = (Copy::kPerPass > 1 << kShift ? row : above) >> kShift;
#pragma unroll
        for (int step = 0; step < Copy::kSteps; ++step) {
            // Where g is a constant, this is a lane's own address, one bit pattern and a constant.
            const int own = 16 * (thread % Copy::kAcross) ^ 16 * swapped_chunk<T>(0, g);
            unsigned char* place = to + first * Copy::kChunks * 16 + own +
                                   (above * Copy::kChunks + step * Copy::kAcross) * 16;
            const T* at =
                source + pass * Copy::kPerPass * stride + step * Copy::kAcross * kPer16Bytes<T>;
            if (row >= valid) {
                *reinterpret_cast<uint4*>(place) = make_uint4(0, 0, 0, 0);
            } else if constexpr (kAligned) {
                copy_async(place, at);
            } else {
                Vec<T, kPer16Bytes<T>> value;
#pragma unroll
                for (int i = 0; i < kPer16Bytes<T>; ++i) value.x[i] = at[i];
                *reinterpret_cast<Vec<T, kPer16Bytes<T>>*>(place) = value;
            }
        }
    }
}

// Zeroes rows [first, kRows) of what load_rows copied, each thread the chunks that it copied
// itself.
template <typename T, int kDim, int kRows, int kThreads, int kShift>
__device__ __forceinline__ void zero_rows(unsigned char* to, int first, int thread) {
    using Copy = RowCopy<T, kDim, kRows, kThreads>;
    if (first >= kRows || thread >= Copy::kActive) return;
    for (int row = thread / Copy::kAcross; row < kRows; row += Copy::kPerPass) {
        if (row < first) continue;
        for (int step = 0; step < Copy::kSteps; ++step) {
            const int chunk =
                swapped_chunk<T>(step * Copy::kAcross + thread % Copy::kAcross, row >> kShift);
            *reinterpret_cast<uint4*>(to + (row * Copy::kChunks + chunk) * 16) =
                make_uint4(0, 0, 0, 0);
        }
    }
}

// Element `at` of a row with index g in shared memory; for what need not be fast.
template <typename T>
__device__ __forceinline__ float row_element(const unsigned char* row, int at, int g) {
    const int chunk = swapped_chunk<T>(at / kPer16Bytes<T>, g);
    return as_float(reinterpret_cast<const T*>(row + 16 * chunk)[at % kPer16Bytes<T>]);
}

}  // namespace treewy
