// SPDX-License-Identifier: Apache-2.0
//
// Commit of accepted paths to the recurrent state, and the history of the deferred commit.
//
//   S_a = exp(G_a) S_0 + sum over i <= a of exp(G_a - G_i) u_i k_i^T          (V x K a value head)
//
// G_a - G_i is the sum of the log decays of the nodes after i on the path to a: it is summed in
// double from a upwards, so that no difference of large sums is ever taken.
//
// Threads. A block walks one row's path once and then updates some of the row's items, an item
// being `tile_rows` rows of V of one (layer, value head). Its threads are groups of K / (16 bytes)
// threads that own 4 consecutive rows of V each, a thread the same 16 bytes of every row. They
// come by cp.async, an item ahead: 16 KiB a block are always under way, and take no registers. The
// path comes in chunks of 16 nodes through shared memory: k normalised and scaled by its decay by a
// warp a node, u as it is.
// So the state is read and written once, and a path may have any length. Paths of a history are the
// same to this kernel: other pointers.
//
// Floor. Bytes: the state once in and once out (4 MiB a layer and sequence of Qwen3.5-35B-A3B in
// fp32; u and k of a path of 4 add 2%). Operations: one FMA per element and node of the path, a
// quarter of what the memory takes at 4 nodes and fp32. Items: 3,840 at batch 1 for that model, so
// that a step of one sequence fills the chip too.
//
// Why this version. A block an item walked the path 60 times over for every layer's worth of heads
// and waited for five loads in a row; here it waits for them once in up to 16 items. It has not
// been measured yet.
//
// The deferred commit is three launches: fold the histories that have no room, append the paths,
// and only then change the lengths, which the first two read in every layer.

#include "fragment.cuh"

namespace treewy {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kChunk = 16;  // nodes of the path in shared memory at a time
constexpr float kNormEps = 1e-6f;

enum class Source {
    kPath,          // commit: the accepted path
    kFullHistory,   // deferred commit: the history, where the path does not fit behind it
    kWholeHistory,  // flush
};

// Parameters of all kernels here; a flush leaves `tree` without parents and `accepted` null.
struct UpdateParams {
    treewy_commit_params commit;
    treewy_history history;
    int tile_rows;       // rows of V in an item
    int tiles;           // items of a head
    int items;           // of a row of the batch, all layers
    int items_of_block;  // that a block updates
    int blocks_of_row;
};

// One (layer, row, head), and in update_states some rows of V of it.
struct Item {
    int layer;
    int row;  // of the batch
    int head;
    int tile;
};

__device__ __forceinline__ Item find_item(int item, int row, int heads, int tiles) {
    Item at;
    at.row = row;
    at.tile = item % tiles;
    at.head = item / tiles % heads;
    at.layer = item / tiles / heads;
    return at;
}

__device__ __forceinline__ RowAction row_action(const treewy_commit_params& commit, int row) {
    const treewy_tree& tree = commit.tree;
    return commit_action(tree.slot[row], tree.num_slots, commit.accepted[row], tree.num_nodes[row],
                         tree.max_nodes);
}

__device__ __forceinline__ void count_error(int32_t* errors) {
    if (errors != nullptr) atomicAdd(errors, 1);
}

// The path to the row's accepted node in shared memory, root first; returns its length, 0 if the
// parents are not in order. `parents_s` and `path_s` hold TREEWY_MAX_NODES each.
__device__ __forceinline__ int find_path(const treewy_commit_params& commit, int row,
                                         int32_t* parents_s, int32_t* path_s, int32_t* length_s) {
    const treewy_tree& tree = commit.tree;
    const int nodes = tree.max_nodes;
    const int32_t* parents = tree.parents + static_cast<int64_t>(row) * nodes;
    for (int i = threadIdx.x; i < nodes; i += blockDim.x) parents_s[i] = parents[i];
    __syncthreads();
    if (threadIdx.x == 0) {
        const int last = commit.accepted[row];
        *length_s = path_length(parents_s, last);
        write_path(parents_s, last, *length_s, path_s);
    }
    __syncthreads();
    return *length_s;
}

// Entries of a path or of a history, as the update reads them for one layer, row and head.
struct Entries {
    const float* u;  // of the block's first row of V
    const void* k;
    const float* g;
    int64_t u_stride;  // from node to node
    int64_t k_offset;  // elements before k of node 0
    int64_t k_stride;
    int64_t g_stride;
    int k_dtype;
    bool normalize;
    int count;
    const int32_t* path;  // node of each entry, null: entry i is node i

