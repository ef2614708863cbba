// SPDX-License-Identifier: Apache-2.0
//
// The gated delta rule over packed sequences in plain float32: any type and any head dim that is a
// multiple of 8, at any address. prefill.cu says what it computes and prefill_chunks.cuh is faster
// where it can be used.
//
// G is summed from the chunk's first token on, in double.
//
// Threads. A block carries kColumns rows of V of one (sequence, value head) through the sequence,
// kTokens at a time. 256 threads form a grid of 16 x 16: thread (y, x) works out rows y + 16 a of
// K K^T, Q K^T, K S^T and Q S^T at columns x + 16 b in one pass over the head dim, which loads each
// operand once for all four. A thread per row of V solves the triangle in registers.
#pragma once

#include "device.cuh"
#include "gates.cuh"

namespace treewy {
namespace general {

constexpr int kThreads = 256;
constexpr int kSide = 16;  // threads of a row and of a column of the grid
constexpr int kWarps = kThreads / kWarp;
constexpr int kPad = 4;  // floats behind a row in shared memory, against bank conflicts

struct PrefillWork {
    treewy_prefill_params prefill;
    int tiles;  // blocks that share a head
};

// Shared memory of a block, in floats.
template <int kTokens, int kColumns>
struct Layout {
    static constexpr int kTokenPitch = kTokens + kPad;
    static constexpr int kColumnPitch = kColumns + kPad;
    float* k;         // [kTokens][K + kPad], normalised
    float* q;         // [kTokens][K + kPad], normalised and scaled
    float* state;     // [kColumns][K + kPad]
    float* coupling;  // B transposed: [kTokens][kTokenPitch], [i][t]
    float* weights;   // [kTokens][kTokenPitch], [t][i]
    float* u;         // R, then U: [kTokens][kColumnPitch]
    float* base;      // exp(G_t) S q_t: [kTokens][kColumnPitch]

    static constexpr size_t bytes(int key_dim) {
        const size_t rows = 2 * kTokens + kColumns;
        return sizeof(float) *
               (rows * (key_dim + kPad) + 2 * kTokens * kTokenPitch + 2 * kTokens * kColumnPitch);
    }

    __device__ __forceinline__ Layout(float* memory, int key_dim) {
        const int pitch = key_dim + kPad;
        k = memory;
        q = k + kTokens * pitch;
        state = q + kTokens * pitch;
        coupling = state + kColumns * pitch;
        weights = coupling + kTokens * kTokenPitch;
        u = weights + kTokens * kTokenPitch;
        base = u + kTokens * kColumnPitch;
    }
};

// What a chunk's gates give, in shared memory.
template <int kTokens>
struct Gates {
    double path_sum[kTokens];  // G_t within the chunk
    float beta[kTokens];
    float from_start[kTokens];  // exp(G_t)
    float to_end[kTokens];      // exp(G_last - G_t)
    float whole;                // exp(G_last)
};

// By the first warp: token `lane` of the chunk. Tokens beyond `count` have g = 0 and beta = 0.
template <int kTokens>
__device__ __forceinline__ void load_gates(const treewy_prefill_params& p, int head, int64_t first,
                                           int count, Gates<kTokens>* gates) {
    const int lane = threadIdx.x;
    float g = 0.0f, beta = 0.0f;
    if (lane < count) {
        const int64_t token = first + lane;
        const float a = load_as_float(p.a, p.gate_dtype, token * p.a_stride + head);
        const float b = load_as_float(p.b, p.gate_dtype, token * p.b_stride + head);
        g = log_decay(a, p.A_log[head], p.dt_bias[head]);
        beta = 1.0f / (1.0f + expf(-b));
    }
    double total;
    const double path_sum = warp_prefix(static_cast<double>(g), &total) + g;
    if (lane < kTokens) {
        gates->path_sum[lane] = path_sum;
        gates->beta[lane] = beta;
        gates->from_start[lane] = expf(static_cast<float>(path_sum));
        gates->to_end[lane] = expf(fminf(static_cast<float>(total - path_sum), 0.0f));
    }
    if (lane == 0) gates->whole = expf(static_cast<float>(total));
}

// Rows of q or k, normalised and scaled, a warp a token; zeros beyond `count`.
template <int kTokens>
__device__ __forceinline__ void load_vectors(const void* data, int dtype, int64_t first_at,
                                             int64_t stride, int key_dim, int count, float scale,
                                             float* to) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    for (int t = static_cast<int>(threadIdx.x) / kWarp; t < kTokens; t += kWarps) {
        float* row = to + t * (key_dim + kPad);
        float square = 0.0f;
        for (int c = lane; c < key_dim; c += kWarp) {
            const float x =
                t < count ? load_as_float(data, dtype, first_at + t * stride + c) : 0.0f;
            row[c] = x;
            square += x * x;
        }
        const float factor = rsqrtf(warp_sum(square) + kNormEps) * scale;
        for (int c = lane; c < key_dim; c += kWarp) row[c] *= factor;  // a lane's own columns
    }
}

// exp(G_t - G_i) for i <= t. NaN in g stays NaN; rounding never makes a growth of it.
__device__ __forceinline__ float decay_between(double later, double earlier) {
    const float log_decay = static_cast<float>(later - earlier);
    return expf(log_decay > 0.0f ? 0.0f : log_decay);
}

__device__ __forceinline__ float dot4(const Vec<float, 4>& a, const Vec<float, 4>& b, float sum) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum = fmaf(a.x[i], b.x[i], sum);
    return sum;
}

