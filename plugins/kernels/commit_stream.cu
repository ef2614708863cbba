// SPDX-License-Identifier: Apache-2.0
//
// Commit of accepted paths of at most 16 nodes, from pseudo-values, by states that stream: the
// equation, the order of its sums and so every bit of the results are those of commit.cu.
//
//   S_a = exp(G_a) S_0 + sum over i <= a of exp(G_a - G_i) u_i k_i^T          (V x K a value head)
//
// A block moves some value heads of one row of the batch, one after the other. Their states come
// through shared memory in pieces of 8 KiB, of which kAhead are on their way, across heads too; a
// thread copies what it will read itself, so that nobody waits for a piece of others. Registers
// hold a piece while it is updated. Entries are staged once a head, by a warp a node, and those of
// the next head are asked for before this one is updated.
//
// The next kernel may start once all blocks of this one have; what this one does before the one
// ahead has ended is to ask L2 for the first states of its first blocks.
//
// Floor. Bytes: the state once in and once out (4 MiB a layer and sequence of Qwen3.5-35B-A3B in
// float32, 2 in bfloat16; u and k of a path of 4 add 2 to 4%). Four blocks a multiprocessor have 96
// to 128 KiB on their way all the time, and at 4.28 TB/s 16 bytes a nanosecond come in beside as
// many that go out: a piece may take 6 us from memory. Instructions of a warp, path of 4, a head:
// 430 to stage the entries and 1,400 (bfloat16) or 2,000 (float32) for its state. The bytes of a
// head take 3,500 cycles of a multiprocessor (7,000): 52% (34%) of the issue slots, where
// commit.cu, which stages the entries for every 64 (32) rows, takes 78% (62%).

#include "commit_entries.cuh"
#include "fragment.cuh"
#include "gpu.h"

namespace treewy {
namespace {

constexpr int kAhead = 4;         // pieces of a block on their way
constexpr int kStreamBlocks = 4;  // of a multiprocessor: what its shared memory holds
constexpr int kStreamHeads = 4;   // of a block at most, unless asked for: several rounds of blocks
constexpr int kStreamWarps = kCommitThreads / kWarp;

struct StreamParams {
    UpdateParams update;    // items are heads
    int heads_of_key;       // value heads of a key head
    unsigned first_blocks;  // that a device holds at once
};

// Where a block is in its heads' states; one goes ahead with the copies, one follows with the
// updates. K is all that a tile can have, so that the compiler knows it.
template <typename Tile>
struct Piece {
    static constexpr int kRows = kCommitThreads / Tile::kLanesOfRow * Tile::kRowsOfThread;

    Item at;
    Tile tile;

    __device__ __forceinline__ void begin(const UpdateParams& p, int slot, int head) {
        at = find_item(p.cut, head);
        find(p, slot);
    }
    __device__ __forceinline__ void find(const UpdateParams& p, int slot) {
        tile.find(p.commit.state, at, slot, kRows);
        tile.key_dim = Tile::kMaxKeyDim;
    }
    // The head behind this one.
    __device__ __forceinline__ Item next_head(const UpdateParams& p) const {
        const bool last = at.head + 1 == p.cut.heads;
        return {at.layer + (last ? 1 : 0), last ? 0 : at.head + 1, 0};
    }
    __device__ __forceinline__ void advance(const UpdateParams& p, int slot) {
        const treewy_state_pool& pool = p.commit.state;
        at.row0 += kRows;
        if (at.row0 < pool.value_dim) {
            tile.data += kRows * Tile::kMaxKeyDim;
            tile.has_rows = at.row0 + Tile::first_row() < pool.value_dim;
            return;
        }
        at = next_head(p);
        find(p, slot);
    }
};

// A block's states on their way through shared memory, vectors of a thread side by side with those
// of the others.
template <typename Tile>
struct Ring {
    static constexpr int kRows = Tile::kRowsOfThread, kVecs = Tile::kVectorsOfThread / kRows;
    static constexpr int kBytes = kAhead * Tile::kVectorsOfThread * kCommitThreads * 16;

    uint4* own;  // the thread's first vector

    __device__ __forceinline__ uint4& at(int place, int r, int v) const {
        return own[((place * kRows + r) * kVecs + v) * kCommitThreads];
    }
    __device__ __forceinline__ void copy(int place, const Tile& tile) const {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int v = 0; v < kVecs; ++v) {
                if (!tile.holds(r, v)) continue;
                copy_async(&at(place, r, v),
                           tile.data + r * tile.key_dim + v * Tile::kLanesOfRow * Tile::kVec);
            }
        }
    }
    __device__ __forceinline__ void take(int place, Tile* tile) const {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int v = 0; v < kVecs; ++v) {
                tile->x[r][v] = make_uint4(0, 0, 0, 0);
                if (tile->holds(r, v)) tile->x[r][v] = at(place, r, v);
            }
        }
    }
};

// A head's entries in memory, those of node 0, and what a thread asks for ahead of the staging.
template <typename Tile>
struct Entries {
    using Key = RawKey<Tile::kMaxKeyDim <= 4 * kWarp ? 1 : 2>;

