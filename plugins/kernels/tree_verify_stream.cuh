// SPDX-License-Identifier: Apache-2.0
//
// Tree verification of many heads by blocks that stay: 17 to 48 nodes without a history. The
// equations are those of tree_verify_kernel.cuh, the algebra that of tree_verify_inverse.cuh, whose
// T and M know nothing of the state. So a block takes 128 rows of V of one value head after the
// other (a turn each), and its warps work on different ones at the same time:
//
//     two groups of warps: copies | paths, products | weights | T and M    turns i + 1, i + 2
//     the rows' warps:     S_0 [K; Q]^T | R | U and o | stores             turn i
//     copies of the state                                                  turns i + 1 ..
//
// The groups take every other turn each. What they make of one lies in a stage, of which there are
// two or three; a stage is filled, read by the rows' warps, and filled again, by the other group
// where there are three. The state comes in parts of 128 bytes a row, in a ring that holds one
// state or several: a warp copies its own 16 rows of a part into the place of the part that it has
// just multiplied, so that nobody waits for anybody else there, and the memory is asked for the
// next states while this one is worked on.
//
// Nothing in the rows' work depends on the tree: pairs of node blocks without a path between them
// have weights of zero. Branches there would keep the compiler from mixing what does not depend on
// each other, and with two of these warps a scheduler that is all that hides latency.
//
// Floor: see tree_verify_kernel.cuh.
#pragma once

#include "tree_verify_inverse.cuh"
#include "tree_verify_selecting.cuh"
#include "tree_verify_steps.cuh"

namespace treewy {

// Barriers of the stream: a group's own; its keys and queries have been copied; a stage has been
// filled; it has been read, one for each group that fills it next: with three stages the groups
// fill a stage alternately, and the one may come for it while a warp of the other has not yet been
// at the barrier of the turn before.
inline constexpr int kStreamGroups = 2;
inline constexpr int kGroupBarrier = 1;
inline constexpr int kCopiedBarrier = kGroupBarrier + kStreamGroups;
inline constexpr int kFilledBarrier = kCopiedBarrier + kStreamGroups;
inline constexpr int kReadBarrier = kFilledBarrier + kMaxStages;
static_assert(kReadBarrier + kMaxStages * kStreamGroups <= 16);

// Where the stage has been read that `group` fills next.
__device__ __forceinline__ int read_barrier(int stage, int group) {
    return kReadBarrier + kStreamGroups * stage + group;
}

// `kHalves`: of the largest tree of the call, 8 nodes each.
template <typename Input_, typename State_, int kHalves_>
struct StreamTypes {
    using Input = Input_;
    using State = State_;
    static constexpr int kKeyDim = 128;
    static constexpr int kTiles = 1;
    static constexpr int kWarps = 8;  // that own rows
    static constexpr int kRowThreads = kWarps * kWarp;
    static constexpr int kHalves = kHalves_;
    static constexpr int kNodeBlocks = (kHalves + 1) / 2;
    static constexpr int kWeightTerms = sizeof(State) == 4 ? 3 : 2;
    static constexpr StreamLayout kStream = stream_layout(
        VerifyShape{kKeyDim, 0, kNodeBlocks * kNodeBlock, 0, static_cast<int>(sizeof(Input)),
                    static_cast<int>(sizeof(State)), kWeightTerms});
    static constexpr int kStages = kStream.stages;
    static constexpr int kGroups = kStreamGroups;
    static constexpr int kGroupWarps = 4;
    static constexpr int kGroupThreads = kGroupWarps * kWarp;
    static constexpr int kThreads = kRowThreads + kGroups * kGroupThreads;
    static constexpr int kStageThreads = kRowThreads + kGroupThreads;  // that meet at a stage
    static constexpr int kPairs = kNodeBlocks * (kNodeBlocks + 1) / 2;
    static constexpr bool kOneBlock = false;
    static constexpr int kNodeRows = kNodeBlock;
    static constexpr bool kAligned = true;
    static constexpr bool kShort = false;
    static constexpr bool kHistory = false;
    static constexpr int kMaskWords = ceil_blocks(kNodeBlocks * kNodeBlock, 32);
    static constexpr int kHelpers = 1;  // the warp of a group that follows the paths
    static constexpr int kHelperThreads = kWarp;
    static constexpr int kNodesPerHelper = kMaskWords;
    static constexpr int kWarpRows = 16 * kTiles;
    static constexpr int kRows = kWarps * kWarpRows;
    static constexpr int kStateShift = 1;
    static constexpr int kInputRowBytes = kKeyDim * static_cast<int>(sizeof(Input));
    static constexpr bool kSumApart = sizeof(State) == 4;
    static constexpr int kPlaces = kStream.places;
    static constexpr int kPartElements = kPartRowBytes / static_cast<int>(sizeof(State));
    static constexpr int kParts = kKeyDim / kPartElements;  // of a state
    static constexpr int kPartPairs = kPartElements / 32;   // pairs of steps of a part
    static constexpr int kWarpPartBytes = kWarpRows * kPartRowBytes;
    static constexpr int kPlaceBytes = kWarps * kWarpPartBytes;
    static constexpr int kMinBlocks = 1;
    static_assert(kStages >= kGroups && kGroupWarps >= kNodeBlocks && kPlaces % kParts == 0);
};

template <typename Types>
__device__ __forceinline__ Shared place_stage(int stage) {
    constexpr VerifyLayout kLayout = Types::kStream.stage;
    return place_shared(
        kLayout, shared_memory() + Types::kStream.first_stage + stage * Types::kStream.stage_bytes);
}

// The heads of all rows of the batch, every gridDim.x-th of which is a block's.
struct Turn {
    int row;
    int block;  // of the row: value head and tile of V
};

__device__ __forceinline__ Turn first_turn(const VerifyArgs& args) {
    const int at = static_cast<int>(blockIdx.x), row = at / args.turns.across;
    return {row, at - row * args.turns.across};
}

__device__ __forceinline__ int count_turns(const VerifyArgs& args) {
    const int all = args.turns.across * args.params.tree.batch, grid = static_cast<int>(gridDim.x);
    return (all - 1 - static_cast<int>(blockIdx.x)) / grid + 1;
}

__device__ __forceinline__ void next_turn(const VerifyArgs& args, Turn& turn) {
    turn.row += args.turns.rows;
    turn.block += args.turns.blocks;
    if (turn.block < args.turns.across) return;
    turn.block -= args.turns.across;
    ++turn.row;
}

template <typename Types>
__device__ __forceinline__ VerifyWork work_of(const VerifyArgs& args, const Turn& turn) {
    const unsigned tiles = args.params.state.value_dim / Types::kRows;
    const unsigned block = static_cast<unsigned>(turn.block);
    const unsigned head = divide(block, args.tiles_inverse), tile = block - head * tiles;
    VerifyWork work;
    work.first_tile = tile == 0;
    work.first_row = static_cast<int>(tile) * Types::kRows;
    work.head = static_cast<int>(head);
    work.row = turn.row;
    work.key_head = static_cast<int>(divide(head, args.ratio_inverse));
    return work;
}

// ------------------------------------------------------------------ groups

// Starts the copies of `rows` (keys or queries) of all nodes; zeros from node `nodes` on.
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
        unsigned char* place =
            to + row * Types::kInputRowBytes + 16 * swapped_chunk<Input>(chunk, row);
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
    constexpr int kTerms = Types::kWeightTerms, kWorkers = Types::kGroupWarps - 1;
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
        keep_products<kTerms>(shared, i, at.lane, products);
    }
    sync_at<Types::kGroupThreads>(kGroupBarrier + at.group);
    if (at.thread < Types::kNodeBlocks * kNodeBlock) make_factor(shared, at.thread);
