// SPDX-License-Identifier: Apache-2.0
//
// Tree verification: outputs of all nodes of the draft trees from the state before the root, and
// the stash that a commit needs, without a state per node.
//
//   (I + B) U = R    B[t,i] = beta_t exp(G_t - G_i) (k_t . k_i) for i < t
//                    R[t]   = beta_t (v_t - exp(G_t) S_0 k_t)
//   o_t = exp(G_t) S_0 q_t + sum over i <= t of exp(G_t - G_i) (k_i . q_t) u_i
//
// with i < t: i is a proper ancestor of t, i <= t: or t itself. k and q enter raw; their norms,
// K^-1/2 and the decays are float32 factors on the sums. G is a path sum, taken in double and kept
// as two floats, so that G_t - G_i is exact to a float's rounding.
//
// Threads. A block owns `rows` of V of one (row, value head); a warp 16 or 32 of them, all K. The
// nodes go by blocks of 16, d = 0, 1, ..., of which e < d are solved:
//
// 1. Gram: K_d K_e^T and Q_d K_e^T, masked by ancestry, times decays and norms, are the weights
//    W_de (of B, negated) and C_de in shared memory. Divided among the warps.
// 2. T_d = (I + B_dd)^-1 by one warp, while the others do 3. Products of (I - beta k k^T) are
//    contractions, so that no entry of T_d exceeds 1.
// 3. S_0 [K_d; Q_d]^T: S_0 is operand A, rows of V, straight from where cp.async put it; nodes are
//    columns. Norms, decays, v and beta make it R and the first part of o, in registers.
// 4. R += sum over e of W_de U_e;  U_d = T_d R;  o += sum over e <= d of C_de U_e. The sums of one
//    product are the operand A of the next in the same registers. Lanes own neighbouring rows of
//    V, row (2 tiles) g + 2 tile + half, so that v, u and out move in whole sectors.
//
// All four are products on tensor cores over exact bfloat16 terms (fragment.cuh): three a value
// where the state is float32; in step 4 two where it is bfloat16 (2^-17 of the correction). The
// accepted history of the deferred commit is blocks e < 0 whose U is known.
//
// Non-ancestors have weight zero, which is a selection as long as everything is finite. If any
// result of the block is not, the block does its work again by `verify_selecting`, which reads
// ancestors alone. Padded nodes are zeroed on the way in.
//
// Floor, Qwen3.5-35B-A3B, N nodes, a row of the batch. Bytes: the state, 1 MiB (bf16) or 2 MiB
// (fp32), and 40 KiB a node (q, k, v, out 24, u 16). At 16 nodes, batch 64, 4.28 TB/s: 25.5 us
// (bf16), 41 us (fp32). Operations, bf16 state, n = N / 16 node blocks: 80 n + 16 n^2 mma a warp,
// 96 at 16 nodes, 384 at 40. At 4 cycles each that is an eighth of the memory's time, and a third.
//
// Why this version. A thread per column of V with the sums in shared memory costs a round trip and
// N^2 FMAs a thread, more than half of the memory's time at 40 nodes; this costs the same for trees
// and chains, since it never looks at the shape. State through cp.async, not registers: 32 KiB a
// block in flight, five blocks a multiprocessor at 16 nodes. Not a bulk copy: it cannot swap
// chunks, and reading would meet two-way bank conflicts. Queries come 16 at a time, so that three
// blocks of 40 nodes fit a multiprocessor. docs/kernels.md has what an H200 made of it.

#include "fragment.cuh"
#include "gates.cuh"
#include "tree_verify_plan.h"

namespace treewy {
namespace {

constexpr float kNormEps = 1e-6f;

struct VerifyArgs {
    treewy_tree_verify_params params;
    VerifyLayout layout;
    int tiles;     // blocks that share a value head
    bool aligned;  // vectors of every tensor may be moved at once
};

// What a block works on.
struct VerifyWork {
    int row;
    int slot;
    int head;
    int key_head;
    int first_row;  // of V
    int nodes;      // real ones
    int history;    // entries in use
    bool first_tile;
};

// Addresses that depend on `work` are computed after this, not kept in registers from before.
__device__ __forceinline__ void compute_here(VerifyWork& work) {
    keep_order(work.row);
    keep_order(work.head);
}

template <typename Input_, typename State_, int kKeyDim_, int kTiles_, int kWarps_>
struct VerifyTypes {
    using Input = Input_;
    using State = State_;
    static constexpr int kKeyDim = kKeyDim_;
    static constexpr int kTiles = kTiles_;  // of 16 rows of V, a warp
    static constexpr int kWarps = kWarps_;
    static constexpr int kThreads = kWarps * kWarp;
    static constexpr int kWarpRows = 16 * kTiles;
    static constexpr int kRows = kWarps * kWarpRows;
    static constexpr int kStateShift = kTiles == 2 ? 2 : 1;  // the lowest bit of g in a row of V
    static constexpr int kStateRowBytes = kKeyDim * static_cast<int>(sizeof(State));
    static constexpr int kInputRowBytes = kKeyDim * static_cast<int>(sizeof(Input));
    static constexpr bool kSumApart = sizeof(State) == 4;  // small terms of sums, in float32's way
    static constexpr int kWeightTerms = sizeof(State) == 4 || sizeof(Input) == 4 ? 3 : 2;
    // Blocks that registers are to allow on a multiprocessor: as many as its memory holds where
    // that matters, which is five of 16 nodes and 32 KiB of state. Some pointers spill for it.
    static constexpr bool kManyBlocks = kTiles == 2 || sizeof(State) == 4;
    static constexpr int kMinBlocks = kWarps == 8 ? 3 : sizeof(Input) == 2 && kManyBlocks ? 5 : 4;
};

// Values of the rows of V of a lane at 16 nodes: x[tile][j][2 half + e] is row
// (2 kTiles) g + 2 tile + half of the warp's, node 8 j + 2 c + e.
template <int kTiles>
struct Tile {
    float x[kTiles][2][4];
};

template <int kTiles>
__device__ __forceinline__ Tile<kTiles> zero_tile() {
    Tile<kTiles> tile;
#pragma unroll
    for (int i = 0; i < kTiles * 8; ++i) tile.x[i / 8][i / 4 % 2][i % 4] = 0.0f;
    return tile;
}

template <int kTiles>
__device__ __forceinline__ void add(Tile<kTiles>& to, const Tile<kTiles>& other) {
#pragma unroll
    for (int i = 0; i < kTiles * 8; ++i)
        to.x[i / 8][i / 4 % 2][i % 4] += other.x[i / 8][i / 4 % 2][i % 4];
}

template <int kTiles>
__device__ __forceinline__ bool is_finite(const Tile<kTiles>& tile) {
    float sum = 0.0f;  // of zeros, unless there is NaN or Inf
#pragma unroll
    for (int i = 0; i < kTiles * 8; ++i) {
        sum = fmaf(tile.x[i / 8][i / 4 % 2][i % 4], 0.0f, sum);
    }
    return sum == 0.0f;
}

// A tile as operand A of a product over its 16 nodes.
template <int kTerms, int kTiles>
struct TileTerms {
    uint32_t x[kTerms][kTiles][4];
};

template <int kTerms, int kTiles>
__device__ __forceinline__ TileTerms<kTerms, kTiles> split_tile(const Tile<kTiles>& tile) {
    TileTerms<kTerms, kTiles> terms;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            const int j = word / 2, half = word % 2;
            uint32_t pair[kTerms];
            split(tile.x[i][j][2 * half], tile.x[i][j][2 * half + 1], pair);
#pragma unroll
            for (int term = 0; term < kTerms; ++term) terms.x[term][i][word] = pair[term];
        }
    }
    return terms;
}

