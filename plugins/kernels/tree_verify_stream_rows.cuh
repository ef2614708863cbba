// SPDX-License-Identifier: Apache-2.0
//
// What the rows' warps of tree_verify_stream.cuh do: copies of the state, its products with the
// nodes of a turn, U and o from them, and the stores.
#pragma once

#include "tree_verify_inverse.cuh"
#include "tree_verify_selecting.cuh"
#include "tree_verify_turns.cuh"

namespace treewy {

// The copies of a warp's rows of the state, as many turns ahead of its work as the ring holds.
template <typename Types>
struct StateCopies {
    using State = typename Types::State;

    const State* from;  // the warp's rows in the turn that is copied, or null
    Turn turn;          // the one behind it
    int slot;           // of that
    int left;           // turns from that one on

    __device__ __forceinline__ void start(const VerifyArgs& args) {
        turn = first_turn(args);
        left = count_turns(args);
        slot = args.params.tree.slot[turn.row];
    }
    // Begins a turn, whose slot has come, and asks for that of the next.
    __device__ __forceinline__ void enter(const VerifyArgs& args, int warp) {
        const treewy_state_pool& state = args.params.state;
        const int row = turn.block * Types::kRows + warp * Types::kWarpRows;
        from = nullptr;
        if (left > 0 && is_live_slot(slot, args.params.tree.num_slots)) {
            from = static_cast<const State*>(state.data) + slot * state.slot_stride +
                   int64_t{row} * Types::kKeyDim;
        }
        if (--left <= 0) return;
        next_turn(args, turn);
        slot = args.params.tree.slot[turn.row];
    }
    // Starts the copy of a part to `to`; a group of copies of its own, even if there is none.
    __device__ __forceinline__ void copy(int part, unsigned char* to, int lane) const {
        if (from != nullptr) {
            load_rows<State, Types::kPartElements, Types::kWarpRows, kWarp, Types::kStateShift,
                      true>(to, from + part * Types::kPartElements, Types::kKeyDim,
                            Types::kWarpRows, lane);
        }
        commit_copies();
    }
};

// What a warp has of its rows at all nodes: S_0 K^T, then R; S_0 Q^T, then o.
template <typename Types>
struct TurnSums {
    Tile<Types::kTiles> rhs[Types::kNodeBlocks];
    Tile<Types::kTiles> out[Types::kNodeBlocks];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int d = 0; d < Types::kNodeBlocks; ++d) rhs[d] = out[d] = zero_tile<Types::kTiles>();
    }
};

// sums += A B over two steps, of several B: side by side, so that none waits for itself.
template <bool kApart, typename A, typename B, int kMost>
__device__ __forceinline__ void multiply_sums(float (*const (&sums)[kMost])[4],
                                              const FragmentA<A> (&a)[2],
                                              const FragmentB<B> (&b)[kMost], int count) {
    constexpr int kTermsA = Operand<A>::kTerms, kTermsB = Operand<B>::kTerms;
    float part[kMost][4] = {};
#pragma unroll
    for (int order = kMaxOrder; order >= 0; --order) {  // the small first
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
            for (int term = 0; term <= order && term < kTermsA; ++term) {
                if (order - term >= kTermsB) continue;
                const uint32_t (&x)[4] = a[odd].x[term];
#pragma unroll
                for (int i = 0; i < count; ++i) {
                    const uint32_t (&y)[2] = b[i].x[order - term][odd];
                    mma(kApart ? part[i] : *sums[i], x[0], x[1], x[2], x[3], y[0], y[1]);
                }
            }
        }
    }
    if constexpr (kApart) {
#pragma unroll
        for (int i = 0; i < count; ++i) {
#pragma unroll
            for (int at = 0; at < 4; ++at) (*sums[i])[at] += part[i][at];
        }
    }
}

