// SPDX-License-Identifier: Apache-2.0
//
// What the rows' warps of tree_verify_stream.cuh do: copies of the state, its products with the
// nodes of a turn, U and o from them, and the stores.
#pragma once

#include "tree_verify_inverse.cuh"
#include "tree_verify_selecting.cuh"
#include "tree_verify_turns.cuh"

namespace treewy {

// Operand A of some steps of a part of a warp's rows.
template <typename State, int kSteps>
struct StepRows {
    FragmentA<State> step[kSteps];

    __device__ __forceinline__ void load(const unsigned char* rows, int first, int lane) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i)
            step[i] = load_a<State, 2 * kPartRowBytes, kPartRowBytes>(rows, first + i, lane);
    }
};

// The copies of a warp's rows of the state, a turn ahead of its work.
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
    // Waits for a part.
    __device__ __forceinline__ void wait() const {
        wait_copies<Types::kParts - 1>();
        __syncwarp();  // a warp reads what its own lanes copied
    }
    // Has one of a later turn copied to the place of one that has been read.
    __device__ __forceinline__ void replace(int part, unsigned char* to, int lane) const {
        __syncwarp();
        copy(part, to, lane);
    }
};

// What a lane has of its two rows of V at all nodes: of the nodes 8 j + 2 c + e S_0 k, then U, as
// x[8 j + 2 half + e], and S_0 q, then o, as x[8 j + 4 + 2 half + e].
template <typename Types>
struct TurnSums {
    float x[16 * Types::kNodeBlocks];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (float& sum : x) sum = 0.0f;
    }
    // Of the nodes 8 j .. of the tree; `kind` 0 for U, 1 for o.
    __device__ __forceinline__ float& at(int j, int kind, int i) { return x[8 * j + 4 * kind + i]; }
};

// The keys and queries of a step.
template <typename Types>
__device__ __forceinline__ const unsigned char* step_columns(const Shared& shared, int step) {
    constexpr int kSteps = kSwappedRow / 32;  // of a panel
    return shared.keys + step / kSteps * kPanelBytes<Types> + step % kSteps * 32;
}

// Columns of a product with node block d: keys and queries, or T and M, of its nodes; of all from
// it on where products are wide, which is faster there and slower with more registers in use.
template <typename Types>
__device__ __forceinline__ constexpr int product_columns(int d) {
    const int left = Types::kHalves - 2 * d;
    return 2 * 8 * (Types::kWideProducts || left < 2 ? left : 2);
}

// Starts sums += rows [K; Q]^T of a step with all node blocks from kBlock on, by warpgroups.
template <typename Types, bool kFresh, int kBlock = 0>
__device__ __forceinline__ void start_step(const uint32_t (&rows)[4], const unsigned char* columns,
                                           TurnSums<Types>& sums) {
    start_product<product_columns<Types>(kBlock), kFresh, 16 * kBlock>(
        sums.x, rows, describe<Columns::kSwapped>(columns));
    if constexpr (!Types::kWideProducts && kBlock + 1 < Types::kNodeBlocks) {
        start_step<Types, kFresh, kBlock + 1>(rows, columns + node_row(kNodeBlock) * kSwappedRow,
                                              sums);
    }
}

// The same of several steps from `first` on, the small terms of each first.
template <typename Types, bool kFresh, int kSteps>
__device__ __forceinline__ void start_steps(const Shared& shared,
                                            const StepRows<typename Types::State, kSteps>& rows,
                                            int first, TurnSums<Types>& sums) {
    constexpr int kTerms = Operand<typename Types::State>::kTerms;
    open_products();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        const unsigned char* columns = step_columns<Types>(shared, first + i);
#pragma unroll
        for (int term = kTerms - 1; term >= 0; --term) {
            if (kFresh && i == 0 && term == kTerms - 1) {
                start_step<Types, true>(rows.step[i].x[term], columns, sums);
            } else {
                start_step<Types, false>(rows.step[i].x[term], columns, sums);
            }
        }
    }
    close_products();
}