// B, the readout's weights, R and the base outputs of a chunk.
template <int kTokens, int kColumns>
__device__ __forceinline__ void build_system(const treewy_prefill_params& p,
                                             const Layout<kTokens, kColumns>& s,
                                             const Gates<kTokens>& gates, int64_t v_at, int count,
                                             int rows) {
    constexpr int kT = kTokens / kSide, kC = kColumns / kSide;
    const int x = static_cast<int>(threadIdx.x) % kSide, y = static_cast<int>(threadIdx.x) / kSide;
    const int key_dim = p.state.key_dim, pitch = key_dim + kPad;

    float v[kT][kC];
#pragma unroll
    for (int a = 0; a < kT; ++a) {
#pragma unroll
        for (int c = 0; c < kC; ++c) {
            const int t = y + kSide * a, row = x + kSide * c;
            v[a][c] = 0.0f;
            if (t < count && row < rows) {
                v[a][c] = load_as_float(p.v, p.dtype, v_at + t * p.v_stride[0] + row);
            }
        }
    }

    float kk[kT][kT] = {}, qk[kT][kT] = {}, sk[kT][kC] = {}, sq[kT][kC] = {};
    for (int column = 0; column < key_dim; column += 4) {
        Vec<float, 4> k[kT], q[kT], key[kT], state[kC];
#pragma unroll
        for (int a = 0; a < kT; ++a) {
            k[a] = load_vec<4>(s.k + (y + kSide * a) * pitch + column);
            q[a] = load_vec<4>(s.q + (y + kSide * a) * pitch + column);
            key[a] = load_vec<4>(s.k + (x + kSide * a) * pitch + column);
        }
#pragma unroll
        for (int c = 0; c < kC; ++c)
            state[c] = load_vec<4>(s.state + (x + kSide * c) * pitch + column);
#pragma unroll
        for (int a = 0; a < kT; ++a) {
#pragma unroll
            for (int b = 0; b <= a; ++b) {  // y + 16 a < x + 16 b for every b > a
                kk[a][b] = dot4(k[a], key[b], kk[a][b]);
                qk[a][b] = dot4(q[a], key[b], qk[a][b]);
            }
#pragma unroll
            for (int c = 0; c < kC; ++c) {
                sk[a][c] = dot4(k[a], state[c], sk[a][c]);
                sq[a][c] = dot4(q[a], state[c], sq[a][c]);
            }
        }
    }

#pragma unroll
    for (int a = 0; a < kT; ++a) {
        const int t = y + kSide * a;
        const float beta = gates.beta[t], from_start = gates.from_start[t];
#pragma unroll
        for (int b = 0; b < kT; ++b) {
            const int i = x + kSide * b;
            float coupling = 0.0f, weight = 0.0f;
            if (i <= t) {
                const float decay = decay_between(gates.path_sum[t], gates.path_sum[i]);
                weight = decay * qk[a][b];
                if (i < t) coupling = beta * (decay * kk[a][b]);
            }
            s.coupling[i * s.kTokenPitch + t] = coupling;
            s.weights[t * s.kTokenPitch + i] = weight;
        }
#pragma unroll
        for (int c = 0; c < kC; ++c) {
            const int row = x + kSide * c;
            s.u[t * s.kColumnPitch + row] = beta * (v[a][c] - from_start * sk[a][c]);
            s.base[t * s.kColumnPitch + row] = from_start * sq[a][c];
        }
    }
}