    const void* u;
    const void* k;
    RawFour first_u;  // of the warp's first node, the lane's first quad
    Key first_key;
    float g;  // of the lane's node

    __device__ __forceinline__ RawFour load_u(const UpdateParams& p, int node, int quad) const {
        const treewy_stash& stash = p.commit.stash;
        const int64_t at = node * stash.u_stride[2] + 4 * quad;
        return load_four(element_at(u, stash.u_dtype, at), stash.u_dtype, p.u_aligned);
    }
    __device__ __forceinline__ Key load_k(const UpdateParams& p, int node) const {
        const treewy_stash& stash = p.commit.stash;
        return load_key<Key>(element_at(k, stash.k_dtype, node * stash.k_stride[2]), stash.k_dtype,
                             Tile::kMaxKeyDim, p.k_aligned);
    }
    __device__ __forceinline__ void ask(const StreamParams& params, const Item& at, int row,
                                        const PathMemory& path, int count) {
        const UpdateParams& p = params.update;
        const treewy_stash& stash = p.commit.stash;
        const int lane = static_cast<int>(threadIdx.x) % kWarp;
        const int warp = static_cast<int>(threadIdx.x) / kWarp;
        const int key_head = at.head / params.heads_of_key;
        u = element_at(
            stash.u, stash.u_dtype,
            at.layer * stash.u_stride[0] + row * stash.u_stride[1] + at.head * stash.u_stride[3]);
        k = element_at(
            stash.k, stash.k_dtype,
            at.layer * stash.k_stride[0] + row * stash.k_stride[1] + key_head * stash.k_stride[3]);
        g = 0.0f;
        if (lane < count) {
            g = stash.g[at.layer * stash.g_stride[0] + row * stash.g_stride[1] +
                        path.node[lane] * stash.g_stride[2] + at.head];
        }
        if (warp >= count) return;
        const int node = path.node[warp];
        if (4 * lane < p.commit.state.value_dim) first_u = load_u(p, node, lane);
        first_key = load_k(p, node);
    }

    // To shared memory: keys scaled by the decays of the nodes behind them, u as it is. Returns the
    // log decay of all. Waits for all threads before it writes, and not after.
    __device__ __forceinline__ double stage(const UpdateParams& p, const PathMemory& path,
                                            int count, float* k_s, float* u_s) const {
        const treewy_stash& stash = p.commit.stash;
        const int lane = static_cast<int>(threadIdx.x) % kWarp;
        const int warp = static_cast<int>(threadIdx.x) / kWarp;
        constexpr int key_dim = Tile::kMaxKeyDim;
        const int value_dim = p.commit.state.value_dim;
        double total;
        const float decay = expf(static_cast<float>(warp_prefix(static_cast<double>(g), &total)));
        __syncthreads();
        RawFour u_quad = first_u;
        Key key = first_key;
#pragma unroll 1
        for (int j = warp; j < count;) {
            for (int quad = lane; 4 * quad < value_dim;) {
                store_vec<4>(u_s + j * value_dim + 4 * quad, four_as_float(u_quad, stash.u_dtype));
                quad += kWarp;
                if (4 * quad < value_dim) u_quad = load_u(p, path.node[j], quad);
            }
            stage_key<Tile::kVec>(key, stash.k_dtype, stash.k_normalized == 0,
                                  __shfl_sync(kAllLanes, decay, j), key_dim, k_s + j * key_dim);
            j += kStreamWarps;
            if (j >= count) break;
            if (4 * lane < value_dim) u_quad = load_u(p, path.node[j], lane);
            key = load_k(p, path.node[j]);
        }
        return total;
    }
};

// Asks L2 for the first states of a block, as far as its slot is known ahead of the previous
// kernel: whatever that still writes, L2 is where it does.
template <typename Tile>
__device__ __forceinline__ void prefetch_head(const StreamParams& params, int row, int head) {
#if !defined(TREEWY_ON_HOST) && __CUDA_ARCH__ >= 900
    using State = typename Tile::Element;
    const treewy_tree& tree = params.update.commit.tree;
    const treewy_state_pool& pool = params.update.commit.state;
    const uint32_t whole = pool.value_dim * pool.key_dim * static_cast<uint32_t>(sizeof(State));
    const int slot = __ldcg(tree.slot + row);
    if (!is_live_slot(slot, tree.num_slots)) return;
    const Item at = find_item(params.update.cut, head);
    const State* from = static_cast<const State*>(pool.data) + at.layer * pool.layer_stride +
                        slot * pool.slot_stride + int64_t{at.head} * pool.value_dim * pool.key_dim;
    prefetch_to_l2(from, min(whole, static_cast<uint32_t>(Ring<Tile>::kBytes)));
#endif
}

