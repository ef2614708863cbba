// SPDX-License-Identifier: Apache-2.0
//
// The words that the tables of the plugins are written in.
#pragma once

#include "contract.h"

namespace treewy::plugin {

inline constexpr Dim B{Symbol::kB}, N{Symbol::kN}, T{Symbol::kT}, L{Symbol::kL};
inline constexpr Dim slots{Symbol::kSlots}, HK{Symbol::kHK}, HV{Symbol::kHV};
inline constexpr Dim K{Symbol::kK}, V{Symbol::kV}, C{Symbol::kC}, W{Symbol::kW}, H{Symbol::kH};
inline constexpr Dim one{Symbol::kOne}, B_plus_1{Symbol::kB, 1}, W_minus_1{Symbol::kW, -1};

inline constexpr FieldSpec kNumKeyHeads{"num_k_heads", FieldType::kInt32};
inline constexpr FieldSpec kNumValueHeads{"num_v_heads", FieldType::kInt32};
inline constexpr FieldSpec kHeadKeyDim{"head_k_dim", FieldType::kInt32};
inline constexpr FieldSpec kHeadValueDim{"head_v_dim", FieldType::kInt32};
inline constexpr FieldSpec kStateCommit{
    "state_commit", FieldType::kString, 0, {"reconstruct", "deferred"}};
inline constexpr FieldSpec kStash{"stash", FieldType::kString, 0, {"pseudo_values", "inputs"}};
inline constexpr FieldSpec kUType{"u_dtype", FieldType::kString, 0, {"float32", "bfloat16"}};
inline constexpr FieldSpec kBias{"bias", FieldType::kInt32, 0};

// The fields of the heads come first where they are: HK, HV, K, V, and C from them.
inline void derive_heads(Call* call) {
    const int32_t* value = call->fields.value;
    const int64_t key_heads = value[0], value_heads = value[1], key_dim = value[2];
    const int64_t value_dim = value[3];
    call->sizes[Symbol::kHK] = key_heads;
    call->sizes[Symbol::kHV] = value_heads;
    call->sizes[Symbol::kK] = key_dim;
    call->sizes[Symbol::kV] = value_dim;
    call->sizes[Symbol::kC] = 2 * key_heads * key_dim + value_heads * value_dim;
}

// Parts of the launchers' parameters.

inline treewy_tree tree_of(const Call& call, const void* slot, const void* parents,
                           const void* num_nodes) {
    treewy_tree tree{};
    tree.batch = call.size(Symbol::kB);
    tree.max_nodes = call.size(Symbol::kN);
    tree.num_slots = call.sizes[Symbol::kSlots];
    tree.slot = static_cast<const int32_t*>(slot);
    tree.parents = static_cast<const int32_t*>(parents);
    tree.num_nodes = static_cast<const int32_t*>(num_nodes);
    return tree;
}

inline treewy_packed packed_of(const Call& call, const void* slot, const void* cu_seqlens) {
    treewy_packed packed{};
    packed.batch = call.size(Symbol::kB);
    packed.tokens = call.sizes[Symbol::kT];
    packed.num_slots = call.sizes[Symbol::kSlots];
    packed.slot = static_cast<const int32_t*>(slot);
    packed.cu_seqlens = static_cast<const int32_t*>(cu_seqlens);
    return packed;
}

inline treewy_state_pool state_of(const Call& call, const void* data, int32_t layers) {
    treewy_state_pool state{};
    state.data = const_cast<void*>(data);  // the one struct is for reading and for writing
    state.dtype = call.type(Kind::kState);
    state.layers = layers;
    state.key_heads = call.size(Symbol::kHK);
    state.value_heads = call.size(Symbol::kHV);
    state.key_dim = call.size(Symbol::kK);
    state.value_dim = call.size(Symbol::kV);
    state.slot_stride = int64_t{state.value_heads} * state.value_dim * state.key_dim;
    state.layer_stride = call.sizes[Symbol::kSlots] * state.slot_stride;
    return state;
}

inline treewy_history history_of(const Call& call, const void* u, const void* k, const void* g,
                                 const void* length) {
    treewy_history history{};
    if (length == nullptr) return history;
    const int64_t entries = call.sizes[Symbol::kH], all_slots = call.sizes[Symbol::kSlots];
    const int64_t value_heads = call.sizes[Symbol::kHV];
    history.u = const_cast<void*>(u);
    history.k = const_cast<void*>(k);
    history.g = static_cast<float*>(const_cast<void*>(g));
    history.length = static_cast<int32_t*>(const_cast<void*>(length));
    history.u_stride[1] = entries * value_heads * call.sizes[Symbol::kV];
    history.k_stride[1] = entries * call.sizes[Symbol::kHK] * call.sizes[Symbol::kK];
    history.g_stride[1] = entries * value_heads;
    history.u_stride[0] = all_slots * history.u_stride[1];
    history.k_stride[0] = all_slots * history.k_stride[1];
    history.g_stride[0] = all_slots * history.g_stride[1];
    history.capacity = static_cast<int32_t>(entries);
    history.u_dtype = call.type(Kind::kStash);
    history.k_dtype = call.type(Kind::kActivation);
    return history;
}

inline treewy_conv_weights weights_of(const Call& call, const void* weight, const void* bias) {
    treewy_conv_weights weights{};
    weights.weight = weight;
    weights.bias = bias;
    weights.dtype = call.type(Kind::kWeight);
    weights.width = call.size(Symbol::kW);
    return weights;
}

// Address of a channel of q, k and v together.
inline const void* at_channel(const void* qkv, int64_t channel, Type type) {
    if (qkv == nullptr) return nullptr;
    return static_cast<const char*>(qkv) + channel * type_bytes(type);
}

}  // namespace treewy::plugin
