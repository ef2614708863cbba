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
// Threads. A block owns `rows` of V of one (row, value head); a warp 16 or 32 of them, all K. One
// or two more warps, the helpers, prepare the nodes. The nodes go by blocks of 16, d = 0, 1, ..:
//
// 1. Helpers: gates, path sums and ancestors, by pointer jumping. Meanwhile the rows' warps take
//    norms and, of block 0, step 3, which waits for nothing but rows and state.
// 2. Gram: K_d K_e^T and Q_d K_e^T, masked by ancestry, times decays and norms, are the weights
//    W_de (of B, negated) and C_de in shared memory. A helper inverts I - W within 8 nodes. All
//    node blocks of a group have their weights in shared memory at once; pairs of node blocks
//    without an ancestor are left out.
// 3. S_0 [K_d; Q_d]^T: S_0 is operand A, rows of V, straight from where cp.async put it; nodes are
//    columns. Norms, decays, v and beta make it R and the first part of o, in registers.
// 4. R += sum over e of W_de U_e, e < d; U_d from R by 8 nodes and then the other 8;
//    o += sum over e <= d of C_de U_e. The sums of one product are the operand A of the next in
//    the same registers, so that steps 3 and 4 need no barrier but for the inverse. Lanes own
//    neighbouring rows of V, row (2 tiles) g + 2 tile + half: v, u and out move in whole sectors.
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
// (fp32), and 40 KiB a node (q, k, v, out 24, u 16). At 16 nodes, batch 64, 4.33 TB/s: 25 us
// (bf16), 41 us (fp32). Operations, bf16 state, n = N / 16 node blocks: about 80 n + 15 n^2 mma a
// warp of 32 rows. At 6.4 cycles each that is a fifth of the memory's time at 16 nodes, half at 40.
//
// Why this version (docs/kernels.md has the steps and what each gave). Time went to waiting, not to
// bytes: for loads that came one after the other (values and gates are asked for before anything
// that they do not need), for one warp's serial work (helpers, halves of 8 nodes), and to moves
// between registers (ldmatrix puts operands where the instruction wants them). At most 16 nodes of
// aligned 16-bit inputs with K = 128 and no history have a kernel of their own
// (tree_verify_small.cuh). State through cp.async, not bulk
// copies: its chunks are swapped against bank conflicts on the way.
#pragma once

#include "tree_verify_selecting.cuh"
#include "tree_verify_steps.cuh"
#include "tree_verify_weights.cuh"

