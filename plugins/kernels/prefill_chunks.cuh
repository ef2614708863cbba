// SPDX-License-Identifier: Apache-2.0
//
// The gated delta rule over packed sequences on tensor cores (the equations are in prefill.cu).
//
// A block takes up to 128 rows of V of one (sequence, value head) through the sequence, in chunks
// of 32 or 64 tokens. Each of its first warps owns 16 rows of V with all of their state, in
// registers as the sums of mma.sync come: these are, as operand A, what S [K; Q]^T multiplies; and
// the same holds for R and U by W, T and C, so that nothing but keys, queries, values and weights
// comes from shared memory and the rows' warps never wait for each other. Helper warps load
// (cp.async, three stages) and make the weights of the next chunk meanwhile (two stages): they need
// no state.
//
//   W = -B, T_d = (I - W_dd)^-1 for each block d of 16 tokens, C: decayed products of q and k
//   for d:  U_d = T_d R_d;  R_e += W_ed U_d and o_e += C_ed U_d for later blocks e (o_d as well)
//
// Weights are made again for each tile of V and each value head of a key head. That is done beside
// the rows and only where blocks are few are there tiles; it saves a workspace and a launch.
//
// Exactness. q, k and v of 16 bits are operands as they come, norms and decays are factors of the
// sums. R, U and the weights are cut into two bfloat16 terms, which leave 2^-17; S into two as
// well, or one where state and inputs are bfloat16. A chunk's change of S is summed apart from S,
// as tensor cores cut sums off. With one term everywhere bfloat16 results have errors of 3.3e-3
// where rounding them makes 1.7e-3, with these 1.8e-3; a float32 state has 5e-6. What is not finite
// is kept from the tokens before it by solving without it.
//
// Floor, K = V = 128, a chunk of 32: a rows' warp issues 164 mma among 930 instructions, with two
// terms of S 228 among 1,210; a helper about 800. On a quarter of a multiprocessor there are two of
// the rows' warps and a helper: 2.7 and 3.2 thousand issue slots a chunk; tensor cores need 2.2
// and 3.0 thousand cycles at 6 an mma. 8 x 512 tokens with 32 heads are 32 chunks a multiprocessor
// of an H200: 50 and 60 us at 1.75 GHz if a slot were never empty; q, k, v and o take 25 us of
// memory. One prompt is a chain: about 3 thousand cycles a chunk of 64.
#pragma once

#include "prefill_weights.cuh"

namespace treewy {

// ------------------------------------------------------------------ a warp's 16 rows of V

// Row g of the fragments is row 4 (g / 2) + g % 2 of V, row 8 + g the second after it: then a lane
// has, of a token, four rows side by side once a tile is transposed.
__device__ __forceinline__ int lane_row(int g) { return g / 2 * 4 + g % 2; }

// State of the rows: x[n] is a sum of mma, at columns 8 n .. of K.
template <int kKeyDim>
struct RowState {
    float x[kKeyDim / 8][4];
};

template <typename T, int kKeyDim>
__device__ __forceinline__ void load_state(const T* from, RowState<kKeyDim>& state, int lane) {
    const T* row = from + lane_row(lane / 4) * kKeyDim + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kKeyDim / 4; ++i) {
        const Vec<T, 2> pair = load_vec<2>(row + i % 2 * 2 * kKeyDim + i / 2 * 8);
        state.x[i / 2][i % 2 * 2] = as_float(pair.x[0]);
        state.x[i / 2][i % 2 * 2 + 1] = as_float(pair.x[1]);
    }
}

template <typename T, int kKeyDim>
__device__ __forceinline__ void store_state(T* to, const RowState<kKeyDim>& state, int lane) {
    T* row = to + lane_row(lane / 4) * kKeyDim + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kKeyDim / 4; ++i) {
        Vec<T, 2> pair;
        pair.x[0] = from_float<T>(state.x[i / 2][i % 2 * 2]);
        pair.x[1] = from_float<T>(state.x[i / 2][i % 2 * 2 + 1]);
        store_vec<2>(row + i % 2 * 2 * kKeyDim + i / 2 * 8, pair);
    }
}

