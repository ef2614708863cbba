// SPDX-License-Identifier: Apache-2.0
//
// Folds of histories by tensor cores, whoever does them (commit_fold.cu, tree_verify_fold.cuh):
// keys in shared memory, u of a warp's rows in registers, and their products added to the state.
#pragma once

#include "commit_update.h"
#include "fragment.cuh"

namespace treewy {

inline constexpr int kFoldEntries = 32;  // that a fold can take
inline constexpr int kFoldWarps = kCommitThreads / kWarp;

// kSplitLate: keys of two terms are cut where they are used, and take half the shared memory.
template <typename State_, typename Key_, int kKeyDim_, int kSteps_, bool kSplitLate_ = false>
struct FoldTypes {
    using State = State_;
    using Key = Key_;
    static constexpr int kKeyDim = kKeyDim_;
    static constexpr int kSteps = kSteps_;                                // of 16 entries
    static constexpr int kSpans = kKeyDim / 32;                           // of 32 columns
    static constexpr int kVectors = static_cast<int>(sizeof(State)) / 2;  // of a lane, row and span
    static constexpr int kSpansAtOnce = kSpans * kVectors > 4 ? 4 / kVectors : kSpans;
    static constexpr int kTerms = sizeof(State) == 4 ? 3 : 2;  // of u times its factor
    static constexpr bool kSplitLate = kSplitLate_;
    static constexpr int kKeyTerms = Operand<Key>::kTerms;
    static constexpr int kKeptTerms = kSplitLate ? 1 : kKeyTerms;
    static_assert(kSpans <= kFoldWarps && kSpans % kSpansAtOnce == 0);
};

// Keys as operand B, by step, span and half of the span; and their squares, by span.
template <typename Types>
using FoldKeys = uint4[Types::kSteps][Types::kSpans][2][Types::kKeptTerms][kWarp];
template <typename Types>
using FoldSquares = float[Types::kSpans][16 * Types::kSteps];

template <typename Types_>
struct FoldMemory {
    using Types = Types_;
    FoldKeys<Types>& keys;
    FoldSquares<Types>& square;
};

// What a block works on at a time.
struct FoldUnit {
    int64_t slot;
    int layer;
    int key_head;
    int count;  // entries
};

// Keys of entries on their way: word j of half i of a step, see column_of.
template <int kSteps>
struct RawKeys {
    uint32_t word[kSteps][2][4];
};

// The columns of a span that are word j of a lane (two elements of 16 bits, from this one on), and
// so, as a lane's sums, column 2 c of 8 of product j.
template <typename Types>
__device__ __forceinline__ int column_of(int j, int c) {
    return Types::kVectors == 1 ? 8 * c + 2 * j : 16 * (j / 2) + 4 * c + 2 * (j % 2);
}

template <typename Types>
__device__ __forceinline__ RawKeys<Types::kSteps> load_keys(const treewy_history& history,
                                                            const treewy_state_pool& pool,
                                                            const FoldUnit& at, int span,
                                                            int lane) {
    using Key = typename Types::Key;
    const int g = lane / 4, c = lane % 4;
    const int64_t stride = int64_t{pool.key_heads} * Types::kKeyDim;
    const Key* from = static_cast<const Key*>(history.k) + at.layer * history.k_stride[0] +
                      at.slot * history.k_stride[1] + int64_t{at.key_head} * Types::kKeyDim +
                      span * 32;
    RawKeys<Types::kSteps> raw{};
#pragma unroll
    for (int i = 0; i < 2 * Types::kSteps; ++i) {
        const int entry = 8 * i + g;
        if (entry >= at.count) continue;
        uint32_t (&word)[4] = raw.word[i / 2][i % 2];
        // Words whose columns lie side by side at once.
        constexpr int kWords = Types::kVectors == 1 ? 4 : 2;
#pragma unroll
        for (int j = 0; j < 4; j += kWords) {
            const auto words = load_vec<kWords>(
                reinterpret_cast<const uint32_t*>(from + entry * stride + column_of<Types>(j, c)));
#pragma unroll
            for (int w = 0; w < kWords; ++w) word[j + w] = words.x[w];
        }
    }
    return raw;
}

// One span of all keys to shared memory, by a warp.
template <typename Types>
__device__ __forceinline__ void stage_keys(const RawKeys<Types::kSteps>& raw, int count, int span,
                                           int lane, const FoldMemory<Types>& memory) {
    using Key = typename Types::Key;
#pragma unroll
    for (int step = 0; step < Types::kSteps; ++step) {
        if (16 * step >= count) continue;
        uint32_t operand[Types::kKeptTerms][4][2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float square = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint32_t word = raw.word[step][half][j];
                const float low = half_value<Key>(word & 0xffffu);
                const float high = half_value<Key>(word >> 16);
                square = fmaf(low, low, fmaf(high, high, square));
                uint32_t terms[Types::kKeptTerms];
                if constexpr (Types::kSplitLate) {
                    terms[0] = word;
                } else {
                    split_word<Key>(word, terms);
                }
#pragma unroll
                for (int term = 0; term < Types::kKeptTerms; ++term)
                    operand[term][j][half] = transpose_matrix(terms[term]);
            }
            square += __shfl_xor_sync(kAllLanes, square, 1);
            square += __shfl_xor_sync(kAllLanes, square, 2);
            if (lane % 4 == 0) memory.square[span][16 * step + 8 * half + lane / 4] = square;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int term = 0; term < Types::kKeptTerms; ++term) {
                const uint32_t (&x)[4][2] = operand[term];
                memory.keys[step][span][i][term][lane] =
                    make_uint4(x[2 * i][0], x[2 * i][1], x[2 * i + 1][0], x[2 * i + 1][1]);
            }
        }
    }
}

