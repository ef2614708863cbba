// SPDX-License-Identifier: Apache-2.0
//
// What a prefill's helper warps do: they load chunks of the sequence, and make of each chunk's
// keys, queries and gates the weights and factors that its rows of V are worked out with.
#pragma once

#include "prefill_plan.h"
#include "tree_verify_weights.cuh"

namespace treewy {

struct ChunkWork {
    treewy_prefill_params prefill;
    int tiles;  // blocks that share a value head
    int row_warps;
    int helpers;  // other warps
    int value_pitch;
};

template <typename Input_, typename State_, int kKeyDim_, int kBlocks_>
struct ChunkTypes {
    using Input = Input_;
    using State = State_;
    static constexpr int kKeyDim = kKeyDim_;
    static constexpr int kBlocks = kBlocks_;  // of 16 tokens
    static constexpr int kTokens = 16 * kBlocks;
    static constexpr int kInputTerms = Operand<Input>::kTerms;
    static constexpr int kTerms = kChunkTerms;
    static constexpr int kStateTerms = state_terms(kInputTerms, static_cast<int>(sizeof(State)));
    static constexpr int kRow = kKeyDim * 2;  // bytes of a key
    static constexpr int kMaxThreads = (most_row_warps(kTokens) + 4) * kWarp;
    static constexpr int kPairs = block_pairs(kTokens);
    static constexpr ChunkLayout kLayout = chunk_layout(kKeyDim, kTokens, most_row_warps(kTokens));
    static_assert(kBlocks <= 4 && kTokens % kWarp == 0);
    static_assert(kWeightStages == 2 && kChunkStages == 3);  // as the barriers' order has it
};

// Of a token: beta; what S k, S q and u k^T are multiplied by, with decays and norms.
struct alignas(16) TokenFactors {
    float beta;
    float key;
    float query;
    float end;
};

// What a block works on.
struct ChunkBlock {
    int64_t start;  // tokens of the sequence
    int64_t stop;
    int head;
    int key_head;
    int row0;  // of V
    int row_warps;
    int helpers;
    int value_pitch;  // bytes
    int chunks;
    int threads;
};

// Barriers of a block, the first two a stage of weights.
inline constexpr int kFullBarrier = 1;   // the helpers have made it
inline constexpr int kEmptyBarrier = 3;  // the rows' warps are done with it
inline constexpr int kChunkHelperBarrier = 5;

// Shared memory of a block; weights of a pair of blocks of tokens lie as weights_at says, those of
// W then those of C.
template <typename Types>
struct ChunkShared {
    static constexpr ChunkLayout kAt = Types::kLayout;
    unsigned char* base;