// Pointers into the block's shared memory.
struct Shared {
    unsigned char* state;
    unsigned char* keys;
    unsigned char* queries;
    uint4* weights;
    float4* known_u;
    unsigned char* history_keys;
    float2* history_sum;
    float2* path_sum;
    float* from_root;
    float* beta;
    float* key_norm;
    float* query_norm;
    uint32_t* ancestors;
    int* not_finite;
    int mask_words;
};

__device__ __forceinline__ Shared place_shared(const VerifyLayout& layout) {
    unsigned char* base = shared_memory();
    Shared at;
    at.state = base + layout.state;
    at.keys = base + layout.keys;
    at.queries = base + layout.queries;
    at.weights = reinterpret_cast<uint4*>(base + layout.weights);
    at.known_u = reinterpret_cast<float4*>(base + layout.known_u);
    at.history_keys = base + layout.history_keys;
    at.history_sum = reinterpret_cast<float2*>(base + layout.history_sum);
    at.path_sum = reinterpret_cast<float2*>(base + layout.path_sum);
    at.from_root = reinterpret_cast<float*>(base + layout.from_root);
    at.beta = reinterpret_cast<float*>(base + layout.beta);
    at.key_norm = reinterpret_cast<float*>(base + layout.key_norm);
    at.query_norm = reinterpret_cast<float*>(base + layout.query_norm);
    at.ancestors = reinterpret_cast<uint32_t*>(base + layout.ancestors);
    at.not_finite = reinterpret_cast<int*>(base + layout.not_finite);
    at.mask_words = layout.mask_words;
    return at;
}

// The weights of node block e for the one at hand, `kind` 0 for W (and T_d - I), 1 for C: terms of
// 32 lanes of 16 bytes. Word 2 j + i of lane (g, c) holds row t = 8 j + g, columns 8 i + 2 c, + 1.
template <int kTerms>
__device__ __forceinline__ uint4* weights_at(const Shared& shared, int block, int kind) {
    return shared.weights + (block * 2 + kind) * kTerms * kWarp;
}

__device__ __forceinline__ float2 two_floats(double x) {
    const float high = static_cast<float>(x);
    return make_float2(high, static_cast<float>(x - static_cast<double>(high)));
}

// exp(to - from), `from` an ancestor of `to` or itself.
__device__ __forceinline__ float decay_between(float2 to, float2 from) {
    return expf((to.x - from.x) + (to.y - from.y));
}

__device__ __forceinline__ bool has_bit(const uint32_t* mask, int bit) {
    return (mask[bit / 32] >> (bit % 32)) & 1u;
}

// ------------------------------------------------------------------ gates and paths

// Log decay of the whole history, and where each entry lies in it. All threads call it.
template <typename Types>
__device__ double sum_history(const VerifyArgs& args, const Shared& shared, const VerifyWork& work,
                              int thread) {
    const treewy_history& history = args.params.history;
    const int64_t heads = args.params.state.value_heads;
    const float* g = history.g + work.slot * history.g_stride[0] + work.head;
    double total = 0.0;
    for (int i = 0; i < work.history; ++i) {
        total += static_cast<double>(g[i * heads]);
        if (i == thread) shared.history_sum[i] = two_floats(total);
    }
    return total;
}

// What a thread reads for its node, before it is known whether the node is real.
struct NodeInputs {
    float a;
    float b;
    float A_log;
    float dt_bias;
    int parent;
};

__device__ __forceinline__ NodeInputs read_node(const treewy_tree_verify_params& p,
                                                const VerifyWork& work, int node) {
    NodeInputs inputs{};
    if (node >= p.tree.max_nodes) return inputs;
    const int64_t a_at = work.row * p.a_stride[0] + node * p.a_stride[1] + work.head;
    const int64_t b_at = work.row * p.b_stride[0] + node * p.b_stride[1] + work.head;
    inputs.a = load_as_float(p.a, p.gate_dtype, a_at);
    inputs.b = load_as_float(p.b, p.gate_dtype, b_at);
    inputs.A_log = p.A_log[work.head];
    inputs.dt_bias = p.dt_bias[work.head];
    inputs.parent = p.tree.parents[int64_t{work.row} * p.tree.max_nodes + node];
    return inputs;
}