    __device__ __forceinline__ int node(int entry) const {
        return path == nullptr ? entry : path[entry];
    }
};

__device__ __forceinline__ Entries path_entries(const treewy_commit_params& commit, const Item& at,
                                                int row0, int count, const int32_t* path) {
    const treewy_stash& stash = commit.stash;
    const int key_head = at.head / (commit.state.value_heads / commit.state.key_heads);
    Entries e;
    e.u = stash.u + at.layer * stash.u_stride[0] + at.row * stash.u_stride[1] +
          at.head * stash.u_stride[3] + row0;
    e.u_stride = stash.u_stride[2];
    e.k = stash.k;
    e.k_offset =
        at.layer * stash.k_stride[0] + at.row * stash.k_stride[1] + key_head * stash.k_stride[3];
    e.k_stride = stash.k_stride[2];
    e.g = stash.g + at.layer * stash.g_stride[0] + at.row * stash.g_stride[1] + at.head;
    e.g_stride = stash.g_stride[2];
    e.k_dtype = stash.k_dtype;
    e.normalize = stash.k_normalized == 0;
    e.count = count;
    e.path = path;
    return e;
}

__device__ __forceinline__ Entries history_entries(const UpdateParams& p, const Item& at,
                                                   int64_t slot, int row0, int count) {
    const treewy_history& history = p.history;
    const treewy_state_pool& state = p.commit.state;
    const int key_head = at.head / (state.value_heads / state.key_heads);
    Entries e;
    e.u = history.u + at.layer * history.u_stride[0] + slot * history.u_stride[1] +
          static_cast<int64_t>(at.head) * state.value_dim + row0;
    e.u_stride = static_cast<int64_t>(state.value_heads) * state.value_dim;
    e.k = history.k;
    e.k_offset = at.layer * history.k_stride[0] + slot * history.k_stride[1] +
                 static_cast<int64_t>(key_head) * state.key_dim;
    e.k_stride = static_cast<int64_t>(state.key_heads) * state.key_dim;
    e.g = history.g + at.layer * history.g_stride[0] + slot * history.g_stride[1] + at.head;
    e.g_stride = state.value_heads;
    e.k_dtype = TREEWY_FLOAT32;
    e.normalize = false;
    e.count = count;
    e.path = nullptr;
    return e;
}

// k of a node in the registers of a warp, lane by lane; normalised, if it was not.
struct Key {
    static constexpr int kPerLane = TREEWY_MAX_HEAD_DIM / kWarp;
    float x[kPerLane];
};

__device__ __forceinline__ Key load_key(const Entries& e, int node, int key_dim, int lane) {
    const int64_t at = e.k_offset + node * e.k_stride;
    Key key;
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < Key::kPerLane; ++i) {
        const int c = i * kWarp + lane;
        key.x[i] = c < key_dim ? load_as_float(e.k, e.k_dtype, at + c) : 0.0f;
        square += key.x[i] * key.x[i];
    }
    if (!e.normalize) return key;
    const float scale = rsqrtf(warp_sum(square) + kNormEps);
#pragma unroll
    for (int i = 0; i < Key::kPerLane; ++i) key.x[i] *= scale;
    return key;
}

// Where column c of a staged key lies: the columns of a thread's vector in quarters of 16 bytes
// that are K / parts apart, so that a warp reads every quarter without bank conflicts.
template <int kVec>
__device__ __forceinline__ int staged_column(int c, int key_dim) {
    constexpr int kParts = kVec / 4;
    const int within = c % kVec;
    return within / 4 * (key_dim / kParts) + c / kVec * 4 + within % 4;
}