// U in place of R: a thread a row of V. What is solved goes into all later tokens at once, so that
// the chain of dependent operations is as long as the chunk and not as its triangle.
template <int kTokens, int kColumns>
__device__ __forceinline__ void solve(const Layout<kTokens, kColumns>& s) {
    if (static_cast<int>(threadIdx.x) >= kColumns) return;
    float* column = s.u + threadIdx.x;
    float x[kTokens];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) x[t] = column[t * s.kColumnPitch];
#pragma unroll
    for (int i = 0; i < kTokens - 1; ++i) {
#pragma unroll
        for (int t = (i + 1) / 4 * 4; t < kTokens; t += 4) {
            const Vec<float, 4> b = load_vec<4>(s.coupling + i * s.kTokenPitch + t);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (t + j > i) x[t + j] = fmaf(-b.x[j], x[i], x[t + j]);
            }
        }
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) column[t * s.kColumnPitch] = x[t];
}

__device__ __forceinline__ void store_as(void* data, int dtype, int64_t at, float value) {
    if (dtype == TREEWY_FLOAT32) {
        static_cast<float*>(data)[at] = value;
    } else if (dtype == TREEWY_BFLOAT16) {
        static_cast<__nv_bfloat16*>(data)[at] = from_float<__nv_bfloat16>(value);
    } else {
        static_cast<__half*>(data)[at] = from_float<__half>(value);
    }
}

template <int kTokens, int kColumns>
__device__ __forceinline__ void write_outputs(const treewy_prefill_params& p,
                                              const Layout<kTokens, kColumns>& s, int64_t out_at,
                                              int count, int rows) {
    const int x = static_cast<int>(threadIdx.x) % kSide, y = static_cast<int>(threadIdx.x) / kSide;
#pragma unroll
    for (int a = 0; a < kTokens / kSide; ++a) {
        const int t = y + kSide * a;
        if (t >= count) continue;
#pragma unroll
        for (int c = 0; c < kColumns / kSide; ++c) {
            const int row = x + kSide * c;
            if (row >= rows) continue;
            float sum = s.base[t * s.kColumnPitch + row];
            for (int i = 0; i <= t; ++i) {
                sum = fmaf(s.weights[t * s.kTokenPitch + i], s.u[i * s.kColumnPitch + row], sum);
            }
            store_as(p.out, p.dtype, out_at + t * p.out_stride[0] + row, sum);
        }
    }
}

// The state after the chunk: a thread owns blocks of 4 x 4 elements.
template <int kTokens, int kColumns>
__device__ __forceinline__ void update_state(const Layout<kTokens, kColumns>& s,
                                             const Gates<kTokens>& gates, int key_dim, int count) {
    const int pitch = key_dim + kPad, across = key_dim / 4;
    for (int item = threadIdx.x; item < across * (kColumns / 4); item += kThreads) {
        const int column = item % across * 4, row = item / across * 4;
        float sum[4][4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const Vec<float, 4> old = load_vec<4>(s.state + (row + r) * pitch + column);
#pragma unroll
            for (int c = 0; c < 4; ++c) sum[r][c] = gates.whole * old.x[c];
        }
        for (int i = 0; i < count; ++i) {
            const Vec<float, 4> k = load_vec<4>(s.k + i * pitch + column);
            const Vec<float, 4> u = load_vec<4>(s.u + i * s.kColumnPitch + row);
            const float to_end = gates.to_end[i];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const float scaled = to_end * u.x[r];
#pragma unroll
                for (int c = 0; c < 4; ++c) sum[r][c] = fmaf(scaled, k.x[c], sum[r][c]);
            }
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            Vec<float, 4> out;
#pragma unroll
            for (int c = 0; c < 4; ++c) out.x[c] = sum[r][c];
            store_vec<4>(s.state + (row + r) * pitch + column, out);
        }
    }
}

