// SPDX-License-Identifier: Apache-2.0
//
// Tree verification by the inverse of the tree's whole matrix, for up to 64 nodes without a
// history. The equations, the rows of a lane and the products are those of tree_verify_kernel.cuh;
// there U is solved block after block in the registers of every warp. Here the block's first warps
// invert I - W once, by the same steps with the identity in place of R, and what they get serves
// all rows of V:
//
//   U = R + (T - I) R, T = (I - W)^-1        o = S_0 part + M R, M = C T
//
// T and M are of N^2 and made while the state is on its way. What every warp then does has no chain
// in it: S_0 [K; Q]^T of all nodes in one pass over the state, which is read from shared memory
// (and cut into terms, where it is float32) once and not once for every 16 nodes, R as terms once,
// and sums over node blocks that wait for nothing. Products of (I - beta k k^T) are contractions,
// so that no entry of T exceeds 1, nor one of M K^-1/2.
//
// Threads. Every warp owns rows of V, there are no helpers: the first follows the paths while the
// others take the products of nodes, whose diagonals are the norms; warp e makes T and M of the
// columns of node block e. The multiprocessor's other block works while one waits.
//
// At 40 nodes and batch 64 this takes 165 us where the other way takes 207 (H200). With a bfloat16
// state it was no faster, and slower above 48 nodes: there the work between barriers is too little.
#pragma once

#include "tree_verify_kernel.cuh"

namespace treewy {

template <typename Input_, int kNodeBlocks_>
struct WholeTypes {
    using Input = Input_;
    using State = float;
    static constexpr int kKeyDim = 128;
    static constexpr int kTiles = 1;
    static constexpr int kWarps = 8;
    static constexpr int kNodeBlocks = kNodeBlocks_;
    static constexpr bool kOneBlock = false;
    static constexpr int kNodeRows = kNodeBlock;
    static constexpr bool kAligned = true;
    static constexpr bool kShort = false;
    static constexpr bool kHistory = false;
    static constexpr int kMaskWords = ceil_blocks(kNodeBlocks * kNodeBlock, 32);
    static constexpr int kThreads = kWarps * kWarp;
    static constexpr int kRowThreads = kThreads;
    static constexpr int kHelpers = 1;  // the warp that follows the paths
    static constexpr int kHelperThreads = kWarp;
    static constexpr int kNodesPerHelper = kMaskWords;
    static constexpr int kWarpRows = 16 * kTiles;
    static constexpr int kRows = kWarps * kWarpRows;
    static constexpr int kStateShift = 1;
    static constexpr int kStateRowBytes = kKeyDim * static_cast<int>(sizeof(State));
    static constexpr int kInputRowBytes = kKeyDim * static_cast<int>(sizeof(Input));
    static constexpr bool kSumApart = true;
    static constexpr int kWeightTerms = 3;
    static constexpr VerifyLayout kLayout = verify_layout(
        VerifyShape{kKeyDim, 0, kNodeBlocks * kNodeBlock, 0, static_cast<int>(sizeof(Input)),
                    static_cast<int>(sizeof(State)), kWeightTerms},
        kRows, kNodeBlocks, true);
    static constexpr int kMinBlocks = 2;  // of a multiprocessor: what shared memory allows
    // Every pair of node blocks has a warp of its own, beside the one that follows the paths.
    static_assert(kNodeBlocks * (kNodeBlocks + 1) / 2 < kWarps);
};

inline constexpr int kInvertersBarrier = 1;

struct HeadInputs {
    float A_log;
    float dt_bias;
};

// The pair (node block d, node block e before it or itself) in shared memory.
__device__ __forceinline__ int pair_of(int d, int e) { return d * (d + 1) / 2 + e; }

__device__ __forceinline__ bool is_related(const Shared& shared, int d, int e) {
    return (shared.related[d] >> e) & 1u;
}

// Products of a pair of node blocks (d, e): 16 keys and 16 queries of d with the 16 keys of e, as
// the sums come.
struct PairProducts {
    float x[2][2][4];  // kind (keys, queries), half of e
};

// Adds rows_a rows_b^T of two steps to two sums, which are added up in the end.
template <typename Input>
__device__ __forceinline__ void add_steps(float (&sum)[2][4], const FragmentA<Input> (&a)[2],
                                          const FragmentB<Input>& b) {
    constexpr bool kOneTerm = Operand<Input>::kTerms == 1;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
        multiply<0, 0>(sum[kOneTerm ? odd : 0], a[odd], b, odd);
        multiply<1, kMaxOrder>(sum[1], a[odd], b, odd);
    }
}