// Gates of all nodes, and by pointer jumping their path sums (on top of the history's) and
// ancestors. A parent that is not before its node counts as none. A thread a node.
template <typename Types>
__device__ void follow_paths(const VerifyArgs& args, const Shared& shared, const VerifyWork& work,
                             const NodeInputs& inputs, int thread) {
    const treewy_tree_verify_params& p = args.params;
    const int nodes = args.layout.node_blocks * kNodeBlock, words = shared.mask_words;
    double* sums = reinterpret_cast<double*>(shared.weights);
    int* jumps = reinterpret_cast<int*>(sums + 2 * nodes);
    uint32_t* masks = reinterpret_cast<uint32_t*>(jumps + 2 * nodes);

    const double before = work.history > 0 ? sum_history<Types>(args, shared, work, thread) : 0.0;
    float g = 0.0f, beta = 0.0f;
    int jump = -1;
    if (thread < work.nodes) {
        g = log_decay(inputs.a, inputs.A_log, inputs.dt_bias);
        beta = 1.0f / (1.0f + expf(-inputs.b));
        if (inputs.parent >= 0 && inputs.parent < thread) jump = inputs.parent;
    }
    if (work.first_tile && thread < p.tree.max_nodes) {
        p.g[work.row * p.g_stride[0] + thread * p.g_stride[1] + work.head] = g;
    }
    double sum = static_cast<double>(g);
    uint32_t mask[4] = {0, 0, 0, 0};
#pragma unroll
    for (int word = 0; word < 4; ++word) {
        if (thread / 32 == word) mask[word] = 1u << (thread % 32);
    }
    int buffer = 0;
    for (int span = 1; span < work.nodes; span *= 2) {
        if (thread < nodes) {
            sums[buffer + thread] = sum;
            jumps[buffer + thread] = jump;
#pragma unroll
            for (int word = 0; word < 4; ++word) {
                if (word < words) masks[(buffer + thread) * words + word] = mask[word];
            }
        }
        __syncthreads();
        if (jump >= 0) {
            const int from = buffer + jump;
            sum += sums[from];
            jump = jumps[from];
#pragma unroll
            for (int word = 0; word < 4; ++word) {
                if (word < words) mask[word] |= masks[from * words + word];
            }
        }
        buffer = nodes - buffer;
    }
    if (thread >= nodes) return;
    const float2 path_sum = two_floats(before + sum);
    shared.path_sum[thread] = path_sum;
    shared.from_root[thread] = expf(path_sum.x + path_sum.y);
    shared.beta[thread] = beta;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
        if (word < words) shared.ancestors[thread * words + word] = mask[word];
    }
}

// ------------------------------------------------------------------ weights of a node block

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

// ------------------------------------------------------------------ memory of a lane's rows

// Values of a lane's 2 kTiles neighbouring rows at node j, e of block d, as they lie in memory.
template <typename Types>
using LaneRows = Vec<typename Types::Input, 2 * Types::kTiles>;

__device__ __forceinline__ int node_of(int d, int j, int c, int e) {
    return d * kNodeBlock + 8 * j + 2 * c + e;
}

template <typename T, int kCount>
__device__ __forceinline__ Vec<T, kCount> load_lane(const T* from, bool aligned) {
    if (aligned) return load_vec<kCount>(from);
    Vec<T, kCount> value;
#pragma unroll
    for (int i = 0; i < kCount; ++i) value.x[i] = from[i];
    return value;
}

template <typename T, int kCount>
__device__ __forceinline__ void store_lane(T* to, const Vec<T, kCount>& value, bool aligned) {
    if (aligned) {
        store_vec(to, value);
        return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = value.x[i];
}

template <typename T>
__device__ __forceinline__ T zero() {
    return from_float<T>(0.0f);
}

// Where node t of `head` lies, at row `first` of V.
__device__ __forceinline__ int64_t at_node(const int64_t (&stride)[3], const VerifyWork& work,
                                           int t, int first) {
    return work.row * stride[0] + t * stride[1] + work.head * stride[2] + first;
}

// Stores out and u of one node; zeros for padding.
template <typename Types>
__device__ __forceinline__ void store_node(const VerifyArgs& args, const VerifyWork& work, int t,
                                           int first, const Vec<float, 2 * Types::kTiles>& out,
                                           const Vec<float, 2 * Types::kTiles>& u) {
    using Input = typename Types::Input;
    const treewy_tree_verify_params& p = args.params;
    if (t >= p.tree.max_nodes) return;
    constexpr int kCount = 2 * Types::kTiles;
    Vec<Input, kCount> rounded;
    Vec<float, kCount> kept;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        rounded.x[i] = t < work.nodes ? from_float<Input>(out.x[i]) : zero<Input>();
        kept.x[i] = t < work.nodes ? u.x[i] : 0.0f;
    }
    store_lane(static_cast<Input*>(p.out) + at_node(p.out_stride, work, t, first), rounded,
               args.aligned);
    store_lane(static_cast<float*>(p.u) + at_node(p.u_stride, work, t, first), kept, args.aligned);
}

template <typename Types>
__device__ __forceinline__ void store_tile(const VerifyArgs& args, const VerifyWork& work, int d,
                                           int first, const Tile<Types::kTiles>& out,
                                           const Tile<Types::kTiles>& u, int c) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            Vec<float, 2 * Types::kTiles> out_rows, u_rows;
#pragma unroll
            for (int i = 0; i < 2 * Types::kTiles; ++i) {
                out_rows.x[i] = out.x[i / 2][j][i % 2 * 2 + e];
                u_rows.x[i] = u.x[i / 2][j][i % 2 * 2 + e];
            }
            store_node<Types>(args, work, node_of(d, j, c, e), first, out_rows, u_rows);
        }
    }
}

// U of the 16 history entries from `block` on.
template <typename Types>
__device__ __forceinline__ Tile<Types::kTiles> load_history(const VerifyArgs& args,
                                                            const VerifyWork& work, int block,
                                                            int first, int c) {
    constexpr int kCount = 2 * Types::kTiles;
    const treewy_tree_verify_params& p = args.params;
    const int64_t heads = p.state.value_heads, dim = p.state.value_dim;
    const float* from = p.history.u + work.slot * p.history.u_stride[0] + work.head * dim + first;
    Tile<Types::kTiles> tile = zero_tile<Types::kTiles>();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int entry = node_of(block, j, c, e);
            if (entry >= work.history) continue;
            const Vec<float, kCount> rows = load_vec<kCount>(from + entry * heads * dim);
#pragma unroll
            for (int i = 0; i < kCount; ++i) tile.x[i / 2][j][i % 2 * 2 + e] = rows.x[i];
        }
    }
    return tile;
}

// U of earlier node blocks, which every thread keeps for itself alone.
template <typename Types>
__device__ __forceinline__ float4* known_u_at(const Shared& shared, int block, int thread) {
    return shared.known_u + block * Types::kTiles * 2 * Types::kThreads + thread;
}

// ------------------------------------------------------------------ the selecting way

