// SPDX-License-Identifier: Apache-2.0
//
// A block of tree verification: what it is compiled for, what it works on, and its shared memory.
// tree_verify_kernel.cuh says how the parts work together.
#pragma once

#include "fragment.cuh"
#include "tree_verify_plan.h"

namespace treewy {

// Strides within a row of the batch, in elements.
struct NodeStrides {
    int node;
    int head;
};

// How a block's turns follow each other where it has several (tree_verify_stream.cuh).
struct TurnSteps {
    int across;  // turns of a row of the batch
    int rows;    // that as many turns pass as there are blocks, whole ones
    int blocks;  // and turns beside
};

struct VerifyArgs {
    treewy_tree_verify_params params;
    NodeStrides q, k, v, out, u;
    VerifyLayout layout;
    uint32_t tiles_inverse;  // 2^32 over the blocks that share a value head
    uint32_t ratio_inverse;  // 2^32 over the value heads that share a key head
    uint32_t first_blocks;   // those that find room on the device at once
    TurnSteps turns;
};

// 2^32 / divisor, rounded up; 0 for 1.
inline uint32_t inverse_of(int divisor) {
    return static_cast<uint32_t>((uint64_t{1} << 32) / static_cast<uint64_t>(divisor)) +
           (divisor > 1 && (divisor & (divisor - 1)) != 0 ? 1u : 0u);
}

// x / divisor for what is far below 2^16.
__device__ __forceinline__ unsigned divide(unsigned x, uint32_t inverse) {
    return inverse == 0 ? x : __umulhi(x, inverse);
}

// Barriers beside the block's: of the rows' warps; of the helpers; of the rows' warps and the
// helper that inverted the weights of block r of a group, kInverseBarrier + r; or the one that
// takes the products of a small tree. After a history: the rows' warps are done with keys and
// queries; its weights and u are there.
inline constexpr int kRowsBarrier = 1;
inline constexpr int kHelperBarrier = 2;
inline constexpr int kInverseBarrier = 3;
inline constexpr int kProductsBarrier = 4;
inline constexpr int kPathsBarrier = 5;
inline constexpr int kNodesFreeBarrier = 6;
inline constexpr int kHistoryBarrier = 7;

// What a block works on.
struct VerifyWork {
    int row;
    int slot;
    int head;
    int key_head;
    int first_row;  // of V
    int nodes;      // real ones
    int history;    // entries in use
    bool first_tile;
};

enum class Nodes {
    kEight,         // at most 8 and no history, so that the layout is known to the compiler
    kSixteen,       // the same, at most 16
    kEightAfter,    // at most 8 after a history of at most 32 entries, likewise
    kSixteenAfter,  // the same, at most 16
    kAny,
    kUnaligned,  // any; vectors of the tensors may not be moved at once
};

template <typename Input_, typename State_, int kKeyDim_, int kTiles_, int kWarps_, Nodes kNodes>
struct VerifyTypes {
    using Input = Input_;
    using State = State_;
    static constexpr int kKeyDim = kKeyDim_;
    static constexpr int kTiles = kTiles_;  // of 16 rows of V, a warp
    static constexpr int kWarps = kWarps_;  // that own rows
    static constexpr bool kShort = kNodes == Nodes::kEightAfter || kNodes == Nodes::kSixteenAfter;
    static constexpr bool kEight = kNodes == Nodes::kEight || kNodes == Nodes::kEightAfter;
    static constexpr bool kOneBlock = kEight || kShort || kNodes == Nodes::kSixteen;
    static constexpr int kNodeRows = kEight ? 8 : kNodeBlock;  // of a node block
    static constexpr int kNodeBlocks = kOneBlock ? 1 : 0;      // 0: as the layout says
    static constexpr bool kAligned = kNodes != Nodes::kUnaligned;
    static constexpr bool kHistory = !kOneBlock || kShort;
    static constexpr bool kKeysStay = !kShort;  // in shared memory, a row a node, until the end
    static constexpr int kMaskWords = kOneBlock ? 1 : TREEWY_MAX_NODES / 32;  // at most
    static constexpr int kRowThreads = kWarps * kWarp;
    static constexpr int kHelpers = kOneBlock ? 1 : 2;  // warps that prepare the nodes
    static constexpr int kHelperThreads = kHelpers * kWarp;
    static constexpr int kNodesPerHelper = kOneBlock ? 1 : TREEWY_MAX_NODES / kHelperThreads;
    static constexpr int kThreads = kRowThreads + kHelperThreads;
    static constexpr int kWarpRows = 16 * kTiles;
    static constexpr int kRows = kWarps * kWarpRows;
    static constexpr int kStateShift = kTiles == 2 ? 2 : 1;  // the lowest bit of g in a row of V
    static constexpr int kStateRowBytes = kKeyDim * static_cast<int>(sizeof(State));
    static constexpr int kInputRowBytes = kKeyDim * static_cast<int>(sizeof(Input));
    static constexpr bool kSumApart = sizeof(State) == 4;  // small terms of sums, in float32's way
    static constexpr int kWeightTerms = sizeof(State) == 4 || sizeof(Input) == 4 ? 3 : 2;
    static constexpr int kUnroll = sizeof(State) == 4 || sizeof(Input) == 4 ? 1 : 4;
    // Blocks that registers are to allow on a multiprocessor.
    static constexpr int kMinBlocks = !kOneBlock                             ? 2
                                      : kWarps == 8                          ? 3
                                      : kShort                               ? 4
                                      : kNodeRows == 8 && sizeof(State) == 2 ? 5
                                      : kTiles == 1 && sizeof(State) == 2    ? 5
                                                                             : 4;
    static constexpr VerifyShape kShape{kKeyDim,
                                        0,
                                        kNodeRows,
                                        kShort ? kShortHistory : 0,
                                        static_cast<int>(sizeof(Input)),
                                        static_cast<int>(sizeof(State)),
                                        kWeightTerms};
    static constexpr VerifyLayout kLayout = small_layout(kShape, kRows, kNodeRows);
};

// Of a node: beta, decay from S_0 over |k| and over |q| (with K^-1/2), decay from S_0.
struct alignas(16) NodeFactors {
    float beta;
    float key;
    float query;
    float from_root;
};

// Pointers into the block's shared memory.
struct Shared {
    unsigned char* state;
    unsigned char* keys;
    unsigned char* queries;
    unsigned char* values;
    uint4* weights;
    float* dense;
    uint4* known_u;
    unsigned char* history_keys;
    float2* history_sum;
    unsigned char* history_u;
    uint4* history_weights;
    int* history_count;
    float2* path_sum;
    NodeFactors* factors;
    float* beta;
    float* key_norm;
    float* query_norm;
    uint32_t* ancestors;
    uint32_t* related;
    int* not_finite;
    int* votes;
    int* nodes;  // of a stage
    int mask_words;
};

// Node blocks of the largest tree of the call.
template <typename Types>
__device__ __forceinline__ int node_blocks(const VerifyArgs& args) {
    return Types::kNodeBlocks > 0 ? Types::kNodeBlocks : args.layout.node_blocks;
}

__device__ __forceinline__ Shared place_shared(const VerifyLayout& layout, unsigned char* base) {
    Shared at;
    at.state = base + layout.state;
    at.keys = base + layout.keys;
    at.queries = base + layout.queries;
    at.values = base + layout.values;
    at.dense = reinterpret_cast<float*>(base + layout.dense);
    at.weights = reinterpret_cast<uint4*>(base + layout.weights);
    at.known_u = reinterpret_cast<uint4*>(base + layout.known_u);
    at.history_keys = base + layout.history_keys;
    at.history_sum = reinterpret_cast<float2*>(base + layout.history_sum);
    at.history_u = base + layout.history_u;
    at.history_weights = reinterpret_cast<uint4*>(base + layout.history_weights);
    at.history_count = reinterpret_cast<int*>(base + layout.history_count);
    at.path_sum = reinterpret_cast<float2*>(base + layout.path_sum);
    at.factors = reinterpret_cast<NodeFactors*>(base + layout.factors);
    at.beta = reinterpret_cast<float*>(base + layout.beta);
    at.key_norm = reinterpret_cast<float*>(base + layout.key_norm);
    at.query_norm = reinterpret_cast<float*>(base + layout.query_norm);
    at.ancestors = reinterpret_cast<uint32_t*>(base + layout.ancestors);
    at.related = reinterpret_cast<uint32_t*>(base + layout.related);
    at.not_finite = reinterpret_cast<int*>(base + layout.not_finite);
    at.votes = at.not_finite + 1;
    at.nodes = at.not_finite;
    at.mask_words = layout.mask_words;
    return at;
}

template <typename Types>
__device__ __forceinline__ Shared place_shared(const VerifyLayout& general) {
    constexpr VerifyLayout kFixed = Types::kLayout;
    return place_shared(Types::kNodeBlocks > 0 ? kFixed : general, shared_memory());
}

// Node blocks [first, first + count), whose weights and queries lie in shared memory.
struct Group {
    int first;
    int count;
    int history_blocks;

    // Where the pairs of the group's block r lie: history blocks, node blocks before it, itself.
    __device__ __forceinline__ int pairs_before(int r) const {
        return r * (history_blocks + first) + r * (r + 1) / 2;
    }
};

}  // namespace treewy
