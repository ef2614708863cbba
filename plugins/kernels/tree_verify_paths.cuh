// SPDX-License-Identifier: Apache-2.0
//
// Gates of the nodes, their path sums and their ancestors.
#pragma once

#include "gates.cuh"
#include "tree_verify_block.cuh"

namespace treewy {

__device__ __forceinline__ float2 two_floats(double x) {
    const float high = static_cast<float>(x);
    return make_float2(high, static_cast<float>(x - static_cast<double>(high)));
}

// exp(to - from), `from` an ancestor of `to` or itself.
__device__ __forceinline__ float decay_between(float2 to, float2 from) {
    return expf((to.x - from.x) + (to.y - from.y));
}

__device__ __forceinline__ bool has_bit(const uint32_t* mask, int bit) {
    return (mask[bit / 32] >> (bit % 32)) & 1u;
}

// Log decay of the whole history, and where each entry lies in it. All threads call it.
template <typename Types>
__device__ double sum_history(const VerifyArgs& args, const Shared& shared, const VerifyWork& work,
                              int thread) {
    const treewy_history& history = args.params.history;
    const int64_t heads = args.params.state.value_heads;
    const float* g = history.g + work.slot * history.g_stride[0] + work.head;
    double total = 0.0;
    for (int i = 0; i < work.history; ++i) {
        total += static_cast<double>(g[i * heads]);
        if (i == thread) shared.history_sum[i] = two_floats(total);
    }
    return total;
}

// What a thread reads for its node, before it is known whether the node is real.
struct NodeInputs {
    float a;
    float b;
    float A_log;
    float dt_bias;
    int parent;
};

__device__ __forceinline__ NodeInputs read_node(const treewy_tree_verify_params& p,
                                                const VerifyWork& work, int node) {
    NodeInputs inputs{};
    if (node >= p.tree.max_nodes) return inputs;
    const int64_t a_at = work.row * p.a_stride[0] + node * p.a_stride[1] + work.head;
    const int64_t b_at = work.row * p.b_stride[0] + node * p.b_stride[1] + work.head;
    inputs.a = load_as_float(p.a, p.gate_dtype, a_at);
    inputs.b = load_as_float(p.b, p.gate_dtype, b_at);
    inputs.A_log = p.A_log[work.head];
    inputs.dt_bias = p.dt_bias[work.head];
    inputs.parent = p.tree.parents[int64_t{work.row} * p.tree.max_nodes + node];
    return inputs;
}

// Gates of all nodes, and by pointer jumping their path sums (on top of the history's) and
// ancestors. A parent that is not before its node counts as none. A thread a node.
template <typename Types>
__device__ void follow_paths(const VerifyArgs& args, const Shared& shared, const VerifyWork& work,
                             const NodeInputs& inputs, int thread) {
    const treewy_tree_verify_params& p = args.params;
    const int nodes = args.layout.node_blocks * kNodeBlock, words = shared.mask_words;
    double* sums = reinterpret_cast<double*>(shared.weights);
    int* jumps = reinterpret_cast<int*>(sums + 2 * nodes);
    uint32_t* masks = reinterpret_cast<uint32_t*>(jumps + 2 * nodes);

    const double before = work.history > 0 ? sum_history<Types>(args, shared, work, thread) : 0.0;
    float g = 0.0f, beta = 0.0f;
    int jump = -1;
    if (thread < work.nodes) {
        g = log_decay(inputs.a, inputs.A_log, inputs.dt_bias);
        beta = 1.0f / (1.0f + expf(-inputs.b));
        if (inputs.parent >= 0 && inputs.parent < thread) jump = inputs.parent;
    }
    if (work.first_tile && thread < p.tree.max_nodes) {
        p.g[work.row * p.g_stride[0] + thread * p.g_stride[1] + work.head] = g;
    }
    double sum = static_cast<double>(g);
    uint32_t mask[4] = {0, 0, 0, 0};
#pragma unroll
    for (int word = 0; word < 4; ++word) {
        if (thread / 32 == word) mask[word] = 1u << (thread % 32);
    }
    int buffer = 0;
    for (int span = 1; span < work.nodes; span *= 2) {
        if (thread < nodes) {
            sums[buffer + thread] = sum;
            jumps[buffer + thread] = jump;
#pragma unroll
            for (int word = 0; word < 4; ++word) {
                if (word < words) masks[(buffer + thread) * words + word] = mask[word];
            }
        }
        __syncthreads();
        if (jump >= 0) {
            const int from = buffer + jump;
            sum += sums[from];
            jump = jumps[from];
#pragma unroll
            for (int word = 0; word < 4; ++word) {
                if (word < words) mask[word] |= masks[from * words + word];
            }
        }
        buffer = nodes - buffer;
    }
    if (thread >= nodes) return;
    const float2 path_sum = two_floats(before + sum);
    shared.path_sum[thread] = path_sum;
    shared.from_root[thread] = expf(path_sum.x + path_sum.y);
    shared.beta[thread] = beta;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
        if (word < words) shared.ancestors[thread * words + word] = mask[word];
    }
}

}  // namespace treewy