// sum += A B of two operands' terms, but for what both leave out.
template <int kTermsA, int kTermsB>
__device__ __forceinline__ void multiply_terms(float (&sum)[4], const uint32_t (&a)[kTermsA][4],
                                               const uint32_t (&b)[kTermsB][2]) {
    constexpr int kOrders = kTermsA > kTermsB ? kTermsA : kTermsB;
#pragma unroll
    for (int i = 0; i < kTermsA; ++i) {
#pragma unroll
        for (int j = 0; j < kTermsB; ++j) {
            if (i + j >= kOrders) continue;
            mma(sum, a[i][0], a[i][1], a[i][2], a[i][3], b[j][0], b[j][1]);
        }
    }
}

// S [K; Q]^T of all tokens.
template <typename Types>
__device__ __forceinline__ void multiply_state(const RowState<Types::kKeyDim>& state,
                                               const unsigned char* keys,
                                               const unsigned char* queries, int lane,
                                               Tile<1> (&rhs)[Types::kBlocks],
                                               Tile<1> (&out)[Types::kBlocks]) {
    using Input = typename Types::Input;
    constexpr int kTerms = Types::kStateTerms, kRow = Types::kRow, kInputTerms = Types::kInputTerms;
#pragma unroll
    for (int d = 0; d < Types::kBlocks; ++d) rhs[d] = out[d] = zero_tile<1>();
#pragma unroll
    for (int pair = 0; pair < Types::kKeyDim / 32; ++pair) {
        uint32_t a[2][kTerms][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            uint32_t terms[kTerms];
            const float (&x)[4] = state.x[4 * pair + i / 2];
            split(x[i % 2 * 2], x[i % 2 * 2 + 1], terms);
#pragma unroll
            for (int term = 0; term < kTerms; ++term) a[i / 4][term][i % 4] = terms[term];
        }
#pragma unroll
        for (int j = 0; j < 2 * Types::kBlocks; ++j) {
            const auto key = load_b<Input, kRow>(keys + 8 * j * kRow, pair, lane);
            const auto query = load_b<Input, kRow>(queries + 8 * j * kRow, pair, lane);
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                uint32_t k[kInputTerms][2], q[kInputTerms][2];
#pragma unroll
                for (int i = 0; i < 2 * kInputTerms; ++i) {
                    k[i / 2][i % 2] = key.x[i / 2][odd][i % 2];
                    q[i / 2][i % 2] = query.x[i / 2][odd][i % 2];
                }
                multiply_terms(rhs[j / 2].x[0][j % 2], a[odd], k);
                multiply_terms(out[j / 2].x[0][j % 2], a[odd], q);
            }
        }
    }
}

template <typename T>
__device__ __forceinline__ float2 unpack_pair(uint32_t word) {
    if constexpr (Operand<T>::kTerms == 1) {
        return make_float2(low_half(word), high_half(word));
    } else {
        return make_float2(__half2float(__ushort_as_half(static_cast<unsigned short>(word))),
                           __half2float(__ushort_as_half(static_cast<unsigned short>(word >> 16))));
    }
}

template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
    if constexpr (Operand<T>::kTerms == 1) {
        return pack_bfloat16(low, high);
    } else {
        return uint32_t{__half_as_ushort(__float2half_rn(low))} |
               uint32_t{__half_as_ushort(__float2half_rn(high))} << 16;
    }
}