// The same by each warp.
template <typename Types>
__device__ __forceinline__ void multiply_part(
    const Shared& shared, const StepRows<typename Types::State, Types::kPartSteps>& rows, int part,
    int lane, TurnSums<Types>& sums) {
    using Input = typename Types::Input;
    constexpr bool kApart = Types::kSumApart;
#pragma unroll
    for (int pair = 0; pair < Types::kPartSteps / 2; ++pair) {
        const int both = part * Types::kPartSteps / 2 + pair;
#pragma unroll
        for (int j = 0; j < Types::kHalves; ++j) {
            const FragmentB<Input> b[2] = {load_node_columns<Types>(shared.keys, j, both, lane),
                                           load_node_columns<Types>(shared.queries, j, both, lane)};
            float sum[2][4];
#pragma unroll
            for (int i = 0; i < 8; ++i)
                sum[i / 4][i % 4] = kApart ? 0.0f : sums.at(j, i / 4, i % 4);
#pragma unroll
            for (int order = kMaxOrder; order >= 0; --order) {  // the small first
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
                    for (int kind = 0; kind < 2; ++kind)
                        multiply_order(sum[kind], rows.step[2 * pair + odd], b[kind], odd, order);
                }
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float& all = sums.at(j, i / 4, i % 4);
                all = kApart ? all + sum[i / 4][i % 4] : sum[i / 4][i % 4];
            }
        }
    }
}

// Stores a lane's rows at all nodes of the call, two of each 8; `kind` 0 for U, 1 for o.
template <typename Types, typename T>
__device__ __forceinline__ void store_nodes(T* to, int node_stride, int max_nodes, int c, int kind,
                                            TurnSums<Types>& sums) {
    T* at = to + 2 * c * node_stride;
#pragma unroll
    for (int j = 0; j < Types::kHalves; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float first = sums.at(j, kind, e), second = sums.at(j, kind, 2 + e);
            if (j + 1 == Types::kHalves && 8 * j + 2 * c + e >= max_nodes) continue;
            store_vec(at + (8 * j + e) * node_stride,
                      Vec<T, 2>{from_float<T>(first), from_float<T>(second)});
        }
    }
}

// Stores o and u of a turn.
template <typename Types>
__device__ __forceinline__ void store_turn(const VerifyArgs& args, const VerifyWork& work,
                                           int first, int lane, TurnSums<Types>& sums) {
    using Input = typename Types::Input;
    const treewy_tree_verify_params& p = args.params;
    const int c = lane % 4, most = p.tree.max_nodes;
    store_nodes<Types>(static_cast<Input*>(p.out) + at_head(p.out_stride[0], args.out, work, first),
                       args.out.node, most, c, 1, sums);
    if (p.u == nullptr) return;
    const int64_t at = at_head(p.u_stride[0], args.u, work, first);
    if (p.u_dtype == TREEWY_FLOAT32) {
        store_nodes<Types>(static_cast<float*>(p.u) + at, args.u.node, most, c, 0, sums);
    } else {
        store_nodes<Types>(static_cast<__nv_bfloat16*>(p.u) + at, args.u.node, most, c, 0, sums);
    }
}

// R = beta (V - S_0 k) from the sums, and o's part of S_0, in their place.
template <typename Types>
__device__ __forceinline__ void finish_turn(const Shared& shared, const VerifyWork& work, int warp,
                                            int lane, TurnSums<Types>& sums) {
#pragma unroll
    for (int j = 0; j < Types::kHalves; ++j) {
        const Values<Types> values(shared.values, j / 2, warp);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int t = node_of(j / 2, j % 2, lane % 4, e);
            const NodeFactors factor = shared.factors[t];
            const auto v = values.at(j % 2, e, lane);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float value = t < work.nodes ? as_float(v.x[half]) : 0.0f;
                float& rhs_of = sums.at(j, 0, 2 * half + e);
                rhs_of = factor.beta * (value - factor.key * rhs_of);
                sums.at(j, 1, 2 * half + e) *= factor.query;
            }
        }
    }
}

// R, or U, as terms; zeros of the other half of the last block.
template <typename Types>
__device__ __forceinline__ void split_turn(
    TurnSums<Types>& sums, TileTerms<Types::kWeightTerms, 1> (&to)[Types::kNodeBlocks]) {
#pragma unroll
    for (int j = 0; j < 2 * Types::kNodeBlocks; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t terms[Types::kWeightTerms] = {};
            if (j < Types::kHalves)
                split(sums.at(j, 0, 2 * half), sums.at(j, 0, 2 * half + 1), terms);
#pragma unroll
            for (int term = 0; term < Types::kWeightTerms; ++term)
                to[j / 2].x[term][0][2 * (j % 2) + half] = terms[term];
        }
    }
}

