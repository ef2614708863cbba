// SPDX-License-Identifier: Apache-2.0
//
// Commit of the conv windows of all layers: the last W-1 raw inputs of (old window, inputs along
// the accepted path).
//
// Threads. A thread owns the channels of 16 bytes, or one channel where addresses are no multiples
// of that; a block some channels of one (layer, row).
//
// Floor. Bytes: W-1 rows in and out.

#include "conv.cuh"

namespace treewy {
namespace {

constexpr int kThreads = 128;

struct ConvCommitWork {
    treewy_conv_commit_params conv;
    int channel_blocks;
};

// A block owns some channels of one (layer, row): it reads all of the new window, old rows
// included, before it writes any of it.
template <typename T, int kVec, int kWidth>
__global__ void __launch_bounds__(kThreads) conv_commit(const __grid_constant__ ConvCommitWork p) {
    constexpr int kMaxWidth = kWidth > 0 ? kWidth : TREEWY_MAX_CONV_WIDTH;
    __shared__ int32_t parents_s[TREEWY_MAX_NODES];
    __shared__ int32_t taps_s[TREEWY_MAX_CONV_WIDTH];
    __shared__ bool ordered_s;
    const treewy_tree& tree = p.conv.tree;
    unsigned block = blockIdx.x;
    const int channel_block = static_cast<int>(block % p.channel_blocks);
    block /= p.channel_blocks;
    const int row = static_cast<int>(block % tree.batch);
    const int layer = static_cast<int>(block / tree.batch);
    const bool reports = channel_block == 0 && layer == 0 && threadIdx.x == 0;

    const int64_t slot = tree.slot[row];
    const int accepted = p.conv.accepted[row];
    const RowAction action =
        commit_action(slot, tree.num_slots, accepted, tree.num_nodes[row], tree.max_nodes);
    if (action == RowAction::kBad && reports && p.conv.errors != nullptr) {
        atomicAdd(p.conv.errors, 1);
    }
    if (action != RowAction::kMove) return;
    const int width = p.conv.width;
    const int32_t* parents = tree.parents + static_cast<int64_t>(row) * tree.max_nodes;
    for (int i = threadIdx.x; i < tree.max_nodes; i += kThreads) parents_s[i] = parents[i];
    __syncthreads();
    if (threadIdx.x == 0) {
        // The state's commit leaves a row of such a tree alone; so must this one.
        ordered_s = path_length(parents_s, accepted) > 0;
        tap_rows(parents_s, accepted, width, taps_s);
    }
    __syncthreads();
    if (!ordered_s) {
        if (reports && p.conv.errors != nullptr) atomicAdd(p.conv.errors, 1);
        return;
    }
    const int channel = (channel_block * kThreads + static_cast<int>(threadIdx.x)) * kVec;
    if (channel >= p.conv.channels) return;

    const T* x = static_cast<const T*>(p.conv.x) + layer * p.conv.x_stride[0] +
                 row * p.conv.x_stride[1] + channel;
    T* window = static_cast<T*>(p.conv.conv_state) + layer * p.conv.state_stride[0] +
                slot * p.conv.state_stride[1] + channel;
    Vec<T, kVec> kept[kMaxWidth - 1];
#pragma unroll
    for (int j = 1; j < kMaxWidth; ++j) {
        if (j >= width) break;
        const int tap = taps_s[j];
        const T* from = tap >= 0 ? x + tap * p.conv.x_stride[2]
                                 : window + window_index(tap, width) * p.conv.state_stride[2];
        kept[j - 1] = load_vec<kVec>(from);
    }
#pragma unroll
    for (int j = 1; j < kMaxWidth; ++j) {
        if (j >= width) break;
        store_vec<kVec>(window + (j - 1) * p.conv.state_stride[2], kept[j - 1]);
    }
}

template <typename T, int kVec, int kWidth>
treewy_status launch_commit(const char* name, const treewy_conv_commit_params& p,
                            treewy_stream stream) {
    const ConvCommitWork work{p, channel_blocks(p.channels, kThreads, kVec)};
    const int64_t blocks = int64_t{p.layers} * p.tree.batch * work.channel_blocks;
    return launch(name, conv_commit<T, kVec, kWidth>, blocks, kThreads, 0, stream, work);
}

treewy_status run_conv_commit(const char* name, const treewy_conv_commit_params& p,
                              treewy_stream stream) {
    const bool vectors = p.channels % (16 / dtype_bytes(p.dtype)) == 0 &&
                         is_vector_layout(p.x, p.dtype, p.x_stride) &&
                         is_vector_layout(p.conv_state, p.dtype, p.state_stride);
    return with_type(p.dtype, [&](auto type) {
        using T = decltype(type);
        constexpr int kVec = kPer16Bytes<T>;
        if (!vectors) return launch_commit<T, 1, 0>(name, p, stream);
        return p.width == 4 ? launch_commit<T, kVec, 4>(name, p, stream)
                            : launch_commit<T, kVec, 0>(name, p, stream);
    });
}

}  // namespace
}  // namespace treewy

extern "C" treewy_status treewy_conv_commit(const treewy_conv_commit_params* params,
                                            treewy_stream stream) {
    const char* name = "conv_commit";
    if (params == nullptr) return treewy::fail_null(name);
    if (params->tree.batch == 0 || params->layers == 0) return TREEWY_OK;
    const treewy_conv_commit_params& p = *params;
    treewy_status status = treewy::check_tree(name, p.tree);
    if (status == TREEWY_OK) status = treewy::check_conv(name, p.dtype, p.channels, p.width);
    if (status == TREEWY_OK) status = treewy::check_pointers(name, p.x, p.accepted, p.conv_state);
    return status == TREEWY_OK ? treewy::run_conv_commit(name, p, stream) : status;
}