// The products of a pair, and of a node block with itself its norms. By one warp.
template <typename Types>
__device__ __forceinline__ void multiply_nodes(const Shared& shared, int d, int e, int lane,
                                               PairProducts& products) {
    using Input = typename Types::Input;
    constexpr int kRow = Types::kInputRowBytes;
    const unsigned char* keys = shared.keys + d * kNodeBlock * kRow;
    const unsigned char* queries = shared.queries + d * kNodeBlock * kRow;
    const unsigned char* columns = shared.keys + e * kNodeBlock * kRow;
    float sum[2][2][2][4] = {}, square[2][2][4] = {};
#pragma unroll 2
    for (int pair = 0; pair < Types::kKeyDim / 32; ++pair) {
        FragmentA<Input> key[2], query[2];
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            key[odd] = load_a<Input, kRow, 8 * kRow>(keys, 2 * pair + odd, lane);
            query[odd] = load_a<Input, kRow, 8 * kRow>(queries, 2 * pair + odd, lane);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const auto b = load_b<Input, kRow>(columns + 8 * half * kRow, pair, lane);
            add_steps(sum[0][half], key, b);
            add_steps(sum[1][half], query, b);
            if (d == e) {
                const auto own = load_b<Input, kRow>(queries + 8 * half * kRow, pair, lane);
                add_steps(square[half], query, own);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        products.x[i / 8][i / 4 % 2][i % 4] =
            sum[i / 8][i / 4 % 2][0][i % 4] + sum[i / 8][i / 4 % 2][1][i % 4];
    }
    if (d != e) return;
    float low[4], high[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        low[i] = square[0][0][i] + square[0][1][i];
        high[i] = square[1][0][i] + square[1][1][i];
    }
    store_norms(shared.query_norm + d * kNodeBlock, low, high, key_scale<Types::kKeyDim>(), lane);
    store_norms(shared.key_norm + d * kNodeBlock, products.x[0][0], products.x[0][1], 1.0f, lane);
}

// Makes a pair's products its weights: W from the keys', C from the queries'.
template <typename Types>
__device__ __forceinline__ void weigh_pair(const Shared& shared, int d, int e,
                                           PairProducts& products, int lane) {
    constexpr int kTerms = Types::kWeightTerms;
    const int g = lane / 4, column = e * kNodeBlock + 2 * (lane % 4);
    float (&w)[2][4] = products.x[0];
    float (&c)[2][4] = products.x[1];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int t = d * kNodeBlock + 8 * j + g;
        const float2 to = shared.path_sum[t];
        const float key = -shared.beta[t] * shared.key_norm[t], query = shared.query_norm[t];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = column + 8 * half;
            const float4 from = *reinterpret_cast<const float4*>(shared.path_sum + i);
            const float2 norm = *reinterpret_cast<const float2*>(shared.key_norm + i);
            const uint32_t mask = shared.ancestors[t * shared.mask_words + i / 32] >> (i % 32);
            const float low = norm.x * decay_between(to, make_float2(from.x, from.y));
            const float high = norm.y * decay_between(to, make_float2(from.z, from.w));
            const bool first = mask & 1u, second = mask & 2u;
            w[half][2 * j] = first && t != i ? key * low * w[half][2 * j] : 0.0f;
            w[half][2 * j + 1] = second && t != i + 1 ? key * high * w[half][2 * j + 1] : 0.0f;
            c[half][2 * j] = first ? query * low * c[half][2 * j] : 0.0f;
            c[half][2 * j + 1] = second ? query * high * c[half][2 * j + 1] : 0.0f;
        }
    }
    uint4* place = weights_at<kTerms>(shared, pair_of(d, e), 0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (d == e) {
            store_own<kTerms>(place, shared.dense + d * 128, w[half], half, lane);
        } else {
            store_terms<kTerms>(place, w[half], half, 0, lane);
        }
        store_terms<kTerms>(place + kTerms * kWarp, c[half], half, 0, lane);
    }
}

