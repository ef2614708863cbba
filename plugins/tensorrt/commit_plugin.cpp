// SPDX-License-Identifier: Apache-2.0
//
// TreeWyCommit: treewy_commit of all layers in one launch, or treewy_commit_deferred.
#include "plugins.h"
#include "tables.h"

namespace treewy::plugin {
namespace {

constexpr int kPolicy = 0;  // field state_commit
constexpr When kDeferred{kPolicy, 1};

enum Input {
    kState,
    kSlot,
    kParents,
    kNumNodes,
    kAccepted,
    kU,
    kKeys,
    kG,
    kHistoryU,
    kHistoryK,
    kHistoryG,
    kHistoryLen
};
enum Output { kStateOut, kErrors, kHistoryUOut, kHistoryKOut, kHistoryGOut, kHistoryLenOut };

treewy_stash stash_of(const Call& call) {
    const int64_t batch = call.sizes[Symbol::kB], nodes = call.sizes[Symbol::kN];
    treewy_stash stash{};
    stash.u = call.inputs[kU];
    stash.k = call.inputs[kKeys];
    stash.g = call.input<float>(kG);
    stash.u_stride[3] = call.sizes[Symbol::kV];
    stash.k_stride[3] = call.sizes[Symbol::kK];
    stash.u_stride[2] = call.sizes[Symbol::kHV] * stash.u_stride[3];
    stash.k_stride[2] = call.sizes[Symbol::kHK] * stash.k_stride[3];
    stash.g_stride[2] = call.sizes[Symbol::kHV];
    for (int64_t* stride : {stash.u_stride, stash.k_stride, stash.g_stride}) {
        stride[1] = nodes * stride[2];
        stride[0] = batch * stride[1];
    }
    stash.k_dtype = call.type(Kind::kActivation);
    stash.k_normalized = 0;
    stash.u_dtype = call.type(Kind::kStash);
    return stash;
}

treewy_status launch(const Call& call) {
    treewy_commit_deferred_params p{};
    treewy_commit_params& commit = p.commit;
    commit.tree = tree_of(call, call.inputs[kSlot], call.inputs[kParents], call.inputs[kNumNodes]);
    commit.state = state_of(call, call.outputs[kStateOut], call.size(Symbol::kL));
    commit.stash = stash_of(call);
    commit.accepted = call.input<int32_t>(kAccepted);
    commit.errors = call.output<int32_t>(kErrors);
    if (call.fields.value[kPolicy] != kDeferred.value) return treewy_commit(&commit, call.stream);
    p.history = history_of(call, call.outputs[kHistoryUOut], call.outputs[kHistoryKOut],
                           call.outputs[kHistoryGOut], call.outputs[kHistoryLenOut]);
    return treewy_commit_deferred(&p, call.stream);
}

}  // namespace

const PluginSpec kCommit{
    "TreeWyCommit",
    {kStateCommit},
    {{"state", Kind::kState, {L, slots, HV, V, K}},
     {"slot", Kind::kInt32, {B}},
     {"parents", Kind::kInt32, {B, N}},
     {"num_nodes", Kind::kInt32, {B}},
     {"accepted", Kind::kInt32, {B}},
     {"u", Kind::kStash, {L, B, N, HV, V}},
     {"k", Kind::kActivation, {L, B, N, HK, K}},
     {"g", Kind::kFloat32, {L, B, N, HV}},
     {"history_u", Kind::kStash, {L, slots, H, HV, V}, kDeferred},
     {"history_k", Kind::kActivation, {L, slots, H, HK, K}, kDeferred},
     {"history_g", Kind::kFloat32, {L, slots, H, HV}, kDeferred},
     {"history_len", Kind::kInt32, {slots}, kDeferred}},
    {{"state", Kind::kState, {L, slots, HV, V, K}, {}, kState},
     {"errors", Kind::kInt32, {one}, {}, -1, true},
     {"history_u", Kind::kStash, {L, slots, H, HV, V}, kDeferred, kHistoryU},
     {"history_k", Kind::kActivation, {L, slots, H, HK, K}, kDeferred, kHistoryK},
     {"history_g", Kind::kFloat32, {L, slots, H, HV}, kDeferred, kHistoryG},
     {"history_len", Kind::kInt32, {slots}, kDeferred, kHistoryLen}},
    nullptr,
    launch};

}  // namespace treewy::plugin
