// SPDX-License-Identifier: Apache-2.0
//
// Weights of a node block: made from Gram products, inverted (steps 1 and 2 of
// tree_verify_kernel.cuh), and applied.
#pragma once

#include "tree_verify_paths.cuh"
#include "tree_verify_rows.cuh"

namespace treewy {

inline constexpr float kNormEps = 1e-6f;

// The weights of node block e for the one at hand, `kind` 0 for W (and T_d - I), 1 for C: terms of
// 32 lanes of 16 bytes. Word 2 j + i of lane (g, c) holds row t = 8 j + g, columns 8 i + 2 c, + 1.
template <int kTerms>
__device__ __forceinline__ uint4* weights_at(const Shared& shared, int block, int kind) {
    return shared.weights + (block * 2 + kind) * kTerms * kWarp;
}

// 1 / |x| of the keys and K^-1/2 / |x| of the queries of node block d.
template <typename Types>
__device__ __forceinline__ void measure_norms(const Shared& shared, int d, int thread) {
    using Input = typename Types::Input;
    constexpr int kThreadsPerRow = Types::kThreads / 32;
    constexpr int kPerChunk = kPer16Bytes<Input>;
    constexpr int kChunks = Types::kKeyDim / kPerChunk;
    const int row = thread / kThreadsPerRow, part = thread % kThreadsPerRow;
    const bool is_key = row < kNodeBlock;
    const unsigned char* from = is_key
                                    ? shared.keys + (d * kNodeBlock + row) * Types::kInputRowBytes
                                    : shared.queries + (row - kNodeBlock) * Types::kInputRowBytes;
    float sum = 0.0f;
#pragma unroll
    for (int chunk = part; chunk < kChunks; chunk += kThreadsPerRow) {
        const Vec<Input, kPerChunk> value =
            *reinterpret_cast<const Vec<Input, kPerChunk>*>(from + 16 * chunk);
#pragma unroll
        for (int i = 0; i < kPerChunk; ++i)
            sum = fmaf(as_float(value.x[i]), as_float(value.x[i]), sum);
    }
#pragma unroll
    for (int step = kThreadsPerRow / 2; step > 0; step /= 2) {
        sum += __shfl_xor_sync(kAllLanes, sum, step);
    }
    if (part != 0) return;
    const float inverse = 1.0f / sqrtf(sum + kNormEps);
    if (is_key) {
        shared.key_norm[d * kNodeBlock + row] = inverse;
    } else {
        constexpr float kScale = Types::kKeyDim == 256  ? 0.0625f
                                 : Types::kKeyDim == 64 ? 0.125f
                                                        : 0.08838834764831845f;
        shared.query_norm[d * kNodeBlock + row - kNodeBlock] = inverse * kScale;
    }
}

// dot[..] = rows_a rows_b^T for 16 rows and 8.
template <typename A, typename B, int kKeyDim>
__device__ __forceinline__ void dot_rows(float (&dot)[4], const unsigned char* rows_a,
                                         const unsigned char* rows_b, int lane) {
    const int g = lane / 4, c = lane % 4, odd = g & 1;
    constexpr int kRowA = kKeyDim * static_cast<int>(sizeof(A));
    constexpr int kRowB = kKeyDim * static_cast<int>(sizeof(B));
    constexpr bool kOneTerm = Operand<A>::kTerms * Operand<B>::kTerms == 1;
    float part[2][4] = {};
#pragma unroll 4
    for (int group = 0; group < kKeyDim / 32; ++group) {
        const auto a0 = load_fragment<A>(rows_a + g * kRowA, group, c, odd);
        const auto a1 = load_fragment<A>(rows_a + (g + 8) * kRowA, group, c, odd);
        const auto b = load_fragment<B>(rows_b + g * kRowB, group, c, odd);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            // The second sum takes the small terms, or every other step: two chains are shorter.
            multiply<0, 0>(part[kOneTerm ? step : 0], a0, a1, b, step);
            multiply<1, kMaxOrder>(part[1], a0, a1, b, step);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) dot[i] = part[0][i] + part[1][i];
}

// Weights of the node block d for 8 columns `first` .. of block `at` (`kHistory`: of the history),
// `kind` 0 for W, 1 for C. Inputs: rows of d, rows of the columns.
template <typename Types, typename Column, bool kHistory>
__device__ __forceinline__ void couple(const Shared& shared, int d, int at, int kind, int half,
                                       const unsigned char* rows, const unsigned char* columns,
                                       int first, int history, int lane) {
    constexpr int kTerms = Types::kWeightTerms;
    float dot[4];
    dot_rows<typename Types::Input, Column, Types::kKeyDim>(dot, rows, columns, lane);
    const int g = lane / 4, c = lane % 4;
    float value[4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int t = d * kNodeBlock + 8 * j + g;
        const float2 to = shared.path_sum[t];
        const float factor =
            kind == 0 ? -shared.beta[t] * shared.key_norm[t] : shared.query_norm[t];
        const uint32_t* mask = shared.ancestors + t * shared.mask_words;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int i = first + 2 * c + e;
            const bool counts = kHistory ? i < history : has_bit(mask, i) && (kind == 1 || i != t);
            float weight = 0.0f;
            if (counts) {
                const float2 from = kHistory ? shared.history_sum[i] : shared.path_sum[i];
                const float norm = kHistory ? 1.0f : shared.key_norm[i];
                weight = factor * norm * decay_between(to, from) * dot[2 * j + e];
            }
            value[2 * j + e] = weight;
        }
    }
    uint32_t* words = reinterpret_cast<uint32_t*>(weights_at<kTerms>(shared, at, kind) + lane);
    if (!kHistory && kind == 0 && first / kNodeBlock == d) {
        // W_dd itself, [16, 16] in the place of T_d - I, which `invert` makes of it.
        float* dense = reinterpret_cast<float*>(weights_at<kTerms>(shared, at, kind));
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            *reinterpret_cast<float2*>(dense + (8 * j + g) * kNodeBlock + 8 * half + 2 * c) =
                make_float2(value[2 * j], value[2 * j + 1]);
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        uint32_t terms[kTerms];
        split(value[2 * j], value[2 * j + 1], terms);
#pragma unroll
        for (int term = 0; term < kTerms; ++term)
            words[term * kWarp * 4 + 2 * j + half] = terms[term];
    }
}

