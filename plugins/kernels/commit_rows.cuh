// SPDX-License-Identifier: Apache-2.0
//
// What the commits share: which row a block moves and along which path, how the states of all
// layers are cut, and the part of a state that a thread holds.
//
// Cut. An item is `tile_rows` rows of V of one (layer, value head). A block finds one row's path
// once and moves some of its items, one after the other. Rows that accept nothing leave at once.
//
// Threads. A row of V belongs to kLanes neighbours of a warp, kVecs vectors of 16 bytes each; a
// thread holds those of kRows rows. All of its loads are begun together, before anything else of
// the item, and need nothing but the slot: a block has 16 bytes * kRows * kVecs * threads on their
// way while it looks for the path.
#pragma once

#include "device.cuh"

namespace treewy {

// ------------------------------------------------------------------ rows and paths

__device__ __forceinline__ void count_error(int32_t* errors) {
    if (errors != nullptr) atomicAdd(errors, 1);
}

// A row of the batch.
struct CommitRow {
    int slot;
    int accepted;
    RowAction action;
};

// Shared memory of read_row and find_path. At most TREEWY_MAX_NODES threads look at parents, so
// that a block must have as many.
struct PathMemory {
    int32_t parents[TREEWY_MAX_NODES];
    int32_t node[TREEWY_MAX_NODES];  // [i] is the node i steps above the accepted one
    int32_t length;
};

// For all threads of a block at once. One trip to memory: parents go to shared memory before
// anything is decided, or their load would come behind what is, as would that of num_nodes.
__device__ __forceinline__ CommitRow read_row(const treewy_tree& tree, const int32_t* accepted,
                                              int row, PathMemory* path) {
    const int thread = static_cast<int>(threadIdx.x);
    const int node = min(thread, tree.max_nodes - 1);
    const int parent = load_now(tree.parents + static_cast<int64_t>(row) * tree.max_nodes + node);
    CommitRow out;
    out.slot = load_now(tree.slot + row);
    out.accepted = load_now(accepted + row);
    const int num_nodes = load_now(tree.num_nodes + row);
    if (thread < TREEWY_MAX_NODES) path->parents[thread] = parent;
    out.action = commit_action(out.slot, tree.num_slots, out.accepted, num_nodes, tree.max_nodes);
    return out;
}

// The path to the row's accepted node, accepted node first; returns its length, 0 if the parents
// are not in order. For all threads of a block, after read_row.
__device__ __forceinline__ int find_path(const CommitRow& row, PathMemory* path) {
    __syncthreads();
    if (threadIdx.x == 0) path->length = walk_up(path->parents, row.accepted, path->node);
    __syncthreads();
    return path->length;
}

// ------------------------------------------------------------------ cut

struct CommitCut {
    int tile_rows;  // rows of V of an item
    int tiles;      // items of a head
    int heads;      // value heads
    int items;      // of a row of the batch, all layers
    int items_of_block;
    int blocks_of_row;
};

struct Item {
    int layer;
    int head;
    int row0;  // the first of its rows of V
};

__device__ __forceinline__ Item find_item(const CommitCut& cut, int item) {
    Item at;
    at.row0 = item % cut.tiles * cut.tile_rows;
    at.head = item / cut.tiles % cut.heads;
    at.layer = item / cut.tiles / cut.heads;
    return at;
}

// ------------------------------------------------------------------ states

// 16 bytes that are read, or written, once: they leave the caches first.
__device__ __forceinline__ uint4 load_once(const void* from) {
#if defined(TREEWY_ON_HOST)
    return *static_cast<const uint4*>(from);
#else
    return __ldcs(static_cast<const uint4*>(from));
#endif
}

__device__ __forceinline__ void store_once(void* to, const uint4& value) {
#if defined(TREEWY_ON_HOST)
    *static_cast<uint4*>(to) = value;
#else
    __stcs(static_cast<uint4*>(to), value);
#endif
}

// Element i of 16 bytes of states. They stay packed until they are used: as values of 16 bits each
// they would take twice the registers.
template <typename State>
__device__ __forceinline__ float element(const uint4& raw, int i) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    if constexpr (sizeof(State) == 4) {
        return __uint_as_float(words[i]);
    } else {
        return __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
    }
}