// R from S K^T, and the outputs' part of S. `values` are the warp's.
template <typename Types>
__device__ __forceinline__ void make_rhs(const unsigned char* values, int pitch,
                                         const TokenFactors* factors, int lane,
                                         Tile<1> (&rhs)[Types::kBlocks],
                                         Tile<1> (&out)[Types::kBlocks]) {
    using Input = typename Types::Input;
    const int g = lane / 4, c = lane % 4;
#pragma unroll
    for (int j = 0; j < 2 * Types::kBlocks; ++j) {
        const uint2 word = *reinterpret_cast<const uint2*>(values + (8 * j + g) * pitch + 8 * c);
        const float2 v[2] = {unpack_pair<Input>(transpose_matrix(word.x)),
                             unpack_pair<Input>(transpose_matrix(word.y))};
        const TokenFactors even = factors[8 * j + 2 * c], odd = factors[8 * j + 2 * c + 1];
        float (&r)[4] = rhs[j / 2].x[0][j % 2];
        float (&o)[4] = out[j / 2].x[0][j % 2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            r[2 * i] = even.beta * v[i].x - even.key * r[2 * i];
            r[2 * i + 1] = odd.beta * v[i].y - odd.key * r[2 * i + 1];
            o[2 * i] *= even.query;
            o[2 * i + 1] *= odd.query;
        }
    }
}

// ------------------------------------------------------------------ what is not finite

__device__ __forceinline__ bool all_finite(const Tile<1>& tile) {
    float sum = 0.0f;  // of zeros, unless there is NaN or Inf
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(tile.x[0][i / 4][i % 4], 0.0f, sum);
    return sum == 0.0f;
}

// First token of 16 that is not finite, of a lane's two rows; 16 where all are.
struct FirstBad {
    int token[2];
};

__device__ __forceinline__ FirstBad find_bad(const Tile<1>& tile, int lane) {
    FirstBad bad{{16, 16}};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int t = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        const float x = tile.x[0][i / 4][i % 4];
        if (!(x * 0.0f == 0.0f)) bad.token[i / 2 % 2] = min(bad.token[i / 2 % 2], t);
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        bad.token[row] = min(bad.token[row], __shfl_xor_sync(kAllLanes, bad.token[row], 1));
        bad.token[row] = min(bad.token[row], __shfl_xor_sync(kAllLanes, bad.token[row], 2));
    }
    return bad;
}

// Sets the tokens from the first bad one on.
__device__ __forceinline__ void overwrite(Tile<1>& tile, const FirstBad& bad, float value,
                                          int lane) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int t = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        if (t >= bad.token[i / 2 % 2]) tile.x[0][i / 4][i % 4] = value;
    }
}

// ------------------------------------------------------------------ a chunk

// Stores a block of 16 tokens, of which `count` are real; `to` is the lane's rows at its token.
template <typename Input>
__device__ __forceinline__ void store_outputs(Input* to, int stride, const Tile<1>& out, int count,
                                              int lane) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const float (&x)[4] = out.x[0][j];
        const uint2 words = make_uint2(transpose_matrix(pack_pair<Input>(x[0], x[1])),
                                       transpose_matrix(pack_pair<Input>(x[2], x[3])));
        if (8 * j + lane / 4 < count) *reinterpret_cast<uint2*>(to + 8 * j * stride) = words;
    }
}

// What a warp needs to know of a chunk.
struct ChunkRows {
    int chunk;
    int count;       // real tokens
    int stride;      // of the outputs, from token to token
    int64_t out_at;  // of the lane's rows at its token of the first block
};

// Outputs of block d, and its U times decay to the chunk's end as operand; takes its part in later
// blocks.
template <typename Types>
__device__ __forceinline__ TileTerms<Types::kTerms, 1> solve_block(const ChunkShared<Types>& shared,
                                                                   const ChunkRows& rows, int d,
                                                                   int lane,
                                                                   Tile<1> (&rhs)[Types::kBlocks],
                                                                   Tile<1> (&out)[Types::kBlocks]) {
    constexpr int kTerms = Types::kTerms;
    const int chunk = rows.chunk;
    FirstBad bad{{16, 16}};
    const bool poisoned = __any_sync(kAllLanes, !all_finite(rhs[d])) != 0;
    if (poisoned) {
        bad = find_bad(rhs[d], lane);
        overwrite(rhs[d], bad, 0.0f, lane);
    }
    Tile<1> u = zero_tile<1>();
    apply<false>(u, split_tile<kTerms>(rhs[d]), shared.weights(chunk, d, d, 0), lane);
    if (poisoned) overwrite(u, bad, 0.0f, lane);  // the weights may be NaN as well
    auto terms = split_tile<kTerms>(u);
    apply<false>(out[d], terms, shared.weights(chunk, d, d, 1), lane);
    if (poisoned) {
        overwrite(u, bad, __uint_as_float(0x7fffffffu), lane);
        overwrite(out[d], bad, __uint_as_float(0x7fffffffu), lane);
        terms = split_tile<kTerms>(u);
    }
#pragma unroll
    for (int e = d + 1; e < Types::kBlocks; ++e) {
        apply<false>(rhs[e], terms, shared.weights(chunk, e, d, 0), lane);
        apply<false>(out[e], terms, shared.weights(chunk, e, d, 1), lane);
    }
    const TokenFactors* factors = shared.factors(chunk) + 16 * d + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < 8; ++i) u.x[0][i / 4][i % 4] *= factors[8 * (i / 4) + i % 2].end;
    return split_tile<Types::kTerms>(u);
}