// Row r = 2 g + half is 1 at node r, else 0.
__device__ __forceinline__ Tile<1> identity_tile(int lane) {
    Tile<1> tile;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int row = 2 * (lane / 4) + i / 2 % 2, node = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        tile.x[0][i / 4][i % 4] = row == node ? 1.0f : 0.0f;
    }
    return tile;
}

__device__ __forceinline__ void subtract(Tile<1>& from, const Tile<1>& other) {
#pragma unroll
    for (int i = 0; i < 8; ++i) from.x[0][i / 4][i % 4] -= other.x[0][i / 4][i % 4];
}

// A tile of columns of node block d (its nodes) and rows of node block e, transposed, in the form
// of weights of d by e.
template <int kTerms>
__device__ __forceinline__ void store_transposed(uint4* place, const Tile<1>& tile, int lane) {
    const int g = lane / 4, c = lane % 4;
    uint32_t* words = reinterpret_cast<uint32_t*>(place + 8 * c + g % 4) + g / 4;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            uint32_t terms[kTerms];
            split(tile.x[0][j][e], tile.x[0][j][2 + e], terms);
#pragma unroll
            for (int term = 0; term < kTerms; ++term)
                words[(term * kWarp + 4 * e) * 4 + 2 * j] = terms[term];
        }
    }
}

// The columns of node block e of T and M, by warp e, in place of W and C. `blocks`: with nodes.
template <typename Types>
__device__ __forceinline__ void invert_tree(const Shared& shared, const VerifyWork& work,
                                            int blocks, int e, int lane) {
    constexpr int kTerms = Types::kWeightTerms, kBlocks = Types::kNodeBlocks;
    constexpr bool kApart = Types::kSumApart;
    if (e < blocks) {
        const int own = pair_of(e, e);
        invert<kTerms>(weights_at<kTerms>(shared, own, 0), shared.dense + e * 128, lane);
    }
    sync_at<kBlocks * kWarp>(kInvertersBarrier);
    TileTerms<kTerms, 1> known[kBlocks];
    Tile<1> inverse[kBlocks], read[kBlocks];
#pragma unroll
    for (int d = 0; d < kBlocks; ++d) {
        if (d < e || d >= blocks || (d > e && !is_related(shared, d, e))) continue;
        inverse[d] = d == e ? identity_tile(lane) : zero_tile<1>();
        read[d] = zero_tile<1>();
#pragma unroll
        for (int f = 0; f < d; ++f) {
            if (f < e || !is_related(shared, d, f) || (f > e && !is_related(shared, f, e)))
                continue;
            const int pair = pair_of(d, f);
            apply<kApart>(inverse[d], known[f], weights_at<kTerms>(shared, pair, 0), lane);
            apply<kApart>(read[d], known[f], weights_at<kTerms>(shared, pair, 1), lane);
        }
        const bool two = work.nodes - d * kNodeBlock > kNodeBlock / 2;
        const int pair = pair_of(d, d);
        known[d] =
            solve_own<kApart, kTerms>(inverse[d], weights_at<kTerms>(shared, pair, 0), two, lane);
        apply<kApart>(read[d], known[d], weights_at<kTerms>(shared, pair, 1), lane);
    }
    sync_at<kBlocks * kWarp>(kInvertersBarrier);
#pragma unroll
    for (int d = 0; d < kBlocks; ++d) {
        if (d < e || d >= blocks || (d > e && !is_related(shared, d, e))) continue;
        const int pair = pair_of(d, e);
        if (d == e) subtract(inverse[d], identity_tile(lane));
        store_transposed<kTerms>(weights_at<kTerms>(shared, pair, 0), inverse[d], lane);
        store_transposed<kTerms>(weights_at<kTerms>(shared, pair, 1), read[d], lane);
    }
}

// What a warp has of its rows at all nodes: S_0 K^T, then R; S_0 Q^T, then o.
template <typename Types>
struct WholeSums {
    Tile<Types::kTiles> rhs[Types::kNodeBlocks];
    Tile<Types::kTiles> out[Types::kNodeBlocks];
};

