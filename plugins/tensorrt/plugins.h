// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "contract.h"

namespace treewy::plugin {

extern const PluginSpec kTreeVerify;    // tree_verify_plugin.cpp
extern const PluginSpec kCommit;        // commit_plugin.cpp
extern const PluginSpec kCommitInputs;  // commit_inputs_plugin.cpp
extern const PluginSpec kTreeConv;      // conv_plugins.cpp
extern const PluginSpec kConvCommit;    // conv_plugins.cpp
extern const PluginSpec kPrefill;       // prefill_plugin.cpp
extern const PluginSpec kPrefillConv;   // conv_plugins.cpp

// All of them; not static data, so that it does not matter which file is initialised first.
inline constexpr int kNumPlugins = 7;
inline const PluginSpec& plugin_at(int index) noexcept {
    const PluginSpec* const all[kNumPlugins] = {&kTreeVerify, &kCommit,  &kCommitInputs, &kTreeConv,
                                                &kConvCommit, &kPrefill, &kPrefillConv};
    return *all[index];
}

}  // namespace treewy::plugin
