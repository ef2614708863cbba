// SPDX-License-Identifier: Apache-2.0
//
// A block of tree verification: what it is compiled for, what it works on, and its shared memory.
// tree_verify_kernel.cuh says how the parts work together.
#pragma once

#include "fragment.cuh"
#include "tree_verify_plan.h"

namespace treewy {

struct VerifyArgs {
    treewy_tree_verify_params params;
    VerifyLayout layout;
    int tiles;     // blocks that share a value head
    bool aligned;  // vectors of every tensor may be moved at once
};

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

// Addresses that depend on `work` are computed after this, not kept in registers from before.
__device__ __forceinline__ void compute_here(VerifyWork& work) {
    keep_order(work.row);
    keep_order(work.head);
}

template <typename Input_, typename State_, int kKeyDim_, int kTiles_, int kWarps_>
struct VerifyTypes {
    using Input = Input_;
    using State = State_;
    static constexpr int kKeyDim = kKeyDim_;
    static constexpr int kTiles = kTiles_;  // of 16 rows of V, a warp
    static constexpr int kWarps = kWarps_;
    static constexpr int kThreads = kWarps * kWarp;
    static constexpr int kWarpRows = 16 * kTiles;
    static constexpr int kRows = kWarps * kWarpRows;
    static constexpr int kStateShift = kTiles == 2 ? 2 : 1;  // the lowest bit of g in a row of V
    static constexpr int kStateRowBytes = kKeyDim * static_cast<int>(sizeof(State));
    static constexpr int kInputRowBytes = kKeyDim * static_cast<int>(sizeof(Input));
    static constexpr bool kSumApart = sizeof(State) == 4;  // small terms of sums, in float32's way
    static constexpr int kWeightTerms = sizeof(State) == 4 || sizeof(Input) == 4 ? 3 : 2;
    // Blocks that registers are to allow on a multiprocessor: as many as its memory holds where
    // that matters, which is five of 16 nodes and 32 KiB of state. Some pointers spill for it.
    static constexpr bool kManyBlocks = kTiles == 2 || sizeof(State) == 4;
    static constexpr int kMinBlocks = kWarps == 8 ? 3 : sizeof(Input) == 2 && kManyBlocks ? 5 : 4;
};

// Pointers into the block's shared memory.
struct Shared {
    unsigned char* state;
    unsigned char* keys;
    unsigned char* queries;
    uint4* weights;
    float4* known_u;
    unsigned char* history_keys;
    float2* history_sum;
    float2* path_sum;
    float* from_root;
    float* beta;
    float* key_norm;
    float* query_norm;
    uint32_t* ancestors;
    int* not_finite;
    int mask_words;
};

__device__ __forceinline__ Shared place_shared(const VerifyLayout& layout) {
    unsigned char* base = shared_memory();
    Shared at;
    at.state = base + layout.state;
    at.keys = base + layout.keys;
    at.queries = base + layout.queries;
    at.weights = reinterpret_cast<uint4*>(base + layout.weights);
    at.known_u = reinterpret_cast<float4*>(base + layout.known_u);
    at.history_keys = base + layout.history_keys;
    at.history_sum = reinterpret_cast<float2*>(base + layout.history_sum);
    at.path_sum = reinterpret_cast<float2*>(base + layout.path_sum);
    at.from_root = reinterpret_cast<float*>(base + layout.from_root);
    at.beta = reinterpret_cast<float*>(base + layout.beta);
    at.key_norm = reinterpret_cast<float*>(base + layout.key_norm);
    at.query_norm = reinterpret_cast<float*>(base + layout.query_norm);
    at.ancestors = reinterpret_cast<uint32_t*>(base + layout.ancestors);
    at.not_finite = reinterpret_cast<int*>(base + layout.not_finite);
    at.mask_words = layout.mask_words;
    return at;
}

}  // namespace treewy