// Adds S_0 [K; Q]^T of a part of a warp's rows.
template <typename Types>
__device__ __forceinline__ void multiply_part(const Shared& shared, const unsigned char* rows,
                                              int part, int lane, TurnSums<Types>& sums) {
    using Input = typename Types::Input;
    using State = typename Types::State;
    constexpr int kInputRow = Types::kInputRowBytes;
#pragma unroll
    for (int at = 0; at < Types::kPartPairs; ++at) {
        const int pair = part * Types::kPartPairs + at;
        FragmentA<State> a[2];
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            a[odd] = load_a<State, 2 * kPartRowBytes, kPartRowBytes>(rows, 2 * at + odd, lane);
        }
#pragma unroll
        for (int j = 0; j < Types::kHalves; j += 2) {
            constexpr int kMost = 2;
            FragmentB<Input> b[2 * kMost];
            float (*sum[2 * kMost])[4];
            const int count = j + 1 < Types::kHalves ? 2 : 1;
#pragma unroll
            for (int i = 0; i < count; ++i) {
                const int below = 8 * (j + i) * kInputRow;
                b[2 * i] = load_b<Input, kInputRow>(shared.keys + below, pair, lane);
                b[2 * i + 1] = load_b<Input, kInputRow>(shared.queries + below, pair, lane);
                sum[2 * i] = &sums.rhs[j / 2].x[0][i];
                sum[2 * i + 1] = &sums.out[j / 2].x[0][i];
            }
            multiply_sums<Types::kSumApart>(sum, a, b, 2 * count);
        }
    }
}

// Stores a lane's rows at all nodes of the call, two of each 8.
template <typename Types, typename T>
__device__ __forceinline__ void store_nodes(T* to, int node_stride, int max_nodes, int c,
                                            const Tile<1> (&tiles)[Types::kNodeBlocks]) {
    T* at = to + 2 * c * node_stride;
#pragma unroll
    for (int j = 0; j < Types::kHalves; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float (&x)[4] = tiles[j / 2].x[0][j % 2];
            if (j + 1 == Types::kHalves && 8 * j + 2 * c + e >= max_nodes) continue;
            store_vec(at + (8 * j + e) * node_stride,
                      Vec<T, 2>{from_float<T>(x[e]), from_float<T>(x[2 + e])});
        }
    }
}

// Stores o and u of a turn.
template <typename Types>
__device__ __forceinline__ void store_turn(const VerifyArgs& args, const VerifyWork& work,
                                           int first, int lane,
                                           const Tile<1> (&out)[Types::kNodeBlocks],
                                           const Tile<1> (&u)[Types::kNodeBlocks]) {
    using Input = typename Types::Input;
    const treewy_tree_verify_params& p = args.params;
    const int c = lane % 4, most = p.tree.max_nodes;
    store_nodes<Types>(static_cast<Input*>(p.out) + at_head(p.out_stride[0], args.out, work, first),
                       args.out.node, most, c, out);
    if (p.u == nullptr) return;
    const int64_t at = at_head(p.u_stride[0], args.u, work, first);
    if (p.u_dtype == TREEWY_FLOAT32) {
        store_nodes<Types>(static_cast<float*>(p.u) + at, args.u.node, most, c, u);
    } else {
        store_nodes<Types>(static_cast<__nv_bfloat16*>(p.u) + at, args.u.node, most, c, u);
    }
}

// first += T applied to the 16 nodes of `nodes`, second += M, of a pair's weights: side by side.
// As `apply`.
template <bool kApart, int kTerms>
__device__ __forceinline__ void apply_both(Tile<1>& first, Tile<1>& second,
                                           const TileTerms<kTerms, 1>& nodes, const uint4* weights,
                                           int lane) {
    uint4 words[2][kTerms];
#pragma unroll
    for (int i = 0; i < 2 * kTerms; ++i) words[i / kTerms][i % kTerms] = weights[i * kWarp + lane];
    Tile<1> sum[2] = {kApart ? zero_tile<1>() : first, kApart ? zero_tile<1>() : second};
#pragma unroll
    for (int order = kTerms - 1; order >= 0; --order) {
#pragma unroll
        for (int term = 0; term <= order; ++term) {
            const uint32_t (&a)[4] = nodes.x[term][0];
#pragma unroll
            for (int kind = 0; kind < 2; ++kind) {
                const uint4 b = words[kind][order - term];
                mma(sum[kind].x[0][0], a[0], a[1], a[2], a[3], b.x, b.y);
                mma(sum[kind].x[0][1], a[0], a[1], a[2], a[3], b.z, b.w);
            }
        }
    }
    if constexpr (kApart) {
        add(first, sum[0]);
        add(second, sum[1]);
    } else {
        first = sum[0];
        second = sum[1];
    }
}

