// SPDX-License-Identifier: Apache-2.0
//
// The adapter to TensorRT 10 and 11: one class for every plugin, as the contract says what each is.
#pragma once

#include "nvinfer_types.h"

namespace treewy::plugin {

class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuild,
                     public nvinfer1::IPluginV3OneRuntime {
  public:
    Plugin(const PluginSpec& spec, const Fields& fields, nvinfer1::TensorRTPhase phase) noexcept;
    Plugin(const Plugin&) = delete;
    Plugin& operator=(const Plugin&) = delete;

    // IPluginV3
    nvinfer1::InterfaceInfo getInterfaceInfo() const noexcept override;
    nvinfer1::IPluginCapability* getCapabilityInterface(
        nvinfer1::PluginCapabilityType type) noexcept override;
    nvinfer1::IPluginV3* clone() noexcept override;

    // Core
    const char* getPluginName() const noexcept override;
    const char* getPluginVersion() const noexcept override;
    const char* getPluginNamespace() const noexcept override;

    // Build
    int32_t getNbOutputs() const noexcept override;
    int32_t getOutputDataTypes(nvinfer1::DataType* types, int32_t num_outputs,
                               const nvinfer1::DataType* input_types,
                               int32_t num_inputs) const noexcept override;
    int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t num_inputs,
                            const nvinfer1::DimsExprs* shape_inputs, int32_t num_shape_inputs,
                            nvinfer1::DimsExprs* outputs, int32_t num_outputs,
                            nvinfer1::IExprBuilder& builder) noexcept override;
    bool supportsFormatCombination(int32_t position,
                                   const nvinfer1::DynamicPluginTensorDesc* tensors,
                                   int32_t num_inputs, int32_t num_outputs) noexcept override;
    int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                            const nvinfer1::DynamicPluginTensorDesc* outputs,
                            int32_t num_outputs) noexcept override;
    const char* getTimingCacheID() noexcept override;
    const char* getMetadataString() noexcept override;

    // Runtime
    int32_t onShapeChange(const nvinfer1::PluginTensorDesc* inputs, int32_t num_inputs,
                          const nvinfer1::PluginTensorDesc* outputs,
                          int32_t num_outputs) noexcept override;
    int32_t enqueue(const nvinfer1::PluginTensorDesc* input_descs,
                    const nvinfer1::PluginTensorDesc* output_descs, const void* const* inputs,
                    void* const* outputs, void* workspace, cudaStream_t stream) noexcept override;
    nvinfer1::IPluginV3* attachToContext(
        nvinfer1::IPluginResourceContext* context) noexcept override;
    const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override;

  private:
    bool has_counts(int32_t num_inputs, int32_t num_outputs, Message* message) const noexcept;

    const PluginSpec& spec_;
    const Fields fields_;
    const nvinfer1::TensorRTPhase phase_;
    const int32_t num_inputs_;
    const int32_t num_outputs_;
    char text_[256];  // the fields, for people and for the timing cache
    nvinfer1::PluginField serialized_[kMaxFields];
    nvinfer1::PluginFieldCollection collection_{};
};

class Creator final : public nvinfer1::IPluginCreatorV3One {
  public:
    explicit Creator(const PluginSpec& spec) noexcept : spec_(spec), names_(spec) {}

    nvinfer1::IPluginV3* createPlugin(const char* name,
                                      const nvinfer1::PluginFieldCollection* fields,
                                      nvinfer1::TensorRTPhase phase) noexcept override;
    const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override;
    const char* getPluginName() const noexcept override;
    const char* getPluginVersion() const noexcept override;
    const char* getPluginNamespace() const noexcept override;

  private:
    const PluginSpec& spec_;
    const FieldNames names_;
};

}  // namespace treewy::plugin
