// SPDX-License-Identifier: Apache-2.0
//
// Commit of accepted paths to the recurrent state, and of histories, from pseudo-values:
//
//   S_a = exp(G_a) S_0 + sum over i <= a of exp(G_a - G_i) u_i k_i^T          (V x K a value head)
//
// G_a - G_i is the sum of the log decays of the nodes after i on the path to a: it is summed in
// double from a upwards, so that no difference of large sums is ever taken.
//
// Accepted paths of at most 16 nodes with K = 64, 128 or 256 go by commit_stream.cu unless a tile
// is asked for; here are the others, and histories that tensor cores do not take.
//
// Threads: see commit_rows.cuh. An item's state is on its way to registers while the path comes to
// shared memory, 16 nodes at a time: k normalised and scaled by its decay by a warp a node, u as it
// is. All first loads of a thread are begun before the first is waited for. Rows are updated 32
// values a thread at a time.
//
// Floor. Bytes: the state once in and once out (4 MiB a layer and sequence of Qwen3.5-35B-A3B in
// float32, 2 in bfloat16; u and k of a path of 4 add 2 to 4%). At 4.28 TB/s a multiprocessor of an
// H200 reads 16 bytes a nanosecond beside as many that it writes; an item takes about 2.5 us from
// its first load to its last store (two trips to memory, of which one is hidden, and 0.5 us of
// work), so 41 KiB of state must be held at a time. Operations: one FMA per element and node of the
// path, at 4 nodes a sixth of the issue slots of that time in bfloat16, with what converts them.
// But a warp takes 1,375 instructions for an item of 16 KiB in bfloat16, more than half of them for
// the staging of its entries, and 300 to begin a block: three quarters of the issue slots of the
// bytes' time, nearly all where blocks have one item each.
//
// Held by a multiprocessor, blocks of 128 threads (registers a thread, none spilled):
//     vectors of a thread    4          8          16
//     blocks                 7 (72)     5 (96)     3 (168)
//     warps                  28         20         12
//     state                  56 KiB     80 KiB     96 KiB
// The path of more than 16 nodes takes another launch, whose blocks leave where it is shorter: to
// keep the state in registers over several chunks would cost the short paths a third of their
// blocks.

#include "commit_entries.cuh"

namespace treewy {
namespace {

constexpr int kHistoryChunk = 32;  // entries in shared memory at a time, of a history

template <bool kHistory>
inline constexpr int kChunk = kHistory ? kHistoryChunk : kPathChunk;

// Of the blocks that a multiprocessor holds; the registers are shared out for them.
template <typename Tile>
constexpr int blocks_held() {
    constexpr int kVectors = Tile::kVectorsOfThread;
    return kVectors == 4 ? (Tile::kMaxKeyDim > 128 ? 6 : 7) : (kVectors == 8 ? 5 : 3);
}

// Where an item's entries are: those of the accepted path in row `row` of the stash, or those of
// the history of slot `row`.
struct Where {
    Item at;
    int row;
    int count;
    const int32_t* path;  // node of the entry i steps before the last, for a path
};

// The entries as the update reads them, from the last to the first. Worked out where they are
// needed, from the kernel's parameters, so that they take no registers between.
struct Entries {
    const void* u;  // of node 0, the item's first row of V
    const void* k;
    const float* g;
    int64_t u_stride;  // from node to node
    int64_t k_stride;
    int64_t g_stride;
    int u_dtype;
    int k_dtype;
    bool normalize;
    int last;             // node of the last entry of a history
    const int32_t* path;  // null for a history

