// SPDX-License-Identifier: Apache-2.0
//
// Steps that the kernels of tree verification share: what a block works on, the copies to shared
// memory, and the products of the state with the nodes.
#pragma once

#include "tree_verify_paths.cuh"
#include "tree_verify_rows.cuh"

namespace treewy {

// Rows of node block d into shared memory; rows from `valid` on become zero.
template <typename Types>
__device__ __forceinline__ void load_nodes(unsigned char* to, const typename Types::Input* from,
                                           int stride, int d, int valid, int thread) {
    load_rows<typename Types::Input, Types::kKeyDim, Types::kNodeRows, Types::kRowThreads, 0,
              Types::kAligned>(to, from + d * kNodeBlock * stride, stride, valid - d * kNodeBlock,
                               thread);
}

template <typename Types>
__device__ __forceinline__ VerifyWork find_work(const VerifyArgs& args) {
    VerifyWork work;
    const unsigned block = blockIdx.x, head = divide(block, args.tiles_inverse);
    const unsigned tiles = args.params.state.value_dim / Types::kRows;
    const unsigned tile = block - head * tiles;
    work.first_tile = tile == 0;
    work.first_row = static_cast<int>(tile) * Types::kRows;
    work.head = static_cast<int>(head);
    work.row = static_cast<int>(blockIdx.y);
    work.key_head = static_cast<int>(divide(head, args.ratio_inverse));
    return work;
}

// Slot and nodes of a row as they come, and what follows from them, apart: everything waits for the
// slot, so that its load goes out before any copy.
struct RowInputs {
    int slot;
    int nodes;
};

__device__ __forceinline__ RowInputs load_row(const treewy_tree_verify_params& p,
                                              const VerifyWork& work) {
    return {p.tree.slot[work.row], p.tree.num_nodes[work.row]};
}

__device__ __forceinline__ void settle_row(const treewy_tree_verify_params& p,
                                           const RowInputs& inputs, VerifyWork& work) {
    const bool live = is_live_slot(inputs.slot, p.tree.num_slots);
    work.slot = inputs.slot;
    work.nodes = live ? max(0, min(inputs.nodes, p.tree.max_nodes)) : 0;
    work.history = 0;
}

// The flag of the block's first rows of V; the others of the block are like it.
__device__ __forceinline__ uint8_t* folded_flag(const treewy_tree_verify_params& p,
                                                const VerifyWork& work) {
    const int row = work.head * p.state.value_dim + work.first_row;
    return p.history.folded + work.slot * p.history.folded_stride[0] + row / TREEWY_FOLD_ROWS;
}

// A history as it comes: entries, and whether the block's rows of the state hold them all. Its
// loads wait for the slot. `folding` is one number for all layers, and so close at hand, where the
// flags of a layer come from memory: they are read where any is set at all.
struct HistoryInputs {
    int length;
    int folded;
};

__device__ __forceinline__ HistoryInputs load_history_of(const treewy_tree_verify_params& p,
                                                         const VerifyWork& work) {
    HistoryInputs inputs{0, 0};
    if (p.history.length == nullptr || work.nodes == 0) return inputs;
    inputs.length = p.history.length[work.slot];
    if (p.history.folded != nullptr && p.history.folding[work.slot] != 0)
        inputs.folded = *folded_flag(p, work);
    return inputs;
}

__device__ __forceinline__ void settle_history(const treewy_tree_verify_params& p,
                                               const HistoryInputs& inputs, VerifyWork& work) {
    work.history = inputs.folded != 0 ? 0 : clamp_length(inputs.length, p.history.capacity);
}

// Where a thread of the rows' warps stands.
struct Place {
    int thread;
    int warp;
    int lane;
    int first;  // of the lane's 2 kTiles rows of V
};

template <typename Types>
__device__ __forceinline__ Place find_place(const VerifyWork& work) {
    Place at;
    at.thread = static_cast<int>(threadIdx.x);
    at.warp = at.thread / kWarp;
    at.lane = at.thread % kWarp;
    at.first = work.first_row + at.warp * Types::kWarpRows + 2 * Types::kTiles * (at.lane / 4);
    return at;
}

// Asks L2 for the state that a block will read, as far as its slot is known ahead of the previous
// kernel: whatever that still writes, L2 is where it does.
template <typename Types>
__device__ __forceinline__ void prefetch_state(const treewy_tree_verify_params& p,
                                               const VerifyWork& work) {
#if !defined(TREEWY_ON_HOST) && __CUDA_ARCH__ >= 900
    using State = typename Types::State;
    constexpr uint32_t kBytes = Types::kRows * Types::kKeyDim * sizeof(State);
    const int slot = __ldcg(p.tree.slot + work.row);
    if (!is_live_slot(slot, p.tree.num_slots)) return;
    const State* from = static_cast<const State*>(p.state.data) + slot * p.state.slot_stride +
                        (int64_t{work.head} * p.state.value_dim + work.first_row) * Types::kKeyDim;
    prefetch_to_l2(from, kBytes);
#endif
}

// What a block may do before the previous kernel has ended, and the wait for that. Blocks that
// start later find it ended, and gain nothing by asking twice.
template <typename Types>
__device__ __forceinline__ void follow_previous(const VerifyArgs& args, const VerifyWork& work,
                                                int thread) {
    let_next_start();
#if !defined(TREEWY_ON_HOST)
    const unsigned block = blockIdx.y * gridDim.x + blockIdx.x;
    if (thread == 0 && block < args.first_blocks) prefetch_state<Types>(args.params, work);
#endif
    wait_for_previous();
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
    load_rows<State, kKeyDim, Types::kWarpRows, kWarp, Types::kStateShift, true>(
        shared.state + at.warp * Types::kWarpRows * Types::kStateRowBytes, from, kKeyDim,
        Types::kWarpRows, at.lane);
}

// Starts the copies of a warp's values of node block d.
template <typename Types>
__device__ __forceinline__ void copy_values(const VerifyArgs& args, const Shared& shared,
                                            const VerifyWork& work, int d, const Place& at) {
    const treewy_tree_verify_params& p = args.params;
    const auto* from =
        static_cast<const typename Types::Input*>(p.v) +
        at_head(p.v_stride[0], args.v, work, work.first_row + at.warp * Types::kWarpRows);
    Values<Types>(shared, d, at.warp).copy(from, args.v.node, d, p.tree.max_nodes, at.lane);
}

// sum += A B over two steps.
template <bool kApart, typename A, typename B>
__device__ __forceinline__ void multiply_pair(float (&sum)[4], const FragmentA<A> (&a)[2],
                                              const FragmentB<B>& b) {
    if constexpr (kApart) {
        // Tensor cores cut sums off: few of them at full size, the small first.
        float part[4] = {};
        multiply<1, kMaxOrder>(part, a[0], b, 0);
        multiply<1, kMaxOrder>(part, a[1], b, 1);
        multiply<0, 0>(part, a[0], b, 0);
        multiply<0, 0>(part, a[1], b, 1);
#pragma unroll
        for (int at = 0; at < 4; ++at) sum[at] += part[at];
    } else {
        multiply<0, kMaxOrder>(sum, a[0], b, 0);
        multiply<0, kMaxOrder>(sum, a[1], b, 1);
    }
}

// Steps 2 pair and 2 pair + 1 of a warp's rows of the state.
template <typename Types>
__device__ __forceinline__ void load_state(
    const Shared& shared, int pair, int warp, int lane,
    FragmentA<typename Types::State> (&a)[Types::kTiles][2]) {
    constexpr int kTiles = Types::kTiles, kStateRow = Types::kStateRowBytes;
    const unsigned char* rows = shared.state + warp * Types::kWarpRows * kStateRow;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            a[i][odd] = load_a<typename Types::State, 2 * kTiles * kStateRow, kStateRow>(
                rows + 2 * i * kStateRow, 2 * pair + odd, lane);
        }
    }
}

