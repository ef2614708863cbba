// SPDX-License-Identifier: Apache-2.0
//
// Tree verification of at most 16 nodes after a short history (deferred commit): the accepted
// entries h = 0 .. m - 1 that the state does not hold yet, whose pseudo-values are known. With G_t
// counted from the state on, over the history, they add to the system of tree_verify_kernel.cuh
//
//   R[t] -= beta_t sum over h of exp(G_t - G_h) (k_t . k_h) u_h
//   o_t  +=        sum over h of exp(G_t - G_h) (q_t . k_h) u_h
//
// and nothing else: no solve, no product with the state, no output of their own.
//
// Threads: as there, with the layout known to the compiler, four blocks a multiprocessor. The rows'
// warps ask for nodes, values and state first and then, once the length is here, for the history's
// u (16 bytes at a time, a warp its own rows) and keys. Each of the four takes 8 entries of every
// 16, for K_d or for Q_d: keys go from memory to operand B in registers, as no other product wants
// them; what is contracted comes in the order in which a lane has it, four neighbours a step, and
// operand A is read in that order too. Their norms are sums over the same registers. The weights
// take the place of keys and queries after the barrier that all products are behind.
//
// More than a plain verification, a row of the batch and entry of the history: 12 KiB (u in
// bfloat16 and raw keys of 16 bits; 20 with u in float32), and of a warp's instructions about 400
// for every 16 entries begun.
#pragma once

#include "tree_verify_kernel.cuh"

namespace treewy {

inline constexpr int kShortBlocks = kShortHistory / kNodeBlock;

// A lane's part of eight raw keys of a history, one a group of four lanes: elements 16 s + 4 c .. +
// 3 of step s, c = lane % 4.
template <typename Types>
struct HistoryKeys {
    using Key = typename Types::Input;
    static constexpr int kSteps = Types::kKeyDim / 16;
    uint2 x[kSteps];

    __device__ __forceinline__ void load(const VerifyArgs& args, const VerifyWork& work, int first,
                                         int lane) {
        const treewy_history& history = args.params.history;
        const int entry = first + lane / 4;
        const Key* from = static_cast<const Key*>(history.k) + work.slot * history.k_stride[0] +
                          ((entry * args.params.state.key_heads + work.key_head) * Types::kKeyDim +
                           4 * (lane % 4));
        const bool there = entry < work.history;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            x[step] = make_uint2(0, 0);
            if (there) x[step] = *reinterpret_cast<const uint2*>(from + 16 * step);
        }
    }

    // Steps 2 pair and 2 pair + 1 as operand B; adds the elements' squares to `square`.
    __device__ __forceinline__ FragmentB<Key> operand(int pair, float& square) const {
        FragmentB<Key> b;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint2& quad = x[2 * pair + i / 2];
            const uint32_t word = i % 2 == 0 ? quad.x : quad.y;
            const float low = half_value<Key>(word), high = half_value<Key>(word >> 16);
            square = fmaf(low, low, square);
            square = fmaf(high, high, square);
            uint32_t terms[Operand<Key>::kTerms];
            split_word<Key>(word, terms);
#pragma unroll
            for (int term = 0; term < Operand<Key>::kTerms; ++term)
                b.x[term][i / 2][i % 2] = terms[term];
        }
        return b;
    }
};

// Step `step` of 16 rows in shared memory as operand A, in the order of HistoryKeys.
template <typename T, int kRowBytes>
__device__ __forceinline__ FragmentA<T> load_a_quads(const unsigned char* rows, int step,
                                                     int lane) {
    const int g = lane / 4, c = lane % 4;
    const int chunk = swapped_chunk<T>(2 * step + c / 2, g);
    FragmentA<T> a;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint2 quad = *reinterpret_cast<const uint2*>(rows + (8 * half + g) * kRowBytes +
                                                           16 * chunk + c % 2 * 8);
        const uint32_t words[2] = {quad.x, quad.y};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32_t terms[Operand<T>::kTerms];
            split_word<T>(words[i], terms);
#pragma unroll
            for (int term = 0; term < Operand<T>::kTerms; ++term)
                a.x[term][2 * i + half] = terms[term];
        }
    }
    return a;
}

