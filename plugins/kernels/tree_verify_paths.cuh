// SPDX-License-Identifier: Apache-2.0
//
// Gates of the nodes, their path sums and their ancestors: the work of a block's helper warps while
// the others wait for keys and take norms. Decays are kept as logarithms of base 2.
#pragma once

#include "gates.cuh"
#include "tree_verify_block.cuh"

namespace treewy {

inline constexpr double kLog2E = 1.4426950408889634;

__device__ __forceinline__ float2 two_floats(double x) {
    const float high = static_cast<float>(x);
    return make_float2(high, static_cast<float>(x - static_cast<double>(high)));
}

// 2^(to - from), `from` an ancestor of `to` or itself.
__device__ __forceinline__ float decay_between(float2 to, float2 from) {
    return fast_exp2((to.x - from.x) + (to.y - from.y));
}

__device__ __forceinline__ bool has_bit(const uint32_t* mask, int bit) {
    return (mask[bit / 32] >> (bit % 32)) & 1u;
}

// Log decays of a history: lane l has those of entries l, l + 32, ...
template <int kEach>
struct HistoryDecays {
    float own[kEach];

    __device__ __forceinline__ void load(const VerifyArgs& args, const VerifyWork& work, int lane) {
        const treewy_history& history = args.params.history;
        const int64_t heads = args.params.state.value_heads;
        const float* g = history.g + work.slot * history.g_stride[0] + work.head;
#pragma unroll
        for (int part = 0; part < kEach; ++part) {
            const int i = part * kWarp + lane;
            own[part] = i < work.history ? g[i * heads] : 0.0f;
        }
    }

    // Log decay of the whole history, and, where `keep`, where each entry lies in it; `upto`: the
    // lane's last. By a warp.
    __device__ __forceinline__ double sum(const Shared& shared, const VerifyWork& work, int lane,
                                          bool keep, double& upto) const {
        double before = 0.0;
#pragma unroll
        for (int part = 0; part < kEach; ++part) {
            const int i = part * kWarp + lane;
            const double g = static_cast<double>(own[part]) * kLog2E;
            double total;
            upto = before + warp_prefix(g, &total) + g;
            if (keep && i < work.history) shared.history_sum[i] = two_floats(upto);
            before += total;
        }
        return before;
    }
};

// What a helper's thread reads for its node, before it is known whether the node is real: the bits
// of a and b.
struct NodeInputs {
    uint32_t a;
    uint32_t b;
    int parent;
};

__device__ __forceinline__ float gate_value(uint32_t bits, int dtype) {
    if (dtype == TREEWY_FLOAT32) return __uint_as_float(bits);
    if (dtype == TREEWY_BFLOAT16) return low_half(bits);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

template <typename Bits>
__device__ __forceinline__ void read_gates(const treewy_tree_verify_params& p,
                                           const VerifyWork& work, int node, NodeInputs& inputs) {
    inputs.a =
        static_cast<const Bits*>(p.a)[work.row * p.a_stride[0] + node * p.a_stride[1] + work.head];
    inputs.b =
        static_cast<const Bits*>(p.b)[work.row * p.b_stride[0] + node * p.b_stride[1] + work.head];
}

template <typename Types>
__device__ __forceinline__ void read_nodes(const treewy_tree_verify_params& p,
                                           const VerifyWork& work, int thread,
                                           NodeInputs (&inputs)[Types::kNodesPerHelper]) {
    const int* parents = p.tree.parents + int64_t{work.row} * p.tree.max_nodes;
#pragma unroll
    for (int i = 0; i < Types::kNodesPerHelper; ++i) {
        const int node = min(Types::kHelperThreads * i + thread, p.tree.max_nodes - 1);
        inputs[i].parent = parents[node];
        if (p.gate_dtype == TREEWY_FLOAT32) {
            read_gates<uint32_t>(p, work, node, inputs[i]);
        } else {
            read_gates<unsigned short>(p, work, node, inputs[i]);
        }
    }
}

template <typename Types>
__device__ __forceinline__ void sync_helpers() {
    if constexpr (Types::kHelpers == 1) {
        __syncwarp();
    } else {
        sync_at<Types::kHelperThreads>(kHelperBarrier);
    }
}

// A barrier of the helpers; returns whether any of them says `vote`. Another barrier of theirs must
// come before the next call.
template <typename Types>
__device__ __forceinline__ bool any_helper(const Shared& shared, bool vote, int thread) {
    const bool any = __any_sync(kAllLanes, vote) != 0;
    if constexpr (Types::kHelpers == 1) {
        __syncwarp();
        return any;
    } else {
        static_assert(Types::kHelpers == 2);
        if (thread % kWarp == 0) shared.votes[thread / kWarp] = any;
        sync_helpers<Types>();
        return shared.votes[0] != 0 || shared.votes[1] != 0;
    }
}

// Node blocks in which a node of this thread's node block has an ancestor; `mask` is the node's.
template <int kWords>
__device__ __forceinline__ uint32_t related_blocks(const uint32_t (&mask)[kWords]) {
    uint32_t bits = 0;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
        if (mask[word] & 0xffffu) bits |= 1u << (2 * word);
        if (mask[word] >> 16) bits |= 2u << (2 * word);
    }
#pragma unroll
    for (int step = kNodeBlock / 2; step > 0; step /= 2) {
        bits |= __shfl_xor_sync(kAllLanes, bits, step);
    }
    return bits;
}

// What pointer jumping knows of a node: sum and ancestors of the path from it up to `jump`.
template <int kWords>
struct PathEnd {
    double sum;
    int jump;  // the next node above, or -1
    uint32_t mask[kWords];
};

// Where the helpers keep it for each other.
template <int kWords>
struct PathTable {
    double* sums;
    int* jumps;
    uint32_t* masks;
    int words;

