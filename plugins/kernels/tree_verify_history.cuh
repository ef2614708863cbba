// SPDX-License-Identifier: Apache-2.0
//
// What a short history (deferred commit) adds to the verification of a small tree
// (tree_verify_small.cuh): the accepted entries h = 0 .. m - 1 that the state does not hold yet,
// whose pseudo-values are known. With G_t counted from the state on, over the history, they add to
// the system of tree_verify_kernel.cuh
//
//   R[t] -= beta_t sum over h of exp(G_t - G_h) (k_t . k_h) u_h
//   o_t  +=        sum over h of exp(G_t - G_h) (q_t . k_h) u_h
//
// and nothing else: no solve, no product with the state, no output of their own.
//
// All of it but the last product is the helper's: its loads, as the length comes after the slot,
// and keys and u after the length; the products of nodes and keys; their weights. The rows' warps
// do not know that there is a history before they have multiplied the state:
//
//     rows' warps: .. S_0 [K; Q]^T | R and the first part of o            | history, U, o, stores
//     helper:      .. keys, weights of the tree | weights of the history  |
//
// Path sums of the nodes begin behind the history, as the weights of the tree need no more, so that
// nothing of the tree waits for the history's decays but what the state is multiplied by. A weight
// is product times a factor of the node times one of the entry: G_t - G_h is the sum of two numbers
// that are not positive.
//
// Keys go from memory to operand B in registers, as no other product wants them; what is contracted
// comes in the order in which a lane has it, eight neighbours at a time, and operand A is read in
// that order too. The weights take the place of keys and queries once the rows' warps are done with
// these, so that as many blocks share a multiprocessor as without a history.
//
// More than without, a row of the batch and entry: 12 KiB (u in bfloat16 and raw keys of 16 bits;
// 20 with u in float32). For every 16 entries begun a warp of the rows takes about 40 instructions
// (bfloat16 state and u; 110 in float32), the helper 400.
#pragma once

#include "tree_verify_steps.cuh"
#include "tree_verify_weights.cuh"

namespace treewy {

inline constexpr int kShortBlocks = kShortHistory / kNodeBlock;

// Whether the helper asks for keys and decays between the nodes' gates and their path sums, where
// it may wait for the length, or behind these.
inline constexpr bool kKeysBeforePaths = true;

// A lane's part of 16 raw keys of a history, one of each half a group of four lanes: 16 bytes at
// chunk 2 c + pair % 2 + 8 (pair / 2) for steps 2 pair and 2 pair + 1, c = lane % 4. In that order
// no lanes that read operand A meet in a bank.
template <typename Types>
struct HistoryKeys {
    using Key = typename Types::Input;
    static constexpr int kPairs = Types::kKeyDim / 32;
    uint4 x[2][kPairs];

    static __device__ __forceinline__ int chunk(int pair, int lane) {
        return 2 * (lane % 4) + pair % 2 + 8 * (pair / 2);
    }

    __device__ __forceinline__ void load(const VerifyArgs& args, const VerifyWork& work, int block,
                                         int lane) {
        const treewy_history& history = args.params.history;
        const int first = block * kNodeBlock + lane / 4, stride = args.params.state.key_heads;
        const Key* from = static_cast<const Key*>(history.k) + work.slot * history.k_stride[0] +
                          (first * stride + work.key_head) * Types::kKeyDim;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const bool there = first + 8 * half < work.history;
#pragma unroll
            for (int pair = 0; pair < kPairs; ++pair) {
                x[half][pair] = make_uint4(0, 0, 0, 0);
                if (!there) continue;
                x[half][pair] =
                    *reinterpret_cast<const uint4*>(from + 8 * half * stride * Types::kKeyDim +
                                                    chunk(pair, lane) * kPer16Bytes<Key>);
            }
        }
    }

    // Steps 2 pair and 2 pair + 1 of eight keys as operand B.
    __device__ __forceinline__ FragmentB<Key> operand(int half, int pair) const {
        const uint4& words = x[half][pair];
        const uint32_t word[4] = {words.x, words.y, words.z, words.w};
        FragmentB<Key> b;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t terms[Operand<Key>::kTerms];
            split_word<Key>(word[i], terms);
#pragma unroll
            for (int term = 0; term < Operand<Key>::kTerms; ++term)
                b.x[term][i / 2][i % 2] = terms[term];
        }
        return b;
    }
};

