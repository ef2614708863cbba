// SPDX-License-Identifier: Apache-2.0
//
// The conv again at the nodes of the accepted paths, all layers in one launch: what a commit needs
// of conv outputs that nobody kept (the raw keys). conv.cuh has the equation and its bits.
//
// A block finds one row's path once and does some of the row's items, which are 32 columns of one
// layer (a channel a lane where addresses or the width do not suit columns), a warp an item after
// the other. Rows that accept nothing leave at once; outputs of other nodes are not written.
//
// Floor. Bytes, for a path of P nodes: P + 3 rows in, P out. 30 layers of 2,048 channels of 16
// bits, batch 64, paths of 4: 86 MB, 20 us at 4.33 TB/s. What is on its way: weights, window and
// the first 4 nodes of an item are asked for at once, 5.5 KiB a warp.

#include "commit_rows.cuh"
#include "conv.cuh"

namespace treewy {
namespace {

constexpr int kThreads = TREEWY_MAX_NODES;  // of a block: see read_row
constexpr int kWarps = kThreads / kWarp;
constexpr int kNodesAtOnce = 4;
constexpr int64_t kEnoughBlocks = 2048;
constexpr int kMaxItemsOfWarp = 8;

struct PathConvWork {
    treewy_path_conv_params conv;
    int columns;        // items of a layer
    int items;          // of a row
    int items_of_warp;  // one after the other
    int blocks_of_row;
    int x_step;  // bytes from node to node, for columns
    int y_step;
};

// An item's place: element offsets of its first channel.
template <typename T>
struct PathItem {
    const T* x;       // of node 0
    T* y;             // of node 0
    const T* window;  // its oldest row
    int layer;
    int channel;
};

template <typename T>
__device__ __forceinline__ PathItem<T> find_path_item(const PathConvWork& p, int item, int row,
                                                      int slot, int vec) {
    const treewy_path_conv_params& conv = p.conv;
    PathItem<T> at;
    at.layer = item / p.columns;
    at.channel = (item % p.columns * kWarp + static_cast<int>(threadIdx.x) % kWarp) * vec;
    at.x = static_cast<const T*>(conv.x) + at.layer * conv.x_stride[0] + row * conv.x_stride[1] +
           at.channel;
    at.y =
        static_cast<T*>(conv.y) + at.layer * conv.y_stride[0] + row * conv.y_stride[1] + at.channel;
    at.window = static_cast<const T*>(conv.conv_state) + at.layer * conv.state_stride[0] +
                slot * conv.state_stride[1] + at.channel;
    return at;
}

// Width 4, 16 bytes a lane; the path's nodes lie in `path` from the last one on.
template <typename T>
__device__ __forceinline__ void conv_columns(const PathConvWork& work, const PathItem<T>& at,
                                             const int32_t* path, int length) {
    const treewy_path_conv_params& p = work.conv;
    const ColumnRows x(at.x, work.x_step), y(at.y, work.y_step);
    ColumnWeights weights;
    weights.load(static_cast<const T*>(p.weights.weight) + at.layer * p.weight_stride +
                 static_cast<int64_t>(at.channel) * kColumnWidth);
    const auto load_node = [&](int index) {
        if (index >= length) return make_uint4(0, 0, 0, 0);
        return load_column(x[path[length - 1 - index]]);
    };
    // Rows stay packed: there is room for what is asked for at once, and little to compute.
    uint4 rows[kWindowRows + kNodesAtOnce];
#pragma unroll
    for (int i = 0; i < kWindowRows; ++i) {
        rows[i] = load_column(at.window + i * p.state_stride[2]);
    }
#pragma unroll
    for (int i = 0; i < kNodesAtOnce; ++i) rows[kWindowRows + i] = load_node(i);
    ColumnFilter<T> filter;
    const T* bias = static_cast<const T*>(p.weights.bias);
    filter.set(weights, bias == nullptr ? nullptr : bias + at.layer * p.bias_stride, at.channel);
#pragma unroll 1
    for (int start = 0; start < length; start += kNodesAtOnce) {
#pragma unroll
        for (int i = 0; i < kNodesAtOnce; ++i) {
            if (start + i >= length) break;
            Channels<kPer16Bytes<T>> sum;
#pragma unroll
            for (int j = 0; j < kColumnWidth; ++j) filter.add(j, unpack<T>(rows[i + j]), &sum);
            store_column(y[path[length - 1 - start - i]], filter.finish(sum));
        }
#pragma unroll
        for (int i = 0; i < kWindowRows; ++i) rows[i] = rows[kNodesAtOnce + i];
#pragma unroll
        for (int i = 0; i < kNodesAtOnce; ++i) {
            rows[kWindowRows + i] = load_node(start + kNodesAtOnce + i);
        }
    }
}

// Any width, a channel a lane.
template <typename T>
__device__ __forceinline__ void conv_channel(const treewy_path_conv_params& p,
                                             const PathItem<T>& at, const int32_t* path,
                                             int length) {
    const int width = p.weights.width;
    Filter<1> filter;
    filter.load(p.weights, at.layer * p.weight_stride, at.layer * p.bias_stride, at.channel);
    for (int i = 0; i < length; ++i) {
        Channels<1> sum{};
#pragma unroll
        for (int j = 0; j < TREEWY_MAX_CONV_WIDTH; ++j) {
            if (j >= width) break;
            const int entry = i - (width - 1) + j;
            const T* from = entry >= 0 ? at.x + path[length - 1 - entry] * p.x_stride[2]
                                       : at.window + window_index(entry, width) * p.state_stride[2];
            filter.add(j, load_channels<1>(from), &sum);
        }
        filter.template finish<T>(&sum);
        store_channels(at.y + path[length - 1 - i] * p.y_stride[2], sum);
    }
}

template <typename T, bool kColumns>
__global__ void __launch_bounds__(kThreads, 4) path_conv(const __grid_constant__ PathConvWork p) {
    __shared__ PathMemory path_s;
    const int row = static_cast<int>(blockIdx.x) / p.blocks_of_row;
    const int part = static_cast<int>(blockIdx.x) % p.blocks_of_row;
    const CommitRow to = read_row(p.conv.tree, p.conv.accepted, row, &path_s);
    if (to.action != RowAction::kMove) return;
    // A path out of order has length 0; the commit counts it.
    const int length = find_path(to, &path_s);
    const int first = part * kWarps * p.items_of_warp + static_cast<int>(threadIdx.x) / kWarp;
    for (int i = 0; i < p.items_of_warp; ++i) {
        const int item = first + i * kWarps;
        if (item >= p.items) break;
        const PathItem<T> at =
            find_path_item<T>(p, item, row, to.slot, kColumns ? kPer16Bytes<T> : 1);
        if (at.channel >= p.conv.channels) continue;
        if constexpr (kColumns) {
            conv_columns(p, at, path_s.node, length);
        } else {
            conv_channel(p.conv, at, path_s.node, length);
        }
    }
}

template <typename T, bool kColumns>
treewy_status launch_path_conv(const char* name, const treewy_path_conv_params& p,
                               treewy_stream stream) {
    PathConvWork work{};
    work.conv = p;
    work.columns = channel_blocks(p.channels, kWarp, kColumns ? kPer16Bytes<T> : 1);
    const int64_t items = int64_t{work.columns} * p.layers;
    if (items > INT32_MAX / 2) {
        return fail(TREEWY_UNSUPPORTED, "%s: %d channels of %d layers are too many", name,
                    p.channels, p.layers);
    }
    work.items = static_cast<int>(items);
    const int64_t each = items * p.tree.batch / (kEnoughBlocks * kWarps);
    work.items_of_warp =
        static_cast<int>(each < 1 ? 1 : (each < kMaxItemsOfWarp ? each : kMaxItemsOfWarp));
    if constexpr (kColumns) {
        work.x_step = static_cast<int>(p.x_stride[2]) * static_cast<int>(sizeof(T));
        work.y_step = static_cast<int>(p.y_stride[2]) * static_cast<int>(sizeof(T));
    }
    work.blocks_of_row = static_cast<int>(ceil_div(items, int64_t{kWarps} * work.items_of_warp));
    return launch(name, path_conv<T, kColumns>, int64_t{p.tree.batch} * work.blocks_of_row,
                  kThreads, 0, stream, work);
}

treewy_status run_path_conv(const char* name, const treewy_path_conv_params& p,
                            treewy_stream stream) {
    const int64_t weights[] = {p.weight_stride};
    const bool columns = p.channels % (16 / dtype_bytes(p.dtype)) == 0 &&
                         is_vector_layout(p.x, p.dtype, p.x_stride) &&
                         is_vector_layout(p.y, p.dtype, p.y_stride) &&
                         is_vector_layout(p.conv_state, p.dtype, p.state_stride) &&
                         is_column_filter(p.weights, p.dtype) &&
                         is_vector_layout(p.weights.weight, p.dtype, weights) &&
                         has_short_rows(p.x_stride[2], p.dtype, p.tree.max_nodes) &&
                         has_short_rows(p.y_stride[2], p.dtype, p.tree.max_nodes);
    return with_type(p.dtype, [&](auto type) {
        using T = decltype(type);
        return columns ? launch_path_conv<T, true>(name, p, stream)
                       : launch_path_conv<T, false>(name, p, stream);
    });
}

}  // namespace
}  // namespace treewy

extern "C" treewy_status treewy_path_conv(const treewy_path_conv_params* params,
                                          treewy_stream stream) {
    const char* name = "path_conv";
    if (params == nullptr) return treewy::fail_null(name);
    if (params->tree.batch == 0 || params->layers == 0) return TREEWY_OK;
    const treewy_path_conv_params& p = *params;
    treewy_status status = treewy::check_tree(name, p.tree);
    if (status == TREEWY_OK) {
        status = treewy::check_conv(name, p.dtype, p.channels, p.weights.width);
    }
    if (status == TREEWY_OK) status = treewy::check_weights(name, p.weights);
    if (status == TREEWY_OK) status = treewy::check_pointers(name, p.x, p.y, p.conv_state);
    if (status == TREEWY_OK && p.accepted == nullptr) {
        status = treewy::fail(TREEWY_INVALID_ARGUMENT, "%s: accepted must not be null", name);
    }
    return status == TREEWY_OK ? treewy::run_path_conv(name, p, stream) : status;
}
