// SPDX-License-Identifier: Apache-2.0
//
// The contract's plugins as IPluginV2DynamicExt, for TensorRT 8.6: a test target, as that is the
// one complete TensorRT on PyPI. It shares everything but this file with the shipped adapter. It
// has no bfloat16, which TensorRT 8.6 has not.
#pragma once

#include "../../tensorrt/nvinfer_types.h"

namespace treewy::plugin {

class PluginV2 final : public nvinfer1::IPluginV2DynamicExt {
  public:
    PluginV2(const PluginSpec& spec, const Fields& fields, bool building, Type activation) noexcept;
    PluginV2(const PluginV2&) = delete;
    PluginV2& operator=(const PluginV2&) = delete;

    const char* getPluginType() const noexcept override { return spec_.name; }
    const char* getPluginVersion() const noexcept override { return kVersion; }
    const char* getPluginNamespace() const noexcept override { return kNamespace; }
    void setPluginNamespace(const char*) noexcept override {}
    int32_t getNbOutputs() const noexcept override { return num_outputs_; }
    int32_t initialize() noexcept override { return 0; }
    void terminate() noexcept override {}
    void destroy() noexcept override { delete this; }
    size_t getSerializationSize() const noexcept override { return sizeof(Fields); }
    void serialize(void* buffer) const noexcept override;
    nvinfer1::IPluginV2DynamicExt* clone() const noexcept override;

    nvinfer1::DataType getOutputDataType(int32_t output, const nvinfer1::DataType* inputs,
                                         int32_t num_inputs) const noexcept override;
    nvinfer1::DimsExprs getOutputDimensions(int32_t output, const nvinfer1::DimsExprs* inputs,
                                            int32_t num_inputs,
                                            nvinfer1::IExprBuilder& builder) noexcept override;
    bool supportsFormatCombination(int32_t position, const nvinfer1::PluginTensorDesc* tensors,
                                   int32_t num_inputs, int32_t num_outputs) noexcept override;
    void configurePlugin(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                         const nvinfer1::DynamicPluginTensorDesc* outputs,
                         int32_t num_outputs) noexcept override;
    size_t getWorkspaceSize(const nvinfer1::PluginTensorDesc*, int32_t,
                            const nvinfer1::PluginTensorDesc*, int32_t) const noexcept override {
        return 0;
    }
    int32_t enqueue(const nvinfer1::PluginTensorDesc* input_descs,
                    const nvinfer1::PluginTensorDesc* output_descs, const void* const* inputs,
                    void* const* outputs, void* workspace, cudaStream_t stream) noexcept override;

  private:
    ~PluginV2() noexcept override = default;

    const PluginSpec& spec_;
    const Fields fields_;
    const bool building_;
    const Type activation_;
    const int32_t num_inputs_;
    const int32_t num_outputs_;
};

class CreatorV2 final : public nvinfer1::IPluginCreator {
  public:
    explicit CreatorV2(const PluginSpec& spec) noexcept : spec_(spec), names_(spec) {}

    const char* getPluginName() const noexcept override { return spec_.name; }
    const char* getPluginVersion() const noexcept override { return kVersion; }
    const char* getPluginNamespace() const noexcept override { return kNamespace; }
    void setPluginNamespace(const char*) noexcept override {}
    const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override {
        return names_.get();
    }
    nvinfer1::IPluginV2* createPlugin(
        const char* name, const nvinfer1::PluginFieldCollection* fields) noexcept override;
    nvinfer1::IPluginV2* deserializePlugin(const char* name, const void* data,
                                           size_t length) noexcept override;

  private:
    const PluginSpec& spec_;
    const FieldNames names_;
};

// Where errors go, and the type of activations, gates and weights of the networks that are built:
// a network of TensorRT 8.6 is weakly typed, and what it would choose may change from run to run.
// Both are set by the program.
extern nvinfer1::ILogger* v2_logger;
extern Type v2_activation;

}  // namespace treewy::plugin
