// SPDX-License-Identifier: Apache-2.0
//
// TreeWyCommitInputs: treewy_commit_inputs, then treewy_conv_commit, of all layers. One plugin, as
// the first reads the conv windows that the second moves, and an engine knows no such order.
#include "plugins.h"
#include "tables.h"

namespace treewy::plugin {
namespace {

constexpr int kKeyHeadsField = 0, kBiasField = 1;
constexpr When kWithBias{kBiasField, 1};

enum Input {
    kState,
    kConvState,
    kSlot,
    kParents,
    kNumNodes,
    kAccepted,
    kX,
    kA,
    kB,
    kWeight,
    kALog,
    kDtBias,
    kBiasInput
};
enum Output { kStateOut, kConvStateOut, kErrors };

void derive(Call* call) { call->sizes[Symbol::kHK] = call->fields.value[kKeyHeadsField]; }

treewy_commit_inputs_params inputs_of(const Call& call) {
    const int64_t batch = call.sizes[Symbol::kB], nodes = call.sizes[Symbol::kN];
    const int64_t channels = call.sizes[Symbol::kC], value_heads = call.sizes[Symbol::kHV];
    treewy_commit_inputs_params p{};
    p.tree = tree_of(call, call.inputs[kSlot], call.inputs[kParents], call.inputs[kNumNodes]);
    p.state = state_of(call, call.outputs[kStateOut], call.size(Symbol::kL));
    p.weights = weights_of(call, call.inputs[kWeight], call.inputs[kBiasInput]);
    p.x = call.inputs[kX];
    p.conv_state = call.outputs[kConvStateOut];
    p.a = call.inputs[kA];
    p.b = call.inputs[kB];
    p.A_log = call.input<float>(kALog);
    p.dt_bias = call.input<float>(kDtBias);
    p.accepted = call.input<int32_t>(kAccepted);
    p.errors = call.output<int32_t>(kErrors);
    p.weight_stride = channels * call.sizes[Symbol::kW];
    p.bias_stride = channels;
    p.A_log_stride = p.dt_bias_stride = value_heads;
    p.x_stride[2] = p.conv_state_stride[2] = channels;
    p.a_stride[2] = p.b_stride[2] = value_heads;
    for (int64_t* stride : {p.x_stride, p.a_stride, p.b_stride}) {
        stride[1] = nodes * stride[2];
        stride[0] = batch * stride[1];
    }
    p.conv_state_stride[1] = (call.sizes[Symbol::kW] - 1) * channels;
    p.conv_state_stride[0] = call.sizes[Symbol::kSlots] * p.conv_state_stride[1];
    p.dtype = call.type(Kind::kActivation);
    p.gate_dtype = call.type(Kind::kGate);
    return p;
}

treewy_conv_commit_params windows_of(const treewy_commit_inputs_params& inputs, const Call& call) {
    treewy_conv_commit_params p{};
    p.tree = inputs.tree;
    p.accepted = inputs.accepted;
    p.errors = nullptr;  // the same rows, and they are counted
    p.x = inputs.x;
    p.conv_state = call.outputs[kConvStateOut];
    for (int i = 0; i < 3; ++i) {
        p.x_stride[i] = inputs.x_stride[i];
        p.state_stride[i] = inputs.conv_state_stride[i];
    }
    p.dtype = inputs.dtype;
    p.layers = inputs.state.layers;
    p.channels = call.size(Symbol::kC);
    p.width = inputs.weights.width;
    return p;
}

treewy_status launch(const Call& call) {
    const treewy_commit_inputs_params inputs = inputs_of(call);
    const treewy_conv_commit_params windows = windows_of(inputs, call);
    const treewy_status status = treewy_commit_inputs(&inputs, call.stream);
    return status == TREEWY_OK ? treewy_conv_commit(&windows, call.stream) : status;
}

}  // namespace

const PluginSpec kCommitInputs{
    "TreeWyCommitInputs",
    {kNumKeyHeads, kBias},
    {{"state", Kind::kState, {L, slots, HV, V, K}},
     {"conv_state", Kind::kActivation, {L, slots, W_minus_1, C}},
     {"slot", Kind::kInt32, {B}},
     {"parents", Kind::kInt32, {B, N}},
     {"num_nodes", Kind::kInt32, {B}},
     {"accepted", Kind::kInt32, {B}},
     {"x", Kind::kActivation, {L, B, N, C}},
     {"a", Kind::kGate, {L, B, N, HV}},
     {"b", Kind::kGate, {L, B, N, HV}},
     {"weight", Kind::kWeight, {L, C, W}},
     {"A_log", Kind::kFloat32, {L, HV}},
     {"dt_bias", Kind::kFloat32, {L, HV}},
     {"bias", Kind::kWeight, {L, C}, kWithBias}},
    {{"state", Kind::kState, {L, slots, HV, V, K}, {}, kState},
     {"conv_state", Kind::kActivation, {L, slots, W_minus_1, C}, {}, kConvState},
     {"errors", Kind::kInt32, {one}, {}, -1, true}},
    derive,
    launch};

}  // namespace treewy::plugin
