// SPDX-License-Identifier: Apache-2.0
//
// Launcher of tree verification: what a call must fulfil, and which kernel it gets.

#include "gpu.h"
#include "tree_verify_launch.h"

namespace treewy {
namespace {

constexpr const char* kName = kVerifyName;

treewy_status check_pointer(const void* pointer, const char* name) {
    if (pointer != nullptr) return TREEWY_OK;
    return fail(TREEWY_INVALID_ARGUMENT, "%s: %s is null", kName, name);
}

treewy_status check_pointers(const treewy_tree_verify_params& p) {
    const struct {
        const void* pointer;
        const char* name;
    } all[] = {{p.tree.slot, "slot"},
               {p.tree.parents, "parents"},
               {p.tree.num_nodes, "num_nodes"},
               {p.state.data, "state"},
               {p.q, "q"},
               {p.k, "k"},
               {p.v, "v"},
               {p.a, "a"},
               {p.b, "b"},
               {p.A_log, "A_log"},
               {p.dt_bias, "dt_bias"},
               {p.out, "out"}};
    for (const auto& one : all) {
        const treewy_status status = check_pointer(one.pointer, one.name);
        if (status != TREEWY_OK) return status;
    }
    return TREEWY_OK;
}

treewy_status check_sizes(const treewy_tree_verify_params& p) {
    const treewy_state_pool& state = p.state;
    if (p.tree.batch < 0 || p.tree.max_nodes < 0 || p.tree.num_slots < 0) {
        return fail(TREEWY_INVALID_ARGUMENT,
                    "%s: batch %d, max_nodes %d and num_slots %lld must not be negative", kName,
                    p.tree.batch, p.tree.max_nodes, static_cast<long long>(p.tree.num_slots));
    }
    if (p.tree.max_nodes > TREEWY_MAX_NODES) {
        return fail(TREEWY_UNSUPPORTED, "%s: max_nodes is %d, at most %d", kName, p.tree.max_nodes,
                    TREEWY_MAX_NODES);
    }
    if (p.tree.batch > kMaxGridY) {
        return fail(TREEWY_UNSUPPORTED, "%s: batch is %d, at most %d", kName, p.tree.batch,
                    kMaxGridY);
    }
    if (state.key_heads < 1 || state.value_heads < 1 || state.value_heads % state.key_heads != 0) {
        return fail(TREEWY_INVALID_ARGUMENT,
                    "%s: value_heads %d must be a multiple of key_heads %d", kName,
                    state.value_heads, state.key_heads);
    }
    if (state.key_dim != 64 && state.key_dim != 128 && state.key_dim != 256) {
        return fail(TREEWY_UNSUPPORTED, "%s: key_dim is %d, must be 64, 128 or 256", kName,
                    state.key_dim);
    }
    if (state.value_dim < 64 || state.value_dim > TREEWY_MAX_HEAD_DIM ||
        state.value_dim % 64 != 0) {
        return fail(TREEWY_UNSUPPORTED, "%s: value_dim is %d, must be a multiple of 64, at most %d",
                    kName, state.value_dim, TREEWY_MAX_HEAD_DIM);
    }
    return TREEWY_OK;
}

// Offsets within a row of the batch are 32-bit numbers.
treewy_status check_strides(const treewy_tree_verify_params& p) {
    const struct {
        const int64_t (&stride)[3];
        const char* name;
    } all[] = {{p.q_stride, "q"},
               {p.k_stride, "k"},
               {p.v_stride, "v"},
               {p.out_stride, "out"},
               {p.u_stride, "u"}};
    for (const auto& one : all) {
        const int64_t node = one.stride[1], head = one.stride[2];
        const bool fits = node >= 0 && head >= 0 && node < INT32_MAX && head < INT32_MAX &&
                          node * (p.tree.max_nodes + kNodeBlock) + head * p.state.value_heads <=
                              INT32_MAX - TREEWY_MAX_HEAD_DIM;
        if (fits || (p.u == nullptr && one.name[0] == 'u')) continue;
        return fail(TREEWY_UNSUPPORTED,
                    "%s: strides of %s are %lld elements a node and %lld a head: they must not be "
                    "negative, and the nodes of a row must lie within 2^31 elements",
                    kName, one.name, static_cast<long long>(node), static_cast<long long>(head));
    }
    return TREEWY_OK;
}

treewy_status check_types(const treewy_tree_verify_params& p) {
    if (!is_float_dtype(p.dtype) || !is_float_dtype(p.gate_dtype)) {
        return fail(TREEWY_UNSUPPORTED,
                    "%s: dtype %d and gate_dtype %d must be float32, bfloat16 or float16", kName,
                    p.dtype, p.gate_dtype);
    }
    if (p.state.dtype != TREEWY_FLOAT32 && p.state.dtype != TREEWY_BFLOAT16) {
        return fail(TREEWY_UNSUPPORTED, "%s: state dtype is %d, must be float32 or bfloat16", kName,
                    p.state.dtype);
    }
    if (p.u_dtype != TREEWY_FLOAT32 &&
        (p.u_dtype != TREEWY_BFLOAT16 || p.state.dtype != TREEWY_BFLOAT16)) {
        return fail(TREEWY_UNSUPPORTED,
                    "%s: u_dtype is %d, must be float32, or bfloat16 where the state is bfloat16",
                    kName, p.u_dtype);
    }
    if ((p.u == nullptr) != (p.g == nullptr)) {
        return fail(TREEWY_INVALID_ARGUMENT, "%s: %s is null: u and g are written both or neither",
                    kName, p.u == nullptr ? "u" : "g");
    }
    if (p.tile < TREEWY_VERIFY_AUTO || p.tile > TREEWY_VERIFY_ROWS_128) {
        return fail(TREEWY_INVALID_ARGUMENT, "%s: tile is %d, must be one of treewy_verify_tile",
                    kName, p.tile);
    }
    const int per_16_bytes = 16 / dtype_bytes(p.state.dtype);
    if (!is_aligned(p.state.data, 16) || p.state.slot_stride % per_16_bytes != 0) {
        return fail(TREEWY_INVALID_ARGUMENT, "%s: every slot of state must be 16-byte aligned",
                    kName);
    }
    return TREEWY_OK;
}

constexpr int kMaxHistory = 64;

treewy_status check_history(const treewy_tree_verify_params& p) {
    const treewy_history& history = p.history;
    if (history.length == nullptr) return TREEWY_OK;
    if (history.u == nullptr || history.k == nullptr || history.g == nullptr) {
        return fail(TREEWY_INVALID_ARGUMENT, "%s: history has a length but u, k or g is null",
                    kName);
    }
    if ((history.folded == nullptr) != (history.folding == nullptr)) {
        return fail(TREEWY_INVALID_ARGUMENT,
                    "%s: history.%s is null: folded and folding are given both or neither", kName,
                    history.folded == nullptr ? "folded" : "folding");
    }
    if (history.folded != nullptr && p.fold_above < 0) {
        return fail(TREEWY_INVALID_ARGUMENT, "%s: fold_above must not be negative, got %d", kName,
                    p.fold_above);
    }
    if (history.capacity < 1 || history.capacity > kMaxHistory) {
        return fail(TREEWY_UNSUPPORTED, "%s: history capacity is %d, must be 1 to %d", kName,
                    history.capacity, kMaxHistory);
    }
    if (history.u_dtype != TREEWY_FLOAT32 &&
        (history.u_dtype != TREEWY_BFLOAT16 || p.state.dtype != TREEWY_BFLOAT16)) {
        return fail(TREEWY_UNSUPPORTED,
                    "%s: the history's u_dtype is %d, must be float32, or bfloat16 where the state "
                    "is bfloat16",
                    kName, history.u_dtype);
    }
    if (history.k_dtype != TREEWY_FLOAT32 && history.k_dtype != p.dtype) {
        return fail(TREEWY_UNSUPPORTED,
                    "%s: the history's k_dtype is %d, must be float32 or dtype, which is %d", kName,
                    history.k_dtype, p.dtype);
    }
    if (!is_aligned(history.u, 16) || !is_aligned(history.k, 16) ||
        history.u_stride[1] * dtype_bytes(history.u_dtype) % 16 != 0 ||
        history.k_stride[1] * dtype_bytes(history.k_dtype) % 16 != 0) {
        return fail(TREEWY_INVALID_ARGUMENT,
                    "%s: every slot of the history's u and k must be 16-byte aligned", kName);
    }
    return TREEWY_OK;
}

treewy_status check(const treewy_tree_verify_params& p) {
    treewy_status status = check_sizes(p);
    if (status == TREEWY_OK && p.tree.batch > 0 && p.tree.max_nodes > 0) status = check_pointers(p);
    if (status == TREEWY_OK) status = check_types(p);
    if (status == TREEWY_OK) status = check_strides(p);
    if (status == TREEWY_OK) status = check_history(p);
    return status;
}

treewy_status tree_verify(const treewy_tree_verify_params& p, treewy_stream stream) {
    treewy_status status = check(p);
    if (status != TREEWY_OK || p.tree.batch == 0 || p.tree.max_nodes == 0) return status;
    Gpu gpu;
    status = find_gpu(kName, &gpu);
    if (status != TREEWY_OK) return status;

    const int state_bytes = dtype_bytes(p.state.dtype), input_bytes = dtype_bytes(p.dtype);
    const int terms = p.dtype == TREEWY_FLOAT32 ? 3 : p.dtype == TREEWY_FLOAT16 ? 2 : 1;
    const int64_t heads = int64_t{p.tree.batch} * p.state.value_heads;
    const VerifyShape shape{p.state.key_dim,
                            p.state.value_dim,
                            p.tree.max_nodes,
                            p.history.length == nullptr ? 0 : p.history.capacity,
                            input_bytes,
                            state_bytes,
                            state_bytes == 4 || input_bytes == 4 ? 3 : 2,
                            dtype_bytes(p.history.u_dtype),
                            dtype_bytes(p.history.k_dtype)};
    int tile = p.tile;
    const bool warpgroups = gpu.major == 9 && p.dtype == TREEWY_BFLOAT16;
    bool stays = streams(shape, gpu.shared_bytes, warpgroups) && all_aligned(p, kWide);
    if (tile == TREEWY_VERIFY_AUTO) {
        stays = stays && enough_turns(shape, heads, gpu.multiprocessors);
        tile = choose_tile(shape, terms, stays, heads, gpu.multiprocessors);
    } else if (!tile_exists(tile, p.state.value_dim, terms)) {
        return fail(TREEWY_UNSUPPORTED, "%s: tile %d is not for value_dim %d and dtype %d", kName,
                    tile, p.state.value_dim, p.dtype);
    }
    // The only one for what is not aligned.
    if (!all_aligned(p, tile)) tile = TREEWY_VERIFY_ROWS_64;
    VerifyLayout layout = choose_layout(shape, tile, stays, all_aligned(p, tile), gpu.shared_bytes,
                                        fills_ahead(shape, warpgroups));
    if (layout.total > gpu.shared_bytes && p.tile == TREEWY_VERIFY_AUTO) {
        tile = TREEWY_VERIFY_ROWS_64;
        layout = choose_layout(shape, tile, stays, all_aligned(p, tile), gpu.shared_bytes);
    }
    if (layout.total > gpu.shared_bytes) {
        return fail(
            TREEWY_UNSUPPORTED,
            "%s: max_nodes %d with key_dim %d takes %d bytes of shared memory a block, this GPU "
            "has %d: lower max_nodes or the history's capacity, or use 16-bit types",
            kName, p.tree.max_nodes, p.state.key_dim, layout.total, gpu.shared_bytes);
    }
    const VerifyPlan plan{tile, layout, gpu.multiprocessors};
    switch (p.dtype) {
        case TREEWY_FLOAT32:
            return verify_float32(p, plan, stream);
        case TREEWY_FLOAT16:
            return verify_float16(p, plan, stream);
        default:
            return verify_bfloat16(p, plan, stream);
    }
}

}  // namespace
}  // namespace treewy

treewy_status treewy_tree_verify(const treewy_tree_verify_params* params, treewy_stream stream) {
    if (params == nullptr) {
        return treewy::fail(TREEWY_INVALID_ARGUMENT, "tree_verify: params is null");
    }
    return treewy::tree_verify(*params, stream);
}
