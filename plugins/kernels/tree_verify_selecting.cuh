// SPDX-License-Identifier: Apache-2.0
//
// Tree verification of what is not finite.
#pragma once

#include "tree_verify_paths.cuh"
#include "tree_verify_rows.cuh"

namespace treewy {

// out and u of the block's rows once more, node by node and ancestor by ancestor: nothing of a
// non-ancestor is read into a sum. A thread a row of V. For what is not finite, seldom and slow.
template <typename Types>
__device__ void verify_selecting(const VerifyArgs& args, const Shared& shared,
                                 const VerifyWork& work, int thread) {
    using Input = typename Types::Input;
    using State = typename Types::State;
    constexpr int kKeyDim = Types::kKeyDim;
    const treewy_tree_verify_params& p = args.params;
    const int lane = thread % kWarp;
    const bool owns_row = thread < Types::kRows;
    const int row = owns_row ? thread : 0, column = work.first_row + row;
    const unsigned char* state = shared.state + row * Types::kStateRowBytes;
    const int state_odd = (row >> Types::kStateShift) & 1;
    const int64_t entry_stride = int64_t{p.state.value_heads} * p.state.value_dim;
    const float* history_u = work.history == 0
                                 ? nullptr
                                 : p.history.u + work.slot * p.history.u_stride[0] +
                                       work.head * int64_t{p.state.value_dim} + column;

    for (int t = 0; t < work.nodes; ++t) {
        const unsigned char* key = shared.keys + t * Types::kInputRowBytes;
        const Input* query = static_cast<const Input*>(p.q) + work.row * p.q_stride[0] +
                             t * p.q_stride[1] + work.key_head * p.q_stride[2];
        float state_key = 0.0f, state_query = 0.0f;
        for (int i = 0; i < kKeyDim; ++i) {
            const float s = row_element<State>(state, i, state_odd);
            state_key = fmaf(s, row_element<Input>(key, i, t & 1), state_key);
            state_query = fmaf(s, as_float(query[i]), state_query);
        }
        const float beta = shared.beta[t], key_norm = shared.key_norm[t];
        const float query_norm = shared.query_norm[t];
        const float2 to = shared.path_sum[t];
        const float value =
            as_float(static_cast<const Input*>(p.v)[at_node(p.v_stride, work, t, column)]);
        float u = beta * (value - shared.from_root[t] * key_norm * state_key);
        float out = shared.from_root[t] * query_norm * state_query;
        for (int i = -work.history; i <= t; ++i) {
            const int entry = i + work.history;
            if (i >= 0 && !has_bit(shared.ancestors + t * shared.mask_words, i)) continue;
            float keys = 0.0f, queries = 0.0f;
            for (int at = lane; at < kKeyDim; at += kWarp) {
                const float other =
                    i < 0 ? row_element<float>(shared.history_keys + entry * kKeyDim * 4, at,
                                               entry & 1)
                          : row_element<Input>(shared.keys + i * Types::kInputRowBytes, at, i & 1);
                keys = fmaf(row_element<Input>(key, at, t & 1), other, keys);
                queries = fmaf(as_float(query[at]), other, queries);
            }
            keys = warp_sum(keys);
            queries = warp_sum(queries);
            const float norm = i < 0 ? 1.0f : shared.key_norm[i];
            const float decay =
                norm * decay_between(to, i < 0 ? shared.history_sum[entry] : shared.path_sum[i]);
            // This thread stored u of the nodes before.
            const float known =
                i < 0 ? history_u[entry * entry_stride]
                : i < t && owns_row
                    ? static_cast<const float*>(p.u)[at_node(p.u_stride, work, i, column)]
                    : u;
            if (i < t) u -= beta * key_norm * decay * keys * known;
            out += query_norm * decay * queries * (i < t ? known : u);
        }
        if (!owns_row) continue;
        static_cast<Input*>(p.out)[at_node(p.out_stride, work, t, column)] = from_float<Input>(out);
        static_cast<float*>(p.u)[at_node(p.u_stride, work, t, column)] = u;
    }
}

}  // namespace treewy