// out and u of the block's rows once more, node by node and ancestor by ancestor: nothing of a
// non-ancestor is read into a sum. A thread a row of V. For what is not finite, seldom and slow.
template <typename Types>
__device__ void verify_selecting(const VerifyArgs& args, const Shared& shared,
                                 const VerifyWork& work, int thread) {
    using Input = typename Types::Input;
    using State = typename Types::State;
    constexpr int kKeyDim = Types::kKeyDim;
    const treewy_tree_verify_params& p = args.params;
    const int lane = thread % kWarp;
    const bool owns_row = thread < Types::kRows;
    const int row = owns_row ? thread : 0, column = work.first_row + row;
    const unsigned char* state = shared.state + row * Types::kStateRowBytes;
    const int state_odd = (row >> Types::kStateShift) & 1;
    const int64_t entry_stride = int64_t{p.state.value_heads} * p.state.value_dim;
    const float* history_u = work.history == 0
                                 ? nullptr
                                 : p.history.u + work.slot * p.history.u_stride[0] +
                                       work.head * int64_t{p.state.value_dim} + column;

    for (int t = 0; t < work.nodes; ++t) {
        const unsigned char* key = shared.keys + t * Types::kInputRowBytes;
        const Input* query = static_cast<const Input*>(p.q) + work.row * p.q_stride[0] +
                             t * p.q_stride[1] + work.key_head * p.q_stride[2];
        float state_key = 0.0f, state_query = 0.0f;
        for (int i = 0; i < kKeyDim; ++i) {
            const float s = row_element<State>(state, i, state_odd);
            state_key = fmaf(s, row_element<Input>(key, i, t & 1), state_key);
            state_query = fmaf(s, as_float(query[i]), state_query);
        }
        const float beta = shared.beta[t], key_norm = shared.key_norm[t];
        const float query_norm = shared.query_norm[t];
        const float2 to = shared.path_sum[t];
        const float value =
            as_float(static_cast<const Input*>(p.v)[at_node(p.v_stride, work, t, column)]);
        float u = beta * (value - shared.from_root[t] * key_norm * state_key);
        float out = shared.from_root[t] * query_norm * state_query;
        for (int i = -work.history; i <= t; ++i) {
            const int entry = i + work.history;
            if (i >= 0 && !has_bit(shared.ancestors + t * shared.mask_words, i)) continue;
            float keys = 0.0f, queries = 0.0f;
            for (int at = lane; at < kKeyDim; at += kWarp) {
                const float other =
                    i < 0 ? row_element<float>(shared.history_keys + entry * kKeyDim * 4, at,
                                               entry & 1)
                          : row_element<Input>(shared.keys + i * Types::kInputRowBytes, at, i & 1);
                keys = fmaf(row_element<Input>(key, at, t & 1), other, keys);
                queries = fmaf(as_float(query[at]), other, queries);
            }
            keys = warp_sum(keys);
            queries = warp_sum(queries);
            const float norm = i < 0 ? 1.0f : shared.key_norm[i];
            const float decay =
                norm * decay_between(to, i < 0 ? shared.history_sum[entry] : shared.path_sum[i]);
            // This thread stored u of the nodes before.
            const float known =
                i < 0 ? history_u[entry * entry_stride]
                : i < t && owns_row
                    ? static_cast<const float*>(p.u)[at_node(p.u_stride, work, i, column)]
                    : u;
            if (i < t) u -= beta * key_norm * decay * keys * known;
            out += query_norm * decay * queries * (i < t ? known : u);
        }
        if (!owns_row) continue;
        static_cast<Input*>(p.out)[at_node(p.out_stride, work, t, column)] = from_float<Input>(out);
        static_cast<float*>(p.u)[at_node(p.u_stride, work, t, column)] = u;
    }
}

// ------------------------------------------------------------------ the kernel

// R and the first part of o of node block d: S_0 [K_d; Q_d]^T with norms, decays, v and beta.
template <typename Types>
__device__ __forceinline__ void apply_state(const Shared& shared, int d, int warp, int lane,
                                            const LaneRows<Types> (&v)[2][2],
                                            Tile<Types::kTiles>& rhs, Tile<Types::kTiles>& out) {
    using Input = typename Types::Input;
    using State = typename Types::State;
    constexpr int kTiles = Types::kTiles;
    const int g = lane / 4, c = lane % 4, odd = g & 1;
    const unsigned char* rows =
        shared.state + (warp * Types::kWarpRows + 2 * kTiles * g) * Types::kStateRowBytes;
    const unsigned char* keys = shared.keys + (d * kNodeBlock + g) * Types::kInputRowBytes;
    const unsigned char* queries = shared.queries + g * Types::kInputRowBytes;
    Tile<kTiles> total[2] = {zero_tile<kTiles>(), zero_tile<kTiles>()};
#pragma unroll 4
    for (int group = 0; group < Types::kKeyDim / 32; ++group) {
        Fragment<State> a[kTiles][2];
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                a[i][half] = load_fragment<State>(rows + (2 * i + half) * Types::kStateRowBytes,
                                                  group, c, odd);
            }
        }
#pragma unroll
        for (int kind = 0; kind < 2; ++kind) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const unsigned char* nodes =
                    (kind == 0 ? keys : queries) + 8 * j * Types::kInputRowBytes;
                const Fragment<Input> b = load_fragment<Input>(nodes, group, c, odd);
#pragma unroll
                for (int i = 0; i < kTiles; ++i) {
                    float (&sum)[4] = total[kind].x[i][j];
                    if constexpr (Types::kSumApart) {
                        // Tensor cores cut sums off: few of them at full size, the small first.
                        float part[4] = {};
                        multiply<1, kMaxOrder>(part, a[i][0], a[i][1], b, 0);
                        multiply<1, kMaxOrder>(part, a[i][0], a[i][1], b, 1);
                        multiply<0, 0>(part, a[i][0], a[i][1], b, 0);
                        multiply<0, 0>(part, a[i][0], a[i][1], b, 1);
#pragma unroll
                        for (int at = 0; at < 4; ++at) sum[at] += part[at];
                    } else {
                        multiply<0, kMaxOrder>(sum, a[i][0], a[i][1], b, 0);
                        multiply<0, kMaxOrder>(sum, a[i][0], a[i][1], b, 1);
                    }
                }
            }
        }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int t = node_of(d, j, c, e);
            const float from_root = shared.from_root[t], beta = shared.beta[t];
            const float key_factor = from_root * shared.key_norm[t];
            const float query_factor = from_root * shared.query_norm[t];