// Sum of the log decays of all entries; every warp works it out for itself.
__device__ __forceinline__ double total_decay(const Entries& e) {
    double sum = 0.0;
    for (int first = 0; first < e.count; first += kWarp) {
        const int i = first + threadIdx.x % kWarp;
        double total;
        warp_prefix(i < e.count ? static_cast<double>(e.g[e.node(i) * e.g_stride]) : 0.0, &total);
        sum += total;
    }
    return sum;
}

constexpr int kRows = 4;  // rows of V that a thread owns

// Shared memory of update_states: staged k and u, then two buffers of states.
__host__ __device__ constexpr size_t staged_bytes(int key_dim, int tile_rows) {
    return sizeof(float) * kChunk * (static_cast<size_t>(key_dim) + tile_rows);
}
constexpr int kBufferVectors = kRows * kThreads;

constexpr size_t update_shared_bytes(int key_dim, int tile_rows) {
    return staged_bytes(key_dim, tile_rows) + 2 * kBufferVectors * sizeof(uint4);
}

// One chunk of entries in shared memory, from `stop` - 1 downwards: `k_s` scaled by their decays,
// `u_s`. `later` is the log decay after the chunk's last entry; returns that of the whole chunk.
template <int kVec>
__device__ __forceinline__ double stage_chunk(const Entries& e, int stop, int count, double later,
                                              int key_dim, int rows, int tile_rows, float* k_s,
                                              float* u_s) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    for (int i = threadIdx.x; i < count * rows; i += kThreads) {
        const int j = i / rows, r = i % rows;
        u_s[j * tile_rows + r] = e.u[e.node(stop - 1 - j) * e.u_stride + r];
    }
    // Every warp works out all decays for itself: lane j has entry stop - 1 - j.
    const double own =
        lane < count ? static_cast<double>(e.g[e.node(stop - 1 - lane) * e.g_stride]) : 0.0;
    double chunk_decay;
    const double after_entry = later + warp_prefix(own, &chunk_decay);
    const float decay = expf(static_cast<float>(after_entry));
    for (int j = warp; j < count; j += kWarps) {
        const Key key = load_key(e, e.node(stop - 1 - j), key_dim, lane);
        const float scale = __shfl_sync(kAllLanes, decay, j);
#pragma unroll
        for (int i = 0; i < Key::kPerLane; ++i) {
            const int c = i * kWarp + lane;
            if (c < key_dim) k_s[j * key_dim + staged_column<kVec>(c, key_dim)] = scale * key.x[i];
        }
    }
    return chunk_decay;
}

// What a thread owns of an item: 16 bytes of kRows rows, or nothing.
template <typename State>
struct Share {
    State* state;
    int column;  // the first of its columns
    int group;   // its rows are the item's 4 * group ..
    bool works;
};

template <typename State>
__device__ __forceinline__ Share<State> find_share(const UpdateParams& p, const Item& at,
                                                   int64_t slot) {
    constexpr int kVec = kPer16Bytes<State>;
    const treewy_state_pool& pool = p.commit.state;
    const int per_row = pool.key_dim / kVec;  // threads of a group
    const int row0 = at.tile * p.tile_rows;
    Share<State> share;
    share.group = static_cast<int>(threadIdx.x) / per_row;
    share.column = static_cast<int>(threadIdx.x) % per_row * kVec;
    // Items have a multiple of 4 rows: a group is all in or out.
    share.works = share.group * kRows < min(p.tile_rows, pool.value_dim - row0);
    const int64_t row = int64_t{at.head} * pool.value_dim + row0 + share.group * kRows;
    share.state = static_cast<State*>(pool.data) + at.layer * pool.layer_stride +
                  slot * pool.slot_stride + row * pool.key_dim + share.column;
    return share;
}

// Starts loading a thread's share into its own places of a buffer in shared memory.
template <typename State>
__device__ __forceinline__ void fetch(const UpdateParams& p, const Item& at, int64_t slot,
                                      uint4* buffer) {
    const Share<State> share = find_share<State>(p, at, slot);
    if (!share.works) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        copy_async(buffer + r * kThreads + threadIdx.x, share.state + r * p.commit.state.key_dim);
    }
}