// 16 keys as operand A of step `odd`, from their halves as operand B: the same registers.
template <typename T>
__device__ __forceinline__ FragmentA<T> as_rows(const FragmentB<T> (&b)[2], int odd) {
    FragmentA<T> a;
#pragma unroll
    for (int term = 0; term < Operand<T>::kTerms; ++term) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a.x[term][i] = b[i % 2].x[term][odd][i / 2];
    }
    return a;
}

// Steps 2 pair and 2 pair + 1 of 16 rows in shared memory as operand A, in that order.
template <typename Types>
__device__ __forceinline__ void load_in_order(const unsigned char* rows, int pair, int lane,
                                              FragmentA<typename Types::Input> (&a)[2]) {
    using Input = typename Types::Input;
    const int g = lane / 4;
    const unsigned char* from = rows + g * Types::kInputRowBytes +
                                16 * swapped_chunk<Input>(HistoryKeys<Types>::chunk(pair, lane), g);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint4 words =
            *reinterpret_cast<const uint4*>(from + 8 * half * Types::kInputRowBytes);
        const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t terms[Operand<Input>::kTerms];
            split_word<Input>(word[i], terms);
#pragma unroll
            for (int term = 0; term < Operand<Input>::kTerms; ++term)
                a[i / 2].x[term][i % 2 * 2 + half] = terms[term];
        }
    }
}

// Weights of 16 entries of a history, 16 rows a unit: of 16 nodes those of the keys (W) and of the
// queries (C); of 8 nodes both. Word 2 j + i of a lane holds row 8 j + g, entries 8 i + 2 c, + 1.
template <typename Types>
struct HistoryWeights {
    static constexpr int kUnits = Types::kNodeRows / 8;
    static constexpr int kTerms = Types::kWeightTerms;
    uint32_t x[kUnits][kTerms][4];

    static __device__ __forceinline__ uint4* place(const Shared& shared, int block, int unit) {
        return shared.history_weights + (block * kUnits + unit) * kTerms * kWarp;
    }
    __device__ __forceinline__ void store(const Shared& shared, int block, int lane) const {
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
#pragma unroll
            for (int term = 0; term < kTerms; ++term) {
                const uint32_t (&words)[4] = x[unit][term];
                place(shared, block, unit)[term * kWarp + lane] =
                    make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
    }
};

// What the helper does of a history.
template <typename Types>
struct HistoryHelper {
    using Input = typename Types::Input;
    using Weights = HistoryWeights<Types>;
    static constexpr int kUnits = Weights::kUnits;

    HistoryKeys<Types> keys;  // of the block at hand
    HistoryDecays<1> decays;
    float after;   // decay from the lane's entry to the last one
    float2 start;  // minus the log decay of the whole history

    // Starts the loads of keys and decays, once the length is known.
    __device__ __forceinline__ void load(const VerifyArgs& args, const Shared& shared,
                                         const VerifyWork& work, int lane);
    // Starts the copies of u, for all rows' warps.
    __device__ __forceinline__ void copy_values(const VerifyArgs& args, const Shared& shared,
                                                const VerifyWork& work, int lane) const;
    __device__ __forceinline__ void settle_decays(const Shared& shared, const VerifyWork& work,
                                                  int lane);
    // Weights of all entries, once keys, queries and their norms are there.
    __device__ __forceinline__ void weigh(const VerifyArgs& args, const Shared& shared,
                                          const VerifyWork& work, int lane);