// S_0 [K_d; Q_d]^T of a warp's rows, as the sums come: total[0] for the keys, total[1] for the
// queries of block r of the group. kColumns: 1 where the block has at most 8 nodes.
template <typename Types, int kColumns>
__device__ __forceinline__ void multiply_state(const Shared& shared, int d, int r, int warp,
                                               int lane, Tile<Types::kTiles> (&total)[2]) {
    using Input = typename Types::Input;
    constexpr int kTiles = Types::kTiles, kInputRow = Types::kInputRowBytes;
    const unsigned char* nodes_of[2] = {shared.keys + d * kNodeBlock * kInputRow,
                                        shared.queries + r * kNodeBlock * kInputRow};
    total[0] = total[1] = zero_tile<kTiles>();
#pragma unroll Types::kUnroll
    for (int pair = 0; pair < Types::kKeyDim / 32; ++pair) {
        FragmentA<typename Types::State> a[kTiles][2];
        load_state<Types>(shared, pair, warp, lane, a);
#pragma unroll
        for (int kind = 0; kind < 2; ++kind) {
#pragma unroll
            for (int j = 0; j < kColumns; ++j) {
                const auto b =
                    load_b<Input, kInputRow>(nodes_of[kind] + 8 * j * kInputRow, pair, lane);
#pragma unroll
                for (int i = 0; i < kTiles; ++i) {
                    multiply_pair<Types::kSumApart>(total[kind].x[i][j], a[i], b);
                }
            }
        }
    }
}

// Makes those sums R and the first part of o: norms, decays, v and beta.
template <typename Types, typename Source>
__device__ __forceinline__ void finish_state(const Shared& shared, const VerifyWork& work, int d,
                                             int lane, const Source& values,
                                             Tile<Types::kTiles>& rhs_of,
                                             Tile<Types::kTiles>& out_of) {
#pragma unroll
    for (int j = 0; j < Types::kNodeRows / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int t = node_of(d, j, lane % 4, e);
            const NodeFactors factor = shared.factors[t];
            const auto v = values.at(j, e, lane);
#pragma unroll
            for (int i = 0; i < 2 * Types::kTiles; ++i) {
                float& rhs = rhs_of.x[i / 2][j][i % 2 * 2 + e];
                float& out = out_of.x[i / 2][j][i % 2 * 2 + e];
                const float value = Source::kZeroed || t < work.nodes ? as_float(v.x[i]) : 0.0f;
                rhs = factor.beta * (value - factor.key * rhs);
                out *= factor.query;
            }
        }
    }
}

}  // namespace treewy