#pragma unroll
            for (int i = 0; i < 2 * kTiles; ++i) {
                const int tile = i / 2, at = i % 2 * 2 + e;
                rhs.x[tile][j][at] =
                    beta * (as_float(v[j][e].x[i]) - key_factor * total[0].x[tile][j][at]);
                out.x[tile][j][at] = query_factor * total[1].x[tile][j][at];
            }
        }
    }
}

// Rows of node block d into its 16 rows of shared memory; rows from `valid` on become zero.
template <typename Types>
__device__ __forceinline__ void load_nodes(unsigned char* to, const typename Types::Input* from,
                                           int64_t stride, int d, int valid, bool aligned,
                                           int thread) {
    load_rows<typename Types::Input, Types::kKeyDim, kNodeBlock, Types::kThreads, 0>(
        to, from + d * kNodeBlock * stride, stride, valid - d * kNodeBlock, aligned, thread);
}

template <typename Types>
__device__ __forceinline__ VerifyWork find_work(const VerifyArgs& args) {
    const treewy_tree_verify_params& p = args.params;
    const unsigned tiles = static_cast<unsigned>(args.tiles);
    const unsigned heads = static_cast<unsigned>(p.state.value_heads);
    unsigned block = blockIdx.x;
    VerifyWork work;
    work.first_tile = block % tiles == 0;
    work.first_row = static_cast<int>(block % tiles) * Types::kRows;
    block /= tiles;
    work.head = static_cast<int>(block % heads);
    work.row = static_cast<int>(block / heads);
    work.key_head = work.head / (p.state.value_heads / p.state.key_heads);
    return work;
}

// Slot, nodes and history of the block's row: the first thing read that the rest depends on.
__device__ __forceinline__ void read_row(const treewy_tree_verify_params& p, VerifyWork& work) {
    work.slot = p.tree.slot[work.row];
    const int nodes = p.tree.num_nodes[work.row];
    const bool live = is_live_slot(work.slot, p.tree.num_slots);
    work.nodes = !live || nodes < 0 ? 0 : nodes < p.tree.max_nodes ? nodes : p.tree.max_nodes;
    work.history = 0;
    if (p.history.length != nullptr && work.nodes > 0) {
        work.history = clamp_length(p.history.length[work.slot], p.history.capacity);
    }
}

// Where a thread stands.
struct Place {
    int thread;
    int warp;
    int lane;
    int first;  // of the lane's 2 kTiles rows of V
};

template <typename Types>
__device__ __forceinline__ const typename Types::Input* queries_of(
    const treewy_tree_verify_params& p, const VerifyWork& work) {
    return static_cast<const typename Types::Input*>(p.q) + work.row * p.q_stride[0] +
           work.key_head * p.q_stride[2];
}

// Starts the copies of what does not wait for the slot: all keys and the first queries. What lies
// beyond the real nodes is zeroed later.
template <typename Types>
__device__ __forceinline__ void copy_nodes(const VerifyArgs& args, const Shared& shared,
                                           const VerifyWork& work, int thread) {
    const treewy_tree_verify_params& p = args.params;
    const int max_nodes = p.tree.max_nodes;
    const auto* keys = static_cast<const typename Types::Input*>(p.k) + work.row * p.k_stride[0] +
                       work.key_head * p.k_stride[2];
    for (int d = 0; d < args.layout.node_blocks; ++d) {
        load_nodes<Types>(shared.keys + d * kNodeBlock * Types::kInputRowBytes, keys, p.k_stride[1],
                          d, max_nodes, args.aligned, thread);
    }
    load_nodes<Types>(shared.queries, queries_of<Types>(p, work), p.q_stride[1], 0, max_nodes,
                      args.aligned, thread);
}

template <typename Types>
__device__ __forceinline__ void zero_padding(const Shared& shared, const VerifyWork& work,
                                             int blocks, int thread) {
    using Input = typename Types::Input;
    for (int at = work.nodes / kNodeBlock; at < blocks; ++at) {
        zero_rows<Input, Types::kKeyDim, kNodeBlock, Types::kThreads, 0>(
            shared.keys + at * kNodeBlock * Types::kInputRowBytes, work.nodes - at * kNodeBlock,
            thread);
    }
    zero_rows<Input, Types::kKeyDim, kNodeBlock, Types::kThreads, 0>(shared.queries, work.nodes,
                                                                     thread);
}

template <typename Types>
__device__ __forceinline__ void copy_history(const VerifyArgs& args, const Shared& shared,
                                             const VerifyWork& work, int history_blocks,
                                             int thread) {
    constexpr int kKeyDim = Types::kKeyDim;
    const treewy_tree_verify_params& p = args.params;
    const int64_t stride = int64_t{p.state.key_heads} * kKeyDim;
    const float* from =
        p.history.k + work.slot * p.history.k_stride[0] + work.key_head * int64_t{kKeyDim};
    for (int at = 0; at < history_blocks; ++at) {
        const int start = at * kNodeBlock;
        load_rows<float, kKeyDim, kNodeBlock, Types::kThreads, 0>(
            shared.history_keys + start * kKeyDim * 4, from + start * stride, stride,
            work.history - start, true, thread);
    }
}

// A warp copies its own rows of the state, so that it need not wait for others.
template <typename Types>
__device__ __forceinline__ void copy_state(const VerifyArgs& args, const Shared& shared,
                                           const VerifyWork& work, const Place& at) {
    using State = typename Types::State;
    constexpr int kKeyDim = Types::kKeyDim;
    const treewy_tree_verify_params& p = args.params;
    const int64_t row =
        int64_t{work.head} * p.state.value_dim + work.first_row + at.warp * Types::kWarpRows;
    const State* from =
        static_cast<const State*>(p.state.data) + work.slot * p.state.slot_stride + row * kKeyDim;
    load_rows<State, kKeyDim, Types::kWarpRows, kWarp, Types::kStateShift>(
        shared.state + at.warp * Types::kWarpRows * Types::kStateRowBytes, from, kKeyDim,
        Types::kWarpRows, true, at.lane);
}

template <typename Types>
struct Values {
    LaneRows<Types> x[2][2];  // [j][e], of node 8 j + 2 c + e
};

