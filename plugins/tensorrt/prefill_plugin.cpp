// SPDX-License-Identifier: Apache-2.0
//
// GdnPrefill: treewy_prefill of one layer, q, k and v read in place from the conv's output.
#include "plugins.h"
#include "tables.h"

namespace treewy::plugin {
namespace {

enum Input { kQkv, kA, kB, kALog, kDtBias, kState, kSlot, kCuSeqlens };
enum Output { kOut, kStateOut };

treewy_status launch(const Call& call) {
    const int64_t channels = call.sizes[Symbol::kC], value_heads = call.sizes[Symbol::kHV];
    const int64_t key_dim = call.sizes[Symbol::kK], value_dim = call.sizes[Symbol::kV];
    const int64_t keys = call.sizes[Symbol::kHK] * key_dim;
    const Type type = call.types[static_cast<int>(Kind::kActivation)];
    const void* qkv = call.inputs[kQkv];

    treewy_prefill_params p{};
    p.packed = packed_of(call, call.inputs[kSlot], call.inputs[kCuSeqlens]);
    p.state = state_of(call, call.outputs[kStateOut], 1);
    p.q = qkv;
    p.k = at_channel(qkv, keys, type);
    p.v = at_channel(qkv, 2 * keys, type);
    p.a = call.inputs[kA];
    p.b = call.inputs[kB];
    p.A_log = call.input<float>(kALog);
    p.dt_bias = call.input<float>(kDtBias);
    p.out = call.outputs[kOut];
    p.q_stride[0] = p.k_stride[0] = p.v_stride[0] = channels;
    p.q_stride[1] = p.k_stride[1] = key_dim;
    p.v_stride[1] = p.out_stride[1] = value_dim;
    p.a_stride = p.b_stride = value_heads;
    p.out_stride[0] = value_heads * value_dim;
    p.dtype = static_cast<int32_t>(type);
    p.gate_dtype = call.type(Kind::kGate);
    return treewy_prefill(&p, call.stream);
}

}  // namespace

const PluginSpec kPrefill{"GdnPrefill",
                          {kNumKeyHeads, kNumValueHeads, kHeadKeyDim, kHeadValueDim},
                          {{"qkv", Kind::kActivation, {T, C}},
                           {"a", Kind::kGate, {T, HV}},
                           {"b", Kind::kGate, {T, HV}},
                           {"A_log", Kind::kFloat32, {HV}},
                           {"dt_bias", Kind::kFloat32, {HV}},
                           {"state", Kind::kState, {slots, HV, V, K}},
                           {"slot", Kind::kInt32, {B}},
                           {"cu_seqlens", Kind::kInt32, {B_plus_1}}},
                          {{"out", Kind::kActivation, {T, HV, V}},
                           {"state", Kind::kState, {slots, HV, V, K}, {}, kState}},
                          derive_heads,
                          launch};

}  // namespace treewy::plugin