// Starts the products of a term of R with one of T - I and M, of the pairs from (kBlock, kFrom) on,
// by warpgroups.
template <typename Types, int kBlock = 0, int kFrom = 0>
__device__ __forceinline__ void start_apply(
    const Shared& shared, int term, int plane,
    const TileTerms<Types::kWeightTerms, 1> (&rhs)[Types::kNodeBlocks], TurnSums<Types>& sums) {
    const unsigned char* weights = PairWeights<Types>(shared, kBlock, kFrom, 0).at;
    start_product<product_columns<Types>(kBlock), false, 16 * kBlock>(
        sums.x, rhs[kFrom].x[term][0],
        describe<Columns::kMatrices>(weights + plane * PairWeights<Types>::kPlaneBytes));
    if constexpr (!Types::kWideProducts && kBlock + 1 < Types::kNodeBlocks) {
        start_apply<Types, kBlock + 1, kFrom>(shared, term, plane, rhs, sums);
    } else if constexpr (kFrom + 1 < Types::kNodeBlocks) {
        start_apply<Types, kFrom + 1, kFrom + 1>(shared, term, plane, rhs, sums);
    }
}

// All of them, the small terms first.
template <typename Types>
__device__ __forceinline__ void apply_turn(
    const Shared& shared, const TileTerms<Types::kWeightTerms, 1> (&rhs)[Types::kNodeBlocks],
    TurnSums<Types>& sums) {
    open_products();
#pragma unroll
    for (int order = Types::kWeightTerms - 1; order >= 0; --order) {
#pragma unroll
        for (int term = 0; term <= order; ++term)
            start_apply<Types>(shared, term, order - term, rhs, sums);
    }
    close_products();
    wait_products<0>();
}

// Of a tree of one node block: adds T R, or (`kKind` 1) C U, to the sums of U, or of o.
template <typename Types, int kKind>
__device__ __forceinline__ void apply_one(const Shared& shared,
                                          const TileTerms<Types::kWeightTerms, 1>& rhs,
                                          TurnSums<Types>& sums) {
    const unsigned char* weights = PairWeights<Types>(shared, 0, 0, kKind).at;
    open_products();
#pragma unroll
    for (int order = Types::kWeightTerms - 1; order >= 0; --order) {
#pragma unroll
        for (int term = 0; term <= order; ++term) {
            const int plane = (order - term) * PairWeights<Types>::kPlaneBytes;
            start_product<kNodeBlock, false, 4 * kKind, 8>(
                sums.x, rhs.x[term][0], describe<Columns::kEveryOtherMatrices>(weights + plane));
        }
    }
    close_products();
    wait_products<0>();
}

// The same by each warp.
template <typename Types>
__device__ __forceinline__ void apply_blocks(
    const Shared& shared, int lane,
    const TileTerms<Types::kWeightTerms, 1> (&rhs)[Types::kNodeBlocks], TurnSums<Types>& sums) {
    constexpr int kTerms = Types::kWeightTerms;
#pragma unroll
    for (int d = 0; d < Types::kNodeBlocks; ++d) {
#pragma unroll
        for (int e = 0; e <= d; ++e) {
#pragma unroll
            for (int kind = 0; kind < 2; ++kind) {
                uint4 words[kTerms];
                PairWeights<Types>(shared, d, e, kind).load(words, lane);
                float sum[2][4];
#pragma unroll
                for (int i = 0; i < 8; ++i) sum[i / 4][i % 4] = sums.at(2 * d + i / 4, kind, i % 4);
#pragma unroll
                for (int order = kTerms - 1; order >= 0; --order) {
#pragma unroll
                    for (int term = 0; term <= order; ++term) {
                        const uint32_t (&a)[4] = rhs[e].x[term][0];
                        const uint4 b = words[order - term];
                        mma(sum[0], a[0], a[1], a[2], a[3], b.x, b.y);
                        mma(sum[1], a[0], a[1], a[2], a[3], b.z, b.w);
                    }
                }
#pragma unroll
                for (int i = 0; i < 8; ++i) sums.at(2 * d + i / 4, kind, i % 4) = sum[i / 4][i % 4];
            }
        }
    }
}