template <typename Types>
__device__ __forceinline__ void load_values(const VerifyArgs& args, VerifyWork work, int d,
                                            const Place& at, Values<Types>& v) {
    using Input = typename Types::Input;
    const treewy_tree_verify_params& p = args.params;
    compute_here(work);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        LaneRows<Types>& rows = v.x[i / 2][i % 2];
        const int t = node_of(d, i / 2, at.lane % 4, i % 2);
#pragma unroll
        for (int row = 0; row < 2 * Types::kTiles; ++row) rows.x[row] = zero<Input>();
        if (t >= work.nodes) continue;
        rows = load_lane<Input, 2 * Types::kTiles>(
            static_cast<const Input*>(p.v) + at_node(p.v_stride, work, t, at.first), args.aligned);
    }
}

// Step 4 for node block d: takes R and the first part of o, leaves U in `rhs` and o in `out`.
template <typename Types>
__device__ __forceinline__ void solve_block(const VerifyArgs& args, const Shared& shared,
                                            const VerifyWork& work, int history_blocks, int d,
                                            bool keep, const Place& at, Tile<Types::kTiles>& rhs,
                                            Tile<Types::kTiles>& out) {
    constexpr int kTiles = Types::kTiles, kTerms = Types::kWeightTerms;
    constexpr bool kApart = Types::kSumApart;
    for (int block = 0; block < history_blocks + d; ++block) {
        Tile<kTiles> known;
        if (block < history_blocks) {
            known = load_history<Types>(args, work, block, at.first, at.lane % 4);
        } else {
            const float4* from = known_u_at<Types>(shared, block - history_blocks, at.thread);
#pragma unroll
            for (int i = 0; i < 2 * kTiles; ++i) {
                const float4 value = from[i * Types::kThreads];
                float (&x)[4] = known.x[i / 2][i % 2];
                x[0] = value.x, x[1] = value.y, x[2] = value.z, x[3] = value.w;
            }
        }
        const auto terms = split_tile<kTerms>(known);
        apply<kApart>(rhs, terms, weights_at<kTerms>(shared, block, 0), at.lane);
        apply<kApart>(out, terms, weights_at<kTerms>(shared, block, 1), at.lane);
    }
    const int diagonal = history_blocks + d;
    apply<kApart>(rhs, split_tile<kTerms>(rhs), weights_at<kTerms>(shared, diagonal, 0), at.lane);
    if (keep) {
        float4* to = known_u_at<Types>(shared, d, at.thread);
#pragma unroll
        for (int i = 0; i < 2 * kTiles; ++i) {
            const float (&x)[4] = rhs.x[i / 2][i % 2];
            to[i * Types::kThreads] = make_float4(x[0], x[1], x[2], x[3]);
        }
    }
    apply<kApart>(out, split_tile<kTerms>(rhs), weights_at<kTerms>(shared, diagonal, 1), at.lane);
}

template <typename Types>
__global__ void __launch_bounds__(Types::kThreads, Types::kMinBlocks)
    tree_verify_kernel(const __grid_constant__ VerifyArgs args) {
    constexpr int kTiles = Types::kTiles, kTerms = Types::kWeightTerms;
    // The values of 32 rows would be in the way of the Gram product's registers.
    constexpr bool kValuesFirst = kTiles == 1;
    const treewy_tree_verify_params& p = args.params;
    const Shared shared = place_shared(args.layout);
    VerifyWork work = find_work<Types>(args);
    Place at;
    // The remainder says that it is not negative, which spares divisions their care for signs.
    at.thread = static_cast<int>(threadIdx.x % Types::kThreads);
    at.warp = at.thread / kWarp;
    at.lane = at.thread % kWarp;
    at.first = work.first_row + at.warp * Types::kWarpRows + 2 * kTiles * (at.lane / 4);

    copy_nodes<Types>(args, shared, work, at.thread);
    commit_copies();
    const NodeInputs inputs = read_node(p, work, at.thread);
    read_row(p, work);
    const int blocks = (work.nodes + kNodeBlock - 1) / kNodeBlock;
    const int history_blocks = (work.history + kNodeBlock - 1) / kNodeBlock;
    if (history_blocks > 0) copy_history<Types>(args, shared, work, history_blocks, at.thread);
    commit_copies();
    if (blocks > 0) copy_state<Types>(args, shared, work, at);
    commit_copies();

    follow_paths<Types>(args, shared, work, inputs, at.thread);
    if (at.thread == 0) *shared.not_finite = 0;
    for (int d = 0; d < blocks; ++d) {
        Values<Types> v;
        if (kValuesFirst) load_values(args, work, d, at, v);
        if (d == 0) {
            wait_copies<1>();  // all but the state
            zero_padding<Types>(shared, work, blocks, at.thread);
        } else {
            wait_copies<0>();
        }
        __syncthreads();
        measure_norms<Types>(shared, d, at.thread);
        __syncthreads();
        couple_block<Types>(shared, work, history_blocks, d, at.warp, at.lane);
        if (!kValuesFirst) load_values(args, work, d, at, v);
        __syncthreads();
        if (at.warp == 0)
            invert<kTerms>(weights_at<kTerms>(shared, history_blocks + d, 0), at.lane);
        if (d == 0) {
            wait_copies<0>();
            __syncwarp();  // a warp reads what its own lanes copied
        }
        Tile<kTiles> rhs, out;
        apply_state<Types>(shared, d, at.warp, at.lane, v.x, rhs, out);
        __syncthreads();
        const bool more = d + 1 < blocks;
        if (more) {  // the queries of this node block are done with
            load_nodes<Types>(shared.queries, queries_of<Types>(p, work), p.q_stride[1], d + 1,
                              work.nodes, args.aligned, at.thread);
            commit_copies();
        }
        solve_block<Types>(args, shared, work, history_blocks, d, more, at, rhs, out);
        VerifyWork here = work;
        compute_here(here);
        store_tile<Types>(args, here, d, at.first, out, rhs, at.lane % 4);
        if (!is_finite(rhs) || !is_finite(out)) *shared.not_finite = 1;
    }
    wait_copies<0>();

    const Tile<kTiles> nothing = zero_tile<kTiles>();
    for (int d = blocks; d < args.layout.node_blocks; ++d) {
        store_tile<Types>(args, work, d, at.first, nothing, nothing, at.lane % 4);
    }
    if (blocks == 0) return;
    __syncthreads();
    if (*shared.not_finite != 0) verify_selecting<Types>(args, shared, work, at.thread);
}

// ------------------------------------------------------------------ host

constexpr const char* kName = "tree_verify";

