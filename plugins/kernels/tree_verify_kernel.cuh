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
#pragma once

#include "tree_verify_selecting.cuh"
#include "tree_verify_weights.cuh"

namespace treewy {

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

}  // namespace treewy
