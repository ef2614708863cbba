// SPDX-License-Identifier: Apache-2.0
//
// Causal conv with SiLU along the paths of a tree: conv.cuh has the equation and its bits. Where a
// stash is given it gets the raw inputs, which the commits need, as they pass by.
//
// Floor. Bytes: x in, y out and the windows once (and the stash out): at 16 nodes and 8,192
// channels of 16 bits 512 KiB a row and 48 KiB of window; 8.5 us at batch 64 and 4.33 TB/s.
// Operations, for each result of 16 bits: 4 to unpack, 4 multiply-adds, 5 for SiLU, half for
// packing, 3 for addresses, loads and stores: 17 instructions as compiled, which at batch 64 and 16
// nodes are 4.8 us of all issue slots. Two of them go to the unit of special functions, which a
// scheduler has every 8 cycles: 4.5 us, at the same time.
//
// Columns (the kernel for width 4 and 16-byte addresses). A block has 32 columns of one row, and
// all rows of x that any of its nodes can need, the window before them, in shared memory: every
// byte of x is asked for once, by copies that begin before anything is known of the tree but the
// node's index. A warp copies and computes the nodes of its own index modulo the warps, stage by
// stage of 4 nodes a warp, with 3 stages on their way behind the one it waits for. With one warp,
// which is what large batches get, a lane reads nothing but what it copied itself: no barrier once
// the taps are known. They lie in shared memory as offsets, 16 bytes a node.
//
// 10 KiB a block of one warp at 16 nodes: 20 blocks a multiprocessor, and up to 8 KiB on their way
// in each. Small batches, and trees of which few fit, get up to 16 warps a block (plan_groups).
//
// General. A thread owns a channel, or those of 16 bytes, over a run of nodes; taps come from L1.

#include "conv.cuh"

namespace treewy {

// ------------------------------------------------------------------ columns

namespace tree_columns {

constexpr int kNodesOfStage = 4;  // of a warp
constexpr int kAhead = 4;         // stages on their way, the one that is waited for included
constexpr int kMaxGroups = 16;    // warps of a block
constexpr int64_t kEnoughWarps = 1536;
constexpr int64_t kWarpsResident = 16;              // wanted on a multiprocessor
constexpr int64_t kSharedOfProcessor = 227 * 1024;  // a block takes 1 KiB more than it asks for

struct TreeColumnsWork {
    treewy_tree_conv_params conv;
    int columns;  // blocks of a row
    int groups;   // warps of a block
    int x_step;   // bytes from node to node
    int y_step;
    int stash_step;
};

struct ColumnsMemory {
    unsigned char* rows;  // [W - 1 + N, 512 bytes]: window, nodes
    int4* taps;           // [N] byte offsets of a node's taps in rows, oldest first
    int32_t* parents;     // [N]
};

constexpr size_t columns_bytes(int nodes) {
    const size_t rows = static_cast<size_t>(kWindowRows + nodes) * kRowBytes;
    const size_t tables = static_cast<size_t>(nodes) * (sizeof(int4) + sizeof(int32_t));
    return rows + (tables + 15) / 16 * 16;
}

__device__ __forceinline__ ColumnsMemory columns_memory(int nodes) {
    ColumnsMemory s;
    s.rows = shared_memory();
    s.taps = reinterpret_cast<int4*>(s.rows + (kWindowRows + nodes) * kRowBytes);
    s.parents = reinterpret_cast<int32_t*>(s.taps + nodes);
    return s;
}

// Where the taps of nodes [0, real) lie, for all threads of a block; `parent` is that of the node
// of the thread's index.
__device__ __forceinline__ void find_taps(const int32_t* parents, int32_t parent, int nodes,
                                          int real, const ColumnsMemory& s) {
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    if (thread < nodes) s.parents[thread] = parent;
    for (int i = thread + threads; i < nodes; i += threads) s.parents[i] = parents[i];
    __syncthreads();
    for (int node = thread; node < real; node += threads) {
        int32_t taps[kColumnWidth];
        tap_rows(s.parents, node, kColumnWidth, taps);
        // A row of the window, -1 for the newest, lies as far before node 0 as its index says.
        s.taps[node] =
            make_int4((kWindowRows + taps[0]) * kRowBytes, (kWindowRows + taps[1]) * kRowBytes,
                      (kWindowRows + taps[2]) * kRowBytes, (kWindowRows + taps[3]) * kRowBytes);
    }
    __syncthreads();
}

// What a node is made of, its own row last, still packed.
struct NodeTaps {
    uint4 raw[kColumnWidth];

