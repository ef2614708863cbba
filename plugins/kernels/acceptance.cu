// SPDX-License-Identifier: Apache-2.0
//
// Greedy acceptance: the longest path whose every token is the target's choice after its parent.
//
//   match_t = (token_t == target[p(t)]) or t is node 0;  ok_t = match_i for all i <= t
//   accepted = the deepest ok node, the lowest index among several
//
// Threads. A block a row, a thread a node: each walks its own path to the root in shared memory, so
// the time is that of the deepest path, and the block takes a maximum. A few microseconds whatever
// the batch; it is here so that no step waits for the CPU between verify and commit.

#include "device.cuh"

namespace treewy {
namespace {

constexpr int kThreads = TREEWY_MAX_NODES;

// Length of the path to `node` if every node of it matches, else 0; 0 too for parents out of order.
__device__ __forceinline__ int matching_path(const int32_t* parents, const uint8_t* match,
                                             int node) {
    int length = 0;
    while (node >= 0) {
        if (!match[node]) return 0;
        ++length;
        const int parent = parents[node];
        if (parent >= node) return 0;
        node = parent;
    }
    return length;
}

__global__ void __launch_bounds__(kThreads)
    greedy_accept(const __grid_constant__ treewy_greedy_accept_params p) {
    __shared__ int32_t parents_s[TREEWY_MAX_NODES];
    __shared__ uint8_t match_s[TREEWY_MAX_NODES];
    __shared__ int rank_s[TREEWY_MAX_NODES];
    const int row = static_cast<int>(blockIdx.x), node = static_cast<int>(threadIdx.x);
    const int nodes = p.tree.max_nodes;
    const int64_t* target = p.target_ids + row * p.target_stride;
    const int64_t slot = p.tree.slot[row];
    const int real = is_live_slot(slot, p.tree.num_slots) ? min(p.tree.num_nodes[row], nodes) : 0;
    if (node < real) {
        const int parent = p.tree.parents[static_cast<int64_t>(row) * nodes + node];
        const int64_t token = p.token_ids[row * p.token_stride + node];
        parents_s[node] = parent;
        match_s[node] = node == 0 || (parent < node && token == target[max(parent, 0)]);
    }
    __syncthreads();

    // Ranks of a row are distinct: deepest first, then the lowest index.
    int rank = -1;
    if (node < real) {
        const int length = matching_path(parents_s, match_s, node);
        if (length > 0 && length <= p.max_path) {
            rank = (length - 1) * TREEWY_MAX_NODES + (TREEWY_MAX_NODES - 1 - node);
        }
    }
    rank_s[node] = rank;
    __syncthreads();
    for (int step = kThreads / 2; step > 0; step /= 2) {
        if (node < step) rank_s[node] = max(rank_s[node], rank_s[node + step]);
        __syncthreads();
    }
    const int best = rank_s[0];
    const int length = best < 0 ? 0 : best / TREEWY_MAX_NODES + 1;
    const int last = best < 0 ? -1 : TREEWY_MAX_NODES - 1 - best % TREEWY_MAX_NODES;
    int64_t* path = p.path + static_cast<int64_t>(row) * p.max_path;
    for (int at = length + node; at < p.max_path; at += kThreads) path[at] = -1;
    if (node != 0) return;
    p.accepted[row] = last;
    p.num_accepted[row] = length;
    p.bonus_ids[row] = last < 0 ? -1 : target[last];
    int at = last;
    for (int i = length - 1; i >= 0; --i) {
        path[i] = at;
        at = parents_s[at];
    }
}

}  // namespace
}  // namespace treewy

extern "C" treewy_status treewy_greedy_accept(const treewy_greedy_accept_params* params,
                                              treewy_stream stream) {
    const char* name = "greedy_accept";
    if (params == nullptr) return treewy::fail_null(name);
    const treewy_greedy_accept_params& p = *params;
    if (p.tree.batch == 0) return TREEWY_OK;
    const treewy_status status = treewy::check_tree(name, p.tree);
    if (status != TREEWY_OK) return status;
    if (p.target_ids == nullptr || p.token_ids == nullptr || p.accepted == nullptr ||
        p.num_accepted == nullptr || p.path == nullptr || p.bonus_ids == nullptr) {
        return treewy::fail(TREEWY_INVALID_ARGUMENT,
                            "%s: token ids, target ids and outputs must not be null", name);
    }
    if (p.max_path < 1) {
        return treewy::fail(TREEWY_INVALID_ARGUMENT,
                            "%s: max_path must be at least 1 (the root is accepted), got %d", name,
                            p.max_path);
    }
    return treewy::launch(name, treewy::greedy_accept, p.tree.batch, treewy::kThreads, 0, stream,
                          p);
}
