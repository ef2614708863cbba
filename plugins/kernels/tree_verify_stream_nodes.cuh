// SPDX-License-Identifier: Apache-2.0
//
// What the groups of tree_verify_stream.cuh do: the nodes of a turn, from the copies of keys,
// queries and values to T and M in a stage.
#pragma once

#include "tree_verify_inverse.cuh"
#include "tree_verify_turns.cuh"

namespace treewy {

// Starts the copies of keys, or of queries, of all nodes; zeros from node `nodes` on.
template <typename Types>
__device__ __forceinline__ void copy_turn_rows(unsigned char* to, const typename Types::Input* from,
                                               int stride, int nodes, int thread) {
    using Input = typename Types::Input;
    constexpr int kChunks = Types::kKeyDim / kPer16Bytes<Input>;
    constexpr int kAll = Types::kNodeBlocks * kNodeBlock * kChunks;
#pragma unroll
    for (int start = 0; start < kAll; start += Types::kGroupThreads) {
        const int at = start + thread, row = at / kChunks, chunk = at % kChunks;
        if (start + Types::kGroupThreads > kAll && at >= kAll) continue;
        unsigned char* place = to + chunk / 8 * kPanelBytes<Types> +
                               node_row(row) * kSwappedRow + 16 * (chunk % 8 ^ row % 8);
        if (row < nodes) {
            copy_async(place, from + row * stride + chunk * kPer16Bytes<Input>);
        } else {
            *reinterpret_cast<uint4*>(place) = make_uint4(0, 0, 0, 0);
        }
    }
}

// The same of the keys and queries of a turn.
template <typename Types>
__device__ __forceinline__ void copy_turn(const VerifyArgs& args, const Shared& shared,
                                          const VerifyWork& work, int thread) {
    using Input = typename Types::Input;
    const treewy_tree_verify_params& p = args.params;
    copy_turn_rows<Types>(
        shared.keys,
        static_cast<const Input*>(p.k) + work.row * p.k_stride[0] + work.key_head * args.k.head,
        args.k.node, work.nodes, thread);
    copy_turn_rows<Types>(
        shared.queries,
        static_cast<const Input*>(p.q) + work.row * p.q_stride[0] + work.key_head * args.q.head,
        args.q.node, work.nodes, thread);
}

// Starts the copies of the values of the real nodes, to where `Values` has them.
template <typename Types>
__device__ __forceinline__ void copy_turn_values(const VerifyArgs& args, const Shared& shared,
                                                 const VerifyWork& work, int thread) {
    using Input = typename Types::Input;
    constexpr int kChunks = Types::kRows / kPer16Bytes<Input>;  // of a node
    constexpr int kNodeBytes = Types::kWarpRows * static_cast<int>(sizeof(Input));
    constexpr int kAll = Types::kHalves * 8 * kChunks;
    const treewy_tree_verify_params& p = args.params;
    const Input* from =
        static_cast<const Input*>(p.v) + at_head(p.v_stride[0], args.v, work, work.first_row);
#pragma unroll
    for (int start = 0; start < kAll; start += Types::kGroupThreads) {
        const int at = start + thread, t = at / kChunks, chunk = at % kChunks;
        if (t >= work.nodes || (start + Types::kGroupThreads > kAll && at >= kAll)) continue;
        const int warp = 16 * chunk / kNodeBytes, node = (t & 8) + t % 2 * 4 + t / 2 % 4;
        const int place = (t / kNodeBlock * Types::kWarps + warp) * kNodeBlock + node;
        copy_async(shared.values + place * kNodeBytes + 16 * chunk % kNodeBytes,
                   from + t * args.v.node + chunk * kPer16Bytes<Input>);
    }
}

// Where a thread of a group stands.
struct GroupPlace {
    int group;
    int thread;
    int warp;
    int lane;
};

// What a group needs of a turn before anything else, asked for a turn ahead.
template <typename Types>
struct TurnInputs {
    RowInputs row;
    NodeInputs nodes[Types::kNodesPerHelper];  // the first warp's
    float2 head;