// after += the staged entries' u k^T.
template <int kVec>
__device__ __forceinline__ void add_entries(float (&after)[kRows][kVec], int count, int key_dim,
                                            int tile_rows, const float* k_s, const float* u_s) {
#pragma unroll 2
    for (int j = 0; j < count; ++j) {
        float k[kVec];
#pragma unroll
        for (int part = 0; part < kVec / 4; ++part) {
            const Vec<float, 4> x = load_vec<4>(k_s + j * key_dim + part * (key_dim / (kVec / 4)));
#pragma unroll
            for (int i = 0; i < 4; ++i) k[part * 4 + i] = x.x[i];
        }
        const Vec<float, kRows> u = load_vec<kRows>(u_s + j * tile_rows);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int i = 0; i < kVec; ++i) after[r][i] = fmaf(u.x[r], k[i], after[r][i]);
        }
    }
}

// The state of one item after its entries; `before` holds the thread's share once its copies are
// waited for, all but the group begun last.
template <typename State>
__device__ __forceinline__ void update_item(const UpdateParams& p, const Item& at, int64_t slot,
                                            const Entries& e, const uint4* before) {
    constexpr int kVec = kPer16Bytes<State>;
    const treewy_state_pool& pool = p.commit.state;
    const int key_dim = pool.key_dim;
    const int rows = min(p.tile_rows, pool.value_dim - at.tile * p.tile_rows);
    float* k_s = reinterpret_cast<float*>(shared_memory());  // [kChunk][K], see staged_column
    float* u_s = k_s + kChunk * key_dim;                     // [kChunk][tile_rows]
    float after[kRows][kVec];
    double later = 0.0;
    const double total = e.count > kChunk ? total_decay(e) : 0.0;
    const Share<State> share = find_share<State>(p, at, slot);
    for (int stop = e.count; stop > 0; stop -= kChunk) {  // from the last entry to the first
        const int count = min(kChunk, stop);
        __syncthreads();  // all are done with what was staged before
        later += stage_chunk<kVec>(e, stop, count, later, key_dim, rows, p.tile_rows, k_s, u_s);
        __syncthreads();
        if (stop == e.count) {
            wait_copies<1>();  // those of the next item may go on
            const float from_root = expf(static_cast<float>(e.count > kChunk ? total : later));
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                const Vec<State, kVec> x = load_vec<kVec>(
                    reinterpret_cast<const State*>(before + r * kThreads + threadIdx.x));
#pragma unroll
                for (int i = 0; i < kVec; ++i) after[r][i] = from_root * as_float(x.x[i]);
            }
        }
        if (share.works) {
            add_entries<kVec>(after, count, key_dim, p.tile_rows, k_s + share.column / kVec * 4,
                              u_s + share.group * kRows);
        }
    }
    if (!share.works) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        Vec<State, kVec> out;
#pragma unroll
        for (int i = 0; i < kVec; ++i) out.x[i] = from_float<State>(after[r][i]);
        store_vec<kVec>(share.state + r * key_dim, out);
    }
}

