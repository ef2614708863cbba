// SPDX-License-Identifier: Apache-2.0
//
// Tree verification of what is not finite.
#pragma once

#include "tree_verify_paths.cuh"
#include "tree_verify_weights.cuh"

namespace treewy {

// One row of V of the state, spread over a warp: lane l has k = l, l + 32, ...
template <int kKeyDim>
struct StateRow {
    float x[kKeyDim / kWarp];
    float2 sum;  // log decay so far

    // S <- 2^(to - sum) S.
    __device__ __forceinline__ void decay(float2 to) {
        const float alpha = decay_between(to, sum);
        sum = to;
#pragma unroll
        for (float& value : x) value *= alpha;
    }
    __device__ __forceinline__ float dot(const float (&other)[kKeyDim / kWarp]) const {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < kKeyDim / kWarp; ++i) total = fmaf(x[i], other[i], total);
        return warp_sum(total);
    }
    __device__ __forceinline__ void add(float u, const float (&key)[kKeyDim / kWarp]) {
#pragma unroll
        for (int i = 0; i < kKeyDim / kWarp; ++i) x[i] = fmaf(u, key[i], x[i]);
    }
};

// S_0 and the history, of row `column` of V.
template <typename Types>
__device__ __forceinline__ StateRow<Types::kKeyDim> state_before(const VerifyArgs& args,
                                                                 const Shared& shared,
                                                                 const VerifyWork& work, int column,
                                                                 int lane) {
    using State = typename Types::State;
    constexpr int kKeyDim = Types::kKeyDim;
    const treewy_tree_verify_params& p = args.params;
    const int64_t dim = p.state.value_dim, stride = p.state.value_heads * dim;
    const State* from = static_cast<const State*>(p.state.data) + work.slot * p.state.slot_stride +
                        (work.head * dim + column) * kKeyDim;
    StateRow<kKeyDim> state;
    state.sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < kKeyDim / kWarp; ++i) {
        state.x[i] = as_float(from[kWarp * i + lane]);
    }
    for (int entry = 0; Types::kHistory && entry < work.history; ++entry) {
        const int64_t at =
            work.slot * p.history.u_stride[0] + entry * stride + work.head * dim + column;
        float key[kKeyDim / kWarp];
        load_history_key(p, work, entry, lane, key);
        state.decay(shared.history_sum[entry]);
        state.add(load_as_float(p.history.u, p.history.u_dtype, at), key);
    }
    if (Types::kShort) state.sum = make_float2(0.0f, 0.0f);  // path sums begin here
    return state;
}

// One step of the recurrence: S of node t from S of its parent. Returns u.
template <typename Types>
__device__ __forceinline__ float step_to(const VerifyArgs& args, const Shared& shared,
                                         const VerifyWork& work, int t, int column, int lane,
                                         StateRow<Types::kKeyDim>& state) {
    using Input = typename Types::Input;
    constexpr int kEach = Types::kKeyDim / kWarp;
    const treewy_tree_verify_params& p = args.params;
    float key[kEach];
    const Input* from = static_cast<const Input*>(p.k) + work.row * p.k_stride[0] +
                        t * args.k.node + work.key_head * args.k.head;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int at = kWarp * i + lane;
        const float own = Types::kKeysStay
                              ? row_element<Input>(shared.keys + t * Types::kInputRowBytes, at, t)
                              : as_float(from[at]);
        key[i] = shared.key_norm[t] * own;
    }
    state.decay(shared.path_sum[t]);
    const float value = as_float(static_cast<const Input*>(
        p.v)[at_head(p.v_stride[0], args.v, work, column) + t * args.v.node]);
    const float u = shared.beta[t] * (value - state.dot(key));
    state.add(u, key);
    return u;
}

template <typename Types>
__device__ __forceinline__ void store_result(const VerifyArgs& args, const VerifyWork& work, int t,
                                             int column, float out, float u) {
    using Input = typename Types::Input;
    const treewy_tree_verify_params& p = args.params;
    static_cast<Input*>(
        p.out)[at_head(p.out_stride[0], args.out, work, column) + t * args.out.node] =
        from_float<Input>(out);
    if (p.u == nullptr) return;
    const int64_t at = at_head(p.u_stride[0], args.u, work, column) + t * args.u.node;
    if (p.u_dtype == TREEWY_FLOAT32) {
        static_cast<float*>(p.u)[at] = u;
    } else {
        static_cast<__nv_bfloat16*>(p.u)[at] = from_float<__nv_bfloat16>(u);
    }
}

// Rows of V of a block that a warp takes.
struct RowsTaken {
    int first;
    int end;
    int step;
};

// out and u of rows once more, by the recurrence along the path of every node: nothing
// of a non-ancestor is read into a sum. By a warp. For what is not finite, seldom and slow:
// N times depth steps, N where parents come right before their nodes.
template <typename Types>
__device__ __noinline__ void verify_selecting(const VerifyArgs& args, const Shared& shared,
                                              const VerifyWork& work, const RowsTaken& rows,
                                              int lane) {
    using Input = typename Types::Input;
    constexpr int kEach = Types::kKeyDim / kWarp;
    const treewy_tree_verify_params& p = args.params;
    for (int row = rows.first; row < rows.end; row += rows.step) {
        const int column = work.first_row + row;
        const auto before = state_before<Types>(args, shared, work, column, lane);
        StateRow<Types::kKeyDim> state = before;
        for (int t = 0; t < work.nodes; ++t) {
            const uint32_t* mask = shared.ancestors + t * shared.mask_words;
            int nearest = t - 1;
            while (nearest >= 0 && !has_bit(mask, nearest)) --nearest;
            if (nearest < 0 || nearest != t - 1) {
                state = before;
                for (int i = 0; i <= nearest; ++i) {
                    if (has_bit(mask, i))
                        step_to<Types>(args, shared, work, i, column, lane, state);
                }
            }
            const float u = step_to<Types>(args, shared, work, t, column, lane, state);
            const Input* query = static_cast<const Input*>(p.q) + work.row * p.q_stride[0] +
                                 t * args.q.node + work.key_head * args.q.head;
            float q[kEach];
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
                q[i] = shared.query_norm[t] * as_float(query[kWarp * i + lane]);
            }
            const float out = state.dot(q);
            if (lane == 0) store_result<Types>(args, work, t, column, out, u);
        }
    }
}

// The same of all rows of the block, by all its warps.
template <typename Types>
__device__ __forceinline__ void verify_selecting(const VerifyArgs& args, const VerifyWork& work,
                                                 int warp, int lane) {
    constexpr int kAll = Types::kThreads / kWarp;
    const Shared shared = place_shared<Types>(args.layout);
    verify_selecting<Types>(args, shared, work, {warp, Types::kRows, kAll}, lane);
}

}  // namespace treewy