// Keys of a step and half of a span as they are used.
template <typename Types>
__device__ __forceinline__ void take_keys(const FoldMemory<Types>& memory, int step, int span,
                                          int i, int lane, uint4 (&b)[Types::kKeyTerms]) {
    const uint4(&kept)[Types::kKeptTerms][kWarp] = memory.keys[step][span][i];
    if constexpr (Types::kKeptTerms == Types::kKeyTerms) {
#pragma unroll
        for (int term = 0; term < Types::kKeyTerms; ++term) b[term] = kept[term][lane];
    } else {
        const uint4 raw = kept[0][lane];
        uint32_t x[Types::kKeyTerms], y[Types::kKeyTerms], z[Types::kKeyTerms], w[Types::kKeyTerms];
        split_word<typename Types::Key>(raw.x, x);
        split_word<typename Types::Key>(raw.y, y);
        split_word<typename Types::Key>(raw.z, z);
        split_word<typename Types::Key>(raw.w, w);
#pragma unroll
        for (int term = 0; term < Types::kKeyTerms; ++term)
            b[term] = make_uint4(x[term], y[term], z[term], w[term]);
    }
}

// Factors of the entries of a value head, a lane each, the last entry first.
struct FoldFactors {
    float own;
    float from_start;  // of the state

    // `g`: the lane's log decay, zero where there is no entry; sums are taken from the last entry
    // back, so that there is no difference of large ones.
    template <typename Types>
    __device__ __forceinline__ void make(const FoldMemory<Types>& memory, float g, int count,
                                         int lane) {
        double total;
        const double later = warp_prefix(static_cast<double>(g), &total);
        from_start = expf(static_cast<float>(total));
        own = 0.0f;
        if (lane >= count) return;
        float square = 0.0f;
#pragma unroll
        for (int span = 0; span < Types::kSpans; ++span)
            square += memory.square[span][count - 1 - lane];
        own = expf(static_cast<float>(later)) * rsqrtf(square + kNormEps);
    }
    // Of an entry; zero of what is none.
    __device__ __forceinline__ float of(int entry, int count) const {
        return __shfl_sync(kAllLanes, own, (count - 1 - entry) & (kWarp - 1));
    }
};

__device__ __forceinline__ float load_decay(const treewy_history& history,
                                            const treewy_state_pool& pool, const FoldUnit& at,
                                            int head, int lane) {
    if (lane >= at.count) return 0.0f;
    const int64_t entry = at.count - 1 - lane;
    return history.g[at.layer * history.g_stride[0] + at.slot * history.g_stride[1] +
                     entry * pool.value_heads + head];
}

// u of 16 rows of V: of every entry rows 2 g and 2 g + 1, as they come.
template <int kSteps>
struct RawRows {
    uint32_t word[kSteps][4][2];