// Products of 16 keys or queries, `rows`, with eight keys of every block of the history, which are
// normalised on the way.
template <typename Types>
__device__ __forceinline__ void dot_history(const unsigned char* rows,
                                            const HistoryKeys<Types> (&keys)[kShortBlocks],
                                            int history, int lane,
                                            float (&dot)[kShortBlocks][1][4]) {
    using Input = typename Types::Input;
    float square[kShortBlocks] = {};
#pragma unroll
    for (int i = 0; i < 4 * kShortBlocks; ++i) dot[i / 4][0][i % 4] = 0.0f;
#pragma unroll
    for (int pair = 0; pair < Types::kKeyDim / 32; ++pair) {
        FragmentA<Input> a[2];
#pragma unroll
        for (int odd = 0; odd < 2; ++odd)
            a[odd] = load_a_quads<Input, Types::kInputRowBytes>(rows, 2 * pair + odd, lane);
#pragma unroll
        for (int block = 0; block < kShortBlocks; ++block) {
            if (block * kNodeBlock >= history) continue;
            const auto b = keys[block].operand(pair, square[block]);
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) multiply<0, kMaxOrder>(dot[block][0], a[odd], b, odd);
        }
    }
#pragma unroll
    for (int block = 0; block < kShortBlocks; ++block) {
        if (block * kNodeBlock >= history) continue;
        float sum = square[block];
#pragma unroll
        for (int step = 1; step < 4; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
        const float own = inverse_norm(sum, 1.0f);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float norm = __shfl_sync(kAllLanes, own, 8 * (lane % 4) + 4 * e);
            dot[block][0][e] *= norm;
            dot[block][0][2 + e] *= norm;
        }
    }
}

// Starts the copies of a warp's rows of the history's u.
template <typename Types, typename U>
__device__ __forceinline__ void copy_history_rows(const VerifyArgs& args, const Shared& shared,
                                                  const VerifyWork& work, const Place& at) {
    const treewy_tree_verify_params& p = args.params;
    const int dim = p.state.value_dim, stride = p.state.value_heads * dim;
    const U* from = static_cast<const U*>(p.history.u) + work.slot * p.history.u_stride[0] +
                    (work.head * dim + work.first_row + at.warp * Types::kWarpRows);
    for (int block = 0; block * kNodeBlock < work.history; ++block) {
        Values<Types, U>(shared.history_u, block, at.warp)
            .template copy<true>(from, stride, block, work.history, at.lane);
    }
}

template <typename Types>
__device__ __forceinline__ void copy_history_values(const VerifyArgs& args, const Shared& shared,
                                                    const VerifyWork& work, const Place& at) {
    if (sizeof(typename Types::State) == 4 || args.params.history.u_dtype == TREEWY_FLOAT32) {
        copy_history_rows<Types, float>(args, shared, work, at);
    } else {
        copy_history_rows<Types, __nv_bfloat16>(args, shared, work, at);
    }
}

// R and o += the weights of the history applied to its u. bfloat16 values are one term.
template <typename Types, typename U>
__device__ __forceinline__ void add_history_rows(const Shared& shared, const VerifyWork& work,
                                                 const Place& at, Tile<Types::kTiles>& rhs,
                                                 Tile<Types::kTiles>& out) {
    constexpr int kTerms = Types::kWeightTerms, kOwnTerms = sizeof(U) == 2 ? 1 : kTerms;
    constexpr int kTiles = Types::kTiles;
    for (int block = 0; block * kNodeBlock < work.history; ++block) {
        const Values<Types, U> values(shared.history_u, block, at.warp);
        Tile<kTiles> u;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const bool there = node_of(block, j, at.lane % 4, e) < work.history;
                const auto rows = values.at(j, e, at.lane);
#pragma unroll
                for (int i = 0; i < 2 * kTiles; ++i)
                    u.x[i / 2][j][i % 2 * 2 + e] = there ? as_float(rows.x[i]) : 0.0f;
            }
        }
        const auto terms = split_tile<kOwnTerms>(u);
        apply<Types::kSumApart, kOwnTerms, kTiles, kTerms>(
            rhs, terms, weights_at<kTerms>(shared, 1 + block, 0), at.lane);
        apply<Types::kSumApart, kOwnTerms, kTiles, kTerms>(
            out, terms, weights_at<kTerms>(shared, 1 + block, 1), at.lane);
    }
}

template <typename Types>
__device__ __forceinline__ void add_history(const VerifyArgs& args, const Shared& shared,
                                            const VerifyWork& work, const Place& at,
                                            Tile<Types::kTiles>& rhs, Tile<Types::kTiles>& out) {
    if (sizeof(typename Types::State) == 4 || args.params.history.u_dtype == TREEWY_FLOAT32) {
        add_history_rows<Types, float>(shared, work, at, rhs, out);
    } else {
        add_history_rows<Types, __nv_bfloat16>(shared, work, at, rhs, out);
    }
}