// U and o of a warp's rows at all nodes from the sums, in their place. Padded nodes have zeros as
// long as all is finite; returns whether it is. What is not finite in R or T shows in o at every
// node of its block: in T it has made a whole column of M = C T so, or U, which C multiplies. What
// is not finite in C alone stays at its own node.
template <typename Types>
__device__ __forceinline__ bool read_out(const Shared& shared, const VerifyWork& work, int warp,
                                         int lane, TurnSums<Types>& sums) {
    TileTerms<Types::kWeightTerms, 1> rhs[Types::kNodeBlocks];
    finish_turn<Types>(shared, work, warp, lane, sums);
    split_turn<Types>(sums, rhs);
    if constexpr (Types::kWholeInverse) {  // the sum of the terms is R
#pragma unroll
        for (int i = 0; i < 4 * Types::kHalves; ++i) sums.at(i / 4, 0, i % 4) = 0.0f;
    }
    if constexpr (Types::kThroughU) {
        apply_one<Types, 0>(shared, rhs[0], sums);
        split_turn<Types>(sums, rhs);
        apply_one<Types, 1>(shared, rhs[0], sums);
    } else if (has_warpgroups()) {
        apply_turn<Types>(shared, rhs, sums);
    } else {
        apply_blocks<Types>(shared, lane, rhs, sums);
    }
    float sum = 0.0f;  // of zeros, unless there is NaN or Inf
#pragma unroll
    for (int i = 0; i < 2 * Types::kNodeBlocks; ++i)
        sum = fmaf(sums.at(i / 2 * 2, 1, i % 2 * 2), 0.0f, sum);
    if (work.nodes == 0) sums.clear();  // of a state that was not read
    return sum == 0.0f || work.nodes == 0;
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
        StepRows<typename Types::State, Types::kPartSteps> own;
        copies.wait();
        own.load(rows, 0, lane);
        multiply_part<Types>(shared, own, part, lane, sums);
        copies.replace(part, rows, lane);
        rows += Types::kPartBytes;
    }
}

// The same by warpgroups: while some steps are under way the next are read. Tensor cores cut sums
// off, 2^-24 of them or so a product: of the 24 of a float32 state that is what float32 has.
template <typename Types>
__device__ __forceinline__ void start_turn(const Shared& shared, unsigned char* rows, int lane,
                                           const StateCopies<Types>& copies,
                                           TurnSums<Types>& sums) {
    constexpr int kSteps =
        sizeof(typename Types::State) == 4 && !Types::kAhead ? 1 : Types::kPartSteps;
#pragma unroll
    for (int part = 0; part < Types::kParts; ++part) {
        copies.wait();
#pragma unroll
        for (int first = 0; first < Types::kPartSteps; first += kSteps) {
            const int step = part * Types::kPartSteps + first;
            if (step >= 2 * kSteps) wait_products<1>();  // whose registers come again
            StepRows<typename Types::State, kSteps> own;
            own.load(rows, first, lane);
            if (step == 0) {
                start_steps<Types, true>(shared, own, step, sums);
            } else {
                start_steps<Types, false>(shared, own, step, sums);
            }
        }
        copies.replace(part, rows, lane);
        rows += Types::kPartBytes;
    }
    wait_products<0>();
}

// What a warp of the rows does.
template <typename Types>
__device__ __forceinline__ void verify_turns(const VerifyArgs& args, int warp, int lane) {
    raise_registers<Types::kRowRegisters>();
    unsigned char* const parts = column_memory() + warp * Types::kWarpPartBytes;
    StateCopies<Types> copies;
    copies.start(args);
    copies.enter(args, warp);
    for (int part = 0; part < Types::kParts; ++part)
        copies.copy(part, parts + part * Types::kPartBytes, lane);
    Turn turn = first_turn(args);
    int stage = 0;
    int next_group = Types::kStages % Types::kGroups;  // the one that fills the stage again
    for (int left = count_turns(args); left > 0; --left, next_turn(args, turn)) {
        copies.enter(args, warp);
        const Shared shared = place_stage<Types>(stage);
        sync_at<Types::kStageThreads>(Types::kFilledBarrier + stage);
        TurnSums<Types> sums;
        if constexpr (Types::kProducts) {
            if (has_warpgroups()) {
                start_turn<Types>(shared, parts, lane, copies, sums);
            } else {
                multiply_turn<Types>(shared, parts, lane, copies, sums);
            }
        } else {
            multiply_turn<Types>(shared, parts, lane, copies, sums);
        }
        VerifyWork work = work_of<Types>(args, turn);
        work.nodes = *shared.nodes;
        const bool finite = read_out<Types>(shared, work, warp, lane, sums);
        store_turn<Types>(args, work, work.first_row + warp * Types::kWarpRows + 2 * (lane / 4),
                          lane, sums);
        if (__any_sync(kAllLanes, !finite)) verify_again<Types>(args, stage, turn, warp, lane);
        if (left > Types::kStages) {
            arrive_at<Types::kReadThreads>(Types::read_barrier(stage, next_group));
        }
        stage = stage + 1 == Types::kStages ? 0 : stage + 1;
        next_group = next_group + 1 == Types::kGroups ? 0 : next_group + 1;
    }
    wait_copies<0>();
}

}  // namespace treewy