    // The entry of word i of a step, as operand A has them.
    static __device__ __forceinline__ int entry(int step, int i, int c) {
        return 16 * step + 8 * (i / 2) + 2 * c + i % 2;
    }
    // `u`: of entry 0 at the tile's first row; `stride` from entry to entry, both in float32 (wide)
    // or bfloat16.
    __device__ __forceinline__ void load(const void* u, int stride, int count, bool wide,
                                         int lane) {
        const int c = lane % 4, row = 2 * (lane / 4);
#pragma unroll
        for (int i = 0; i < 4 * kSteps; ++i) {
            const int of = entry(i / 4, i % 4, c), at = of * stride + row;
            uint32_t (&x)[2] = word[i / 4][i % 4];
            x[0] = x[1] = 0;
            if (of >= count) continue;
            if (wide) {
                const auto two = load_vec<2>(static_cast<const uint32_t*>(u) + at);
                x[0] = two.x[0], x[1] = two.x[1];
            } else {
                x[0] = *reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(u) + at);
            }
        }
    }
    // Of row 2 g + odd.
    __device__ __forceinline__ float value(int step, int i, int odd, bool wide) const {
        const uint32_t (&x)[2] = word[step][i];
        if (wide) return __uint_as_float(x[odd]);
        return odd == 0 ? low_half(x[0]) : high_half(x[0]);
    }
};

// The same, times the entries' factors, as operand A.
template <typename Types>
struct FoldRows {
    uint32_t x[Types::kSteps][Types::kTerms][4];

    __device__ __forceinline__ void make(const RawRows<Types::kSteps>& raw,
                                         const FoldFactors& factors, int count, bool wide,
                                         int lane) {
#pragma unroll
        for (int step = 0; step < Types::kSteps; ++step) {
            if (16 * step >= count) continue;
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const int entry = RawRows<Types::kSteps>::entry(step, i, lane % 4);
                const float low = factors.of(entry, count), high = factors.of(entry + 1, count);
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    uint32_t terms[Types::kTerms];
                    split(low * raw.value(step, i, odd, wide),
                          high * raw.value(step, i + 1, odd, wide), terms);
#pragma unroll
                    for (int term = 0; term < Types::kTerms; ++term)
                        x[step][term][i + odd] = terms[term];
                }
            }
        }
    }
    // Their products with the keys' half `i` of a span: a lane's columns of words 2 i and 2 i + 1,
    // rows 2 g and 2 g + 1 one after the other.
    __device__ __forceinline__ void multiply(const FoldMemory<Types>& memory, int count, int span,
                                             int i, int lane, float (&sum)[2][4]) const {
#pragma unroll
        for (int at = 0; at < 8; ++at) sum[at / 4][at % 4] = 0.0f;
#pragma unroll
        for (int step = 0; step < Types::kSteps; ++step) {
            if (16 * step >= count) continue;
            uint4 b[Types::kKeyTerms];
            take_keys(memory, step, span, i, lane, b);
#pragma unroll
            for (int order = Types::kTerms - 1; order >= 0; --order) {  // the small first
#pragma unroll
                for (int term = 0; term < Types::kKeyTerms && term <= order; ++term) {
                    const uint32_t (&a)[4] = x[step][order - term];
                    mma(sum[0], a[0], a[1], a[2], a[3], b[term].x, b[term].y);
                    mma(sum[1], a[0], a[1], a[2], a[3], b[term].z, b[term].w);
                }
            }
        }
    }
};

// Rows 2 g and 2 g + 1 of a tile in a span, decayed and with the products added. `at` gives 16
// bytes of the state, load(odd, vector), and takes them, store(odd, vector, 16 bytes).
template <typename Types, typename Place>
__device__ __forceinline__ void fold_span(const Place& at, const FoldRows<Types>& rows,
                                          const FoldMemory<Types>& memory, int count, int span,
                                          float decay, int lane) {
    using State = typename Types::State;
    constexpr int kVectors = Types::kVectors;
    float after[2][8];  // elements of a row: those of half i from 4 i on
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float sum[2][4];
        rows.multiply(memory, count, span, i, lane, sum);
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const uint4 vector = at.load(odd, kVectors == 1 ? 0 : i);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float before = element<State>(vector, kVectors == 1 ? 4 * i + e : e);
                after[odd][4 * i + e] = fmaf(decay, before, sum[e / 2][2 * odd + e % 2]);
            }
            if (kVectors == 1 && i == 0) continue;
            at.store(odd, kVectors == 1 ? 0 : i,
                     pack<State>(after[odd] + (kVectors == 1 ? 0 : 4 * i), 1.0f));
        }
    }
}

}  // namespace treewy
