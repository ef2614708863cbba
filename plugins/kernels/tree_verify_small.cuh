// SPDX-License-Identifier: Apache-2.0
//
// Tree verification of at most 8 or 16 nodes, with or without a short history: the algebra of
// tree_verify_kernel.cuh where one block of nodes is all there is, arranged so that the rows' warps
// wait for little. Products of the nodes with each other need no state, so they are taken while it
// is on its way; and what makes weights of them, gates, norms and the inverse, is one helper's
// work while the rows' warps multiply the state. These meet once:
//
//     rows' warps: copies | norms, K K^T, Q K^T | S_0 [K; Q]^T           | R, U, o, stores
//     helper:      gates, path sums, ancestors  | weights, their inverse |
//
// Of 16 nodes and a bfloat16 state, whose products are short, the rows' warps make the weights,
// too, and the helper the inverse alone.
//
// Up to 8 nodes, keys and queries are the two halves of one operand A, and every product of nodes
// is half as long; their rows in shared memory are 8, so that three blocks of a float32 state share
// a multiprocessor and not two.
//
// What a history adds is in tree_verify_history.cuh, and how it is folded in tree_verify_fold.cuh.
#pragma once

#include "tree_verify_fold.cuh"
#include "tree_verify_history.cuh"
#include "tree_verify_selecting.cuh"
#include "tree_verify_steps.cuh"
#include "tree_verify_weights.cuh"

namespace treewy {

// Products of nodes with each other, one unit a warp. Of 16 nodes unit 2 kind + half, kind 0 the
// keys, has columns 8 half ..; of 8 the only unit has the keys as rows 0 to 7 and the queries as
// rows 8 to 15.
template <typename Types>
struct NodeProducts {
    static constexpr bool kEight = Types::kEight;
    static constexpr int kUnits = kEight ? 1 : 4;
    // The rows' warps make weights of their own units where the state's products are short, and the
    // helper of all of them where those leave it the time.
    static constexpr bool kRowsWeigh = !kEight && sizeof(typename Types::State) == 2;
    using Unit = float[1][4];