template <typename State>
__device__ __forceinline__ uint4 pack(const float* x, float scale) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(State) == 4) {
            words[i] = __float_as_uint(scale * x[i]);
        } else {
            const __nv_bfloat162 two =
                __floats2bfloat162_rn(scale * x[2 * i], scale * x[2 * i + 1]);
            words[i] = uint32_t{__bfloat16_as_ushort(two.x)} |
                       (uint32_t{__bfloat16_as_ushort(two.y)} << 16);
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// What a thread holds of an item's state.
template <typename State, int kLanes, int kVecs, int kRows>
struct StateTile {
    using Element = State;
    static constexpr int kVec = kPer16Bytes<State>;
    static constexpr int kColumns = kVecs * kVec;  // of a row that a thread owns
    static constexpr int kMaxKeyDim = kLanes * kColumns;
    static constexpr int kRowsOfThread = kRows;
    static constexpr int kLanesOfRow = kLanes;
    static constexpr int kVectorsOfThread = kRows * kVecs;
    uint4 x[kRows][kVecs];
    State* data;  // the thread's first row, its first column
    int key_dim;
    bool has_rows;

    // Of the kLanes that share a row.
    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kLanes; }

    // Of the item's rows of V, the thread's first.
    static __device__ __forceinline__ int first_row() {
        return static_cast<int>(threadIdx.x) / kLanes * kRows;
    }

    // V is a multiple of 8: of every 8 rows a thread has all or none.
    bool has_more_rows;

    // Columns of vector v start here; beyond K there are none.
    __device__ __forceinline__ int column(int v) const { return (v * kLanes + lane()) * kVec; }

    __device__ __forceinline__ bool holds(int r, int v) const {
        return (r < 8 ? has_rows : has_more_rows) && column(v) < key_dim;
    }

    __device__ __forceinline__ void find(const treewy_state_pool& pool, const Item& at,
                                         int64_t slot, int tile_rows) {
        key_dim = pool.key_dim;
        const int row = at.row0 + first_row();
        has_rows = row < pool.value_dim && first_row() < tile_rows;
        has_more_rows = has_rows && row + 8 < pool.value_dim;
        data = static_cast<State*>(pool.data) + at.layer * pool.layer_stride +
               slot * pool.slot_stride +
               (static_cast<int64_t>(at.head) * pool.value_dim + row) * key_dim + lane() * kVec;
    }

    __device__ __forceinline__ void load() {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int v = 0; v < kVecs; ++v) {
                x[r][v] = make_uint4(0, 0, 0, 0);
                if (holds(r, v)) x[r][v] = load_once(data + r * key_dim + v * kLanes * kVec);
            }
        }
    }

    // kCount rows from row `first` of the thread's own, as float32 times `scale`.
    template <int kCount>
    __device__ __forceinline__ void read(int first, float scale,
                                         float (&values)[kCount][kColumns]) const {
#pragma unroll
        for (int r = 0; r < kCount; ++r) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                values[r][c] = scale * element<State>(x[first + r][c / kVec], c % kVec);
            }
        }
    }

    // Stores kCount rows of float32 values from row `first` of the thread's own.
    template <int kCount>
    __device__ __forceinline__ void store(int first, const float (&values)[kCount][kColumns],
                                          float scale) const {
#pragma unroll
        for (int r = 0; r < kCount; ++r) {
#pragma unroll
            for (int v = 0; v < kVecs; ++v) {
                if (!holds(first + r, v)) continue;
                store_once(data + (first + r) * key_dim + v * kLanes * kVec,
                           pack<State>(values[r] + v * kVec, scale));
            }
        }
    }
};

// ------------------------------------------------------------------ keys in shared memory
//
// A row of K floats in which the columns of a thread's vector lie in quarters of 16 bytes that are
// K / kParts apart, so that a warp reads every quarter without bank conflicts.

template <int kVec>
inline constexpr int kStagedParts = kVec / 4;

// Where the quarter of columns 4 q .. lies.
template <int kVec>
__device__ __forceinline__ int staged_quarter(int q, int key_dim) {
    constexpr int kParts = kStagedParts<kVec>;
    return q % kParts * (key_dim / kParts) + q / kParts * 4;
}

// The columns of a tile's thread from a staged row; zero where there are none.
template <typename Tile>
__device__ __forceinline__ void read_staged(const float* row, const Tile& tile,
                                            float (&k)[Tile::kColumns]) {
    constexpr int kVec = Tile::kVec, kParts = kStagedParts<kVec>;
#pragma unroll
    for (int v = 0; v < Tile::kColumns / kVec; ++v) {
        const bool there = tile.column(v) < tile.key_dim;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            Vec<float, 4> x{};
            if (there) {
                x = load_vec<4>(row + part * (tile.key_dim / kParts) + tile.column(v) / kVec * 4);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) k[v * kVec + part * 4 + i] = x.x[i];
        }
    }
}

// ------------------------------------------------------------------ values of any type
//
// A load that branches on the type must not convert within the branch: it would wait there, and
// loads that follow each other would come one after the other.

__device__ __forceinline__ const void* element_at(const void* data, int dtype, int64_t at) {
    return static_cast<const char*>(data) + at * (dtype == TREEWY_FLOAT32 ? 4 : 2);
}

__device__ __forceinline__ uint32_t load_raw(const void* from, int dtype) {
    if (dtype == TREEWY_FLOAT32) return *static_cast<const uint32_t*>(from);
    return *static_cast<const uint16_t*>(from);
}

__device__ __forceinline__ float raw_as_float(uint32_t raw, int dtype) {
    if (dtype == TREEWY_FLOAT32) return __uint_as_float(raw);
    if (dtype == TREEWY_BFLOAT16) return __uint_as_float(raw << 16);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(raw)));
}

// Four neighbours; those of 16 bits lie in the first two words.
struct RawFour {
    uint32_t word[4];
};

__device__ __forceinline__ RawFour load_four(const void* data, int dtype, bool aligned) {
    RawFour raw{};
    if (dtype == TREEWY_FLOAT32) {
        const uint32_t* from = static_cast<const uint32_t*>(data);
        if (aligned) {
            const Vec<uint32_t, 4> x = load_vec<4>(from);
#pragma unroll
            for (int i = 0; i < 4; ++i) raw.word[i] = x.x[i];
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) raw.word[i] = from[i];
        }
    } else {
        const uint16_t* from = static_cast<const uint16_t*>(data);
        if (aligned) {
            const Vec<uint32_t, 2> x = load_vec<2>(reinterpret_cast<const uint32_t*>(from));
            raw.word[0] = x.x[0];
            raw.word[1] = x.x[1];
        } else {
            raw.word[0] = from[0] | (uint32_t{from[1]} << 16);
            raw.word[1] = from[2] | (uint32_t{from[3]} << 16);
        }
    }
    return raw;
}

__device__ __forceinline__ Vec<float, 4> four_as_float(const RawFour& raw, int dtype) {
    Vec<float, 4> out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t word =
            dtype == TREEWY_FLOAT32 ? raw.word[i] : raw.word[i / 2] >> (i % 2 * 16) & 0xffffu;
        out.x[i] = raw_as_float(word, dtype);
    }
    return out;
}

}  // namespace treewy