template <typename Tile>
__global__ void __launch_bounds__(kCommitThreads, kStreamBlocks)
    stream_states(const __grid_constant__ StreamParams params) {
    __shared__ PathMemory path;
    const UpdateParams& p = params.update;
    const treewy_state_pool& pool = p.commit.state;
    const int row = static_cast<int>(blockIdx.x) / p.cut.blocks_of_row;
    const int block = static_cast<int>(blockIdx.x) % p.cut.blocks_of_row;
    const int first = block * p.cut.items_of_block;
    const int stop = min(first + p.cut.items_of_block, p.cut.items);
    let_next_start();
    if (threadIdx.x == 0 && blockIdx.x < params.first_blocks) {
        prefetch_head<Tile>(params, row, first);
    }
    wait_for_previous();
    const CommitRow found = read_row(p.commit.tree, p.commit.accepted, row, &path);
    const bool reports = block == 0 && threadIdx.x == 0;
    if (found.action == RowAction::kBad && reports) count_error(p.commit.errors);
    if (found.action != RowAction::kMove) return;

    const Ring<Tile> ring{reinterpret_cast<uint4*>(shared_memory()) + threadIdx.x};
    float* const k_s = reinterpret_cast<float*>(shared_memory() + Ring<Tile>::kBytes);
    float* const u_s =
        k_s + kPathChunk * Tile::kMaxKeyDim;  // [kPathChunk][V]; keys: staged_quarter
    int to_copy = (stop - first) * ((pool.value_dim + Piece<Tile>::kRows - 1) / Piece<Tile>::kRows);
    Piece<Tile> next, piece;
    next.begin(p, found.slot, first);
    piece.begin(p, found.slot, first);
    const auto copy_next = [&](int place) {
        if (to_copy > 0) {
            ring.copy(place, next.tile);
            if (--to_copy > 0) next.advance(p, found.slot);
        }
        commit_copies();
    };
    copy_next(0);  // the others come behind the entries, which are needed first
    const int count = find_path(found, &path);
    if (count == 0 && reports) count_error(p.commit.errors);
    if (count == 0 || count > kPathChunk) {  // a longer one is the next launch's
        wait_copies<0>();
        return;
    }
    Entries<Tile> entries{};
    entries.ask(params, piece.at, row, path, count);
#pragma unroll 1
    for (int place = 1; place < kAhead; ++place) copy_next(place);
    int place = 0;
#pragma unroll 1
    for (int head = first; head < stop; ++head) {
        const double total = entries.stage(p, path, count, k_s, u_s);
        const float from_root = expf(static_cast<float>(total));
        __syncthreads();
        // Of the last head again: behind a branch the loads would be waited for at its end.
        entries.ask(params, head + 1 < stop ? piece.next_head(p) : piece.at, row, path, count);
#pragma unroll 1
        for (int row0 = 0; row0 < pool.value_dim; row0 += Piece<Tile>::kRows) {
            constexpr int kRows = Tile::kRowsOfThread;
            float after[kRows][Tile::kColumns];
            wait_copies<kAhead - 1>();
            ring.take(place, &piece.tile);
            piece.tile.template read<kRows>(0, from_root, after);
            copy_next(place);
            if (++place == kAhead) place = 0;
            if (piece.tile.has_rows) {
                add_entries<kRows, 2>(after, count, piece.tile, pool.value_dim, k_s,
                                      u_s + row0 + Tile::first_row());
            }
            piece.tile.template store<kRows>(0, after, 1.0f);
            piece.advance(p, found.slot);
        }
    }
}

}  // namespace

// ------------------------------------------------------------------ host

treewy_status launch_stream(const char* name, const UpdateParams& update, treewy_stream stream) {
    const treewy_state_pool& pool = update.commit.state;
    const int batch = update.commit.tree.batch;
    Gpu gpu;
    const treewy_status status = find_gpu(name, &gpu);
    if (status != TREEWY_OK) return status;
    StreamParams p{update, pool.value_heads / pool.key_heads, 0};
    p.first_blocks = static_cast<unsigned>(kStreamBlocks * gpu.multiprocessors);
    // One round of blocks that all have as many heads, or several rounds.
    const int64_t share = ceil_div(int64_t{pool.layers} * pool.value_heads * batch, p.first_blocks);
    const int64_t heads = share < kStreamHeads ? share : kStreamHeads;
    const int wanted = update.commit.items > 0 ? update.commit.items : static_cast<int>(heads);
    const treewy_status cut = cut_states(name, pool, batch, pool.value_dim, wanted, &p.update.cut);
    if (cut != TREEWY_OK) return cut;
    return with_row_shape(pool, [&](auto state, auto shape) {
        constexpr int kLanes = decltype(shape)::lanes, kVecs = decltype(shape)::vecs;
        using Tile = StateTile<decltype(state), kLanes, kVecs, 4 / kVecs>;
        const size_t staged = sizeof(float) * kPathChunk * (pool.key_dim + pool.value_dim);
        prefer_shared_memory(stream_states<Tile>);
        return launch(name, stream_states<Tile>, int64_t{p.update.cut.blocks_of_row} * batch,
                      kCommitThreads, Ring<Tile>::kBytes + staged, stream, p, Start::kOverlapping);
    });
}

}  // namespace treewy
