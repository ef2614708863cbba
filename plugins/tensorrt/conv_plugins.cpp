// SPDX-License-Identifier: Apache-2.0
//
// TreeConv1d and GdnPrefillConv1d, of one layer, and TreeConvCommit, of all layers in one launch.
#include "plugins.h"
#include "tables.h"

namespace treewy::plugin {
namespace {

constexpr When kWithBias{0, 1};  // field bias is 1

namespace tree {

enum Input { kX, kConvState, kWeight, kSlot, kParents, kNumNodes, kBiasInput };

treewy_status launch(const Call& call) {
    const int64_t channels = call.sizes[Symbol::kC];
    treewy_tree_conv_params p{};
    p.tree = tree_of(call, call.inputs[kSlot], call.inputs[kParents], call.inputs[kNumNodes]);
    p.weights = weights_of(call, call.inputs[kWeight], call.inputs[kBiasInput]);
    p.x = call.inputs[kX];
    p.y = call.outputs[0];
    p.conv_state = call.inputs[kConvState];
    p.x_stride[0] = p.y_stride[0] = call.sizes[Symbol::kN] * channels;
    p.x_stride[1] = p.y_stride[1] = channels;
    p.state_stride[0] = (call.sizes[Symbol::kW] - 1) * channels;
    p.state_stride[1] = channels;
    p.dtype = call.type(Kind::kActivation);
    p.channels = call.size(Symbol::kC);
    return treewy_tree_conv(&p, call.stream);
}

}  // namespace tree

namespace commit {

enum Input { kConvState, kSlot, kParents, kNumNodes, kAccepted, kX };
enum Output { kConvStateOut, kErrors };

treewy_status launch(const Call& call) {
    const int64_t channels = call.sizes[Symbol::kC];
    treewy_conv_commit_params p{};
    p.tree = tree_of(call, call.inputs[kSlot], call.inputs[kParents], call.inputs[kNumNodes]);
    p.accepted = call.input<int32_t>(kAccepted);
    p.errors = call.output<int32_t>(kErrors);
    p.x = call.inputs[kX];
    p.conv_state = call.outputs[kConvStateOut];
    p.x_stride[2] = p.state_stride[2] = channels;
    p.x_stride[1] = call.sizes[Symbol::kN] * channels;
    p.x_stride[0] = call.sizes[Symbol::kB] * p.x_stride[1];
    p.state_stride[1] = (call.sizes[Symbol::kW] - 1) * channels;
    p.state_stride[0] = call.sizes[Symbol::kSlots] * p.state_stride[1];
    p.dtype = call.type(Kind::kActivation);
    p.layers = call.size(Symbol::kL);
    p.channels = call.size(Symbol::kC);
    p.width = call.size(Symbol::kW);
    return treewy_conv_commit(&p, call.stream);
}

}  // namespace commit

namespace prefill {

enum Input { kX, kConvState, kWeight, kSlot, kCuSeqlens, kBiasInput };
enum Output { kY, kConvStateOut };

treewy_status launch(const Call& call) {
    const int64_t channels = call.sizes[Symbol::kC];
    treewy_prefill_conv_params p{};
    p.packed = packed_of(call, call.inputs[kSlot], call.inputs[kCuSeqlens]);
    p.weights = weights_of(call, call.inputs[kWeight], call.inputs[kBiasInput]);
    p.x = call.inputs[kX];
    p.y = call.outputs[kY];
    p.conv_state = call.outputs[kConvStateOut];
    p.x_stride = p.y_stride = channels;
    p.state_stride[0] = (call.sizes[Symbol::kW] - 1) * channels;
    p.state_stride[1] = channels;
    p.dtype = call.type(Kind::kActivation);
    p.channels = call.size(Symbol::kC);
    return treewy_prefill_conv(&p, call.stream);
}

}  // namespace prefill
}  // namespace

const PluginSpec kTreeConv{"TreeConv1d",
                           {kBias},
                           {{"x", Kind::kActivation, {B, N, C}},
                            {"conv_state", Kind::kActivation, {slots, W_minus_1, C}},
                            {"weight", Kind::kWeight, {C, W}},
                            {"slot", Kind::kInt32, {B}},
                            {"parents", Kind::kInt32, {B, N}},
                            {"num_nodes", Kind::kInt32, {B}},
                            {"bias", Kind::kWeight, {C}, kWithBias}},
                           {{"y", Kind::kActivation, {B, N, C}}},
                           nullptr,
                           tree::launch};

const PluginSpec kConvCommit{
    "TreeConvCommit",
    {},
    {{"conv_state", Kind::kActivation, {L, slots, W_minus_1, C}},
     {"slot", Kind::kInt32, {B}},
     {"parents", Kind::kInt32, {B, N}},
     {"num_nodes", Kind::kInt32, {B}},
     {"accepted", Kind::kInt32, {B}},
     {"x", Kind::kActivation, {L, B, N, C}}},
    {{"conv_state", Kind::kActivation, {L, slots, W_minus_1, C}, {}, commit::kConvState},
     {"errors", Kind::kInt32, {one}, {}, -1, true}},
    nullptr,
    commit::launch};

const PluginSpec kPrefillConv{
    "GdnPrefillConv1d",
    {kBias},
    {{"x", Kind::kActivation, {T, C}},
     {"conv_state", Kind::kActivation, {slots, W_minus_1, C}},
     {"weight", Kind::kWeight, {C, W}},
     {"slot", Kind::kInt32, {B}},
     {"cu_seqlens", Kind::kInt32, {B_plus_1}},
     {"bias", Kind::kWeight, {C}, kWithBias}},
    {{"y", Kind::kActivation, {T, C}},
     {"conv_state", Kind::kActivation, {slots, W_minus_1, C}, {}, prefill::kConvState}},
    nullptr,
    prefill::launch};

}  // namespace treewy::plugin
