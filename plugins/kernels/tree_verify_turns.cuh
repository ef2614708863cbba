// SPDX-License-Identifier: Apache-2.0
//
// What a block of tree_verify_stream.cuh is compiled for, its barriers and stages, and which heads
// are its own.
#pragma once

#include "tree_verify_steps.cuh"
#include "warpgroup.cuh"

namespace treewy {

// A group's own barrier is kGroupBarrier + group; StreamTypes has the others.
inline constexpr int kStreamGroups = 2;
inline constexpr int kGroupBarrier = 1;

// `kHalves`: of the largest tree of the call, 8 nodes each. `kAhead`: two more warps for each group
// fill its stages with keys, queries, values and paths.
template <typename Input_, typename State_, int kHalves_, bool kAhead_ = false>
struct StreamTypes {
    using Input = Input_;
    using State = State_;
    static constexpr int kKeyDim = 128;
    static constexpr int kTiles = 1;
    static constexpr int kWarps = 8;  // that own rows
    static constexpr int kRowThreads = kWarps * kWarp;
    static constexpr int kHalves = kHalves_;
    static constexpr bool kAhead = kAhead_;
    static constexpr int kNodeBlocks = (kHalves + 1) / 2;
    static constexpr int kWeightTerms = sizeof(State) == 4 ? 3 : 2;
    static constexpr StreamLayout kStream =
        stream_layout(VerifyShape{kKeyDim, 0, kHalves * 8, 0, static_cast<int>(sizeof(Input)),
                                  static_cast<int>(sizeof(State)), kWeightTerms},
                      kAhead_);
    static constexpr int kStages = kStream.stages;
    static constexpr int kGroups = kStreamGroups;
    static constexpr int kGroupWarps = 4;
    static constexpr int kGroupThreads = kGroupWarps * kWarp;
    static constexpr int kInputThreads = kAhead ? 2 * kWarp : 0;  // of a group
    static constexpr int kThreads = kRowThreads + kGroups * (kGroupThreads + kInputThreads);
    static constexpr int kReadyThreads = kInputThreads + kGroupThreads;  // that see inputs come
    static constexpr int kStageThreads = kRowThreads + kGroupThreads;    // that see a stage filled
    static constexpr int kReadThreads =                                  // that see it read
        kRowThreads + (kAhead ? kInputThreads : kGroupThreads);
    static constexpr int kPathWarp = kGroupWarps - 1;  // of a group: follows the paths
    static constexpr int kInvertThreads = kAhead ? kGroupThreads : kNodeBlocks * kWarp;
    // Barriers behind the groups' own. Ahead: the inputs of a stage are there; it is filled; it has
    // been read. Else: of a group's warps that invert; a stage is filled; it has been read, one for
    // each group that fills it next: with three stages the groups fill a stage alternately, and the
    // one may come for it while a warp of the other has not yet been at the barrier of the turn
    // before.
    static constexpr int kReadyBarrier = kGroupBarrier + kGroups;
    static constexpr int kInvertBarrier = kAhead ? kGroupBarrier : kGroupBarrier + kGroups;
    static constexpr int kFilledBarrier =
        kAhead ? kReadyBarrier + kStages : kInvertBarrier + kGroups;
    static constexpr int kReadBarrier = kFilledBarrier + kStages;
    static_assert(kReadBarrier + kStages * (kAhead ? 1 : kGroups) <= 16);
    static_assert(!kAhead || kStages % kGroups == 0);
    static constexpr int kPairs = kNodeBlocks * (kNodeBlocks + 1) / 2;
    static constexpr bool kOneBlock = false;
    static constexpr int kNodeRows = kNodeBlock;
    static constexpr bool kAligned = true;
    static constexpr bool kShort = false;
    static constexpr bool kHistory = false;
    static constexpr bool kKeysStay = false;
    static constexpr int kMaskWords = ceil_blocks(kNodeBlocks * kNodeBlock, 32);
    static constexpr int kHelpers = 1;  // the warp of a group that follows the paths
    static constexpr int kHelperThreads = kWarp;
    static constexpr int kNodesPerHelper = kMaskWords;
    static constexpr int kWarpRows = 16 * kTiles;
    static constexpr int kRows = kWarps * kWarpRows;
    static constexpr int kStateShift = 1;
    static constexpr int kInputRowBytes = kKeyDim * static_cast<int>(sizeof(Input));
    static constexpr bool kSumApart = sizeof(State) == 4;
    // U = T R, R being the sum of its terms; else R and (T - I) R.
    static constexpr bool kWholeInverse = kSumApart;
    static constexpr int kPartElements = kPartRowBytes / static_cast<int>(sizeof(State));
    static constexpr int kParts = kKeyDim / kPartElements;  // of a state
    static constexpr int kPartSteps = kPartElements / 16;   // of a part
    static constexpr int kWarpPartBytes = kWarpRows * kPartRowBytes;
    static constexpr int kPartBytes = kWarps * kWarpPartBytes;
    static constexpr int kMinBlocks = 1;
    // Of a thread, where products are those of warpgroups: as many as a launch has for all.
    static constexpr int kLaunchRegisters = 64 * 1024 / kThreads / 8 * 8;
    static constexpr int kRowRegisters = kAhead ? 120 : sizeof(State) == 4 ? 144 : 136;
    static constexpr int kGroupRegisters = kAhead ? 96 : sizeof(State) == 4 ? 112 : 120;
    static constexpr int kInputRegisters = 48;
    static_assert(kRowThreads * kRowRegisters + kGroups * (kGroupThreads * kGroupRegisters +
                                                           kInputThreads * kInputRegisters) <=
                  kThreads * kLaunchRegisters);
    static constexpr bool kProducts = std::is_same_v<Input, __nv_bfloat16>;  // of warpgroups
    static constexpr bool kWideProducts = kAhead;
    // o = S_0 part + C U, and no M, where the groups have the longer work (of one node block); else
    // o = S_0 part + M R beside U.
    static constexpr bool kThroughU = kAhead && sizeof(State) == 4;
    static_assert(!kThroughU || (kWholeInverse && kNodeBlocks == 1));
    static constexpr bool kFits = kStream.total <= kStreamShared;
    static_assert(kStages >= kGroups && kGroupWarps >= kNodeBlocks);

    // Where the stage has been read that `group` has next.
    static __device__ __forceinline__ int read_barrier(int stage, int group) {
        return kReadBarrier + (kAhead ? stage : kGroups * stage + group);
    }
};

// The stage of a group's next turn.
template <typename Types>
__device__ __forceinline__ int next_stage(int stage) {
    return stage + (stage + Types::kGroups < Types::kStages ? Types::kGroups
                                                            : Types::kGroups - Types::kStages);
}

// Waits until the stage of turn `i` has been read, if it was in use.
template <typename Types>
__device__ __forceinline__ void wait_free(int i, int stage, int group) {
    if (i >= Types::kStages) sync_at<Types::kReadThreads>(Types::read_barrier(stage, group));
}

template <typename Types>
__device__ __forceinline__ Shared place_stage(int stage) {
    constexpr VerifyLayout kLayout = Types::kStream.stage;
    return place_shared(
        kLayout, column_memory() + Types::kStream.first_stage + stage * Types::kStream.stage_bytes);
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

__device__ __forceinline__ void skip_turns(const VerifyArgs& args, Turn& turn, int count) {
    for (int i = 0; i < count; ++i) next_turn(args, turn);
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

}  // namespace treewy