template <typename State, int kTokens, int kColumns>
__global__ void __launch_bounds__(kThreads)
    prefill_general(const __grid_constant__ PrefillWork work) {
    constexpr int kVec = kPer16Bytes<State>;
    static_assert(kTokens % kSide == 0 && kTokens <= kWarp && kColumns % kSide == 0);
    __shared__ Gates<kTokens> gates;
    const treewy_prefill_params& p = work.prefill;
    const treewy_state_pool& pool = p.state;
    unsigned block = blockIdx.x;
    const int row0 = static_cast<int>(block % work.tiles) * kColumns;
    block /= work.tiles;
    const int head = static_cast<int>(block % pool.value_heads);
    const int sequence = static_cast<int>(block / pool.value_heads);
    const int key_head = head / (pool.value_heads / pool.key_heads);
    const int rows = min(kColumns, pool.value_dim - row0);
    const int key_dim = pool.key_dim, pitch = key_dim + kPad;

    const int64_t slot = p.packed.slot[sequence];
    const Span span = sequence_span(p.packed.cu_seqlens, sequence, p.packed.tokens);
    if (span.stop == span.start) return;
    const int64_t out_head = head * p.out_stride[1] + row0;
    if (!is_live_slot(slot, p.packed.num_slots)) {
        for (int64_t i = threadIdx.x; i < (span.stop - span.start) * rows; i += kThreads) {
            const int64_t token = span.start + i / rows;
            store_as(p.out, p.dtype, token * p.out_stride[0] + out_head + i % rows, 0.0f);
        }
        return;
    }

    const Layout<kTokens, kColumns> s(reinterpret_cast<float*>(shared_memory()), key_dim);
    State* state = static_cast<State*>(pool.data) + slot * pool.slot_stride +
                   (static_cast<int64_t>(head) * pool.value_dim + row0) * key_dim;
    const int per_row = key_dim / kVec;
    for (int i = threadIdx.x; i < kColumns * per_row; i += kThreads) {
        const int row = i / per_row, column = i % per_row * kVec;
        Vec<State, kVec> raw{};
        if (row < rows) raw = load_vec<kVec>(state + static_cast<int64_t>(row) * key_dim + column);
#pragma unroll
        for (int j = 0; j < kVec; ++j) s.state[row * pitch + column + j] = as_float(raw.x[j]);
    }

    const float query_scale = rsqrtf(static_cast<float>(key_dim));
    for (int64_t first = span.start; first < span.stop; first += kTokens) {
        const int count = static_cast<int>(min(span.stop - first, int64_t{kTokens}));
        load_vectors<kTokens>(p.k, p.dtype, first * p.k_stride[0] + key_head * p.k_stride[1],
                              p.k_stride[0], key_dim, count, 1.0f, s.k);
        load_vectors<kTokens>(p.q, p.dtype, first * p.q_stride[0] + key_head * p.q_stride[1],
                              p.q_stride[0], key_dim, count, query_scale, s.q);
        if (threadIdx.x < kWarp) load_gates(p, head, first, count, &gates);
        __syncthreads();
        build_system(p, s, gates, first * p.v_stride[0] + head * p.v_stride[1] + row0, count, rows);
        __syncthreads();
        solve(s);
        __syncthreads();
        write_outputs(p, s, first * p.out_stride[0] + out_head, count, rows);
        update_state(s, gates, key_dim, count);
        __syncthreads();
    }

    for (int i = threadIdx.x; i < rows * per_row; i += kThreads) {
        const int row = i / per_row, column = i % per_row * kVec;
        Vec<State, kVec> raw;
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
            raw.x[j] = from_float<State>(s.state[row * pitch + column + j]);
        }
        store_vec<kVec>(state + static_cast<int64_t>(row) * key_dim + column, raw);
    }
}

// ------------------------------------------------------------------ host

constexpr int64_t kEnoughBlocks = 264;  // two for each multiprocessor of an H200

template <int kTokens, int kColumns>
treewy_status launch_prefill(const char* name, const treewy_prefill_params& p,
                             treewy_stream stream) {
    const PrefillWork work{p, static_cast<int>(ceil_div(p.state.value_dim, kColumns))};
    const int64_t blocks = int64_t{p.packed.batch} * p.state.value_heads * work.tiles;
    const size_t shared = Layout<kTokens, kColumns>::bytes(p.state.key_dim);
    return launch(name,
                  p.state.dtype == TREEWY_FLOAT32
                      ? prefill_general<float, kTokens, kColumns>
                      : prefill_general<__nv_bfloat16, kTokens, kColumns>,
                  blocks, kThreads, shared, stream, work);
}

inline treewy_status run_prefill(const char* name, const treewy_prefill_params& p,
                                 treewy_stream stream) {
    // 99 KiB of shared memory are there on every GPU served.
    if (p.state.key_dim > 128) return launch_prefill<16, 32>(name, p, stream);
    const int64_t wide_blocks =
        int64_t{p.packed.batch} * p.state.value_heads * ceil_div(p.state.value_dim, 64);
    if (p.state.value_dim % 64 == 0 && wide_blocks >= kEnoughBlocks) {
        return launch_prefill<32, 64>(name, p, stream);
    }
    return launch_prefill<32, 32>(name, p, stream);
}

}  // namespace general
}  // namespace treewy
