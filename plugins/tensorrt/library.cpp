// SPDX-License-Identifier: Apache-2.0
//
// What the library gives to TensorRT: creators on request (IPluginRegistry::loadLibrary, trtexec
// --dynamicPlugins), and by itself where it is loaded in other ways (LD_PRELOAD, Triton, dlopen).
#include "plugin_v3.h"
#include "plugins.h"
#include "tensorrt_library.h"

namespace treewy::plugin {
namespace {

nvinfer1::IPluginCreatorInterface* const* all_creators() noexcept {
    static Creator creators[] = {
        Creator(plugin_at(0)), Creator(plugin_at(1)), Creator(plugin_at(2)), Creator(plugin_at(3)),
        Creator(plugin_at(4)), Creator(plugin_at(5)), Creator(plugin_at(6))};
    static nvinfer1::IPluginCreatorInterface* pointers[] = {
        &creators[0], &creators[1], &creators[2], &creators[3],
        &creators[4], &creators[5], &creators[6]};
    static_assert(sizeof(pointers) / sizeof(pointers[0]) == kNumPlugins);
    return pointers;
}

__attribute__((constructor)) void register_when_loaded() {
    register_at_load(all_creators(), kNumPlugins);
}

}  // namespace
}  // namespace treewy::plugin

extern "C" {

__attribute__((visibility("default"))) nvinfer1::IPluginCreatorInterface* const* getCreators(
    int32_t& count) {
    count = treewy::plugin::kNumPlugins;
    return treewy::plugin::all_creators();
}

__attribute__((visibility("default"))) void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
    treewy::plugin::set_logger_finder(finder);
}

}  // extern "C"