// All weights of node block d. A warp takes one kind, 8 columns of every block it comes to.
template <typename Types>
__device__ __forceinline__ void couple_block(const Shared& shared, const VerifyWork& work,
                                             int history_blocks, int d, int warp, int lane) {
    using Input = typename Types::Input;
    const int kind = warp / 2 % 2, half = warp % 2;
    const unsigned char* rows =
        kind == 0 ? shared.keys + d * kNodeBlock * Types::kInputRowBytes : shared.queries;
    for (int at = warp / 4; at < history_blocks; at += Types::kWarps / 4) {
        const int first = at * kNodeBlock + 8 * half;
        couple<Types, float, true>(shared, d, at, kind, half, rows,
                                   shared.history_keys + first * Types::kKeyDim * 4, first,
                                   work.history, lane);
    }
    for (int e = warp / 4; e <= d; e += Types::kWarps / 4) {
        const int first = e * kNodeBlock + 8 * half;
        couple<Types, Input, false>(shared, d, history_blocks + e, kind, half, rows,
                                    shared.keys + first * Types::kInputRowBytes, first, 0, lane);
    }
}

// (I - W)^-1 - I for the strictly lower W of couple(), in its place. Lane j has column j.
template <int kTerms>
__device__ __forceinline__ void invert(uint4* place, int lane) {
    const float* dense = reinterpret_cast<const float*>(place);
    const int column = lane % kNodeBlock;
    float x[kNodeBlock];
#pragma unroll
    for (int t = 0; t < kNodeBlock; ++t) {
        float sum[4] = {dense[t * kNodeBlock + column], 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < t; i += 4) {
            const float4 w = *reinterpret_cast<const float4*>(dense + t * kNodeBlock + i);
            sum[0] = fmaf(w.x, x[i], sum[0]);
            if (i + 1 < t) sum[1] = fmaf(w.y, x[i + 1], sum[1]);
            if (i + 2 < t) sum[2] = fmaf(w.z, x[i + 2], sum[2]);
            if (i + 3 < t) sum[3] = fmaf(w.w, x[i + 3], sum[3]);
        }
        x[t] = t > column ? (sum[0] + sum[1]) + (sum[2] + sum[3]) : 0.0f;
    }
    __syncwarp();
    if (lane >= kNodeBlock) return;
    // Row t = 8 j + g, column 8 i + 2 c + e: half e of word 2 j + i of lane 4 g + c.
    uint32_t* words = reinterpret_cast<uint32_t*>(place);
    const int i = column / 8, c = column % 8 / 2, e = column % 2;
#pragma unroll
    for (int t = 0; t < kNodeBlock; ++t) {
        const int j = t / 8, g = t % 8;
        uint32_t terms[kTerms];
        split(x[t], 0.0f, terms);
#pragma unroll
        for (int term = 0; term < kTerms; ++term) {
            uint32_t* word = words + (term * kWarp + 4 * g + c) * 4 + 2 * j + i;
            reinterpret_cast<unsigned short*>(word)[e] = static_cast<unsigned short>(terms[term]);
        }
    }
}

// to += (weights applied to the 16 nodes of `nodes`), the small terms first. Tensor cores cut sums
// off: where float32 counts (kApart) the product is summed apart.
template <bool kApart, int kTerms, int kTiles>
__device__ __forceinline__ void apply(Tile<kTiles>& to, const TileTerms<kTerms, kTiles>& nodes,
                                      const uint4* weights, int lane) {
    uint4 words[kTerms];
#pragma unroll
    for (int term = 0; term < kTerms; ++term) words[term] = weights[term * kWarp + lane];
    Tile<kTiles> sum = kApart ? zero_tile<kTiles>() : to;
#pragma unroll
    for (int order = kTerms - 1; order >= 0; --order) {
#pragma unroll
        for (int term = 0; term <= order; ++term) {
            const uint4 b = words[order - term];
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                const uint32_t (&a)[4] = nodes.x[term][i];
                mma(sum.x[i][0], a[0], a[1], a[2], a[3], b.x, b.y);
                mma(sum.x[i][1], a[0], a[1], a[2], a[3], b.z, b.w);
            }
        }
    }
    if constexpr (kApart) {
        add(to, sum);
    } else {
        to = sum;
    }
}

}  // namespace treewy
