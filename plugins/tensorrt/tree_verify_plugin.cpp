// SPDX-License-Identifier: Apache-2.0
//
// TreeWyVerify: treewy_tree_verify of one layer, q, k and v read in place from the conv's output.
#include "plugins.h"
#include "tables.h"

namespace treewy::plugin {
namespace {

constexpr int kPolicyField = 4, kStashField = 5, kUTypeField = 6;
constexpr When kDeferred{kPolicyField, 1};
constexpr When kPseudoValues{kStashField, 0};

enum Input {
    kQkv,
    kA,
    kB,
    kALog,
    kDtBias,
    kState,
    kSlot,
    kParents,
    kNumNodes,
    kHistoryU,
    kHistoryK,
    kHistoryG,
    kHistoryLen
};
enum Output { kOut, kU, kG };

void derive(Call* call) {
    derive_heads(call);
    const bool wide = call->fields.value[kUTypeField] == 0;
    call->types[static_cast<int>(Kind::kStash)] = wide ? Type::kFloat32 : Type::kBFloat16;
}

treewy_status launch(const Call& call) {
    const int64_t nodes = call.sizes[Symbol::kN], channels = call.sizes[Symbol::kC];
    const int64_t key_dim = call.sizes[Symbol::kK], value_dim = call.sizes[Symbol::kV];
    const int64_t value_heads = call.sizes[Symbol::kHV];
    const int64_t keys = call.sizes[Symbol::kHK] * key_dim, values = value_heads * value_dim;
    const Type type = call.types[static_cast<int>(Kind::kActivation)];
    const void* qkv = call.inputs[kQkv];

    treewy_tree_verify_params p{};
    p.tree = tree_of(call, call.inputs[kSlot], call.inputs[kParents], call.inputs[kNumNodes]);
    p.state = state_of(call, call.inputs[kState], 1);
    p.history = history_of(call, call.inputs[kHistoryU], call.inputs[kHistoryK],
                           call.inputs[kHistoryG], call.inputs[kHistoryLen]);
    p.q = qkv;
    p.k = at_channel(qkv, keys, type);
    p.v = at_channel(qkv, 2 * keys, type);
    p.a = call.inputs[kA];
    p.b = call.inputs[kB];
    p.A_log = call.input<float>(kALog);
    p.dt_bias = call.input<float>(kDtBias);
    p.out = call.outputs[kOut];
    p.u = call.outputs[kU];
    p.g = call.output<float>(kG);
    for (int64_t* stride : {p.q_stride, p.k_stride, p.v_stride}) {
        stride[0] = nodes * channels;
        stride[1] = channels;
        stride[2] = stride == p.v_stride ? value_dim : key_dim;
    }
    for (int64_t* stride : {p.out_stride, p.u_stride}) {
        stride[0] = nodes * values;
        stride[1] = values;
        stride[2] = value_dim;
    }
    for (int64_t* stride : {p.a_stride, p.b_stride, p.g_stride}) {
        stride[0] = nodes * value_heads;
        stride[1] = value_heads;
    }
    p.dtype = static_cast<int32_t>(type);
    p.gate_dtype = call.type(Kind::kGate);
    p.u_dtype = call.type(Kind::kStash);
    p.tile = TREEWY_VERIFY_AUTO;
    return treewy_tree_verify(&p, call.stream);
}

}  // namespace

const PluginSpec kTreeVerify{
    "TreeWyVerify",
    {kNumKeyHeads, kNumValueHeads, kHeadKeyDim, kHeadValueDim, kStateCommit, kStash, kUType},
    {{"qkv", Kind::kActivation, {B, N, C}},
     {"a", Kind::kGate, {B, N, HV}},
     {"b", Kind::kGate, {B, N, HV}},
     {"A_log", Kind::kFloat32, {HV}},
     {"dt_bias", Kind::kFloat32, {HV}},
     {"state", Kind::kState, {slots, HV, V, K}},
     {"slot", Kind::kInt32, {B}},
     {"parents", Kind::kInt32, {B, N}},
     {"num_nodes", Kind::kInt32, {B}},
     {"history_u", Kind::kStash, {slots, H, HV, V}, kDeferred},
     {"history_k", Kind::kActivation, {slots, H, HK, K}, kDeferred},
     {"history_g", Kind::kFloat32, {slots, H, HV}, kDeferred},
     {"history_len", Kind::kInt32, {slots}, kDeferred}},
    {{"out", Kind::kActivation, {B, N, HV, V}},
     {"u", Kind::kStash, {B, N, HV, V}, kPseudoValues},
     {"g", Kind::kFloat32, {B, N, HV}, kPseudoValues}},
    derive,
    launch};

}  // namespace treewy::plugin
