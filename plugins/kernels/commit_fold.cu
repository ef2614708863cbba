// SPDX-License-Identifier: Apache-2.0
//
// Folds of histories into the states of all layers by tensor cores: the update of commit.cu where
// the entries are many and in shapes that mma takes,
//
//   S = exp(G) S_0 + sum over h of u_h (exp(G - G_h) / |k_h|) k_h^T        (V x K a value head)
//
// 16 entries are one step of the instruction: A has 16 rows of V and as columns the entries' u
// times their factor, in two terms beside a bfloat16 state and three beside a float32 one; B the
// raw keys, which are one term (two in float16). The products are summed apart, from zero, and S_0
// is added in float32.
//
// Threads. A unit is a key head of a (row, layer): keys are staged once, as operand B, for all rows
// of V of its value heads, which the four warps share in runs of tiles of 16 rows. A lane has rows
// 2 g and 2 g + 1 of a tile (g = lane / 4) and of 32 columns the eight that make 16 bytes, or twice
// 16, side by side: which column of operand B a key's element is, is free, so that states go from
// memory to the sums and back without a shuffle. They come through shared memory, two pieces of
// 4 KiB a warp ahead, so that they take no registers on their way.
//
// Floor. Bytes: the state in and out and the entries once: 2.2 MiB (bfloat16) or 4.3 (float32) a
// layer and row at 16 entries of Qwen3.5-35B-A3B, u in the state's type; five blocks a
// multiprocessor have 160 KiB on their way. Instructions: 560 a warp and tile of 16 rows, of which
// 32 or 48 are mma, and 110 for its share of the keys: a third of the bytes' time.

#include "commit_fold.cuh"

namespace treewy {
namespace {

constexpr int kFoldAhead = 2;  // pieces of a warp's states on their way

struct FoldParams {
    UpdateParams update;
    int units;  // of a row
    int parts;  // blocks of a row
};

// A warp's states on their way through shared memory: pieces of 16 rows and some spans. A lane
// copies what it will read, so that nobody waits for others; registers hold one vector of each row.
template <typename Types>
struct FoldRing {
    using State = typename Types::State;
    static constexpr int kSpans = Types::kSpansAtOnce, kVectors = Types::kVectors;
    static constexpr int kOfPiece = 2 * kSpans * kVectors;  // vectors of a lane
    static constexpr int kBytes = kFoldAhead * kOfPiece * kWarp * 16;

    uint4* own;  // the lane's first vector

    // Vector `vector` of a span, row 2 g + odd, from a piece's first row and span on.
    static __device__ __forceinline__ int element_of(int odd, int span, int vector, int lane) {
        return (2 * (lane / 4) + odd) * Types::kKeyDim + 32 * span +
               column_of<Types>(2 * vector, lane % 4);
    }
    __device__ __forceinline__ uint4& at(int place, int odd, int span, int vector) const {
        return own[(((place * 2 + odd) * kSpans + span) * kVectors + vector) * kWarp];
    }
    __device__ __forceinline__ void copy(int place, const State* piece, int lane) const {
#pragma unroll
        for (int i = 0; i < kOfPiece; ++i) {
            const int odd = i / kVectors / kSpans, span = i / kVectors % kSpans;
            copy_async(&at(place, odd, span, i % kVectors),
                       piece + element_of(odd, span, i % kVectors, lane));
        }
    }
};

// A span of a piece: from the ring, to where it came from.
template <typename Types>
struct RingSpan {
    const FoldRing<Types>& ring;
    typename Types::State* piece;
    int place;
    int span;  // of the piece
    int lane;