// S_0 [K; Q]^T of a warp's rows, in one pass over the state.
template <typename Types>
__device__ __forceinline__ void multiply_all(const Shared& shared, const VerifyWork& work,
                                             const Place& at, WholeSums<Types>& sums) {
    using Input = typename Types::Input;
    constexpr int kTiles = Types::kTiles, kInputRow = Types::kInputRowBytes;
#pragma unroll
    for (int d = 0; d < Types::kNodeBlocks; ++d) {
        sums.rhs[d] = sums.out[d] = zero_tile<kTiles>();
    }
#pragma unroll 1
    for (int pair = 0; pair < Types::kKeyDim / 32; ++pair) {
        FragmentA<typename Types::State> a[kTiles][2];
        load_state<Types>(shared, pair, at.warp, at.lane, a);
#pragma unroll
        for (int j = 0; j < 2 * Types::kNodeBlocks; ++j) {
            if (j > 0 && 8 * j >= work.nodes) continue;
            const auto key =
                load_b<Input, kInputRow>(shared.keys + 8 * j * kInputRow, pair, at.lane);
            const auto query =
                load_b<Input, kInputRow>(shared.queries + 8 * j * kInputRow, pair, at.lane);
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                multiply_pair<Types::kSumApart>(sums.rhs[j / 2].x[i][j % 2], a[i], key);
                multiply_pair<Types::kSumApart>(sums.out[j / 2].x[i][j % 2], a[i], query);
            }
        }
    }
}

// Values of v of a lane's rows at the nodes of a node block, asked for early.
template <typename Types>
struct LaneValues {
    using Rows = Vec<typename Types::Input, 2 * Types::kTiles>;
    static constexpr bool kZeroed = true;
    Rows x[2][2];

    __device__ __forceinline__ void load(const VerifyArgs& args, const VerifyWork& work, int d,
                                         const Place& place) {
        const treewy_tree_verify_params& p = args.params;
        const auto* from = static_cast<const typename Types::Input*>(p.v) +
                           at_head(p.v_stride[0], args.v, work, place.first);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int t = node_of(d, i / 2, place.lane % 4, i % 2);
            x[i / 2][i % 2] =
                t < work.nodes ? *reinterpret_cast<const Rows*>(from + t * args.v.node) : Rows{};
        }
    }
    __device__ __forceinline__ const Rows& at(int j, int e, int) const { return x[j][e]; }
};

// U and o of a warp's rows at all nodes from the sums, stored block by block. Returns whether they
// are finite.
template <typename Types>
__device__ __forceinline__ bool read_out(const VerifyArgs& args, const Shared& shared,
                                         const VerifyWork& work, int blocks, const Place& at,
                                         const LaneValues<Types> (&values)[Types::kNodeBlocks],
                                         WholeSums<Types>& sums) {
    constexpr int kTerms = Types::kWeightTerms, kTiles = Types::kTiles;
    constexpr bool kApart = Types::kSumApart;
    TileTerms<kTerms, kTiles> rhs[Types::kNodeBlocks];
    bool finite = true;
#pragma unroll
    for (int d = 0; d < Types::kNodeBlocks; ++d) {
        if (d >= blocks) {
            store_block<Types>(args, work, d, at.first, zero_tile<kTiles>(), zero_tile<kTiles>(),
                               at.lane % 4);
            continue;
        }
        finish_state<Types>(shared, work, d, at.lane, values[d], sums.rhs[d], sums.out[d]);
        rhs[d] = split_tile<kTerms>(sums.rhs[d]);
        Tile<kTiles> u = sums.rhs[d];
#pragma unroll
        for (int e = 0; e <= d; ++e) {
            if (e < d && !is_related(shared, d, e)) continue;
            const int pair = pair_of(d, e);
            apply<kApart>(u, rhs[e], weights_at<kTerms>(shared, pair, 0), at.lane);
            apply<kApart>(sums.out[d], rhs[e], weights_at<kTerms>(shared, pair, 1), at.lane);
        }
        store_block<Types>(args, work, d, at.first, sums.out[d], u, at.lane % 4);
        finite = finite && is_finite(sums.out[d]);
    }
    return finite;
}