  private:
    __device__ __forceinline__ void dot(const Shared& shared, int lane,
                                        float (&value)[kUnits][2][4], float (&own)[2][4]) const;
    __device__ __forceinline__ Weights weigh_block(const Shared& shared, int block, int lane) const;
};

// Starts the copies of u of all rows of a block of V, zeros behind the last entry.
template <typename Types, typename U>
__device__ __forceinline__ void copy_history_rows(const VerifyArgs& args, const Shared& shared,
                                                  const VerifyWork& work, int lane) {
    const treewy_tree_verify_params& p = args.params;
    const int dim = p.state.value_dim, stride = p.state.value_heads * dim;
    const U* from = static_cast<const U*>(p.history.u) + work.slot * p.history.u_stride[0] +
                    (work.head * dim + work.first_row);
    for (int block = 0; block * kNodeBlock < work.history; ++block) {
#pragma unroll
        for (int warp = 0; warp < Types::kWarps; ++warp) {
            Values<Types, U, kNodeBlock>(shared.history_u, block, warp)
                .template copy<true>(from + warp * Types::kWarpRows, stride, block, work.history,
                                     lane);
        }
    }
}

// There is one type of u for a float32 state.
template <typename Types>
__device__ __forceinline__ bool has_wide_history(const VerifyArgs& args) {
    return sizeof(typename Types::State) == 4 || args.params.history.u_dtype == TREEWY_FLOAT32;
}

template <typename Types>
__device__ __forceinline__ void HistoryHelper<Types>::load(const VerifyArgs& args,
                                                           const Shared& shared,
                                                           const VerifyWork& work, int lane) {
    if (lane == 0) *shared.history_count = work.history;
    if (work.history == 0) return;
    decays.load(args, work, lane);
    keys.load(args, work, 0, lane);
}

template <typename Types>
__device__ __forceinline__ void HistoryHelper<Types>::copy_values(const VerifyArgs& args,
                                                                  const Shared& shared,
                                                                  const VerifyWork& work,
                                                                  int lane) const {
    if (work.history == 0) return;
    if (has_wide_history<Types>(args)) {
        copy_history_rows<Types, float>(args, shared, work, lane);
    } else {
        copy_history_rows<Types, __nv_bfloat16>(args, shared, work, lane);
    }
    commit_copies();
}

template <typename Types>
__device__ __forceinline__ void HistoryHelper<Types>::settle_decays(const Shared& shared,
                                                                    const VerifyWork& work,
                                                                    int lane) {
    start = make_float2(0.0f, 0.0f);
    if (work.history == 0) return;
    double upto;
    const double total = decays.sum(shared, work, lane, true, upto);
    after = fast_exp2(static_cast<float>(total - upto));
    start = two_floats(-total);
}

// Products of all rows with the 16 keys, and of these with each other.
template <typename Types>
__device__ __forceinline__ void HistoryHelper<Types>::dot(const Shared& shared, int lane,
                                                          float (&value)[kUnits][2][4],
                                                          float (&own)[2][4]) const {
#pragma unroll
    for (int i = 0; i < 8 * kUnits; ++i) value[i / 8][i / 4 % 2][i % 4] = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) own[i / 4][i % 4] = 0.0f;
#pragma unroll
    for (int pair = 0; pair < HistoryKeys<Types>::kPairs; ++pair) {
        const FragmentB<Input> b[2] = {keys.operand(0, pair), keys.operand(1, pair)};
#pragma unroll
        for (int i = 0; i < 4; ++i)
            multiply<0, kMaxOrder>(own[i % 2], as_rows(b, i / 2), b[i % 2], i / 2);
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
            FragmentA<Input> a[2];
            load_in_order<Types>(shared.keys + unit * kNodeBlock * Types::kInputRowBytes, pair,
                                 lane, a);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                multiply<0, kMaxOrder>(value[unit][i % 2], a[i / 2], b[i % 2], i / 2);
        }
    }
}

template <typename Types>
__device__ __forceinline__ HistoryWeights<Types> HistoryHelper<Types>::weigh_block(
    const Shared& shared, int block, int lane) const {
    const int g = lane / 4, c = lane % 4;
    float value[kUnits][2][4], own[2][4];
    dot(shared, lane, value, own);
    // Factors of entries 8 i + 2 c + e: norms are on the diagonal, of which lane 4 g + g / 2 has
    // that of rows g and 8 + g.
    float entry[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float square = __shfl_sync(kAllLanes, own[i][2 * i + e], 9 * c + 4 * e);
            entry[i][e] = inverse_norm(square, 1.0f) *
                          __shfl_sync(kAllLanes, after, block * kNodeBlock + 8 * i + 2 * c + e);
        }
    }
    Weights weights;
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int kind = Types::kEight ? j : unit, t = Types::kEight ? g : 8 * j + g;
            const float decay = decay_between(shared.path_sum[t], make_float2(0.0f, 0.0f));
            const float node =
                decay * (kind == 0 ? -shared.beta[t] * shared.key_norm[t] : shared.query_norm[t]);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float (&x)[4] = value[unit][i];
                uint32_t terms[Weights::kTerms];
                split(node * entry[i][0] * x[2 * j], node * entry[i][1] * x[2 * j + 1], terms);
#pragma unroll
                for (int term = 0; term < Weights::kTerms; ++term)
                    weights.x[unit][term][2 * j + i] = terms[term];
            }
        }
    }
    return weights;
}