namespace treewy {

__device__ __forceinline__ void set_count(const VerifyArgs& args, const VerifyWork& work,
                                          Group& group) {
    const int left = (work.nodes + kNodeBlock - 1) / kNodeBlock - group.first;
    group.count = min(args.layout.group, left);
}

__device__ __forceinline__ void next_group(const VerifyArgs& args, const VerifyWork& work,
                                           Group& group) {
    group.first += group.count;
    set_count(args, work, group);
}

// Starts the copies of the queries of a group.
template <typename Types>
__device__ __forceinline__ void copy_queries(const VerifyArgs& args, const Shared& shared,
                                             const VerifyWork& work, int first, int count,
                                             int valid, int thread) {
    const treewy_tree_verify_params& p = args.params;
    const auto* from = static_cast<const typename Types::Input*>(p.q) + work.row * p.q_stride[0] +
                       work.key_head * args.q.head;
    for (int r = 0; r < count; ++r) {
        load_nodes<Types>(shared.queries + r * kNodeBlock * Types::kInputRowBytes, from,
                          args.q.node, first + r, valid, thread);
    }
}

// Starts the copies of what does not wait for the slot: all keys and the first queries. What lies
// beyond the real nodes is zeroed later.
template <typename Types>
__device__ __forceinline__ void copy_nodes(const VerifyArgs& args, const Shared& shared,
                                           const VerifyWork& work, int thread) {
    const treewy_tree_verify_params& p = args.params;
    const auto* keys = static_cast<const typename Types::Input*>(p.k) + work.row * p.k_stride[0] +
                       work.key_head * args.k.head;
    const int blocks = node_blocks<Types>(args);
    for (int d = 0; d < blocks; ++d) {
        load_nodes<Types>(shared.keys + d * kNodeBlock * Types::kInputRowBytes, keys, args.k.node,
                          d, p.tree.max_nodes, thread);
    }
    copy_queries<Types>(args, shared, work, 0, args.layout.group, p.tree.max_nodes, thread);
}

template <typename Types>
__device__ __forceinline__ void zero_padding(const Shared& shared, const VerifyWork& work,
                                             int blocks, int group, int thread) {
    using Input = typename Types::Input;
    constexpr int kBlockBytes = kNodeBlock * Types::kInputRowBytes;
    for (int d = work.nodes / kNodeBlock; d < blocks; ++d) {
        const int first = work.nodes - d * kNodeBlock;
        zero_rows<Input, Types::kKeyDim, kNodeBlock, Types::kRowThreads, 0>(
            shared.keys + d * kBlockBytes, first, thread);
        if (d >= group) continue;
        zero_rows<Input, Types::kKeyDim, kNodeBlock, Types::kRowThreads, 0>(
            shared.queries + d * kBlockBytes, first, thread);
    }
}

// Keys of 16 bits are normalised on the way.
template <typename Types>
__device__ __forceinline__ void copy_raw_history(const VerifyArgs& args, const Shared& shared,
                                                 const VerifyWork& work, int entries, int thread) {
    constexpr int kKeyDim = Types::kKeyDim;
    const int lane = thread % kWarp;
    for (int entry = thread / kWarp; entry < entries; entry += Types::kWarps) {
        float key[kKeyDim / kWarp] = {};
        if (entry < work.history) load_history_key(args.params, work, entry, lane, key);
        unsigned char* row = shared.history_keys + entry * kKeyDim * 4;
#pragma unroll
        for (int i = 0; i < kKeyDim / kWarp; ++i) {
            const int at = kWarp * i + lane;
            const int chunk = swapped_chunk<float>(at / 4, entry);
            reinterpret_cast<float*>(row + 16 * chunk)[at % 4] = key[i];
        }
    }
}

template <typename Types>
__device__ __forceinline__ void copy_history(const VerifyArgs& args, const Shared& shared,
                                             const VerifyWork& work, int history_blocks,
                                             int thread) {
    constexpr int kKeyDim = Types::kKeyDim;
    const treewy_tree_verify_params& p = args.params;
    if (p.history.k_dtype != TREEWY_FLOAT32) {
        copy_raw_history<Types>(args, shared, work, history_blocks * kNodeBlock, thread);
        return;
    }
    const int stride = p.state.key_heads * kKeyDim;
    const float* from = static_cast<const float*>(p.history.k) + work.slot * p.history.k_stride[0] +
                        work.key_head * kKeyDim;
    for (int at = 0; at < history_blocks; ++at) {
        const int start = at * kNodeBlock;
        load_rows<float, kKeyDim, kNodeBlock, Types::kRowThreads, 0, true>(
            shared.history_keys + start * kKeyDim * 4, from + start * stride, stride,
            work.history - start, thread);
    }
}

template <typename Types>
__device__ __forceinline__ void multiply_state(const Shared& shared, const VerifyWork& work, int d,
                                               int r, const Place& at,
                                               Tile<Types::kTiles> (&total)[2]) {
    if (work.nodes - d * kNodeBlock > kNodeBlock / 2) {
        multiply_state<Types, 2>(shared, d, r, at.warp, at.lane, total);
    } else {
        multiply_state<Types, 1>(shared, d, r, at.warp, at.lane, total);
    }
}

// Step 4 for block r of the group: takes R and the first part of o, leaves U in `rhs`, o in `out`.
template <typename Types>
__device__ __forceinline__ void solve_block(const VerifyArgs& args, const Shared& shared,
                                            const VerifyWork& work, const Group& group, int r,
                                            bool keep, const Place& at, Tile<Types::kTiles>& rhs,
                                            Tile<Types::kTiles>& out) {
    constexpr int kTerms = Types::kWeightTerms;
    constexpr bool kApart = Types::kSumApart;
    const int d = group.first + r;
    int pair = group.pairs_before(r);
    for (int block = 0; block < group.history_blocks; ++block, ++pair) {
        const auto terms =
            split_tile<kTerms>(load_history<Types>(args, work, block, at.first, at.lane % 4));
        apply<kApart>(rhs, terms, weights_at<kTerms>(shared, pair, 0), at.lane);
        apply<kApart>(out, terms, weights_at<kTerms>(shared, pair, 1), at.lane);
    }
    const uint32_t related = d > 0 ? shared.related[d] : 0;
    for (int e = 0; e < d; ++e, ++pair) {
        if (!((related >> e) & 1u)) continue;
        const auto terms = load_known<Types>(shared, e, at.thread);
        apply<kApart>(rhs, terms, weights_at<kTerms>(shared, pair, 0), at.lane);
        apply<kApart>(out, terms, weights_at<kTerms>(shared, pair, 1), at.lane);
    }
    const bool two = work.nodes - d * kNodeBlock > kNodeBlock / 2;
    const auto terms =
        solve_own<kApart, kTerms>(rhs, weights_at<kTerms>(shared, pair, 0), two, at.lane);
    if (keep) keep_known<Types>(shared, d, at.thread, terms);
    apply<kApart>(out, terms, weights_at<kTerms>(shared, pair, 1), at.lane);
}

template <typename Types>
__device__ __forceinline__ Group first_group(const VerifyArgs& args, const VerifyWork& work) {
    Group group{0, 0, (work.history + kNodeBlock - 1) / kNodeBlock};
    set_count(args, work, group);
    return group;
}

// What the helper warps do: gates and paths, factors, inverses.
template <typename Types>
__device__ __forceinline__ void help(const VerifyArgs& args, const Shared& shared, VerifyWork& work,
                                     int thread) {
    constexpr int kTerms = Types::kWeightTerms;
    const treewy_tree_verify_params& p = args.params;
    const int helper = thread / kWarp, lane = thread % kWarp;
    // All loads at once: none of them waits for another.
    NodeInputs inputs[Types::kNodesPerHelper];
    const RowInputs row = load_row(p, work);
    read_nodes<Types>(p, work, thread, inputs);
    const float A_log = p.A_log[work.head], dt_bias = p.dt_bias[work.head];
    settle_row(p, row, work);
    settle_history(p, load_history_of(p, work), work);
    if (thread == 0) *shared.not_finite = 0;
    follow_paths<Types>(args, shared, work, inputs, A_log, dt_bias, thread);
    for (Group group = first_group<Types>(args, work); group.count > 0;
         next_group(args, work, group)) {
        __syncthreads();  // norms
        for (int r = helper; r < group.count; r += Types::kHelpers) {
            if (lane < kNodeBlock) make_factor(shared, (group.first + r) * kNodeBlock + lane);
        }
        __syncthreads();  // weights and factors
        for (int r = helper; r < group.count; r += Types::kHelpers) {
            const int pair = group.pairs_before(r) + group.history_blocks + group.first + r;
            invert<kTerms>(weights_at<kTerms>(shared, pair, 0), shared.dense + r * 128, lane);
            __syncwarp();
            arrive_at<Types::kRowThreads + kWarp>(kInverseBarrier + r);
        }
        __syncthreads();  // the group is done with
    }
}

// Starts the copies that rows' warps make, and waits for all but the state.
template <typename Types>
__device__ __forceinline__ void start_rows(const VerifyArgs& args, const Shared& shared,
                                           VerifyWork& work, const Place& at) {
    const RowInputs row = load_row(args.params, work);
    copy_nodes<Types>(args, shared, work, at.thread);
    commit_copies();
    settle_row(args.params, row, work);
    settle_history(args.params, load_history_of(args.params, work), work);
    const int blocks = (work.nodes + kNodeBlock - 1) / kNodeBlock;
    if (work.history > 0) {
        copy_history<Types>(args, shared, work, (work.history + kNodeBlock - 1) / kNodeBlock,
                            at.thread);
    }
    commit_copies();
    if (blocks > 0) {
        copy_values<Types>(args, shared, work, 0, at);
        copy_state<Types>(args, shared, work, at);
    }
    commit_copies();
    wait_copies<1>();  // all but the state
    zero_padding<Types>(shared, work, blocks, args.layout.group, at.thread);
    sync_at<Types::kRowThreads>(kRowsBarrier);
}

// Solves the node blocks of a group. `total`: multiply_state of block 0, in the first group.
template <typename Types>
__device__ __forceinline__ void solve_group(const VerifyArgs& args, const Shared& shared,
                                            const VerifyWork& work, const Group& group, int blocks,
                                            const Place& at, Tile<Types::kTiles> (&total)[2]) {
    for (int r = 0; r < group.count; ++r) {
        const int d = group.first + r;
        if (d > 0) {
            multiply_state<Types>(shared, work, d, r, at, total);
            wait_copies<0>();  // the values
            __syncwarp();
        }
        if (d + 1 < blocks) {
            copy_values<Types>(args, shared, work, d + 1, at);
            commit_copies();
        }
        finish_state<Types>(shared, work, d, at.lane, Values<Types>(shared, d, at.warp), total[0],
                            total[1]);
        sync_at<Types::kRowThreads + kWarp>(kInverseBarrier + r);
        solve_block<Types>(args, shared, work, group, r, d + 1 < blocks, at, total[0], total[1]);
        store_block<Types>(args, work, d, at.first, total[1], total[0], at.lane % 4);
        if (!is_finite(total[1])) *shared.not_finite = 1;
    }
}

// What a warp of the rows does.
template <typename Types>
__device__ __forceinline__ void work_rows(const VerifyArgs& args, const Shared& shared,
                                          VerifyWork& work, const Place& at) {
    start_rows<Types>(args, shared, work, at);
    const int blocks = (work.nodes + kNodeBlock - 1) / kNodeBlock;
    for (Group group = first_group<Types>(args, work); group.count > 0;
         next_group(args, work, group)) {
        if (group.first > 0) {  // the queries of the last group are done with
            copy_queries<Types>(args, shared, work, group.first, group.count, work.nodes,
                                at.thread);
            commit_copies();
            wait_copies<0>();
            sync_at<Types::kRowThreads>(kRowsBarrier);
        }
        measure_norms<Types>(shared, group, group.first == 0, blocks, at.warp, at.lane);
        // What need not wait for the helpers. Where the weights take the queries' place, nobody may
        // make one before everybody is done with the queries: products now, weights later.
        const bool shares = args.layout.weights == args.layout.queries;
        float dot[1][4];
        if (shares) dot_one_block<Types>(shared, at.warp, at.lane, dot);
        Tile<Types::kTiles> total[2];
        if (group.first == 0) {
            wait_copies<0>();
            __syncwarp();  // a warp reads what its own lanes copied
            multiply_state<Types>(shared, work, 0, 0, at, total);
        }
        __syncthreads();
        if (shares) {
            weigh_one_block<Types>(shared, at.warp, at.lane, dot);
        } else {
            couple_group<Types>(shared, group, work.history, at.warp, at.lane);
        }
        __syncthreads();
        solve_group<Types>(args, shared, work, group, blocks, at, total);
        __syncthreads();
    }
    const Tile<Types::kTiles> nothing = zero_tile<Types::kTiles>();
    for (int d = blocks; d < args.layout.node_blocks; ++d) {
        store_block<Types>(args, work, d, at.first, nothing, nothing, at.lane % 4);
    }
}

template <typename Types>
__global__ void __launch_bounds__(Types::kThreads, Types::kMinBlocks)
    tree_verify_kernel(const __grid_constant__ VerifyArgs args) {
    const Shared shared = place_shared<Types>(args.layout);
    VerifyWork work = find_work<Types>(args);
    const Place at = find_place<Types>(work);
    follow_previous<Types>(args, work, at.thread);
    if (at.warp >= Types::kWarps) {
        help<Types>(args, shared, work, at.thread - Types::kRowThreads);
    } else {
        work_rows<Types>(args, shared, work, at);
    }
    if (work.nodes > 0 && *shared.not_finite != 0) {
        verify_selecting<Types>(args, work, at.warp, at.lane);
    }
}

}  // namespace treewy