#pragma unroll 1
    for (int i = first; i < Types::kPairs; i += kWorkers) {
        const NodePair pair = nth_pair(i);
        if (is_related(shared, pair.d, pair.e)) {
            PairProducts products;
            take_products<kTerms>(shared, i, at.lane, products);
            weigh_pair<Types>(shared, pair.d, pair.e, products, at.lane);
        } else {
            zero_pair<kTerms>(shared, i, at.lane);
        }
    }
    sync_at<Types::kGroupThreads>(kGroupBarrier + at.group);
}

// What a group does: the nodes of every kGroups-th turn.
template <typename Types>
__device__ __forceinline__ void prepare_turns(const VerifyArgs& args, const GroupPlace& at) {
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
        arrive_at<Types::kStageThreads>(kFilledBarrier + stage);
        stage += Types::kGroups;
        if (stage >= Types::kStages) stage -= Types::kStages;
    }
}

// ------------------------------------------------------------------ rows

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

template <typename Types>
__global__ void __launch_bounds__(Types::kThreads, Types::kMinBlocks)
    tree_verify_stream_kernel(const __grid_constant__ VerifyArgs args) {
    const int thread = static_cast<int>(threadIdx.x);
    follow_previous<Types>(args, work_of<Types>(args, first_turn(args)), thread);
    if (thread < Types::kRowThreads) {
        verify_turns<Types>(args, thread / kWarp, thread % kWarp);
    } else {
        const int own = thread - Types::kRowThreads;
        const int at = own % Types::kGroupThreads;
        prepare_turns<Types>(args, {own / Types::kGroupThreads, at, at / kWarp, at % kWarp});
    }
}

}  // namespace treewy