    __device__ __forceinline__ NodeTaps(const unsigned char* column, const int4& at)
        : raw{load_column(column + at.x), load_column(column + at.y), load_column(column + at.z),
              load_column(column + at.w)} {}

    template <typename T>
    __device__ __forceinline__ uint4 conv(const ColumnFilter<T>& filter) const {
        Channels<kPer16Bytes<T>> sum;
#pragma unroll
        for (int j = 0; j < kColumnWidth; ++j) filter.add(j, unpack<T>(raw[j]), &sum);
        return filter.finish(sum);
    }
};

template <typename T>
__global__ void __launch_bounds__(kMaxGroups* kWarp)
    tree_conv_columns(const __grid_constant__ TreeColumnsWork p) {
    let_next_start();  // verification asks for its states meanwhile
    wait_for_previous();
    constexpr int kVec = kPer16Bytes<T>;
    const treewy_tree& tree = p.conv.tree;
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % kWarp, group = thread / kWarp;
    const int row = static_cast<int>(blockIdx.x) / p.columns;
    const int channel = (static_cast<int>(blockIdx.x) % p.columns * kWarp + lane) * kVec;
    const bool works = channel < p.conv.channels;
    const int nodes = tree.max_nodes, stage_nodes = kNodesOfStage * p.groups;
    const ColumnsMemory s = columns_memory(nodes);
    unsigned char* column = s.rows + 16 * lane;
    unsigned char* column_of_nodes = column + kWindowRows * kRowBytes;
    const ColumnRows x(static_cast<const T*>(p.conv.x) + row * p.conv.x_stride[0] + channel,
                       p.x_step);
    // The warp's nodes of a stage, as far as they are below `stop`.
    const auto copy_stage = [&](int stage, int stop) {
#pragma unroll
        for (int i = 0; i < kNodesOfStage; ++i) {
            const int node = stage * stage_nodes + i * p.groups + group;
            if (works && node < stop) {
                copy_async(column_of_nodes + node * kRowBytes, x[node]);
            }
        }
    };

    // All that can be asked for at once.
    const int32_t* parents = tree.parents + static_cast<int64_t>(row) * nodes;
    const int64_t slot = tree.slot[row];
    const int num_nodes = tree.num_nodes[row];
    const int32_t parent = thread < nodes ? load_now(parents + thread) : -1;
    ColumnWeights weights{};
    if (works) {
        weights.load(static_cast<const T*>(p.conv.weights.weight) +
                     static_cast<int64_t>(channel) * kColumnWidth);
    }
    copy_stage(0, nodes);
    const int real = is_live_slot(slot, tree.num_slots) ? min(num_nodes, nodes) : 0;
    if (works && real > 0) {
        const T* window =
            static_cast<const T*>(p.conv.conv_state) + slot * p.conv.state_stride[0] + channel;
        for (int i = group; i < kWindowRows; i += p.groups) {
            copy_async(column + i * kRowBytes, window + i * p.conv.state_stride[1]);
        }
    }
    commit_copies();
#pragma unroll
    for (int stage = 1; stage < kAhead; ++stage) {
        copy_stage(stage, real);
        commit_copies();
    }
    find_taps(parents, parent, nodes, real, s);
    ColumnFilter<T> filter;
    filter.set(weights, p.conv.weights.bias, channel);

    const ColumnRows y(static_cast<T*>(p.conv.y) + row * p.conv.y_stride[0] + channel, p.y_step);
    const bool keeps = p.conv.stash != nullptr;
    const ColumnRows stash(static_cast<T*>(p.conv.stash) + row * p.conv.stash_stride[0] + channel,
                           p.stash_step);
    for (int stage = 0; stage * stage_nodes < nodes; ++stage) {
        wait_copies<kAhead - 1>();
        copy_stage(stage + kAhead, real);
        commit_copies();
        if (p.groups > 1) __syncthreads();  // what the other warps copied
#pragma unroll 1
        for (int i = 0; i < kNodesOfStage; ++i) {
            const int node = stage * stage_nodes + i * p.groups + group;
            if (!works || node >= nodes) break;
            uint4 result = make_uint4(0, 0, 0, 0);
            if (node < real) {
                const NodeTaps taps(column, s.taps[node]);
                if (keeps) store_column(stash[node], taps.raw[kColumnWidth - 1]);
                result = taps.conv(filter);
            }
            store_column(y[node], result);
        }
    }
}

// Warps of a block: one where the batch alone fills the machine, more where it does not, or where
// trees are so large that few of them fit a multiprocessor.
inline int plan_groups(int64_t blocks, int nodes) {
    const int64_t resident =
        kSharedOfProcessor / (static_cast<int64_t>(columns_bytes(nodes)) + 1024);
    int groups = 1;
    while (2 * groups <= kMaxGroups && groups < nodes &&
           (blocks * groups < kEnoughWarps || resident * groups < kWarpsResident)) {
        groups *= 2;
    }
    return groups;
}

template <typename T>
treewy_status run_columns(const char* name, const treewy_tree_conv_params& p,
                          treewy_stream stream) {
    constexpr int kBytes = static_cast<int>(sizeof(T));
    TreeColumnsWork work{p,
                         channel_blocks(p.channels, kWarp, kPer16Bytes<T>),
                         1,
                         static_cast<int>(p.x_stride[1]) * kBytes,
                         static_cast<int>(p.y_stride[1]) * kBytes,
                         p.stash == nullptr ? 0 : static_cast<int>(p.stash_stride[1]) * kBytes};
    const int64_t blocks = int64_t{p.tree.batch} * work.columns;
    work.groups = plan_groups(blocks, p.tree.max_nodes);
    return launch(name, tree_conv_columns<T>, blocks, work.groups * kWarp,
                  columns_bytes(p.tree.max_nodes), stream, work, Start::kOverlapping);
}

}  // namespace tree_columns

// ------------------------------------------------------------------ general

namespace {

constexpr int kThreads = 128;
constexpr int kMaxNodesOfBlock = 16;
constexpr int64_t kEnoughBlocks = 1024;  // several for every multiprocessor

struct TreeConvWork {
    treewy_tree_conv_params conv;
    int channel_blocks;
    int node_blocks;
    int nodes_of_block;
};

template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads) tree_conv(const __grid_constant__ TreeConvWork p) {
    __shared__ int32_t parents_s[TREEWY_MAX_NODES];
    __shared__ int32_t taps_s[kMaxNodesOfBlock][TREEWY_MAX_CONV_WIDTH];
    const treewy_tree& tree = p.conv.tree;
    unsigned block = blockIdx.x;
    const int channel_block = static_cast<int>(block % p.channel_blocks);
    block /= p.channel_blocks;
    const int first = static_cast<int>(block % p.node_blocks) * p.nodes_of_block;
    const int row = static_cast<int>(block / p.node_blocks);
    const int stop = min(first + p.nodes_of_block, tree.max_nodes);
    const int channel = (channel_block * kThreads + static_cast<int>(threadIdx.x)) * kVec;
    const bool works = channel < p.conv.channels;

    const int64_t slot = tree.slot[row];
    const int real = is_live_slot(slot, tree.num_slots) ? min(tree.num_nodes[row], stop) : 0;
    const int width = p.conv.weights.width;
    const int32_t* parents = tree.parents + static_cast<int64_t>(row) * tree.max_nodes;
    for (int i = threadIdx.x; i < real; i += kThreads) parents_s[i] = parents[i];
    __syncthreads();
    for (int node = first + threadIdx.x; node < real; node += kThreads) {
        tap_rows(parents_s, node, width, taps_s[node - first]);
    }
    __syncthreads();
    if (!works) return;

    const T* x = static_cast<const T*>(p.conv.x) + row * p.conv.x_stride[0] + channel;
    T* y = static_cast<T*>(p.conv.y) + row * p.conv.y_stride[0] + channel;
    const bool keeps = p.conv.stash != nullptr;
    T* stash = static_cast<T*>(p.conv.stash) + row * p.conv.stash_stride[0] + channel;
    Filter<kVec> filter;
    const T* window = nullptr;
    if (first < real) {
        filter.load(p.conv.weights, 0, 0, channel);
        window = static_cast<const T*>(p.conv.conv_state) + slot * p.conv.state_stride[0] + channel;
    }
    for (int node = first; node < stop; ++node) {
        Channels<kVec> sum{};
        if (node < real) {
#pragma unroll
            for (int j = 0; j < TREEWY_MAX_CONV_WIDTH; ++j) {
                if (j >= width) break;
                const int tap = taps_s[node - first][j];
                const T* from = tap >= 0
                                    ? x + tap * p.conv.x_stride[1]
                                    : window + window_index(tap, width) * p.conv.state_stride[1];
                filter.add(j, load_channels<kVec>(from), &sum);
            }
            filter.template finish<T>(&sum);
            if (keeps) {
                store_vec<kVec>(stash + node * p.conv.stash_stride[1],
                                load_vec<kVec>(x + node * p.conv.x_stride[1]));
            }
        }
        store_channels(y + node * p.conv.y_stride[1], sum);
    }
}

template <typename T, int kVec>
treewy_status run_general(const char* name, const treewy_tree_conv_params& p,
                          treewy_stream stream) {
    TreeConvWork work{p, channel_blocks(p.channels, kThreads, kVec), 1, 1};
    const int64_t all = int64_t{p.tree.batch} * p.tree.max_nodes * work.channel_blocks;
    const int64_t nodes = all / kEnoughBlocks;
    work.nodes_of_block =
        static_cast<int>(nodes < 1 ? 1 : (nodes < kMaxNodesOfBlock ? nodes : kMaxNodesOfBlock));
    work.node_blocks = static_cast<int>(ceil_div(p.tree.max_nodes, work.nodes_of_block));
    const int64_t blocks = int64_t{p.tree.batch} * work.node_blocks * work.channel_blocks;
    return launch(name, tree_conv<T, kVec>, blocks, kThreads, 0, stream, work);
}

treewy_status run_tree_conv(const char* name, const treewy_tree_conv_params& p,
                            treewy_stream stream) {
    const bool vectors = p.channels % (16 / dtype_bytes(p.dtype)) == 0 &&
                         is_vector_layout(p.x, p.dtype, p.x_stride) &&
                         is_vector_layout(p.y, p.dtype, p.y_stride) &&
                         is_vector_layout(p.conv_state, p.dtype, p.state_stride) &&
                         (p.stash == nullptr || is_vector_layout(p.stash, p.dtype, p.stash_stride));
    const bool short_rows =
        has_short_rows(p.x_stride[1], p.dtype, p.tree.max_nodes) &&
        has_short_rows(p.y_stride[1], p.dtype, p.tree.max_nodes) &&
        (p.stash == nullptr || has_short_rows(p.stash_stride[1], p.dtype, p.tree.max_nodes));
    return with_type(p.dtype, [&](auto type) {
        using T = decltype(type);
        if (!vectors) return run_general<T, 1>(name, p, stream);
        if (!is_column_filter(p.weights, p.dtype) || !short_rows) {
            return run_general<T, kPer16Bytes<T>>(name, p, stream);
        }
        return tree_columns::run_columns<T>(name, p, stream);
    });
}

}  // namespace
}  // namespace treewy

extern "C" treewy_status treewy_tree_conv(const treewy_tree_conv_params* params,
                                          treewy_stream stream) {
    const char* name = "tree_conv";
    if (params == nullptr) return treewy::fail_null(name);
    if (params->tree.batch == 0 || params->tree.max_nodes == 0) return TREEWY_OK;
    const treewy_tree_conv_params& p = *params;
    treewy_status status = treewy::check_tree(name, p.tree);
    if (status == TREEWY_OK) {
        status = treewy::check_conv(name, p.dtype, p.channels, p.weights.width);
    }
    if (status == TREEWY_OK) status = treewy::check_weights(name, p.weights);
    if (status == TREEWY_OK) status = treewy::check_pointers(name, p.x, p.y, p.conv_state);
    return status == TREEWY_OK ? treewy::run_tree_conv(name, p, stream) : status;
}