// U and o of a warp's rows at all nodes from the sums, in their place. Padded nodes have zeros as
// long as all is finite; returns whether it is. What is not finite in R or T shows in o at every
// node of its block: in T it has made a whole column of M = C T so. What is not finite in C alone
// stays at its own node.
template <typename Types>
__device__ __forceinline__ bool read_out(const Shared& shared, const VerifyWork& work, int warp,
                                         int lane, TurnSums<Types>& sums) {
    constexpr int kTerms = Types::kWeightTerms, kTiles = Types::kTiles;
    constexpr bool kApart = Types::kSumApart;
    if (work.nodes == 0) {
        sums.clear();
        return true;
    }
    TileTerms<kTerms, kTiles> rhs[Types::kNodeBlocks];
    bool finite = true;
#pragma unroll
    for (int d = 0; d < Types::kNodeBlocks; ++d) {
        finish_state<Types>(shared, work, d, lane, Values<Types>(shared.values, d, warp),
                            sums.rhs[d], sums.out[d]);
        rhs[d] = split_tile<kTerms>(sums.rhs[d]);
#pragma unroll
        for (int e = 0; e <= d; ++e) {
            apply_both<kApart>(sums.rhs[d], sums.out[d], rhs[e],
                               weights_at<kTerms>(shared, pair_of(d, e), 0), lane);
        }
        finite = finite && is_finite(sums.out[d]);
    }
    return finite;
}

// A turn once more, where something is not finite, and zeros of the padded nodes.
template <typename Types>
__device__ __noinline__ void verify_again(const VerifyArgs& args, int stage, const Turn& turn,
                                          int warp, int lane) {
    const treewy_tree_verify_params& p = args.params;
    VerifyWork work = work_of<Types>(args, turn);
    settle_row(p, load_row(p, work), work);
    const int first = warp * Types::kWarpRows, end = first + Types::kWarpRows;
    const Shared shared = place_stage<Types>(stage);
    __syncwarp();  // what was stored before is overwritten
    verify_selecting<Types>(args, shared, work, {first, end, 1}, lane);
    for (int t = work.nodes; t < p.tree.max_nodes; ++t) {
        if (lane >= Types::kWarpRows) continue;
        store_result<Types>(args, work, t, work.first_row + first + lane, 0.0f, 0.0f);
    }
}

// S_0 [K; Q]^T of a warp's rows, as the parts of the state come to `rows`, where those of a later
// turn follow.
template <typename Types>
__device__ __forceinline__ void multiply_turn(const Shared& shared, unsigned char* rows, int lane,
                                              const StateCopies<Types>& copies,
                                              TurnSums<Types>& sums) {
    sums.clear();
#pragma unroll 1
    for (int part = 0; part < Types::kParts; ++part) {
        wait_copies<Types::kPlaces - 1>();
        __syncwarp();  // a warp reads what its own lanes copied
        multiply_part<Types>(shared, rows, part, lane, sums);
        __syncwarp();  // and copies to where it has read
        copies.copy(part, rows, lane);
        rows += Types::kPlaceBytes;
    }
}

// What a warp of the rows does.
template <typename Types>
__device__ __forceinline__ void verify_turns(const VerifyArgs& args, int warp, int lane) {
    unsigned char* const ring = shared_memory() + warp * Types::kWarpPartBytes;
    StateCopies<Types> copies;
    copies.start(args);
    for (int place = 0; place < Types::kPlaces; ++place) {
        if (place % Types::kParts == 0) copies.enter(args, warp);
        copies.copy(place % Types::kParts, ring + place * Types::kPlaceBytes, lane);
    }
    Turn turn = first_turn(args);
    int place = 0, stage = 0;
    int next_group = Types::kStages % Types::kGroups;  // the one that fills the stage again
    for (int left = count_turns(args); left > 0; --left, next_turn(args, turn)) {
        copies.enter(args, warp);
        const Shared shared = place_stage<Types>(stage);
        sync_at<Types::kStageThreads>(kFilledBarrier + stage);
        TurnSums<Types> sums;
        multiply_turn<Types>(shared, ring + place * Types::kPlaceBytes, lane, copies, sums);
        place = place + Types::kParts == Types::kPlaces ? 0 : place + Types::kParts;
        VerifyWork work = work_of<Types>(args, turn);
        work.nodes = *shared.nodes;
        const bool finite = read_out<Types>(shared, work, warp, lane, sums);
        store_turn<Types>(args, work, work.first_row + warp * Types::kWarpRows + 2 * (lane / 4),
                          lane, sums.out, sums.rhs);
        if (__any_sync(kAllLanes, !finite)) verify_again<Types>(args, stage, turn, warp, lane);
        if (left > Types::kStages) {
            arrive_at<Types::kStageThreads>(read_barrier(stage, next_group));
        }
        stage = stage + 1 == Types::kStages ? 0 : stage + 1;
        next_group = next_group + 1 == Types::kGroups ? 0 : next_group + 1;
    }
    wait_copies<0>();
}

}  // namespace treewy