// Pairs of node blocks (d, e) of a tree, e <= d, in the order of pair_of.
struct NodePair {
    int d;
    int e;
};
__device__ __forceinline__ NodePair nth_pair(int n) {
    const int d = n < 1 ? 0 : n < 3 ? 1 : n < 6 ? 2 : 3;
    return {d, n - pair_of(d, 0)};
}

// W and C of all pairs: products while the first warp follows the paths, weights when both are
// there.
template <typename Types>
__device__ __forceinline__ void couple_nodes(const VerifyArgs& args, const Shared& shared,
                                             const VerifyWork& work,
                                             const NodeInputs (&inputs)[Types::kNodesPerHelper],
                                             const HeadInputs& head, int blocks, const Place& at) {
    constexpr int kPairs = Types::kNodeBlocks * (Types::kNodeBlocks + 1) / 2;
    const NodePair pair = nth_pair(at.warp - 1);
    const bool has_pair = at.warp > 0 && at.warp <= kPairs && pair.d < blocks;
    PairProducts products;
    if (at.warp == 0) {
        follow_paths<Types>(args, shared, work, inputs, head.A_log, head.dt_bias, at.thread);
    } else if (has_pair) {
        multiply_nodes<Types>(shared, pair.d, pair.e, at.lane, products);
    }
    __syncthreads();
    for (int t = at.thread; t < Types::kNodeBlocks * kNodeBlock; t += Types::kThreads) {
        if (t < blocks * kNodeBlock) make_factor(shared, t);
    }
    if (has_pair && is_related(shared, pair.d, pair.e)) {
        weigh_pair<Types>(shared, pair.d, pair.e, products, at.lane);
    }
    __syncthreads();
}

// Starts all copies, waits for keys and queries, and makes W and C.
template <typename Types>
__device__ __forceinline__ void prepare_nodes(const VerifyArgs& args, const Shared& shared,
                                              VerifyWork& work, const Place& at) {
    const treewy_tree_verify_params& p = args.params;
    const RowInputs row = load_row(p, work);
    NodeInputs inputs[Types::kNodesPerHelper];
    HeadInputs head{};
    if (at.warp == 0) {
        read_nodes<Types>(p, work, at.thread, inputs);
        head = {p.A_log[work.head], p.dt_bias[work.head]};
    }
    copy_nodes<Types>(args, shared, work, at.thread);
    commit_copies();
    settle_row(p, row, work);
    if (work.nodes > 0) copy_state<Types>(args, shared, work, at);
    commit_copies();
    if (at.thread == 0) *shared.not_finite = 0;
    wait_copies<1>();  // all but the state
    const int blocks = (work.nodes + kNodeBlock - 1) / kNodeBlock;
    zero_padding<Types>(shared, work, blocks, blocks, at.thread);
    __syncthreads();
    couple_nodes<Types>(args, shared, work, inputs, head, blocks, at);
}

template <typename Types>
__global__ void __launch_bounds__(Types::kThreads, Types::kMinBlocks)
    tree_verify_whole_kernel(const __grid_constant__ VerifyArgs args) {
    const Shared shared = place_shared<Types>(args.layout);
    VerifyWork work = find_work<Types>(args);
    const Place at = find_place<Types>(work);
    follow_previous<Types>(args, work, at);
    prepare_nodes<Types>(args, shared, work, at);
    const int blocks = (work.nodes + kNodeBlock - 1) / kNodeBlock;
    if (at.warp < Types::kNodeBlocks) invert_tree<Types>(shared, work, blocks, at.warp, at.lane);
    LaneValues<Types> values[Types::kNodeBlocks];
#pragma unroll
    for (int d = 0; d < Types::kNodeBlocks; ++d) values[d].load(args, work, d, at);
    WholeSums<Types> sums;
    wait_copies<0>();
    __syncwarp();  // a warp reads what its own lanes copied
    if (blocks > 0) multiply_all<Types>(shared, work, at, sums);
    __syncthreads();
    if (!read_out<Types>(args, shared, work, blocks, at, values, sums)) *shared.not_finite = 1;
    __syncthreads();
    if (work.nodes > 0 && *shared.not_finite != 0) {
        verify_selecting<Types>(args, work, at.warp, at.lane);
    }
}

}  // namespace treewy