template <typename State, Source kSource>
__global__ void __launch_bounds__(kThreads, sizeof(State) == 4 ? 3 : 2)
    update_states(const __grid_constant__ UpdateParams p) {
    __shared__ int32_t parents_s[TREEWY_MAX_NODES];
    __shared__ int32_t path_s[TREEWY_MAX_NODES];
    __shared__ int32_t length_s;

    const treewy_state_pool& pool = p.commit.state;
    const treewy_tree& tree = p.commit.tree;
    const int row = static_cast<int>(blockIdx.x / p.blocks_of_row);
    const int block = static_cast<int>(blockIdx.x % p.blocks_of_row);
    const int64_t slot = tree.slot[row];
    const bool reports = kSource == Source::kPath && block == 0 && threadIdx.x == 0;

    int count = 0;  // entries
    if constexpr (kSource == Source::kWholeHistory) {
        if (!is_live_slot(slot, tree.num_slots)) return;
        count = clamp_length(p.history.length[slot], p.history.capacity);
    } else {
        const RowAction action = row_action(p.commit, row);
        if (action == RowAction::kBad && reports) count_error(p.commit.errors);
        if (action != RowAction::kMove) return;
        count = find_path(p.commit, row, parents_s, path_s, &length_s);
        if (count == 0 && reports) count_error(p.commit.errors);
    }
    if constexpr (kSource == Source::kFullHistory) {
        const int length = p.history.length[slot];
        const HistoryPlan plan = plan_history(length, count, p.history.capacity);
        count = count > 0 && plan.fits && plan.fold ? clamp_length(length, p.history.capacity) : 0;
    }
    if (count == 0) return;

    const int first = block * p.items_of_block;
    const int stop = min(first + p.items_of_block, p.items);
    uint4* buffers =
        reinterpret_cast<uint4*>(shared_memory() + staged_bytes(pool.key_dim, p.tile_rows));
    fetch<State>(p, find_item(first, row, pool.value_heads, p.tiles), slot, buffers);
    commit_copies();
    for (int item = first; item < stop; ++item) {
        const Item at = find_item(item, row, pool.value_heads, p.tiles);
        uint4* before = buffers + (item - first) % 2 * kBufferVectors;
        uint4* next = buffers + (item - first + 1) % 2 * kBufferVectors;
        // A thread reads its places of a buffer before it fills them again: it needs no barrier.
        if (item + 1 < stop) {
            fetch<State>(p, find_item(item + 1, row, pool.value_heads, p.tiles), slot, next);
        }
        commit_copies();
        const int row0 = at.tile * p.tile_rows;
        const Entries e = kSource == Source::kPath ? path_entries(p.commit, at, row0, count, path_s)
                                                   : history_entries(p, at, slot, row0, count);
        update_item<State>(p, at, slot, e, before);
    }
}

// Appends the accepted paths: a block for every (layer, row, value head); the first head of a key
// head's group writes its keys. Reads the lengths as they were before the commit.
constexpr int kAppendThreads = 128;

__global__ void __launch_bounds__(kAppendThreads)
    append_paths(const __grid_constant__ UpdateParams p) {
    __shared__ int32_t parents_s[TREEWY_MAX_NODES];
    __shared__ int32_t path_s[TREEWY_MAX_NODES];
    __shared__ int32_t length_s;
    const treewy_state_pool& pool = p.commit.state;
    const treewy_history& history = p.history;
    const int block = static_cast<int>(blockIdx.x);
    const int pairs = pool.layers * pool.value_heads;
    const Item at = find_item(block % pairs, block / pairs, pool.value_heads, 1);
    if (row_action(p.commit, at.row) != RowAction::kMove) return;
    const int length = find_path(p.commit, at.row, parents_s, path_s, &length_s);
    if (length == 0) return;
    const int64_t slot = p.commit.tree.slot[at.row];
    const HistoryPlan plan = plan_history(history.length[slot], length, history.capacity);
    if (!plan.fits) return;

    const Entries e = path_entries(p.commit, at, 0, length, path_s);
    const int64_t heads = pool.value_heads, value_dim = pool.value_dim;
    float* u = history.u + at.layer * history.u_stride[0] + slot * history.u_stride[1] +
               (plan.start * heads + at.head) * value_dim;
    for (int i = threadIdx.x; i < length * pool.value_dim; i += kAppendThreads) {
        const int j = i / pool.value_dim, r = i % pool.value_dim;
        u[j * heads * value_dim + r] = e.u[e.node(j) * e.u_stride + r];
    }
    float* g = history.g + at.layer * history.g_stride[0] + slot * history.g_stride[1] +
               plan.start * heads + at.head;
    for (int j = threadIdx.x; j < length; j += kAppendThreads) {
        g[j * heads] = e.g[e.node(j) * e.g_stride];
    }
    const int group = pool.value_heads / pool.key_heads;
    if (at.head % group != 0) return;
    const int64_t key_heads = pool.key_heads, key_dim = pool.key_dim;
    float* k = history.k + at.layer * history.k_stride[0] + slot * history.k_stride[1] +
               (plan.start * key_heads + at.head / group) * key_dim;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    for (int j = static_cast<int>(threadIdx.x) / kWarp; j < length; j += kAppendThreads / kWarp) {
        const Key key = load_key(e, e.node(j), pool.key_dim, lane);
#pragma unroll
        for (int i = 0; i < Key::kPerLane; ++i) {
            const int c = i * kWarp + lane;
            if (c < pool.key_dim) k[j * key_heads * key_dim + c] = key.x[i];
        }
    }
}