    __device__ __forceinline__ void write(int node, const PathEnd<kWords>& path) const {
        sums[node] = path.sum;
        jumps[node] = path.jump;
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
            if (word < words) masks[node * words + word] = path.mask[word];
        }
    }
    // Goes on from where `path` ends.
    __device__ __forceinline__ void extend(PathEnd<kWords>& path) const {
        const int from = path.jump;
        path.sum += sums[from];
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
            if (word < words) path.mask[word] |= masks[from * words + word];
        }
        path.jump = jumps[from];
    }
};

template <typename Types>
__device__ __forceinline__ PathTable<Types::kMaskWords> path_table(const VerifyArgs& args,
                                                                   const Shared& shared) {
    double* sums = reinterpret_cast<double*>(shared.factors);
    return {sums, reinterpret_cast<int*>(sums + node_blocks<Types>(args) * kNodeBlock),
            shared.ancestors, Types::kOneBlock ? 1 : shared.mask_words};
}

// A helper's paths, a node each: a thread has one, or two.
template <typename Types>
using Paths = PathEnd<Types::kMaskWords>[Types::kNodesPerHelper];

// A node as a path of its own, its log decay stored; `beta`: its other gate. A parent that is not
// before its node counts as none.
template <int kWords>
__device__ __forceinline__ PathEnd<kWords> open_path(const VerifyArgs& args, const VerifyWork& work,
                                                     const NodeInputs& inputs, float A_log,
                                                     float dt_bias, int node, float& beta) {
    const treewy_tree_verify_params& p = args.params;
    const bool real = node < work.nodes;
    const float g = real ? log_decay(gate_value(inputs.a, p.gate_dtype), A_log, dt_bias) : 0.0f;
    const float b = gate_value(inputs.b, p.gate_dtype);
    beta = real ? 1.0f / (1.0f + expf(-b)) : 0.0f;
    if (work.first_tile && p.g != nullptr && node < p.tree.max_nodes) {
        p.g[work.row * p.g_stride[0] + node * p.g_stride[1] + work.head] = g;
    }
    PathEnd<kWords> path;
    path.sum = static_cast<double>(g) * kLog2E;
    path.jump = real && inputs.parent >= 0 && inputs.parent < node ? inputs.parent : -1;
#pragma unroll
    for (int word = 0; word < kWords; ++word)
        path.mask[word] = word == node / 32 ? 1u << (node % 32) : 0u;
    return path;
}

