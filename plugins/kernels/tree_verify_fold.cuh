// SPDX-License-Identifier: Apache-2.0
//
// A block of verification folds its slot's short history into its own rows of the state, once its
// results are stored: the update of commit_fold.cu, to the bit, for a fold that costs no read of
// the state. S_0 lies in shared memory still, where nothing else has been put, and so does u; the
// keys come again, from L2, where the helper's loads have left them, and take the place of what is
// done with.
//
// Who writes. Rows of the state are read by the block that owns them alone, and have been read
// before it writes the first of them; no two blocks of a launch own the same, and what runs behind
// it waits for its end. The flag of the rows (treewy_history) is read by the block when it begins,
// and says to whoever comes next that the entries are in. A block that is run again finds it set.
//
// Threads. The rows' warps, each for the rows that it had: a tile of 16 is rows 2 kTiles g + 2 tile
// and the next, of a lane's operand A and of its sums, as they lie in u. The helper is done.
//
// Bytes, a layer and row of Qwen3.5-35B-A3B: the state once, written (1 MiB in bfloat16, 2 in
// float32), and the keys again. Instructions, a warp and tile: those of commit_fold.cu. Registers
// are a function's own, so that a block that folds nothing pays a comparison.
#pragma once

#include "commit_fold.cuh"
#include "tree_verify_steps.cuh"

namespace treewy {

__device__ __forceinline__ bool is_to_fold(const VerifyArgs& args, const VerifyWork& work) {
    return args.params.history.folded != nullptr && work.history > args.params.fold_above;
}

// A lane's vectors of the rows of a tile in a span: from shared memory, to where they came from.
template <typename Types, typename Fold>
struct BlockSpan {
    using State = typename Types::State;
    const unsigned char* rows;  // the warp's, in shared memory
    State* state;
    int tile;
    int span;
    int lane;

    // Of the warp's.
    __device__ __forceinline__ int row(int odd) const {
        return 2 * Types::kTiles * (lane / 4) + 2 * tile + odd;
    }
    __device__ __forceinline__ int column(int vector) const {
        return 32 * span + column_of<Fold>(2 * vector, lane % 4);
    }
    __device__ __forceinline__ uint4 load(int odd, int vector) const {
        const int chunk = swapped_chunk<State>(column(vector) / kPer16Bytes<State>, lane / 4);
        return *reinterpret_cast<const uint4*>(rows + row(odd) * Types::kStateRowBytes +
                                               16 * chunk);
    }
    __device__ __forceinline__ void store(int odd, int vector, const uint4& value) const {
        store_once(state + row(odd) * Types::kKeyDim + column(vector), value);
    }
};

// u of a tile of a warp's rows, as it came.
template <typename Types, typename U, int kSteps>
__device__ __forceinline__ void take_u(const Shared& shared, int count, int warp, int tile,
                                       int lane, RawRows<kSteps>& raw) {
#pragma unroll
    for (int i = 0; i < 4 * kSteps; ++i) {
        uint32_t (&word)[2] = raw.word[i / 4][i % 4];
        word[0] = word[1] = 0;
        if (i / 4 * kNodeBlock >= count) continue;
        const Values<Types, U, kNodeBlock> values(shared.history_u, i / 4, warp);
        const auto rows = values.at(i / 2 % 2, i % 2, lane);
        if constexpr (sizeof(U) == 4) {
            word[0] = __float_as_uint(rows.x[2 * tile]);
            word[1] = __float_as_uint(rows.x[2 * tile + 1]);
        } else {
            word[0] = uint32_t{__bfloat16_as_ushort(rows.x[2 * tile])} |
                      uint32_t{__bfloat16_as_ushort(rows.x[2 * tile + 1])} << 16;
        }
    }
}

template <typename Types>
__device__ __forceinline__ void set_folded(const treewy_tree_verify_params& p,
                                           const VerifyWork& work) {
    uint8_t* const flags = folded_flag(p, work);
#pragma unroll
    for (int i = 0; i < Types::kRows / TREEWY_FOLD_ROWS; ++i) flags[i] = 1;
    p.history.folding[work.slot] = 1;  // by all blocks that fold, and all the same
}

// By the rows' warps, once all warps are done with everything else.
template <typename Types>
__device__ __noinline__ void fold_block(const VerifyArgs& args, const VerifyWork& work, int warp,
                                        int lane) {
    using State = typename Types::State;
    constexpr int kSteps = kShortHistory / kNodeBlock;
    using Fold = FoldTypes<State, typename Types::Input, Types::kKeyDim, kSteps, true>;
    constexpr VerifyLayout kLayout = Types::kLayout;
    static_assert(Fold::kSpans == Types::kWarps && Types::kRows % TREEWY_FOLD_ROWS == 0);
    static_assert(sizeof(FoldKeys<Fold>) <= kLayout.not_finite - kLayout.keys);
    static_assert(sizeof(FoldSquares<Fold>) <= kLayout.history_count - kLayout.history_sum);
    const treewy_tree_verify_params& p = args.params;
    const Shared shared = place_shared<Types>(args.layout);
    const FoldMemory<Fold> memory{*reinterpret_cast<FoldKeys<Fold>*>(shared.keys),
                                  *reinterpret_cast<FoldSquares<Fold>*>(shared.history_sum)};
    const FoldUnit at{work.slot, 0, work.key_head, work.history};
    const float g = load_decay(p.history, p.state, at, work.head, lane);
    stage_keys<Fold>(load_keys<Fold>(p.history, p.state, at, warp, lane), at.count, warp, lane,
                     memory);
    sync_at<Types::kRowThreads>(kRowsBarrier);
    FoldFactors factors;
    factors.make(memory, g, at.count, lane);
    const bool wide = sizeof(State) == 4 || p.history.u_dtype == TREEWY_FLOAT32;
    const int first = warp * Types::kWarpRows;
    State* const state =
        static_cast<State*>(p.state.data) + work.slot * p.state.slot_stride +
        (int64_t{work.head} * p.state.value_dim + work.first_row + first) * Types::kKeyDim;
    const unsigned char* const own = shared.state + first * Types::kStateRowBytes;
#pragma unroll 1
    for (int tile = 0; tile < Types::kTiles; ++tile) {
        RawRows<kSteps> raw;
        if (wide) {
            take_u<Types, float>(shared, at.count, warp, tile, lane, raw);
        } else {
            take_u<Types, __nv_bfloat16>(shared, at.count, warp, tile, lane, raw);
        }
        FoldRows<Fold> rows;
        rows.make(raw, factors, at.count, wide, lane);
#pragma unroll
        for (int span = 0; span < Fold::kSpans; ++span) {
            const BlockSpan<Types, Fold> here{own, state, tile, span, lane};
            fold_span(here, rows, memory, at.count, span, factors.from_start, lane);
        }
    }
    if (warp == 0 && lane == 0) set_folded<Types>(p, work);
}

}  // namespace treewy