// S <- `whole` S + U K of a chunk, U as operands.
template <typename Types>
__device__ __forceinline__ void update_state(RowState<Types::kKeyDim>& state,
                                             const unsigned char* keys, float whole,
                                             const TileTerms<Types::kTerms, 1> (&u)[Types::kBlocks],
                                             int lane) {
    constexpr int kInputTerms = Types::kInputTerms;
    const int g = lane % 8;
    const unsigned char* row = keys + lane % 16 * Types::kRow;
#pragma unroll
    for (int n = 0; n < Types::kKeyDim / 8; n += 2) {
        float sum[2][4] = {};
        const int chunk = swapped_chunk<typename Types::Input>(n + lane / 16, g);
#pragma unroll
        for (int d = 0; d < Types::kBlocks; ++d) {
            uint32_t words[4];
            load_transposed(words, row + d * 16 * Types::kRow + 16 * chunk);
            uint32_t b[2][kInputTerms][2];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint32_t terms[kInputTerms];
                split_word<typename Types::Input>(words[i], terms);
#pragma unroll
                for (int term = 0; term < kInputTerms; ++term) b[i / 2][term][i % 2] = terms[term];
            }
            uint32_t a[Types::kTerms][4];
#pragma unroll
            for (int i = 0; i < 4 * Types::kTerms; ++i) a[i / 4][i % 4] = u[d].x[i / 4][0][i % 4];
            multiply_terms(sum[0], a, b[0]);
            multiply_terms(sum[1], a, b[1]);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float& s = state.x[n + i / 4][i % 4];
            s = fmaf(whole, s, sum[i / 4][i % 4]);
        }
    }
}

// A rows' warp's way through the sequence.
template <typename Types>
__device__ __forceinline__ void carry_rows(const treewy_prefill_params& p,
                                           const ChunkShared<Types>& shared,
                                           const ChunkBlock& block, int64_t slot, int warp,
                                           int lane) {
    using Input = typename Types::Input;
    using State = typename Types::State;
    constexpr int kKeyDim = Types::kKeyDim, kTokens = Types::kTokens;
    const int first_row = block.row0 + 16 * warp, pitch = block.value_pitch;
    State* data = static_cast<State*>(p.state.data) + slot * p.state.slot_stride +
                  (int64_t{block.head} * p.state.value_dim + first_row) * kKeyDim;
    RowState<kKeyDim> state;
    load_state(data, state, lane);
    ChunkRows rows{};
    rows.stride = static_cast<int>(p.out_stride[0]);
    rows.out_at = (block.start + lane / 4) * p.out_stride[0] + block.head * p.out_stride[1] +
                  first_row + lane % 4 * 4;
#pragma unroll 1
    for (int chunk = 0; chunk < block.chunks; ++chunk) {
        rows.chunk = chunk;
        rows.count = static_cast<int>(
            min(block.stop - block.start - int64_t{chunk} * kTokens, int64_t{kTokens}));
        Tile<1> rhs[Types::kBlocks], out[Types::kBlocks];
        sync_at(kFullBarrier + chunk % kWeightStages, block.threads);
        multiply_state<Types>(state, shared.keys(chunk), shared.queries(chunk), lane, rhs, out);
        make_rhs<Types>(shared.values(chunk, pitch) + 32 * warp, pitch, shared.factors(chunk), lane,
                        rhs, out);
        TileTerms<Types::kTerms, 1> u[Types::kBlocks];
        Input* to = static_cast<Input*>(p.out) + rows.out_at;
#pragma unroll
        for (int d = 0; d < Types::kBlocks; ++d) {
            u[d] = solve_block<Types>(shared, rows, d, lane, rhs, out);
            store_outputs(to + 16 * d * rows.stride, rows.stride, out[d], rows.count - 16 * d,
                          lane);
        }
        rows.out_at += kTokens * p.out_stride[0];
        update_state<Types>(state, shared.keys(chunk), *shared.whole(chunk), u, lane);
        if (chunk + 2 < block.chunks) {
            arrive_at(kEmptyBarrier + chunk % kWeightStages, block.threads);
        }
    }
    store_state(data, state, lane);
}

