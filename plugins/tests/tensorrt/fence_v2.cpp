// SPDX-License-Identifier: Apache-2.0
#include "fence_v2.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <new>

namespace treewy::plugin {

namespace {

using nvinfer1::DataType;

// Bytes of an element; 0 for a type that a fence has not.
size_t size_of(DataType type) noexcept {
    switch (type) {
        case DataType::kFLOAT:
        case DataType::kINT32:
            return 4;
        case DataType::kHALF:
            return 2;
        default:
            return 0;
    }
}

FenceV2* make(int32_t type) noexcept {
    const auto known = static_cast<DataType>(type);
    return size_of(known) == 0 ? nullptr : new (std::nothrow) FenceV2(known);
}

}  // namespace

void FenceV2::serialize(void* buffer) const noexcept { std::memcpy(buffer, &type_, sizeof(type_)); }

nvinfer1::IPluginV2DynamicExt* FenceV2::clone() const noexcept {
    return new (std::nothrow) FenceV2(type_);
}

int32_t FenceV2::enqueue(const nvinfer1::PluginTensorDesc* input_descs,
                         const nvinfer1::PluginTensorDesc*, const void* const* inputs,
                         void* const* outputs, void*, cudaStream_t stream) noexcept {
    size_t bytes = size_of(type_);
    for (int32_t i = 0; i < input_descs[0].dims.nbDims; ++i) {
        bytes *= static_cast<size_t>(input_descs[0].dims.d[i]);
    }
    if (bytes == 0) return 0;
    return cudaMemcpyAsync(outputs[0], inputs[0], bytes, cudaMemcpyDeviceToDevice, stream) ==
                   cudaSuccess
               ? 0
               : 1;
}

FenceCreatorV2::FenceCreatorV2() noexcept
    : field_("type", nullptr, nvinfer1::PluginFieldType::kINT32, 1), collection_{1, &field_} {}

nvinfer1::IPluginV2* FenceCreatorV2::createPlugin(
    const char*, const nvinfer1::PluginFieldCollection* fields) noexcept {
    for (int32_t i = 0; i < fields->nbFields; ++i) {
        const nvinfer1::PluginField& field = fields->fields[i];
        if (std::strcmp(field.name, "type") == 0 && field.length == 1 &&
            field.type == nvinfer1::PluginFieldType::kINT32) {
            return make(*static_cast<const int32_t*>(field.data));
        }
    }
    return nullptr;
}

nvinfer1::IPluginV2* FenceCreatorV2::deserializePlugin(const char*, const void* data,
                                                       size_t length) noexcept {
    int32_t type = -1;
    if (length != sizeof(type)) return nullptr;
    std::memcpy(&type, data, sizeof(type));
    return make(type);
}

}  // namespace treewy::plugin