// All that may go before the weights are made: norms and products. `total`: multiply_state.
template <typename Types>
__device__ __forceinline__ void multiply_all(const VerifyArgs& args, const Shared& shared,
                                             VerifyWork& work, const Place& at, float (&own)[1][4],
                                             float (&dot)[kShortBlocks][1][4],
                                             Tile<Types::kTiles> (&total)[2]) {
    const RowInputs row = load_row(args.params, work);
    copy_nodes<Types>(args, shared, work, at.thread);
    commit_copies();
    settle_row(args.params, row, work);
    if (work.nodes > 0) {
        copy_values<Types>(args, shared, work, 0, at);
        copy_state<Types>(args, shared, work, at);
    }
    commit_copies();
    copy_history_values<Types>(args, shared, work, at);
    commit_copies();
    const int half = 8 * (at.warp % 2);
    HistoryKeys<Types> keys[kShortBlocks];
#pragma unroll
    for (int block = 0; block < kShortBlocks; ++block) {
        if (block * kNodeBlock < work.history) {
            keys[block].load(args, work, block * kNodeBlock + half, at.lane);
        }
    }
    wait_copies<2>();  // the nodes
    zero_padding<Types>(shared, work, work.nodes > 0 ? 1 : 0, 1, at.thread);
    sync_at<Types::kRowThreads>(kRowsBarrier);
    if (work.nodes == 0) return;
    measure_norms<Types>(shared, Group{0, 1, 0}, true, 1, at.warp, at.lane);
    dot_one_block<Types>(shared, at.warp, at.lane, own);
    const unsigned char* rows = at.warp / 2 == 0 ? shared.keys : shared.queries;
    dot_history<Types>(rows, keys, work.history, at.lane, dot);
    wait_copies<1>();  // the state
    __syncwarp();      // a warp reads what its own lanes copied
    multiply_state<Types>(shared, work, 0, 0, at, total);
}

template <typename Types>
__device__ __forceinline__ void weigh_history(const Shared& shared, const VerifyWork& work,
                                              const Place& at, float (&dot)[kShortBlocks][1][4]) {
    constexpr int kTerms = Types::kWeightTerms;
    const int kind = at.warp / 2;
#pragma unroll
    for (int block = 0; block < kShortBlocks; ++block) {
        if (block * kNodeBlock >= work.history) continue;
        const Target target{weights_at<kTerms>(shared, 1 + block, kind), nullptr};
        weigh<Types, true>(shared, 0, block, kind, at.warp % 2, work.history, dot[block], target,
                           at.lane);
    }
}

// What a warp of the rows does.
template <typename Types>
__device__ __forceinline__ void work_history_rows(const VerifyArgs& args, const Shared& shared,
                                                  VerifyWork& work, const Place& at) {
    static_assert(Types::kWarps == 4);  // a warp for each kind and half of 16 columns
    constexpr int kTiles = Types::kTiles;
    float own[1][4], dot[kShortBlocks][1][4];
    Tile<kTiles> total[2];
    multiply_all<Types>(args, shared, work, at, own, dot, total);
    if (work.nodes == 0) {
        const Tile<kTiles> nothing = zero_tile<kTiles>();
        store_block<Types>(args, work, 0, at.first, nothing, nothing, at.lane % 4);
        return;
    }
    __syncthreads();  // all are done with keys and queries
    weigh_one_block<Types>(shared, at.warp, at.lane, own);
    weigh_history<Types>(shared, work, at, dot);
    __syncthreads();
    finish_state<Types>(shared, work, 0, at.lane, Values<Types>(shared, 0, at.warp), total[0],
                        total[1]);
    wait_copies<0>();  // u of the history
    __syncwarp();
    add_history<Types>(args, shared, work, at, total[0], total[1]);
    sync_at<Types::kRowThreads + kWarp>(kInverseBarrier);
    solve_block<Types>(args, shared, work, Group{0, 1, 0}, 0, false, at, total[0], total[1]);
    store_block<Types>(args, work, 0, at.first, total[1], total[0], at.lane % 4);
    if (!is_finite(total[1])) *shared.not_finite = 1;
    __syncthreads();
}

template <typename Types>
__global__ void __launch_bounds__(Types::kThreads, Types::kMinBlocks)
    tree_verify_history_kernel(const __grid_constant__ VerifyArgs args) {
    const Shared shared = place_shared<Types>(args.layout);
    VerifyWork work = find_work<Types>(args);
    const Place at = find_place<Types>(work);
    if (at.warp >= Types::kWarps) {
        help<Types>(args, shared, work, at.thread - Types::kRowThreads);
    } else {
        work_history_rows<Types>(args, shared, work, at);
    }
    if (work.nodes > 0 && *shared.not_finite != 0) {
        verify_selecting<Types>(args, work, at.warp, at.lane);
    }
}

}  // namespace treewy