    static __device__ __forceinline__ void make(const Shared& shared, int unit, int lane,
                                                Unit& value) {
        dot_keys<Types, false>(shared, unit / 2 == 0 ? shared.keys : shared.queries, 8 * (unit % 2),
                               lane, value);
    }
    // For the helper, as they come out of mma, in the weights' place.
    static __device__ __forceinline__ float4* place(const Shared& shared, int unit, int lane) {
        return reinterpret_cast<float4*>(shared.weights) + unit * kWarp + lane;
    }
    static __device__ __forceinline__ void hand_over(const Shared& shared, int unit, int lane,
                                                     const Unit& value) {
        *place(shared, unit, lane) =
            make_float4(value[0][0], value[0][1], value[0][2], value[0][3]);
    }
    static __device__ __forceinline__ void take_over(const Shared& shared, int unit, int lane,
                                                     Unit& value) {
        const float4 x = *place(shared, unit, lane);
        value[0][0] = x.x, value[0][1] = x.y, value[0][2] = x.z, value[0][3] = x.w;
    }
};

// Norms of 8 rows, `unit` as in NodeProducts of 16 nodes; of 8 nodes units 0 and 1.
template <typename Types>
__device__ __forceinline__ void measure_unit(const Shared& shared, int unit, int lane) {
    constexpr int kPer = Types::kNodeRows / 8;  // units of a kind
    const int kind = unit / kPer, first = unit % kPer * 8;
    const unsigned char* rows = kind == 0 ? shared.keys : shared.queries;
    float* to = kind == 0 ? shared.key_norm : shared.query_norm;
    measure_rows<Types, 8>(to + first, rows + first * Types::kInputRowBytes,
                           kind == 0 ? 1.0f : key_scale<Types::kKeyDim>(), lane);
}

// Makes the products of node t and of nodes i and i + 1 weights; `kind` 0 for W, 1 for C.
__device__ __forceinline__ void weigh_own(const Shared& shared, int kind, int t, int i, float& low,
                                          float& high) {
    const float2 to = shared.path_sum[t];
    const float4 from = *reinterpret_cast<const float4*>(shared.path_sum + i);
    const float2 norm = *reinterpret_cast<const float2*>(shared.key_norm + i);
    const float factor = kind == 0 ? -shared.beta[t] * shared.key_norm[t] : shared.query_norm[t];
    uint32_t mask = shared.ancestors[t] >> i;
    if (kind == 0 && (t >> 1) == (i >> 1)) mask &= ~(1u << (t & 1));
    const float first = factor * norm.x * decay_between(to, make_float2(from.x, from.y));
    const float second = factor * norm.y * decay_between(to, make_float2(from.z, from.w));
    low = mask & 1u ? first * low : 0.0f;
    high = mask & 2u ? second * high : 0.0f;
}

// The weights of a unit.
template <typename Types>
__device__ __forceinline__ void weigh_unit(const Shared& shared, int unit, int lane,
                                           float (&value)[1][4]) {
    constexpr int kTerms = Types::kWeightTerms;
    const int g = lane / 4, column = 2 * (lane % 4);
    float (&x)[4] = value[0];
    if constexpr (NodeProducts<Types>::kEight) {
        weigh_own(shared, 0, g, column, x[0], x[1]);
        weigh_own(shared, 1, g, column, x[2], x[3]);
        *reinterpret_cast<float2*>(shared.dense + 8 * g + column) = make_float2(x[0], x[1]);
        uint32_t terms[kTerms];
        split(x[2], x[3], terms);
        uint4* place = weights_at<kTerms>(shared, 0, 1) + lane;
#pragma unroll
        for (int term = 0; term < kTerms; ++term) place[term * kWarp].x = terms[term];
    } else {
        const int kind = unit / 2, half = unit % 2, i = 8 * half + column;
        weigh_own(shared, kind, g, i, x[0], x[1]);
        weigh_own(shared, kind, 8 + g, i, x[2], x[3]);
        uint4* place = weights_at<kTerms>(shared, 0, kind);
        if (kind == 0) {
            store_own<kTerms>(place, shared.dense, x, half, lane);
        } else {
            store_terms<kTerms>(place, x, half, 0, lane);
        }
    }
}

// All weights, by the helper.
template <typename Types>
__device__ __forceinline__ void weigh_nodes(const Shared& shared, int lane) {
    using Products = NodeProducts<Types>;
    typename Products::Unit value[Products::kUnits];
#pragma unroll
    for (int unit = 0; unit < Products::kUnits; ++unit) {
        Products::take_over(shared, unit, lane, value[unit]);
    }
    __syncwarp();  // weights take their place
#pragma unroll
    for (int unit = 0; unit < Products::kUnits; ++unit) {
        weigh_unit<Types>(shared, unit, lane, value[unit]);
    }
    __syncwarp();
}

// Norms, products and, where the rows' warps make them, weights of the nodes, by those warps.
template <typename Types>
__device__ __forceinline__ void relate_nodes(const Shared& shared, int warp, int lane) {
    using Products = NodeProducts<Types>;
    constexpr int kBoth = Types::kRowThreads + kWarp;
    const int norms = Types::kWarps - 1 - warp;  // by other warps where there are more
    typename Products::Unit value;
    if (warp < Products::kUnits) Products::make(shared, warp, lane, value);
    if (norms < Types::kNodeRows / 4) measure_unit<Types>(shared, norms, lane);
    if constexpr (Products::kRowsWeigh) {
        sync_at<kBoth>(kPathsBarrier);
        if (warp < Products::kUnits) weigh_unit<Types>(shared, warp, lane, value);
    } else {
        if (warp < Products::kUnits) Products::hand_over(shared, warp, lane, value);
    }
    arrive_at<kBoth>(kProductsBarrier);
}

// What the helper does: gates and paths, factors, weights and their inverse.
template <typename Types>
__device__ __forceinline__ void help_small(const VerifyArgs& args, const Shared& shared,
                                           VerifyWork& work, int lane) {
    constexpr int kTerms = Types::kWeightTerms;
    const treewy_tree_verify_params& p = args.params;
    // All loads at once: none of them waits for another.
    const RowInputs row = load_row(p, work);
    NodeInputs inputs[Types::kNodesPerHelper];
    read_nodes<Types>(p, work, lane, inputs);
    const float A_log = p.A_log[work.head], dt_bias = p.dt_bias[work.head];
    settle_row(p, row, work);
    HistoryInputs entries{0, 0};
    if (Types::kShort) entries = load_history_of(p, work);
    if (lane == 0) *shared.not_finite = 0;
    Paths<Types> paths;
    open_paths<Types>(args, shared, work, inputs, A_log, dt_bias, lane, paths);
    HistoryHelper<Types> history;
    if constexpr (Types::kShort && kKeysBeforePaths) {
        settle_history(p, entries, work);
        history.load(args, shared, work, lane);
    }
    join_paths<Types>(args, shared, lane, paths);
    store_paths<Types>(args, shared, lane, 0.0, paths);
    if (work.nodes == 0) return;
    constexpr bool kRowsWeigh = NodeProducts<Types>::kRowsWeigh;
    if (kRowsWeigh) arrive_at<Types::kRowThreads + kWarp>(kPathsBarrier);
    if constexpr (Types::kShort) {
        if (!kKeysBeforePaths) {
            settle_history(p, entries, work);
            history.load(args, shared, work, lane);
        }
        history.copy_values(args, shared, work, lane);
    }
    sync_at<Types::kRowThreads + kWarp>(kProductsBarrier);  // and norms
    if (!Types::kShort && lane < Types::kNodeRows) make_factor(shared, lane);
    if (!kRowsWeigh) weigh_nodes<Types>(shared, lane);
    invert<kTerms, Types::kNodeRows / 8>(weights_at<kTerms>(shared, 0, 0), shared.dense, lane);
    if constexpr (Types::kShort) {  // the history's decays may come late
        history.settle_decays(shared, work, lane);
        if (lane < Types::kNodeRows) make_factor(shared, lane, history.start);
    }
    __syncwarp();
    arrive_at<Types::kRowThreads + kWarp>(kInverseBarrier);
    if constexpr (Types::kShort) history.weigh(args, shared, work, lane);
}

// Starts the copies of a block, and waits for all but the state.
template <typename Types>
__device__ __forceinline__ void start_small(const VerifyArgs& args, const Shared& shared,
                                            VerifyWork& work, const Place& at) {
    using Input = typename Types::Input;
    const treewy_tree_verify_params& p = args.params;
    const RowInputs row = load_row(p, work);
    load_nodes<Types>(
        shared.keys,
        static_cast<const Input*>(p.k) + work.row * p.k_stride[0] + work.key_head * args.k.head,
        args.k.node, 0, p.tree.max_nodes, at.thread);
    load_nodes<Types>(
        shared.queries,
        static_cast<const Input*>(p.q) + work.row * p.q_stride[0] + work.key_head * args.q.head,
        args.q.node, 0, p.tree.max_nodes, at.thread);
    commit_copies();
    settle_row(p, row, work);
    if (work.nodes > 0) {
        copy_values<Types>(args, shared, work, 0, at);
        copy_state<Types>(args, shared, work, at);
    }
    commit_copies();
    wait_copies<1>();  // all but values and state
    for (unsigned char* rows : {shared.keys, shared.queries}) {
        zero_rows<Input, Types::kKeyDim, Types::kNodeRows, Types::kRowThreads, 0>(rows, work.nodes,
                                                                                  at.thread);
    }
    sync_at<Types::kRowThreads>(kRowsBarrier);
}

// Takes R and the first part of o; leaves U in `rhs`, o in `out`.
template <typename Types>
__device__ __forceinline__ void solve_small(const Shared& shared, int lane,
                                            Tile<Types::kTiles>& rhs, Tile<Types::kTiles>& out) {
    constexpr int kTerms = Types::kWeightTerms;
    constexpr bool kApart = Types::kSumApart;
    const uint4* inverse = weights_at<kTerms>(shared, 0, 0);
    const uint4* readout = weights_at<kTerms>(shared, 0, 1);
    if constexpr (Types::kNodeRows == 8) {
        uint32_t own[kTerms], out_of[kTerms];
#pragma unroll
        for (int term = 0; term < kTerms; ++term) {
            own[term] = inverse[term * kWarp + lane].x;
            out_of[term] = readout[term * kWarp + lane].x;
        }
        TileTerms<kTerms, Types::kTiles> terms;
        split_half(rhs, 0, terms);
        apply_half<kApart>(rhs, 0, own, terms, 0);
        split_half(rhs, 0, terms);
        apply_half<kApart>(out, 0, out_of, terms, 0);
    } else {
        const auto terms = solve_own<kApart, kTerms>(rhs, inverse, true, lane);
        apply<kApart>(out, terms, readout, lane);
    }
}

// What a warp of the rows does.
template <typename Types>
__device__ __forceinline__ void work_small(const VerifyArgs& args, const Shared& shared,
                                           VerifyWork& work, const Place& at) {
    start_small<Types>(args, shared, work, at);
    Tile<Types::kTiles> total[2] = {zero_tile<Types::kTiles>(), zero_tile<Types::kTiles>()};
    if (work.nodes > 0) {
        relate_nodes<Types>(shared, at.warp, at.lane);
        wait_copies<0>();
        __syncwarp();  // a warp reads what its own lanes copied
        multiply_state<Types, Types::kNodeRows / 8>(shared, 0, 0, at.warp, at.lane, total);
        sync_at<Types::kRowThreads + kWarp>(kInverseBarrier);
        if constexpr (Types::kShort) meet_history<Types>(shared, work);
        finish_state<Types>(shared, work, 0, at.lane, Values<Types>(shared, 0, at.warp), total[0],
                            total[1]);
        if constexpr (Types::kShort) {
            add_history<Types>(args, shared, work, at, total[0], total[1]);
        }
        solve_small<Types>(shared, at.lane, total[0], total[1]);
        if (!is_finite(total[1])) *shared.not_finite = 1;
    }
    store_block<Types>(args, work, 0, at.first, total[1], total[0], at.lane % 4);
}

template <typename Types>
__global__ void __launch_bounds__(Types::kThreads, Types::kMinBlocks)
    tree_verify_small_kernel(const __grid_constant__ VerifyArgs args) {
    const Shared shared = place_shared<Types>(args.layout);
    VerifyWork work = find_work<Types>(args);
    const Place at = find_place<Types>(work);
    follow_previous<Types>(args, work, at.thread);
    if (at.warp >= Types::kWarps) {
        help_small<Types>(args, shared, work, at.lane);
    } else {
        work_small<Types>(args, shared, work, at);
    }
    __syncthreads();
    const bool selects = work.nodes > 0 && *shared.not_finite != 0;
    if (selects) verify_selecting<Types>(args, work, at.warp, at.lane);
    if constexpr (Types::kShort) {
        if (!is_to_fold(args, work)) return;
        if (selects) __syncthreads();  // it reads the state
        if (at.warp < Types::kWarps) fold_block<Types>(args, work, at.warp, at.lane);
    }
}

}  // namespace treewy