// Whether addresses and strides allow vectors of `bytes` bytes.
template <int kStrides>
bool moves_in(int bytes, const void* data, const int64_t (&stride)[kStrides], int element_bytes) {
    bool fits = is_aligned(data, static_cast<size_t>(bytes));
    for (const int64_t step : stride) fits = fits && step * element_bytes % bytes == 0;
    return fits;
}

bool all_aligned(const treewy_tree_verify_params& p, int lane_rows) {
    const int size = dtype_bytes(p.dtype);
    return moves_in(16, p.q, p.q_stride, size) && moves_in(16, p.k, p.k_stride, size) &&
           moves_in(lane_rows * size, p.v, p.v_stride, size) &&
           moves_in(lane_rows * size, p.out, p.out_stride, size) &&
           moves_in(lane_rows * 4, p.u, p.u_stride, 4);
}

treewy_status check_pointer(const void* pointer, const char* name) {
    if (pointer != nullptr) return TREEWY_OK;
    return fail(TREEWY_INVALID_ARGUMENT, "%s: %s is null", kName, name);
}

treewy_status check_pointers(const treewy_tree_verify_params& p) {
    const struct {
        const void* pointer;
        const char* name;
    } all[] = {{p.tree.slot, "slot"},
               {p.tree.parents, "parents"},
               {p.tree.num_nodes, "num_nodes"},
               {p.state.data, "state"},
               {p.q, "q"},
               {p.k, "k"},
               {p.v, "v"},
               {p.a, "a"},
               {p.b, "b"},
               {p.A_log, "A_log"},
               {p.dt_bias, "dt_bias"},
               {p.out, "out"},
               {p.u, "u"},
               {p.g, "g"}};
    for (const auto& one : all) {
        const treewy_status status = check_pointer(one.pointer, one.name);
        if (status != TREEWY_OK) return status;
    }
    return TREEWY_OK;
}

treewy_status check_sizes(const treewy_tree_verify_params& p) {
    const treewy_state_pool& state = p.state;
    if (p.tree.batch < 0 || p.tree.max_nodes < 0 || p.tree.num_slots < 0) {
        return fail(TREEWY_INVALID_ARGUMENT,
                    "%s: batch %d, max_nodes %d and num_slots %lld must not be negative", kName,
                    p.tree.batch, p.tree.max_nodes, static_cast<long long>(p.tree.num_slots));
    }
    if (p.tree.max_nodes > TREEWY_MAX_NODES) {
        return fail(TREEWY_UNSUPPORTED, "%s: max_nodes is %d, at most %d", kName, p.tree.max_nodes,
                    TREEWY_MAX_NODES);
    }
    if (state.key_heads < 1 || state.value_heads < 1 || state.value_heads % state.key_heads != 0) {
        return fail(TREEWY_INVALID_ARGUMENT,
                    "%s: value_heads %d must be a multiple of key_heads %d", kName,
                    state.value_heads, state.key_heads);
    }
    if (state.key_dim != 64 && state.key_dim != 128 && state.key_dim != 256) {
        return fail(TREEWY_UNSUPPORTED, "%s: key_dim is %d, must be 64, 128 or 256", kName,
                    state.key_dim);
    }
    if (state.value_dim < 64 || state.value_dim > TREEWY_MAX_HEAD_DIM ||
        state.value_dim % 64 != 0) {
        return fail(TREEWY_UNSUPPORTED, "%s: value_dim is %d, must be a multiple of 64, at most %d",
                    kName, state.value_dim, TREEWY_MAX_HEAD_DIM);
    }
    return TREEWY_OK;
}

treewy_status check_types(const treewy_tree_verify_params& p) {
    if (!is_float_dtype(p.dtype) || !is_float_dtype(p.gate_dtype)) {
        return fail(TREEWY_UNSUPPORTED,
                    "%s: dtype %d and gate_dtype %d must be float32, bfloat16 or float16", kName,
                    p.dtype, p.gate_dtype);
    }
    if (p.state.dtype != TREEWY_FLOAT32 && p.state.dtype != TREEWY_BFLOAT16) {
        return fail(TREEWY_UNSUPPORTED, "%s: state dtype is %d, must be float32 or bfloat16", kName,
                    p.state.dtype);
    }
    if (p.u_dtype != TREEWY_FLOAT32) {
        return fail(TREEWY_UNSUPPORTED, "%s: u_dtype is %d, must be float32", kName, p.u_dtype);
    }
    if (p.tile < TREEWY_VERIFY_AUTO || p.tile > TREEWY_VERIFY_ROWS_128_WARPS_8) {
        return fail(TREEWY_INVALID_ARGUMENT, "%s: tile is %d, must be one of treewy_verify_tile",
                    kName, p.tile);
    }
    const int per_16_bytes = 16 / dtype_bytes(p.state.dtype);
    if (!is_aligned(p.state.data, 16) || p.state.slot_stride % per_16_bytes != 0) {
        return fail(TREEWY_INVALID_ARGUMENT, "%s: every slot of state must be 16-byte aligned",
                    kName);
    }
    return TREEWY_OK;
}

constexpr int kMaxHistory = 64;

treewy_status check_history(const treewy_tree_verify_params& p) {
    const treewy_history& history = p.history;
    if (history.length == nullptr) return TREEWY_OK;
    if (history.u == nullptr || history.k == nullptr || history.g == nullptr) {
        return fail(TREEWY_INVALID_ARGUMENT, "%s: history has a length but u, k or g is null",
                    kName);
    }
    if (history.capacity < 1 || history.capacity > kMaxHistory) {
        return fail(TREEWY_UNSUPPORTED, "%s: history capacity is %d, must be 1 to %d", kName,
                    history.capacity, kMaxHistory);
    }
    if (!is_aligned(history.u, 16) || !is_aligned(history.k, 16) || history.u_stride[1] % 4 != 0 ||
        history.k_stride[1] % 4 != 0) {
        return fail(TREEWY_INVALID_ARGUMENT,
                    "%s: every slot of the history's u and k must be 16-byte aligned", kName);
    }
    return TREEWY_OK;
}

treewy_status check(const treewy_tree_verify_params& p) {
    treewy_status status = check_sizes(p);
    if (status == TREEWY_OK && p.tree.batch > 0 && p.tree.max_nodes > 0) status = check_pointers(p);
    if (status == TREEWY_OK) status = check_types(p);
    if (status == TREEWY_OK) status = check_history(p);
    return status;
}