// Lengths after a deferred commit, and the count of rows that could not be moved: a warp a row, so
// that a wrong tree is walked as everywhere else.
__global__ void __launch_bounds__(kWarp) advance_history(const __grid_constant__ UpdateParams p) {
    __shared__ int32_t parents_s[TREEWY_MAX_NODES];
    __shared__ int32_t path_s[TREEWY_MAX_NODES];
    __shared__ int32_t length_s;
    const int row = static_cast<int>(blockIdx.x);
    const RowAction action = row_action(p.commit, row);
    if (action == RowAction::kBad && threadIdx.x == 0) count_error(p.commit.errors);
    if (action != RowAction::kMove) return;
    const int length = find_path(p.commit, row, parents_s, path_s, &length_s);
    if (threadIdx.x != 0) return;
    int32_t* held = p.history.length + p.commit.tree.slot[row];
    const HistoryPlan plan = plan_history(*held, length, p.history.capacity);
    if (length == 0 || !plan.fits) {
        count_error(p.commit.errors);
    } else {
        *held = plan.start + length;
    }
}

// Lengths after a flush, and the count of slots out of range.
__global__ void __launch_bounds__(kWarp) clear_history(const __grid_constant__ UpdateParams p) {
    const int row = static_cast<int>(blockIdx.x) * kWarp + static_cast<int>(threadIdx.x);
    if (row >= p.commit.tree.batch) return;
    const int64_t slot = p.commit.tree.slot[row];
    if (is_live_slot(slot, p.commit.tree.num_slots)) {
        p.history.length[slot] = 0;
    } else if (slot != -1) {
        count_error(p.commit.errors);
    }
}

// ------------------------------------------------------------------ host

constexpr int64_t kEnoughBlocks = 1024;  // a few rounds of what an H200 holds at once
constexpr int64_t kMaxItemsOfBlock = 16;

template <Source kSource>
treewy_status launch_update(const char* name, UpdateParams p, treewy_stream stream) {
    const treewy_state_pool& pool = p.commit.state;
    const bool wide = pool.dtype == TREEWY_FLOAT32;
    const int rows = kThreads / (pool.key_dim / (wide ? 4 : 8)) * kRows;
    p.tile_rows = rows < pool.value_dim ? rows : pool.value_dim;
    p.tiles = static_cast<int>(ceil_div(pool.value_dim, p.tile_rows));
    const int64_t items = int64_t{pool.layers} * pool.value_heads * p.tiles;
    if (items > INT32_MAX) {
        return fail(TREEWY_UNSUPPORTED, "%s: %d layers of %d value heads are too many", name,
                    pool.layers, pool.value_heads);
    }
    const int64_t share = items * p.commit.tree.batch / kEnoughBlocks;
    p.items = static_cast<int>(items);
    p.items_of_block =
        static_cast<int>(share < 1 ? 1 : (share < kMaxItemsOfBlock ? share : kMaxItemsOfBlock));
    p.blocks_of_row = static_cast<int>(ceil_div(items, p.items_of_block));
    const int64_t blocks = int64_t{p.blocks_of_row} * p.commit.tree.batch;
    const size_t shared = update_shared_bytes(pool.key_dim, p.tile_rows);
    return launch(name,
                  wide ? update_states<float, kSource> : update_states<__nv_bfloat16, kSource>,
                  blocks, kThreads, shared, stream, p);
}

treewy_status check_commit(const char* name, const treewy_commit_params& p) {
    treewy_status status = check_tree(name, p.tree);
    if (status == TREEWY_OK) status = check_state_pool(name, p.state);
    if (status != TREEWY_OK) return status;
    if (p.stash.u == nullptr || p.stash.k == nullptr || p.stash.g == nullptr) {
        return fail(TREEWY_INVALID_ARGUMENT, "%s: stash.u, stash.k and stash.g must not be null",
                    name);
    }
    if (p.accepted == nullptr) {
        return fail(TREEWY_INVALID_ARGUMENT, "%s: accepted must not be null", name);
    }
    if (!is_float_dtype(p.stash.k_dtype)) {
        return fail(TREEWY_UNSUPPORTED,
                    "%s: stash.k_dtype must be float32, bfloat16 or float16, got %d", name,
                    p.stash.k_dtype);
    }
    return TREEWY_OK;
}