// Outputs of a padded row.
template <typename Types>
__device__ __forceinline__ void zero_outputs(const treewy_prefill_params& p,
                                             const ChunkBlock& block) {
    using Input = typename Types::Input;
    const int across = 4 * block.row_warps;
    const int64_t at = block.head * p.out_stride[1] + block.row0;
    for (int64_t i = threadIdx.x; i < (block.stop - block.start) * across; i += block.threads) {
        Input* to = static_cast<Input*>(p.out) + (block.start + i / across) * p.out_stride[0] + at;
        *reinterpret_cast<uint2*>(to + i % across * 4) = make_uint2(0, 0);
    }
}

template <typename Types>
__global__ void __launch_bounds__(Types::kMaxThreads, 1)
    prefill_chunks(const __grid_constant__ ChunkWork work) {
    const treewy_prefill_params& p = work.prefill;
    ChunkBlock block;
    unsigned index = blockIdx.x;
    block.row_warps = work.row_warps;
    block.value_pitch = work.value_pitch;
    block.helpers = work.helpers;
    block.threads = (work.helpers + work.row_warps) * kWarp;
    block.row0 = static_cast<int>(index % work.tiles) * 16 * work.row_warps;
    index /= work.tiles;
    block.head = static_cast<int>(index % p.state.value_heads);
    block.key_head = block.head / (p.state.value_heads / p.state.key_heads);
    const int sequence = static_cast<int>(index / p.state.value_heads);
    const Span span = sequence_span(p.packed.cu_seqlens, sequence, p.packed.tokens);
    if (span.stop == span.start) return;
    block.start = span.start;
    block.stop = span.stop;
    block.chunks = static_cast<int>((span.stop - span.start + Types::kTokens - 1) / Types::kTokens);
    const int64_t slot = p.packed.slot[sequence];
    if (!is_live_slot(slot, p.packed.num_slots)) {
        zero_outputs<Types>(p, block);
        return;
    }
    const ChunkShared<Types> shared{shared_memory()};
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    if (warp < block.row_warps) {
        carry_rows(p, shared, block, slot, warp, lane);
    } else {
        prepare_chunks(p, shared, block, warp - block.row_warps, lane);
    }
}

template <typename Types>
treewy_status launch_chunks(const char* name, const treewy_prefill_params& p,
                            const PrefillPlan& plan, treewy_stream stream) {
    const int tiles = p.state.value_dim / (16 * plan.row_warps);
    const ChunkLayout layout = chunk_layout(Types::kKeyDim, Types::kTokens, plan.row_warps);
    const int helpers = helper_warps(Types::kTokens, plan.row_warps);
    return launch(name, prefill_chunks<Types>,
                  int64_t{p.packed.batch} * p.state.value_heads * tiles,
                  (helpers + plan.row_warps) * kWarp, static_cast<size_t>(layout.total), stream,
                  ChunkWork{p, tiles, plan.row_warps, helpers, value_pitch(plan.row_warps)});
}

}  // namespace treewy
