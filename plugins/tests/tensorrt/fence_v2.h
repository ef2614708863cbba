// SPDX-License-Identifier: Apache-2.0
//
// A plugin that copies its input, for TensorRT 8.6: what TensorRT fuses into one region ends at it,
// and the tensor has the type that the node names. Where a region has no implementation, fences
// leave smaller ones (tests/fences_tensorrt86.py).
#pragma once

#include <NvInfer.h>

namespace treewy::plugin {

class FenceV2 final : public nvinfer1::IPluginV2DynamicExt {
  public:
    explicit FenceV2(nvinfer1::DataType type) noexcept : type_(type) {}

    const char* getPluginType() const noexcept override { return "Fence"; }
    const char* getPluginVersion() const noexcept override { return "1"; }
    const char* getPluginNamespace() const noexcept override { return "treewy"; }
    void setPluginNamespace(const char*) noexcept override {}
    int32_t getNbOutputs() const noexcept override { return 1; }
    int32_t initialize() noexcept override { return 0; }
    void terminate() noexcept override {}
    void destroy() noexcept override { delete this; }
    size_t getSerializationSize() const noexcept override { return sizeof(type_); }
    void serialize(void* buffer) const noexcept override;
    nvinfer1::IPluginV2DynamicExt* clone() const noexcept override;
    nvinfer1::DataType getOutputDataType(int32_t, const nvinfer1::DataType*,
                                         int32_t) const noexcept override {
        return type_;
    }
    nvinfer1::DimsExprs getOutputDimensions(int32_t, const nvinfer1::DimsExprs* inputs, int32_t,
                                            nvinfer1::IExprBuilder&) noexcept override {
        return inputs[0];
    }
    bool supportsFormatCombination(int32_t position, const nvinfer1::PluginTensorDesc* tensors,
                                   int32_t, int32_t) noexcept override {
        return tensors[position].type == type_ &&
               tensors[position].format == nvinfer1::TensorFormat::kLINEAR;
    }
    void configurePlugin(const nvinfer1::DynamicPluginTensorDesc*, int32_t,
                         const nvinfer1::DynamicPluginTensorDesc*, int32_t) noexcept override {}
    size_t getWorkspaceSize(const nvinfer1::PluginTensorDesc*, int32_t,
                            const nvinfer1::PluginTensorDesc*, int32_t) const noexcept override {
        return 0;
    }
    int32_t enqueue(const nvinfer1::PluginTensorDesc* input_descs,
                    const nvinfer1::PluginTensorDesc* output_descs, const void* const* inputs,
                    void* const* outputs, void* workspace, cudaStream_t stream) noexcept override;

  private:
    ~FenceV2() noexcept override = default;

    const nvinfer1::DataType type_;
};

class FenceCreatorV2 final : public nvinfer1::IPluginCreator {
  public:
    FenceCreatorV2() noexcept;

    const char* getPluginName() const noexcept override { return "Fence"; }
    const char* getPluginVersion() const noexcept override { return "1"; }
    const char* getPluginNamespace() const noexcept override { return "treewy"; }
    void setPluginNamespace(const char*) noexcept override {}
    const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override {
        return &collection_;
    }
    // The field `type`: a nvinfer1::DataType.
    nvinfer1::IPluginV2* createPlugin(
        const char* name, const nvinfer1::PluginFieldCollection* fields) noexcept override;
    nvinfer1::IPluginV2* deserializePlugin(const char* name, const void* data,
                                           size_t length) noexcept override;

  private:
    const nvinfer1::PluginField field_;
    const nvinfer1::PluginFieldCollection collection_;
};

}  // namespace treewy::plugin