template <typename Types>
__device__ __forceinline__ void HistoryHelper<Types>::weigh(const VerifyArgs& args,
                                                            const Shared& shared,
                                                            const VerifyWork& work, int lane) {
    constexpr int kBoth = Types::kRowThreads + kWarp;
    if (work.history == 0) return;
    Weights weights[kShortBlocks];
#pragma unroll
    for (int block = 0; block < kShortBlocks; ++block) {
        if (block * kNodeBlock >= work.history) continue;
        if (block > 0) keys.load(args, work, block, lane);
        weights[block] = weigh_block(shared, block, lane);
    }
    sync_at<kBoth>(kNodesFreeBarrier);
#pragma unroll
    for (int block = 0; block < kShortBlocks; ++block) {
        if (block * kNodeBlock < work.history) weights[block].store(shared, block, lane);
    }
    wait_copies<0>();  // u
    __syncwarp();
    arrive_at<kBoth>(kHistoryBarrier);
}

// u of 16 entries as operand A. bfloat16 values are one term.
template <typename Types, typename U, int kTerms>
__device__ __forceinline__ TileTerms<kTerms, Types::kTiles> load_history_values(
    const Shared& shared, int block, int warp, int lane) {
    const Values<Types, U, kNodeBlock> values(shared.history_u, block, warp);
    TileTerms<kTerms, Types::kTiles> terms;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const auto first = values.at(j, 0, lane), second = values.at(j, 1, lane);
#pragma unroll
        for (int i = 0; i < 2 * Types::kTiles; ++i) {
            uint32_t pair[kTerms];
            if constexpr (sizeof(U) == 2) {
                pair[0] = uint32_t{__bfloat16_as_ushort(first.x[i])} |
                          uint32_t{__bfloat16_as_ushort(second.x[i])} << 16;
            } else {
                split(first.x[i], second.x[i], pair);
            }
#pragma unroll
            for (int term = 0; term < kTerms; ++term)
                terms.x[term][i / 2][2 * j + i % 2] = pair[term];
        }
    }
    return terms;
}

// R and o += the weights of the history applied to its u.
template <typename Types, typename U>
__device__ __forceinline__ void add_history_rows(const Shared& shared, const VerifyWork& work,
                                                 int warp, int lane, Tile<Types::kTiles>& rhs,
                                                 Tile<Types::kTiles>& out) {
    using Weights = HistoryWeights<Types>;
    constexpr int kTerms = sizeof(U) == 2 ? 1 : Weights::kTerms, kTiles = Types::kTiles;
    constexpr bool kApart = Types::kSumApart;
#pragma unroll 1
    for (int block = 0; block * kNodeBlock < work.history; ++block) {
        const auto terms = load_history_values<Types, U, kTerms>(shared, block, warp, lane);
        const uint4* weights = Weights::place(shared, block, 0);
        if constexpr (Types::kEight) {  // of nodes 8 to 15 there is nothing: columns of o
            Tile<kTiles> both;
#pragma unroll
            for (int i = 0; i < 4 * kTiles; ++i) {
                both.x[i / 4][0][i % 4] = rhs.x[i / 4][0][i % 4];
                both.x[i / 4][1][i % 4] = out.x[i / 4][0][i % 4];
            }
            apply<kApart, kTerms, kTiles, Weights::kTerms>(both, terms, weights, lane);
#pragma unroll
            for (int i = 0; i < 4 * kTiles; ++i) {
                rhs.x[i / 4][0][i % 4] = both.x[i / 4][0][i % 4];
                out.x[i / 4][0][i % 4] = both.x[i / 4][1][i % 4];
            }
        } else {
            apply<kApart, kTerms, kTiles, Weights::kTerms>(rhs, terms, weights, lane);
            apply<kApart, kTerms, kTiles, Weights::kTerms>(out, terms,
                                                           Weights::place(shared, block, 1), lane);
        }
    }
}

// What the rows' warps learn of the history once they are done with keys and queries.
template <typename Types>
__device__ __forceinline__ void meet_history(const Shared& shared, VerifyWork& work) {
    work.history = *shared.history_count;
    if (work.history > 0) arrive_at<Types::kRowThreads + kWarp>(kNodesFreeBarrier);
}

// The same, once the helper has brought weights and u.
template <typename Types>
__device__ __forceinline__ void add_history(const VerifyArgs& args, const Shared& shared,
                                            const VerifyWork& work, const Place& at,
                                            Tile<Types::kTiles>& rhs, Tile<Types::kTiles>& out) {
    if (work.history == 0) return;
    sync_at<Types::kRowThreads + kWarp>(kHistoryBarrier);
    if (has_wide_history<Types>(args)) {
        add_history_rows<Types, float>(shared, work, at.warp, at.lane, rhs, out);
    } else {
        add_history_rows<Types, __nv_bfloat16>(shared, work, at.warp, at.lane, rhs, out);
    }
}

}  // namespace treewy