    __device__ __forceinline__ unsigned char* keys(int chunk) const {
        return base + kAt.keys + chunk % kChunkStages * (Types::kTokens * Types::kRow);
    }
    __device__ __forceinline__ unsigned char* queries(int chunk) const {
        return base + kAt.queries + chunk % kChunkStages * (Types::kTokens * Types::kRow);
    }
    __device__ __forceinline__ unsigned char* values(int chunk, int pitch) const {
        return base + kAt.values + chunk % kChunkStages * (Types::kTokens * pitch);
    }
    __device__ __forceinline__ uint4* weights(int chunk, int d, int e, int kind) const {
        const int pair = chunk % kWeightStages * Types::kPairs + d * (d + 1) / 2 + e;
        return reinterpret_cast<uint4*>(base + kAt.weights) +
               (2 * pair + kind) * Types::kTerms * kWarp;
    }
    __device__ __forceinline__ TokenFactors* factors(int chunk) const {
        return reinterpret_cast<TokenFactors*>(base + kAt.factors) +
               chunk % kWeightStages * Types::kTokens;
    }
    __device__ __forceinline__ float* whole(int chunk) const {  // decay over the chunk
        return reinterpret_cast<float*>(base + kAt.whole) + chunk % kWeightStages;
    }
    __device__ __forceinline__ float2* path_sum() const {
        return reinterpret_cast<float2*>(base + kAt.path_sum);
    }
    __device__ __forceinline__ float* beta() const {
        return reinterpret_cast<float*>(base + kAt.beta);
    }
    __device__ __forceinline__ float* key_norm() const {
        return reinterpret_cast<float*>(base + kAt.key_norm);
    }
    __device__ __forceinline__ float* query_norm() const {
        return reinterpret_cast<float*>(base + kAt.query_norm);
    }
    __device__ __forceinline__ float* dense(int d) const {  // W of a block with itself, in float32
        return reinterpret_cast<float*>(base + kAt.dense) + d * 16 * 20;
    }
};

inline constexpr int kDensePitch = 20;

__device__ __forceinline__ void sync_helpers(const ChunkBlock& block) {
    sync_at(kChunkHelperBarrier, block.helpers * kWarp);
}

// ------------------------------------------------------------------ loads

// Starts the copies of a chunk's keys, queries and values; zeros beyond the sequence's end.
template <typename Types>
__device__ __forceinline__ void load_chunk(const treewy_prefill_params& p,
                                           const ChunkShared<Types>& shared,
                                           const ChunkBlock& block, int chunk, int thread) {
    using Input = typename Types::Input;
    constexpr int kTokens = Types::kTokens, kThreads = 4 * kWarp;
    const int64_t first = block.start + int64_t{chunk} * kTokens;
    const int count = static_cast<int>(min(block.stop - first, int64_t{kTokens}));
    const Input* k =
        static_cast<const Input*>(p.k) + first * p.k_stride[0] + block.key_head * p.k_stride[1];
    const Input* q =
        static_cast<const Input*>(p.q) + first * p.q_stride[0] + block.key_head * p.q_stride[1];
    if (thread < kThreads) {
        load_rows<Input, Types::kKeyDim, kTokens, kThreads, 0, true>(
            shared.keys(chunk), k, static_cast<int>(p.k_stride[0]), count, thread);
        load_rows<Input, Types::kKeyDim, kTokens, kThreads, 0, true>(
            shared.queries(chunk), q, static_cast<int>(p.q_stride[0]), count, thread);
    }

    const int pitch = block.value_pitch, across = 2 * block.row_warps;
    const Input* v = static_cast<const Input*>(p.v) + first * p.v_stride[0] +
                     block.head * p.v_stride[1] + block.row0;
    unsigned char* values = shared.values(chunk, pitch);
    for (int i = thread; i < kTokens * across; i += block.helpers * kWarp) {
        const int t = i / across, at = i % across;
        unsigned char* to = values + t * pitch + 16 * at;
        if (t < count) {
            copy_async(to, v + t * static_cast<int>(p.v_stride[0]) + 8 * at);
        } else {
            *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
        }
    }
}

// a and b of a lane's tokens, kEach side by side.
template <int kEach>
struct GateInputs {
    float a[kEach];
    float b[kEach];
};

template <typename Types, int kEach>
__device__ __forceinline__ void load_gates(const treewy_prefill_params& p, const ChunkBlock& block,
                                           int chunk, int lane, GateInputs<kEach>& gates) {
    const int64_t first = block.start + int64_t{chunk} * Types::kTokens + kEach * lane;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        gates.a[i] = gates.b[i] = 0.0f;
        if (first + i >= block.stop) continue;
        gates.a[i] = load_as_float(p.a, p.gate_dtype, (first + i) * p.a_stride + block.head);
        gates.b[i] = load_as_float(p.b, p.gate_dtype, (first + i) * p.b_stride + block.head);
    }
}

// What a chunk's gates give, of a lane's tokens.
template <int kEach>
struct ChunkGates {
    float2 sum[kEach];  // path sums from the chunk's start, base 2
    float beta[kEach];
    float end[kEach];  // decay to the chunk's end
    float whole;       // over the chunk
};

// By a warp. Tokens beyond the end have g = 0 and beta = 0.
template <typename Types, int kEach>
__device__ __forceinline__ ChunkGates<kEach> sum_gates(const ChunkBlock& block, int chunk, int lane,
                                                       const GateInputs<kEach>& inputs, float A_log,
                                                       float dt_bias) {
    const int64_t first = block.start + int64_t{chunk} * Types::kTokens + kEach * lane;
    ChunkGates<kEach> gates;
    double g[kEach], own = 0.0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const bool real = first + i < block.stop;
        g[i] = real ? static_cast<double>(log_decay(inputs.a[i], A_log, dt_bias)) * kLog2E : 0.0;
        own += g[i];
        gates.beta[i] = real ? 1.0f / (1.0f + expf(-inputs.b[i])) : 0.0f;
    }
    double total, sum = warp_prefix(own, &total);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        sum += g[i];
        gates.sum[i] = two_floats(sum);
        const float end = static_cast<float>(total - sum);
        gates.end[i] = fast_exp2(end > 0.0f ? 0.0f : end);
    }
    gates.whole = fast_exp2(static_cast<float>(total));
    return gates;
}

template <typename Types, int kEach>
__device__ __forceinline__ void store_gates(const ChunkShared<Types>& shared, int chunk, int lane,
                                            const ChunkGates<kEach>& gates) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int t = kEach * lane + i;
        shared.path_sum()[t] = gates.sum[i];
        shared.beta()[t] = gates.beta[i];
        shared.factors(chunk)[t].end = gates.end[i];
    }
    if (lane == 0) *shared.whole(chunk) = gates.whole;
}