    __device__ __forceinline__ void load(const VerifyArgs& args, const VerifyWork& work, int warp,
                                         int lane) {
        const treewy_tree_verify_params& p = args.params;
        row = load_row(p, work);
        if (warp > 0) return;
        read_nodes<Types>(p, work, lane, nodes);
        head = make_float2(p.A_log[work.head], p.dt_bias[work.head]);
    }
};

// W and C of all pairs, zero where no node of the one has an ancestor in the other, and the nodes'
// factors: the first warp follows the paths while the others take products.
template <typename Types>
__device__ __forceinline__ void couple_turn(const VerifyArgs& args, const Shared& shared,
                                            const VerifyWork& work, const TurnInputs<Types>& inputs,
                                            const GroupPlace& at) {
    constexpr int kWorkers = Types::kGroupWarps - 1;
    const int first = at.warp == 0 ? Types::kPairs : at.warp - 1;
    if (at.warp == 0) {
        arrive_at<Types::kGroupThreads>(kCopiedBarrier + at.group);
        follow_paths<Types>(args, shared, work, inputs.nodes, inputs.head.x, inputs.head.y,
                            at.lane);
    } else {
        sync_at<Types::kGroupThreads>(kCopiedBarrier + at.group);
    }
#pragma unroll 1
    for (int i = first; i < Types::kPairs; i += kWorkers) {
        const NodePair pair = nth_pair(i);
        PairProducts products;
        multiply_nodes<Types>(shared, pair.d, pair.e, at.lane, products);
        keep_products<Types>(shared, pair.d, pair.e, at.lane, products);
    }
    sync_at<Types::kGroupThreads>(kGroupBarrier + at.group);
    if (at.thread < Types::kNodeBlocks * kNodeBlock) make_factor(shared, at.thread);
#pragma unroll 1
    for (int i = first; i < Types::kPairs; i += kWorkers) {
        const NodePair pair = nth_pair(i);
        if (is_related(shared, pair.d, pair.e)) {
            PairProducts products;
            take_products<Types>(shared, pair.d, pair.e, at.lane, products);
            weigh_pair<Types>(shared, pair.d, pair.e, products, at.lane);
        } else {
            PairWeights<Types>(shared, pair.d, pair.e, 0).clear(at.lane);
            PairWeights<Types>(shared, pair.d, pair.e, 1).clear(at.lane);
        }
    }
    sync_at<Types::kGroupThreads>(kGroupBarrier + at.group);
}

// What a group does: the nodes of every kGroups-th turn.
template <typename Types>
__device__ __forceinline__ void prepare_turns(const VerifyArgs& args, const GroupPlace& at) {
    lower_registers<Types::kGroupRegisters>();
    const int count = count_turns(args), barrier = kGroupBarrier + at.group;
    Turn turn = first_turn(args);
    for (int i = 0; i < at.group; ++i) next_turn(args, turn);
    VerifyWork work = work_of<Types>(args, turn);
    TurnInputs<Types> inputs;
    if (at.group < count) inputs.load(args, work, at.warp, at.lane);
    for (int i = at.group, stage = at.group; i < count; i += Types::kGroups) {
        const Shared shared = place_stage<Types>(stage);
        settle_row(args.params, inputs.row, work);
        if (i >= Types::kStages) {
            sync_at<Types::kStageThreads>(read_barrier(stage, at.group));
        }
        copy_turn<Types>(args, shared, work, at.thread);
        commit_copies();
        copy_turn_values<Types>(args, shared, work, at.thread);
        commit_copies();
        if (at.thread == 0) *shared.nodes = work.nodes;
        wait_copies<1>();  // all but the values
        couple_turn<Types>(args, shared, work, inputs, at);
        const int nodes = work.nodes;
        for (int j = 0; j < Types::kGroups; ++j) next_turn(args, turn);
        work = work_of<Types>(args, turn);
        if (i + Types::kGroups < count) inputs.load(args, work, at.warp, at.lane);
        invert_tree<Types>(shared, nodes, at.warp, at.lane, barrier);
        wait_copies<0>();
        show_to_products();
        arrive_at<Types::kStageThreads>(kFilledBarrier + stage);
        stage += Types::kGroups;
        if (stage >= Types::kStages) stage -= Types::kStages;
    }
}

}  // namespace treewy
