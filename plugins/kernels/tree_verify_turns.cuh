// SPDX-License-Identifier: Apache-2.0
//
// What a block of tree_verify_stream.cuh is compiled for, its barriers and stages, and which heads
// are its own.
#pragma once

#include "tree_verify_steps.cuh"
#include "warpgroup.cuh"

namespace treewy {

// Barriers of the stream: a group's own; of its warps that invert; a stage has been filled; it has
// been read, one for each group that fills it next: with three stages the groups fill a stage
// alternately, and the one may come for it while a warp of the other has not yet been at the
// barrier of the turn before.
inline constexpr int kStreamGroups = 2;
inline constexpr int kGroupBarrier = 1;
inline constexpr int kInvertBarrier = kGroupBarrier + kStreamGroups;
inline constexpr int kFilledBarrier = kInvertBarrier + kStreamGroups;
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
    static constexpr StreamLayout kStream =
        stream_layout(VerifyShape{kKeyDim, 0, kHalves * 8, 0, static_cast<int>(sizeof(Input)),
                                  static_cast<int>(sizeof(State)), kWeightTerms});
    static constexpr int kStages = kStream.stages;
    static constexpr int kGroups = kStreamGroups;
    static constexpr int kGroupWarps = 4;
    static constexpr int kGroupThreads = kGroupWarps * kWarp;
    static constexpr int kThreads = kRowThreads + kGroups * kGroupThreads;
    static constexpr int kStageThreads = kRowThreads + kGroupThreads;  // that meet at a stage
    static constexpr int kPathWarp = kGroupWarps - 1;  // of a group: follows the paths
    static constexpr int kInvertThreads = kNodeBlocks * kWarp;
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
    static constexpr int kPlaces = kStream.places;
    static constexpr int kPartElements = kPartRowBytes / static_cast<int>(sizeof(State));
    static constexpr int kParts = kKeyDim / kPartElements;  // of a state
    static constexpr int kPartSteps = kPartElements / 16;   // of a part
    static constexpr int kWarpPartBytes = kWarpRows * kPartRowBytes;
    static constexpr int kPlaceBytes = kWarps * kWarpPartBytes;
    static constexpr int kMinBlocks = 1;
    // Of a thread, where products are those of warpgroups: as many as a launch has for all.
    static constexpr int kRowRegisters = sizeof(State) == 4 ? 144 : 136;
    static constexpr int kGroupRegisters = sizeof(State) == 4 ? 112 : 120;
    static_assert(kRowThreads * kRowRegisters + kGroups * kGroupThreads * kGroupRegisters <=
                  64 * 1024);
    static constexpr bool kProducts = std::is_same_v<Input, __nv_bfloat16>;  // of warpgroups
    static constexpr bool kFits = kPlaces > 0;
    static_assert(kStages >= kGroups && kGroupWarps >= kNodeBlocks && kPlaces % kParts == 0);
};

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