// ------------------------------------------------------------------ weights

// Makes the products of block d's keys (kind 0) or queries (1) with block e's keys weights: W where
// d > e, else to `dense`; C.
template <typename Types>
__device__ __forceinline__ void weigh_products(const ChunkShared<Types>& shared, int chunk, int d,
                                               int e, int kind, float (&value)[2][4], int lane) {
    const int g = lane / 4, column = 16 * e + 2 * (lane % 4);
    const float* norms = kind == 0 ? shared.key_norm() : shared.query_norm();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int t = 16 * d + 8 * j + g;
        const float2 to = shared.path_sum()[t];
        const float factor = kind == 0 ? -shared.beta()[t] * norms[t] : norms[t];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                const int i = column + 8 * half + odd;
                const bool earlier = i < t || (kind == 1 && i == t);  // a query's own as well
                const float decay = decay_between(to, shared.path_sum()[i]);
                float& x = value[half][2 * j + odd];
                x = earlier ? factor * (shared.key_norm()[i] * decay) * x : 0.0f;
            }
        }
    }
    if (kind == 0 && d == e) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int half = i / 4, row = 8 * (i / 2 % 2) + g;
            shared.dense(d)[row * kDensePitch + 8 * half + 2 * (lane % 4) + i % 2] =
                value[half][i % 4];
        }
        return;
    }
    uint4* place = shared.weights(chunk, d, e, kind);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        store_terms<Types::kTerms>(place, value[half], half, 0, lane);
    }
}

// T = (I - W)^-1 of block d with itself, for the strictly lower triangle W in `dense`, to the
// block's place among the weights. A lane has a column. Products of (I - beta k k^T) are
// contractions, so that no entry exceeds 1.
template <typename Types>
__device__ __forceinline__ void invert_block(const ChunkShared<Types>& shared, int chunk, int d,
                                             int lane) {
    constexpr int kTerms = Types::kTerms;
    const float* w = shared.dense(d);
    const int column = lane % 16;
    float x[16];
#pragma unroll
    for (int t = 0; t < 16; ++t) {
        float sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < t; i += 4) {
            const float4 row = *reinterpret_cast<const float4*>(w + t * kDensePitch + i);
            const float four[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (i + j < t) sum[j % 2] = fmaf(four[j], x[i + j], sum[j % 2]);
            }
        }
        x[t] = t > column ? sum[0] + sum[1] : t == column ? 1.0f : 0.0f;
    }
    if (lane >= 16) return;
    // Row t = 8 j + g, column 8 i + 2 c + odd: half `odd` of word 2 j + i of lane (g, c).
    uint32_t* words = reinterpret_cast<uint32_t*>(shared.weights(chunk, d, d, 0)) +
                      column % 8 / 2 * 4 + column / 8;
#pragma unroll
    for (int t = 0; t < 16; ++t) {
        uint32_t terms[kTerms];
        split(x[t], 0.0f, terms);
#pragma unroll
        for (int term = 0; term < kTerms; ++term) {
            uint32_t* word = words + (term * kWarp + 4 * (t % 8)) * 4 + 2 * (t / 8);
            reinterpret_cast<unsigned short*>(word)[column % 2] =
                static_cast<unsigned short>(terms[term]);
        }
    }
}

// A block's products with itself, and of them its norms. All in one pass, as sums that wait for
// themselves.
template <typename Types>
__device__ __forceinline__ void multiply_own(const ChunkShared<Types>& shared, int chunk, int d,
                                             int lane, float (&key)[2][4], float (&query)[2][4]) {
    using Input = typename Types::Input;
    constexpr int kRow = Types::kRow;
    const unsigned char* keys = shared.keys(chunk) + d * 16 * kRow;
    const unsigned char* queries = shared.queries(chunk) + d * 16 * kRow;
    float square[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        key[i / 4][i % 4] = query[i / 4][i % 4] = square[i / 4][i % 4] = 0.0f;
    }
#pragma unroll 2
    for (int pair = 0; pair < Types::kKeyDim / 32; ++pair) {
        FragmentA<Input> k[2], q[2];
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            k[odd] = load_a<Input, kRow, 8 * kRow>(keys, 2 * pair + odd, lane);
            q[odd] = load_a<Input, kRow, 8 * kRow>(queries, 2 * pair + odd, lane);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const auto with = load_b<Input, kRow>(keys + 8 * half * kRow, pair, lane);
            const auto own = load_b<Input, kRow>(queries + 8 * half * kRow, pair, lane);
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                multiply<0, kMaxOrder>(key[half], k[odd], with, odd);
                multiply<0, kMaxOrder>(query[half], q[odd], with, odd);
                multiply<0, kMaxOrder>(square[half], q[odd], own, odd);
            }
        }
    }
    store_norms(shared.key_norm() + 16 * d, key[0], key[1], 1.0f, lane);
    store_norms(shared.query_norm() + 16 * d, square[0], square[1], key_scale<Types::kKeyDim>(),
                lane);
}