struct Device {
    int multiprocessors;
    int shared_bytes;  // that a block may have
};

treewy_status find_device(Device* device) {
    int index = 0;
    cudaError_t status = cudaGetDevice(&index);
    if (status == cudaSuccess) {
        status =
            cudaDeviceGetAttribute(&device->multiprocessors, cudaDevAttrMultiProcessorCount, index);
    }
    if (status == cudaSuccess) {
        status = cudaDeviceGetAttribute(&device->shared_bytes,
                                        cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
    }
    return status == cudaSuccess ? TREEWY_OK : fail_cuda(kName, status);
}

// A hint, so that the status does not matter: most of L1 as shared memory, for more blocks.
void prefer_shared_memory(void (*kernel)(VerifyArgs)) {
#if defined(TREEWY_ON_HOST)
    static_cast<void>(kernel);
#else
    static_cast<void>(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                           cudaFuncAttributePreferredSharedMemoryCarveout,
                                           cudaSharedmemCarveoutMaxShared));
#endif
}

template <typename Types>
treewy_status launch_types(const treewy_tree_verify_params& p, const VerifyLayout& layout,
                           treewy_stream stream) {
    prefer_shared_memory(tree_verify_kernel<Types>);
    VerifyArgs args{p, layout, p.state.value_dim / Types::kRows, all_aligned(p, 2 * Types::kTiles)};
    // treewy_history is of all layers: of its strides the slot's counts here.
    args.params.history.u_stride[0] = p.history.u_stride[1];
    args.params.history.k_stride[0] = p.history.k_stride[1];
    args.params.history.g_stride[0] = p.history.g_stride[1];
    const int64_t blocks = int64_t{p.tree.batch} * p.state.value_heads * args.tiles;
    return launch(kName, tree_verify_kernel<Types>, blocks, Types::kThreads,
                  static_cast<size_t>(layout.total), stream, args);
}

template <typename Input, typename State, int kKeyDim>
treewy_status launch_tile(int tile, const treewy_tree_verify_params& p, const VerifyLayout& layout,
                          treewy_stream stream) {
    if constexpr (sizeof(Input) == 2 && sizeof(State) == 2) {
        if (tile == TREEWY_VERIFY_ROWS_128) {
            return launch_types<VerifyTypes<Input, State, kKeyDim, 2, 4>>(p, layout, stream);
        }
        if (tile == TREEWY_VERIFY_ROWS_128_WARPS_8) {
            return launch_types<VerifyTypes<Input, State, kKeyDim, 1, 8>>(p, layout, stream);
        }
    }
    return launch_types<VerifyTypes<Input, State, kKeyDim, 1, 4>>(p, layout, stream);
}

template <typename Input, typename State>
treewy_status launch_dim(int tile, const treewy_tree_verify_params& p, const VerifyLayout& layout,
                         treewy_stream stream) {
    switch (p.state.key_dim) {
        case 64:
            return launch_tile<Input, State, 64>(tile, p, layout, stream);
        case 128:
            return launch_tile<Input, State, 128>(tile, p, layout, stream);
        default:
            return launch_tile<Input, State, 256>(tile, p, layout, stream);
    }
}

template <typename Input>
treewy_status launch_state(int tile, const treewy_tree_verify_params& p, const VerifyLayout& layout,
                           treewy_stream stream) {
    return p.state.dtype == TREEWY_FLOAT32
               ? launch_dim<Input, float>(tile, p, layout, stream)
               : launch_dim<Input, __nv_bfloat16>(tile, p, layout, stream);
}

treewy_status tree_verify(const treewy_tree_verify_params& p, treewy_stream stream) {
    treewy_status status = check(p);
    if (status != TREEWY_OK || p.tree.batch == 0 || p.tree.max_nodes == 0) return status;
    Device device;
    status = find_device(&device);
    if (status != TREEWY_OK) return status;

    const int state_bytes = dtype_bytes(p.state.dtype), input_bytes = dtype_bytes(p.dtype);
    const int terms = p.dtype == TREEWY_FLOAT32 ? 3 : p.dtype == TREEWY_FLOAT16 ? 2 : 1;
    const int64_t heads = int64_t{p.tree.batch} * p.state.value_heads;
    int tile = p.tile;
    if (tile == TREEWY_VERIFY_AUTO) {
        tile = choose_tile(p.state.value_dim, state_bytes, terms, p.tree.max_nodes, heads,
                           device.multiprocessors);
    } else if (!tile_exists(tile, p.state.value_dim, state_bytes, terms)) {
        return fail(TREEWY_UNSUPPORTED,
                    "%s: tile %d is not for value_dim %d, dtype %d, state dtype %d", kName, tile,
                    p.state.value_dim, p.dtype, p.state.dtype);
    }
    const VerifyShape shape{p.state.key_dim,
                            p.state.value_dim,
                            p.tree.max_nodes,
                            p.history.length == nullptr ? 0 : p.history.capacity,
                            input_bytes,
                            state_bytes,
                            state_bytes == 4 || input_bytes == 4 ? 3 : 2};
    VerifyLayout layout = verify_layout(shape, verify_tile(tile).rows);
    if (layout.total > device.shared_bytes && p.tile == TREEWY_VERIFY_AUTO) {
        tile = TREEWY_VERIFY_ROWS_64;
        layout = verify_layout(shape, verify_tile(tile).rows);
    }
    if (layout.total > device.shared_bytes) {
        return fail(
            TREEWY_UNSUPPORTED,
            "%s: max_nodes %d with key_dim %d takes %d bytes of shared memory a block, this GPU "
            "has %d: lower max_nodes or use 16-bit types",
            kName, p.tree.max_nodes, p.state.key_dim, layout.total, device.shared_bytes);
    }
    switch (p.dtype) {
        case TREEWY_FLOAT32:
            return launch_state<float>(tile, p, layout, stream);
        case TREEWY_FLOAT16:
            return launch_state<__half>(tile, p, layout, stream);
        default:
            return launch_state<__nv_bfloat16>(tile, p, layout, stream);
    }
}

}  // namespace
}  // namespace treewy

treewy_status treewy_tree_verify(const treewy_tree_verify_params* params, treewy_stream stream) {
    if (params == nullptr) {
        return treewy::fail(TREEWY_INVALID_ARGUMENT, "tree_verify: params is null");
    }
    return treewy::tree_verify(*params, stream);
}