treewy_status check_history(const char* name, const treewy_history& history) {
    if (history.u == nullptr || history.k == nullptr || history.g == nullptr ||
        history.length == nullptr) {
        return fail(TREEWY_INVALID_ARGUMENT,
                    "%s: the history's u, k, g and length must not be null", name);
    }
    if (history.capacity < 1) {
        return fail(TREEWY_INVALID_ARGUMENT, "%s: history.capacity must be at least 1, got %d",
                    name, history.capacity);
    }
    return TREEWY_OK;
}

bool is_empty(const treewy_state_pool& pool, int batch) { return batch == 0 || pool.layers == 0; }

}  // namespace
}  // namespace treewy

using treewy::UpdateParams;

extern "C" treewy_status treewy_commit(const treewy_commit_params* params, treewy_stream stream) {
    const char* name = "commit";
    if (params == nullptr) return treewy::fail_null(name);
    if (treewy::is_empty(params->state, params->tree.batch)) return TREEWY_OK;
    const treewy_status status = treewy::check_commit(name, *params);
    if (status != TREEWY_OK) return status;
    return treewy::launch_update<treewy::Source::kPath>(
        name, UpdateParams{*params, {}, 0, 0, 0, 0, 0}, stream);
}

extern "C" treewy_status treewy_commit_deferred(const treewy_commit_deferred_params* params,
                                                treewy_stream stream) {
    const char* name = "commit_deferred";
    if (params == nullptr) return treewy::fail_null(name);
    const treewy_commit_params& commit = params->commit;
    if (treewy::is_empty(commit.state, commit.tree.batch)) return TREEWY_OK;
    treewy_status status = treewy::check_commit(name, commit);
    if (status == TREEWY_OK) status = treewy::check_history(name, params->history);
    const UpdateParams p{commit, params->history, 0, 0, 0, 0, 0};
    if (status == TREEWY_OK) {
        status = treewy::launch_update<treewy::Source::kFullHistory>(name, p, stream);
    }
    if (status == TREEWY_OK) {
        const int64_t blocks =
            int64_t{commit.state.layers} * commit.tree.batch * commit.state.value_heads;
        status = treewy::launch(name, treewy::append_paths, blocks, treewy::kAppendThreads, 0,
                                stream, p);
    }
    if (status == TREEWY_OK) {
        status = treewy::launch(name, treewy::advance_history, commit.tree.batch, treewy::kWarp, 0,
                                stream, p);
    }
    return status;
}

extern "C" treewy_status treewy_flush_history(const treewy_flush_history_params* params,
                                              treewy_stream stream) {
    const char* name = "flush_history";
    if (params == nullptr) return treewy::fail_null(name);
    if (treewy::is_empty(params->state, params->batch)) return TREEWY_OK;
    UpdateParams p{};
    p.commit.tree.batch = params->batch;
    p.commit.tree.num_slots = params->num_slots;
    p.commit.tree.slot = params->slot;
    p.commit.state = params->state;
    p.commit.errors = params->errors;
    p.history = params->history;
    treewy_status status = treewy::check_state_pool(name, params->state);
    if (status == TREEWY_OK) status = treewy::check_history(name, params->history);
    if (status == TREEWY_OK && (params->batch < 0 || params->slot == nullptr)) {
        status = treewy::fail(TREEWY_INVALID_ARGUMENT,
                              "%s: batch must be >= 0 and slot not null, got batch %d", name,
                              params->batch);
    }
    if (status == TREEWY_OK) {
        status = treewy::launch_update<treewy::Source::kWholeHistory>(name, p, stream);
    }
    if (status == TREEWY_OK) {
        status = treewy::launch(name, treewy::clear_history,
                                treewy::ceil_div(params->batch, treewy::kWarp), treewy::kWarp, 0,
                                stream, p);
    }
    return status;
}