// Factors of block d's tokens, 16 lanes.
template <typename Types>
__device__ __forceinline__ void make_factors(const ChunkShared<Types>& shared, int chunk, int d,
                                             int lane) {
    if (lane >= 16) return;
    const int t = 16 * d + lane;
    const float beta = shared.beta()[t], key = shared.key_norm()[t];
    const float from_start = decay_between(shared.path_sum()[t], make_float2(0.0f, 0.0f));
    TokenFactors& factors = shared.factors(chunk)[t];
    factors = {beta, beta * from_start * key, from_start * shared.query_norm()[t],
               factors.end * key};
}

// All weights and factors of a chunk, whose gates are summed. Warp d has block d with itself; the
// pairs of different blocks go round, from the warps on that have none.
template <typename Types>
__device__ __forceinline__ void make_weights(const ChunkShared<Types>& shared,
                                             const ChunkBlock& block, int chunk, int warp,
                                             int lane) {
    using Input = typename Types::Input;
    constexpr int kBlocks = Types::kBlocks;
    float key[2][4], query[2][4];
    if (warp < kBlocks) multiply_own(shared, chunk, warp, lane, key, query);
    sync_helpers(block);
    if (warp < kBlocks) {
        weigh_products(shared, chunk, warp, warp, 0, key, lane);
        weigh_products(shared, chunk, warp, warp, 1, query, lane);
        make_factors(shared, chunk, warp, lane);
        __syncwarp();
        invert_block(shared, chunk, warp, lane);
    }
    int turn = kBlocks % block.helpers;
#pragma unroll 1
    for (int d = 1; d < kBlocks; ++d) {
#pragma unroll 1
        for (int e = 0; e < d; ++e) {
#pragma unroll 1
            for (int kind = 0; kind < 2; ++kind) {
                const bool mine = turn == warp;
                if (++turn == block.helpers) turn = 0;
                if (!mine) continue;
                const unsigned char* rows = kind == 0 ? shared.keys(chunk) : shared.queries(chunk);
                float value[2][4];
                dot_rows<Input, Input, Types::kKeyDim>(value, rows + d * 16 * Types::kRow,
                                                       shared.keys(chunk) + e * 16 * Types::kRow,
                                                       lane);
                weigh_products(shared, chunk, d, e, kind, value, lane);
            }
        }
    }
}

// The helpers' way through the sequence. While the rows' warps work at a chunk, the next one's
// weights are made and the one after it is on its way. The last helper has the gates, two chunks
// ahead.
template <typename Types>
__device__ __forceinline__ void prepare_chunks(const treewy_prefill_params& p,
                                               const ChunkShared<Types>& shared,
                                               const ChunkBlock& block, int warp, int lane) {
    constexpr int kEach = Types::kTokens / kWarp;
    const int thread = warp * kWarp + lane;
    load_chunk(p, shared, block, 0, thread);
    commit_copies();
    GateInputs<kEach> inputs{};
    ChunkGates<kEach> gates{};
    float A_log = 0.0f, dt_bias = 0.0f;
    const bool has_gates = warp == block.helpers - 1;
    if (has_gates) {
        A_log = p.A_log[block.head];
        dt_bias = p.dt_bias[block.head];
        load_gates<Types>(p, block, 0, lane, inputs);
        gates = sum_gates<Types>(block, 0, lane, inputs, A_log, dt_bias);
        load_gates<Types>(p, block, 1, lane, inputs);
    }
#pragma unroll 1
    for (int chunk = 0; chunk < block.chunks; ++chunk) {
        // Of chunk - 2 everyone is done with weights, and with what chunk + 1 is loaded over.
        if (chunk >= 2) {
            sync_at(kEmptyBarrier + chunk % kWeightStages, block.threads);
        } else {
            sync_helpers(block);
        }
        if (chunk + 1 < block.chunks) load_chunk(p, shared, block, chunk + 1, thread);
        commit_copies();
        if (has_gates) store_gates(shared, chunk, lane, gates);
        wait_copies<1>();
        sync_helpers(block);
        make_weights(shared, block, chunk, warp, lane);
        arrive_at(kFullBarrier + chunk % kWeightStages, block.threads);
        if (has_gates) {
            gates = sum_gates<Types>(block, chunk + 1, lane, inputs, A_log, dt_bias);
            load_gates<Types>(p, block, chunk + 2, lane, inputs);
        }
    }
}

}  // namespace treewy