    __device__ __forceinline__ uint4 load(int odd, int vector) const {
        return ring.at(place, odd, span, vector);
    }
    __device__ __forceinline__ void store(int odd, int vector, const uint4& value) const {
        store_once(piece + FoldRing<Types>::element_of(odd, span, vector, lane), value);
    }
};

// Moves a unit, but for the rows that verification has folded (`folding`: any of the slot). All of
// a unit are or none, so that those which are to stay are only not stored.
template <typename Types>
__device__ __forceinline__ void fold_unit(const UpdateParams& p, const FoldUnit& at,
                                          const FoldRing<Types>& ring,
                                          const FoldMemory<Types>& memory, bool folding) {
    using State = typename Types::State;
    constexpr int kPieces = Types::kSpans / Types::kSpansAtOnce;  // of a tile
    const treewy_state_pool& pool = p.commit.state;
    const treewy_history& history = p.history;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    // A unit's value heads, in tiles of 16 rows, of which a warp has a run.
    const int of_head = pool.value_dim / 16, ratio = pool.value_heads / pool.key_heads;
    const int each = (ratio * of_head + kFoldWarps - 1) / kFoldWarps;
    const int first = warp * each, stop = min(first + each, ratio * of_head);
    const int row0 = at.key_head * ratio * pool.value_dim;  // rows of V of all heads
    State* const states = static_cast<State*>(pool.data) + at.layer * pool.layer_stride +
                          at.slot * pool.slot_stride + int64_t{row0} * Types::kKeyDim;
    const bool wide = sizeof(State) == 4 || history.u_dtype == TREEWY_FLOAT32;
    const char* const u = static_cast<const char*>(
        element_at(history.u, history.u_dtype,
                   at.layer * history.u_stride[0] + at.slot * history.u_stride[1] + row0));
    const int u_stride = pool.value_heads * pool.value_dim;
    const int u_tile = 16 * (wide ? 4 : 2);  // bytes from tile to tile
    const auto piece_at = [&](int index) {   // of the run
        return states + (first + index / kPieces) * 16 * Types::kKeyDim +
               index % kPieces * Types::kSpansAtOnce * 32;
    };
    const int pieces = (stop - first) * kPieces;  // none or less: nothing to do but keys
    // What the first tiles need is on its way while the keys are staged.
#pragma unroll
    for (int index = 0; index < kFoldAhead; ++index) {
        if (index < pieces) ring.copy(index, piece_at(index), lane);
        commit_copies();
    }
    RawRows<Types::kSteps> raw;
    float g = 0.0f;
    if (pieces > 0) {
        raw.load(u + first * u_tile, u_stride, at.count, wide, lane);
        g = load_decay(history, pool, at, at.key_head * ratio + first / of_head, lane);
    }
    RawKeys<Types::kSteps> keys;
    if (warp < Types::kSpans) keys = load_keys<Types>(history, pool, at, warp, lane);
    __syncthreads();  // all are done with the keys before
    if (warp < Types::kSpans) stage_keys<Types>(keys, at.count, warp, lane, memory);
    __syncthreads();
    FoldFactors factors{};
    int index = 0, place = 0;
#pragma unroll 1
    for (int tile = first; tile < stop; ++tile) {
        if (tile == first || tile % of_head == 0) {
            if (tile > first) {
                g = load_decay(history, pool, at, at.key_head * ratio + tile / of_head, lane);
            }
            factors.make(memory, g, at.count, lane);
        }
        const bool done =
            folding && *folded_flag(history, pool, at.slot, at.layer,
                                    at.key_head * ratio + tile / of_head, tile % of_head * 16) != 0;
        FoldRows<Types> rows;
        rows.make(raw, factors, at.count, wide, lane);
        if (tile + 1 < stop) raw.load(u + (tile + 1) * u_tile, u_stride, at.count, wide, lane);
#pragma unroll
        for (int part = 0; part < kPieces; ++part, ++index) {
            wait_copies<kFoldAhead - 1>();
#pragma unroll
            for (int span = 0; span < Types::kSpansAtOnce; ++span) {
                if (done) break;
                const RingSpan<Types> here{ring, piece_at(index), place, span, lane};
                fold_span(here, rows, memory, at.count, part * Types::kSpansAtOnce + span,
                          factors.from_start, lane);
            }
            if (index + kFoldAhead < pieces) {
                ring.copy(place, piece_at(index + kFoldAhead), lane);
            }
            commit_copies();
            place = place + 1 == kFoldAhead ? 0 : place + 1;
        }
    }
}

template <typename Types>
__global__ void __launch_bounds__(kCommitThreads, 5)
    fold_histories(const __grid_constant__ FoldParams p) {
    using Ring = FoldRing<Types>;
    __shared__ PathMemory path;
    __shared__ FoldKeys<Types> keys;
    __shared__ FoldSquares<Types> squares;
    static_assert(sizeof(path) + sizeof(keys) + sizeof(squares) <= kMostStatic);
    const FoldMemory<Types> memory{keys, squares};
    const UpdateParams& update = p.update;
    const treewy_state_pool& pool = update.commit.state;
    const int row = static_cast<int>(blockIdx.x) / p.parts;
    const int64_t part = static_cast<int>(blockIdx.x) % p.parts;
    const int slot = update.commit.tree.slot[row];
    const int first = static_cast<int>(part * p.units / p.parts);
    const int stop = static_cast<int>((part + 1) * p.units / p.parts);
    const int64_t of_unit = pool.value_heads / pool.key_heads * flags_of_head(pool);
    FoldUnit at;
    at.slot = slot;
    at.count = history_to_fold(update, row, slot, {first * of_unit, stop * of_unit}, &path);
    if (at.count == 0) return;
    const bool folding = is_folding(update.history, slot);
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const Ring ring{reinterpret_cast<uint4*>(shared_memory() + warp * Ring::kBytes) +
                    static_cast<int>(threadIdx.x) % kWarp};
#pragma unroll 1
    for (int unit = first; unit < stop; ++unit) {
        at.layer = unit / pool.key_heads;
        at.key_head = unit % pool.key_heads;
        if (folding && is_folded(update, slot, {unit * of_unit, (unit + 1) * of_unit})) continue;
        fold_unit<Types>(update, at, ring, memory, folding);
    }
}

// ------------------------------------------------------------------ host

bool fits_tensor_cores(const UpdateParams& p) {
    const treewy_state_pool& pool = p.commit.state;
    const treewy_history& history = p.history;
    bool keys_whole = is_aligned(history.k, 16);
    for (const int64_t stride : history.k_stride) keys_whole = keys_whole && stride % 8 == 0;
    return (pool.key_dim == 64 || pool.key_dim == 128) && pool.value_dim % 16 == 0 &&
           history.capacity <= kFoldEntries && history.k_dtype != TREEWY_FLOAT32 && keys_whole &&
           is_quad_layout(history.u, history.u_dtype, history.u_stride);
}

template <typename Types>
treewy_status launch_types(const char* name, const FoldParams& p, treewy_stream stream) {
    const int64_t blocks = int64_t{p.update.commit.tree.batch} * p.parts;
    prefer_shared_memory(fold_histories<Types>);
    return launch(name, fold_histories<Types>, blocks, kCommitThreads,
                  size_t{kFoldWarps} * FoldRing<Types>::kBytes, stream, p);
}

template <typename State, typename Key>
treewy_status launch_shape(const char* name, const FoldParams& p, treewy_stream stream) {
    const bool narrow = p.update.commit.state.key_dim == 64;
    if (p.update.history.capacity <= 16) {
        return narrow ? launch_types<FoldTypes<State, Key, 64, 1>>(name, p, stream)
                      : launch_types<FoldTypes<State, Key, 128, 1>>(name, p, stream);
    }
    return narrow ? launch_types<FoldTypes<State, Key, 64, 2>>(name, p, stream)
                  : launch_types<FoldTypes<State, Key, 128, 2>>(name, p, stream);
}

}  // namespace

treewy_status launch_fold(const char* name, const UpdateParams& params, treewy_stream stream) {
    // Several rounds of what an H200 holds at once; few to leave where nothing is to fold.
    constexpr int64_t kEnoughBlocks = 4096;
    if (!fits_tensor_cores(params)) return launch_update(name, params, stream);
    const treewy_state_pool& pool = params.commit.state;
    const int64_t batch = params.commit.tree.batch, units = int64_t{pool.layers} * pool.key_heads;
    const int64_t wanted = ceil_div(kEnoughBlocks, batch), parts = wanted < units ? wanted : units;
    if (batch * parts > INT32_MAX || units > INT32_MAX) {
        return fail(TREEWY_UNSUPPORTED, "%s: %lld rows of %lld key heads are too many", name,
                    static_cast<long long>(batch), static_cast<long long>(units));
    }
    const FoldParams p{params, static_cast<int>(units), static_cast<int>(parts)};
    const bool half = params.history.k_dtype == TREEWY_FLOAT16;
    if (pool.dtype == TREEWY_FLOAT32) {
        return half ? launch_shape<float, __half>(name, p, stream)
                    : launch_shape<float, __nv_bfloat16>(name, p, stream);
    }
    return half ? launch_shape<__nv_bfloat16, __half>(name, p, stream)
                : launch_shape<__nv_bfloat16, __nv_bfloat16>(name, p, stream);
}

}  // namespace treewy