// All nodes so, and in the table.
template <typename Types>
__device__ __forceinline__ void open_paths(const VerifyArgs& args, const Shared& shared,
                                           const VerifyWork& work,
                                           const NodeInputs (&inputs)[Types::kNodesPerHelper],
                                           float A_log, float dt_bias, int thread,
                                           Paths<Types>& paths) {
    const int nodes = node_blocks<Types>(args) * kNodeBlock;
    const auto table = path_table<Types>(args, shared);
#pragma unroll
    for (int i = 0; i < Types::kNodesPerHelper; ++i) {
        const int node = Types::kHelperThreads * i + thread;
        float beta;
        paths[i] = open_path<Types::kMaskWords>(args, work, inputs[i], A_log, dt_bias, node, beta);
        if (node >= nodes) continue;
        table.write(node, paths[i]);
        shared.beta[node] = beta;
    }
}

// By pointer jumping the sums and ancestors of all paths.
template <typename Types>
__device__ __forceinline__ void join_paths(const VerifyArgs& args, const Shared& shared, int thread,
                                           Paths<Types>& paths) {
    constexpr int kEach = Types::kNodesPerHelper;
    const int nodes = node_blocks<Types>(args) * kNodeBlock;
    const auto table = path_table<Types>(args, shared);
    for (bool more = true; more;) {
        sync_helpers<Types>();
        more = false;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            if (paths[i].jump < 0) continue;
            table.extend(paths[i]);
            more = more || paths[i].jump >= 0;
        }
        more = any_helper<Types>(shared, more, thread);
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int node = Types::kHelperThreads * i + thread;
            if (node < nodes) table.write(node, paths[i]);
        }
    }
}

// Path sums on top of what is `before` them.
template <typename Types>
__device__ __forceinline__ void store_paths(const VerifyArgs& args, const Shared& shared,
                                            int thread, double before, const Paths<Types>& paths) {
    const int nodes = node_blocks<Types>(args) * kNodeBlock;
#pragma unroll
    for (int i = 0; i < Types::kNodesPerHelper; ++i) {
        const int node = Types::kHelperThreads * i + thread;
        if (node < nodes) shared.path_sum[node] = two_floats(before + paths[i].sum);
        if (Types::kOneBlock) continue;
        const uint32_t related = related_blocks(paths[i].mask);
        if (node < nodes && node % kNodeBlock == 0) shared.related[node / kNodeBlock] = related;
    }
    __syncwarp();
}

// All of it, path sums on top of the history's.
template <typename Types>
__device__ __forceinline__ void follow_paths(const VerifyArgs& args, const Shared& shared,
                                             const VerifyWork& work,
                                             const NodeInputs (&inputs)[Types::kNodesPerHelper],
                                             float A_log, float dt_bias, int thread) {
    HistoryDecays<2> decays;
    if (Types::kHistory && work.history > 0) decays.load(args, work, thread % kWarp);
    Paths<Types> paths;
    open_paths<Types>(args, shared, work, inputs, A_log, dt_bias, thread, paths);
    join_paths<Types>(args, shared, thread, paths);
    double before = 0.0, last;
    if (Types::kHistory && work.history > 0) {
        before = decays.sum(shared, work, thread % kWarp, thread < kWarp, last);
    }
    store_paths<Types>(args, shared, thread, before, paths);
}

// The factors of node t, once its norms are known. `start`: of the state, where path sums do not
// begin there.
__device__ __forceinline__ void make_factor(const Shared& shared, int t,
                                            float2 start = make_float2(0.0f, 0.0f)) {
    const float from_root = decay_between(shared.path_sum[t], start);
    shared.factors[t] = {shared.beta[t], from_root * shared.key_norm[t],
                         from_root * shared.query_norm[t], from_root};
}

}  // namespace treewy