    __device__ __forceinline__ int64_t node(int back) const {
        return path == nullptr ? last - back : path[back];
    }
};

template <bool kHistory>
__device__ __forceinline__ Entries find_entries(const UpdateParams& p, const Where& where) {
    const treewy_state_pool& state = p.commit.state;
    const Item& at = where.at;
    const int64_t row = where.row;
    const int key_head = at.head / (state.value_heads / state.key_heads);
    Entries e;
    int64_t u, k, g;  // elements before them
    if constexpr (kHistory) {
        const treewy_history& history = p.history;
        u = at.layer * history.u_stride[0] + row * history.u_stride[1] +
            static_cast<int64_t>(at.head) * state.value_dim;
        k = at.layer * history.k_stride[0] + row * history.k_stride[1] +
            static_cast<int64_t>(key_head) * state.key_dim;
        g = at.layer * history.g_stride[0] + row * history.g_stride[1] + at.head;
        e.u = history.u;
        e.u_stride = static_cast<int64_t>(state.value_heads) * state.value_dim;
        e.k = history.k;
        e.k_stride = static_cast<int64_t>(state.key_heads) * state.key_dim;
        e.g = history.g;
        e.g_stride = state.value_heads;
        e.u_dtype = history.u_dtype;
        e.k_dtype = history.k_dtype;
        e.normalize = history.k_dtype != TREEWY_FLOAT32;
        e.path = nullptr;
    } else {
        const treewy_stash& stash = p.commit.stash;
        u = at.layer * stash.u_stride[0] + row * stash.u_stride[1] + at.head * stash.u_stride[3];
        k = at.layer * stash.k_stride[0] + row * stash.k_stride[1] + key_head * stash.k_stride[3];
        g = at.layer * stash.g_stride[0] + row * stash.g_stride[1] + at.head;
        e.u = stash.u;
        e.u_stride = stash.u_stride[2];
        e.k = stash.k;
        e.k_stride = stash.k_stride[2];
        e.g = stash.g;
        e.g_stride = stash.g_stride[2];
        e.u_dtype = stash.u_dtype;
        e.k_dtype = stash.k_dtype;
        e.normalize = stash.k_normalized == 0;
        e.path = where.path;
    }
    e.u = element_at(e.u, e.u_dtype, u + at.row0);
    e.k = element_at(e.k, e.k_dtype, k);
    e.g += g;
    e.last = where.count - 1;
    return e;
}

// Sum of the log decays of all entries; every warp works it out for itself.
template <bool kHistory>
__device__ __forceinline__ double total_decay(const UpdateParams& p, const Where& where) {
    const Entries e = find_entries<kHistory>(p, where);
    double sum = 0.0;
    for (int first = 0; first < where.count; first += kWarp) {
        const int i = first + static_cast<int>(threadIdx.x) % kWarp;
        double own = 0.0, total;
        if (i < where.count) own = e.g[e.node(i) * e.g_stride];
        warp_prefix(own, &total);
        sum += total;
    }
    return sum;
}

// A chunk of entries in shared memory, from the one `first` steps before the last upwards: `k_s`
// scaled by their decays, `u_s`. `later` is the log decay after the chunk; returns that of the
// chunk. Waits for all threads before it writes, and not after.
template <typename Tile, bool kHistory>
__device__ __forceinline__ double stage_chunk(const UpdateParams& p, const Where& where, int first,
                                              double later, float* k_s, float* u_s) {
    const Entries e = find_entries<kHistory>(p, where);
    constexpr int kWarps = kCommitThreads / kWarp;
    // Loads of a thread at once: the entries of a history are many.
    constexpr int kAtOnce = kHistory ? 4 : 1;
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % kWarp, warp = thread / kWarp;
    const int key_dim = p.commit.state.key_dim, tile_rows = p.cut.tile_rows;
    const int count = min(kChunk<kHistory>, where.count - first);
    const int quads = min(tile_rows, p.commit.state.value_dim - where.at.row0) / 4,
              all_quads = count * quads;
    const auto load_u = [&](int i) {
        const int64_t at = e.node(first + i / quads) * e.u_stride + i % quads * 4;
        return load_four(element_at(e.u, e.u_dtype, at), e.u_dtype, p.u_aligned);
    };
    // Every warp works out all decays for itself: lane j has entry first + j.
    float g = 0.0f;
    if (lane < count) g = e.g[e.node(first + lane) * e.g_stride];
    RawFour u[kAtOnce] = {};
    using Key = RawKey<Tile::kMaxKeyDim <= 4 * kWarp ? 1 : 2>;
    Key key[kAtOnce] = {};
    const auto load_quads = [&](int i) {
#pragma unroll
        for (int a = 0; a < kAtOnce; ++a) {
            if (i + a * kCommitThreads < all_quads) u[a] = load_u(i + a * kCommitThreads);
        }
    };
    const auto load_keys = [&](int j) {
#pragma unroll
        for (int a = 0; a < kAtOnce; ++a) {
            if (j + a * kWarps >= count) continue;
            const int64_t at = e.node(first + j + a * kWarps) * e.k_stride;
            key[a] = load_key<Key>(element_at(e.k, e.k_dtype, at), e.k_dtype, key_dim, p.k_aligned);
        }
    };
    load_quads(thread);
    load_keys(warp);
    double chunk_decay;
    const double after_entry = later + warp_prefix(static_cast<double>(g), &chunk_decay);
    const float decay = expf(static_cast<float>(after_entry));
    __syncthreads();  // all are done with what was staged before
    for (int i = thread; i < all_quads;) {
#pragma unroll
        for (int a = 0; a < kAtOnce; ++a, i += kCommitThreads) {
            if (a > 0 && i >= all_quads) continue;
            store_vec<4>(u_s + i / quads * tile_rows + i % quads * 4,
                         four_as_float(u[a], e.u_dtype));
        }
        load_quads(i);
    }
    for (int j = warp; j < count;) {
#pragma unroll
        for (int a = 0; a < kAtOnce; ++a, j += kWarps) {
            if (a > 0 && j >= count) continue;
            stage_key<Tile::kVec>(key[a], e.k_dtype, e.normalize, __shfl_sync(kAllLanes, decay, j),
                                  key_dim, k_s + j * key_dim);
        }
        load_keys(j);
    }
    return chunk_decay;
}

// Moves an item whose state has been asked for. A path of several chunks is staged once for every
// set of rows.
template <bool kHistory, bool kLong, typename Tile>
__device__ __forceinline__ void update_item(const UpdateParams& p, const Tile& tile,
                                            const Where& where) {
    constexpr int kColumns = Tile::kColumns, kRows = Tile::kRowsOfThread;
    constexpr int kAtOnce = 32 / kColumns < kRows ? 32 / kColumns : kRows;
    constexpr int kUnroll = Tile::kVectorsOfThread == 16 ? 2 : 1;  // what the registers allow
    float* k_s = reinterpret_cast<float*>(shared_memory());  // [kChunk][K], see staged_quarter
    float* u_s = k_s + kChunk<kHistory> * tile.key_dim;      // [kChunk][tile_rows]
    double total = 0.0;
    if constexpr (kLong) {
        total = total_decay<kHistory>(p, where);
    } else {
        total = stage_chunk<Tile, kHistory>(p, where, 0, 0.0, k_s, u_s);
        __syncthreads();
    }
    const float from_root = expf(static_cast<float>(total));
#pragma unroll
    for (int row = 0; row < kRows; row += kAtOnce) {
        float after[kAtOnce][kColumns];
        tile.template read<kAtOnce>(row, from_root, after);
        const float* u = u_s + tile.first_row() + row;
        if constexpr (kLong) {
            double later = 0.0;
#pragma unroll 1
            for (int first = 0; first < where.count; first += kChunk<kHistory>) {
                later += stage_chunk<Tile, kHistory>(p, where, first, later, k_s, u_s);
                __syncthreads();
                const int count = min(kChunk<kHistory>, where.count - first);
                if (tile.has_rows)
                    add_entries<kAtOnce, kUnroll>(after, count, tile, p.cut.tile_rows, k_s, u);
            }
        } else if (tile.has_rows) {
            add_entries<kAtOnce, kUnroll>(after, where.count, tile, p.cut.tile_rows, k_s, u);
        }
        tile.template store<kAtOnce>(row, after, 1.0f);
    }
}

// Flags of what verification has folded of the items from `first` to before `stop`.
__device__ __forceinline__ FlagRange flags_of_items(const UpdateParams& p, int first, int stop) {
    const int of_head = flags_of_head(p.commit.state);
    const auto flag = [&](const Item& at, int row) {
        return (int64_t{at.layer} * p.cut.heads + at.head) * of_head + row / TREEWY_FOLD_ROWS;
    };
    const Item from = find_item(p.cut, first), to = find_item(p.cut, stop - 1);
    const int last_row = min(to.row0 + p.cut.tile_rows, p.commit.state.value_dim) - 1;
    return {flag(from, from.row0), flag(to, last_row) + 1};
}

// An item of a history's slot; the thread has no rows where verification has folded them: its rows
// are of one flag.
template <typename Tile>
__device__ __forceinline__ void find_unfolded(const UpdateParams& p, const Item& at, int64_t slot,
                                              Tile& tile) {
    static_assert(TREEWY_FOLD_ROWS % Tile::kRowsOfThread == 0);
    const treewy_state_pool& pool = p.commit.state;
    tile.find(pool, at, slot, p.cut.tile_rows);
    if (!tile.has_rows || !is_folding(p.history, slot)) return;
    const int row = at.row0 + Tile::first_row();
    if (*folded_flag(p.history, pool, slot, at.layer, at.head, row) != 0) {
        tile.has_rows = tile.has_more_rows = false;
    }
}

// Paths of one chunk, or (kLong) those of more: the others' blocks leave.
template <typename Tile, bool kHistory, bool kLong>
__global__ void __launch_bounds__(kCommitThreads, kLong || kHistory ? 4 : blocks_held<Tile>())
    update_states(const __grid_constant__ UpdateParams p) {
    __shared__ PathMemory path;
    const treewy_state_pool& pool = p.commit.state;
    const int row = static_cast<int>(blockIdx.x) / p.cut.blocks_of_row;
    const int block = static_cast<int>(blockIdx.x) % p.cut.blocks_of_row;
    const int first = block * p.cut.items_of_block;
    const int stop = min(first + p.cut.items_of_block, p.cut.items);
    Tile tile;
    Where where;
    where.at = find_item(p.cut, first);
    where.path = path.node;
    int slot;
    if constexpr (!kHistory) {
        const CommitRow found = read_row(p.commit.tree, p.commit.accepted, row, &path);
        const bool reports = !kLong && block == 0 && threadIdx.x == 0;
        if (found.action == RowAction::kBad && reports) count_error(p.commit.errors);
        if (found.action != RowAction::kMove) return;
        slot = found.slot;
        where.row = row;
        tile.find(pool, where.at, slot, p.cut.tile_rows);
        if constexpr (!kLong) tile.load();  // in vain for a long path: it is rare
        where.count = find_path(found, &path);
        if (where.count == 0 && reports) count_error(p.commit.errors);
    } else {
        slot = p.commit.tree.slot[row];
        where.row = slot;
        where.count = history_to_fold(p, row, slot, flags_of_items(p, first, stop), &path);
        if (where.count == 0) return;
        find_unfolded(p, where.at, slot, tile);
        if constexpr (!kLong) tile.load();
    }
    if (where.count == 0 || (where.count > kChunk<kHistory>) != kLong) return;
    if constexpr (kLong) tile.load();
#pragma unroll 1
    for (int item = first;;) {
        update_item<kHistory, kLong>(p, tile, where);
        if (++item == stop) break;
        where.at = find_item(p.cut, item);
        if constexpr (kHistory) {
            find_unfolded(p, where.at, slot, tile);
        } else {
            tile.find(pool, where.at, slot, p.cut.tile_rows);
        }
        tile.load();
    }
}

}  // namespace

// ------------------------------------------------------------------ host

treewy_status check_tile(const char* name, int32_t tile, int32_t last_tile, int32_t items) {
    if (tile < 0 || tile > last_tile) {
        return fail(TREEWY_INVALID_ARGUMENT, "%s: tile must be in [0, %d], got %d", name, last_tile,
                    tile);
    }
    if (items < 0) {
        return fail(TREEWY_INVALID_ARGUMENT, "%s: items must be at least 0, got %d", name, items);
    }
    return TREEWY_OK;
}

treewy_status check_commit(const char* name, const treewy_commit_params& p) {
    treewy_status status = check_tree(name, p.tree);
    if (status == TREEWY_OK) status = check_state_pool(name, p.state);
    if (status == TREEWY_OK) status = check_tile(name, p.tile, TREEWY_COMMIT_STREAM, p.items);
    if (status != TREEWY_OK) return status;
    const treewy_stash& stash = p.stash;
    if (stash.u == nullptr || stash.k == nullptr || stash.g == nullptr || p.accepted == nullptr) {
        return fail(TREEWY_INVALID_ARGUMENT,
                    "%s: stash.u, stash.k, stash.g and accepted must not be null", name);
    }
    if (!is_float_dtype(stash.k_dtype)) {
        return fail(TREEWY_UNSUPPORTED,
                    "%s: stash.k_dtype must be float32, bfloat16 or float16, got %d", name,
                    stash.k_dtype);
    }
    if (stash.u_dtype != TREEWY_FLOAT32 &&
        (stash.u_dtype != TREEWY_BFLOAT16 || p.state.dtype != TREEWY_BFLOAT16)) {
        return fail(TREEWY_UNSUPPORTED,
                    "%s: stash.u_dtype must be float32, or bfloat16 where the state is, got %d",
                    name, stash.u_dtype);
    }
    return TREEWY_OK;
}

treewy_status cut_states(const char* name, const treewy_state_pool& pool, int batch, int tile_rows,
                         int32_t items, CommitCut* cut, int64_t most_items) {
    constexpr int64_t kEnoughBlocks = 4096;  // several rounds of what an H200 holds at once
    cut->tile_rows = tile_rows;
    cut->tiles = static_cast<int>(ceil_div(pool.value_dim, tile_rows));
    cut->heads = pool.value_heads;
    const int64_t all = int64_t{pool.layers} * pool.value_heads * cut->tiles;
    if (all * batch > INT32_MAX) {
        return fail(TREEWY_UNSUPPORTED, "%s: %d rows of %d layers of %d value heads are too many",
                    name, batch, pool.layers, pool.value_heads);
    }
    const int64_t share = all * batch / kEnoughBlocks;
    const int64_t wanted =
        items > 0 ? items : (share < 1 ? 1 : (share < most_items ? share : most_items));
    cut->items = static_cast<int>(all);
    cut->items_of_block = static_cast<int>(wanted < all ? wanted : all);
    cut->blocks_of_row = static_cast<int>(ceil_div(all, cut->items_of_block));
    return TREEWY_OK;
}

treewy_status launch_update(const char* name, UpdateParams p, treewy_stream stream) {
    const treewy_state_pool& pool = p.commit.state;
    const treewy_history& history = p.history;
    if (p.source == Source::kPath) {
        const treewy_stash& stash = p.commit.stash;
        p.u_aligned = is_quad_layout(stash.u, stash.u_dtype, stash.u_stride);
        p.k_aligned = is_quad_layout(stash.k, stash.k_dtype, stash.k_stride);
    } else {
        p.u_aligned = is_quad_layout(history.u, history.u_dtype, history.u_stride);
        p.k_aligned = is_quad_layout(history.k, history.k_dtype, history.k_stride);
    }
    return with_row_shape(pool, [&](auto state, auto shape) {
        using State = decltype(state);
        constexpr int kLanes = decltype(shape)::lanes, kVecs = decltype(shape)::vecs;
        using Tile4 = StateTile<State, kLanes, kVecs, 4 / kVecs>;
        using Tile8 = StateTile<State, kLanes, kVecs, 8 / kVecs>;
        using Tile16 = StateTile<State, kLanes, kVecs, 16 / kVecs>;
        const bool history = p.source != Source::kPath;
        const int chunk = history ? kHistoryChunk : kPathChunk;
        // Few blocks to leave where nothing is to fold, enough for a row that folds alone.
        const int64_t most = history ? 16 : kMaxItemsOfBlock;
        const auto run = [&](void (*kernel)(UpdateParams), int vectors) {
            const int rows = kCommitThreads / kLanes * (vectors / kVecs);
            const treewy_status status =
                cut_states(name, pool, p.commit.tree.batch, rows, p.commit.items, &p.cut, most);
            if (status != TREEWY_OK) return status;
            const int64_t blocks = int64_t{p.cut.blocks_of_row} * p.commit.tree.batch;
            const size_t shared = sizeof(float) * chunk * (pool.key_dim + rows);
            return launch(name, kernel, blocks, kCommitThreads, shared, stream, p);
        };
        // Folds are rare: they have one tile.
        const int vectors = history ? 8 : vectors_of_thread(p.commit.tile);
        void (*kernel)(UpdateParams) = update_states<Tile8, false, false>;
        if (history) kernel = update_states<Tile8, true, false>;
        if (vectors == 4) kernel = update_states<Tile4, false, false>;
        if (vectors == 16) kernel = update_states<Tile16, false, false>;
        // AUTO too: what is not whole, or a history, goes by vectors.
        const bool whole = pool.key_dim == 64 || pool.key_dim == 128 || pool.key_dim == 256;
        const bool streams =
            whole && !history &&
            (p.commit.tile == TREEWY_COMMIT_AUTO || p.commit.tile == TREEWY_COMMIT_STREAM);
        const treewy_status status =
            streams ? launch_stream(name, p, stream) : run(kernel, vectors);
        const int longest = history ? p.history.capacity : p.commit.tree.max_nodes;
        if (status != TREEWY_OK || longest <= chunk) return status;
        return run(history ? update_states<Tile4, true, true> : update_states<Tile4, false, true>,
                   4);
    });
}

}  // namespace treewy

extern "C" treewy_status treewy_commit(const treewy_commit_params* params, treewy_stream stream) {
    const char* name = "commit";
    if (params == nullptr) return treewy::fail_null(name);
    if (treewy::is_empty(params->state, params->tree.batch)) return TREEWY_OK;
    const treewy_status status = treewy::check_commit(name, *params);
    if (status != TREEWY_OK) return status;
    treewy::UpdateParams update{};
    update.commit = *params;
    update.source = treewy::Source::kPath;
    return treewy::launch_update(name, update, stream);
}
