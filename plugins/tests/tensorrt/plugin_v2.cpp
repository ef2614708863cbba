// SPDX-License-Identifier: Apache-2.0
#include "plugin_v2.h"

#include <cstring>
#include <new>

namespace treewy::plugin {

nvinfer1::ILogger* v2_logger = nullptr;
Type v2_activation = Type::kFloat32;

namespace {

int32_t status_of(bool good, const Message& message) noexcept {
    if (good) return 0;
    if (v2_logger != nullptr) {
        v2_logger->log(nvinfer1::ILogger::Severity::kERROR, message.text());
    }
    return 1;
}

bool is_free(Kind kind) noexcept {
    return kind == Kind::kActivation || kind == Kind::kGate || kind == Kind::kWeight;
}

}  // namespace

PluginV2::PluginV2(const PluginSpec& spec, const Fields& fields, bool building,
                   Type activation) noexcept
    : spec_(spec),
      fields_(fields),
      building_(building),
      activation_(activation),
      num_inputs_(Present(spec.inputs, fields).count),
      num_outputs_(Present(spec.outputs, fields).count) {}

void PluginV2::serialize(void* buffer) const noexcept {
    std::memcpy(buffer, &fields_, sizeof(Fields));
}

nvinfer1::IPluginV2DynamicExt* PluginV2::clone() const noexcept {
    return new (std::nothrow) PluginV2(spec_, fields_, building_, activation_);
}

nvinfer1::DataType PluginV2::getOutputDataType(int32_t output, const nvinfer1::DataType*,
                                               int32_t) const noexcept {
    const Present out(spec_.outputs, fields_);
    const Kind kind = spec_.outputs[out.place[output]].kind;
    if (is_free(kind)) return nvinfer_type(activation_);
    return kind == Kind::kInt32 ? nvinfer1::DataType::kINT32 : nvinfer1::DataType::kFLOAT;
}

nvinfer1::DimsExprs PluginV2::getOutputDimensions(int32_t output, const nvinfer1::DimsExprs* inputs,
                                                  int32_t num_inputs,
                                                  nvinfer1::IExprBuilder& builder) noexcept {
    nvinfer1::DimsExprs result{};
    if (num_inputs != num_inputs_) return result;
    const Present out(spec_.outputs, fields_);
    result.nbDims = spec_.outputs[out.place[output]].rank();
    for (int32_t j = 0; j < result.nbDims; ++j) {
        OutputDim from;
        output_dim(spec_, fields_, output, j, &from);
        result.d[j] = from.input < 0 ? builder.constant(static_cast<int32_t>(from.constant))
                                     : inputs[from.input].d[from.dim];
    }
    return result;
}

bool PluginV2::supportsFormatCombination(int32_t position,
                                         const nvinfer1::PluginTensorDesc* tensors,
                                         int32_t num_inputs, int32_t num_outputs) noexcept {
    if (num_inputs != num_inputs_ || num_outputs != num_outputs_) return false;
    Tensor all[2 * kMaxTensors];
    for (int32_t i = 0; i <= position; ++i) all[i] = tensor_of(tensors[i], tensors[i].dims);
    const Present in(spec_.inputs, fields_), out(spec_.outputs, fields_);
    const Kind kind = position < num_inputs ? spec_.inputs[in.place[position]].kind
                                            : spec_.outputs[out.place[position - num_inputs]].kind;
    return supports(spec_, fields_, position, all) &&
           (!is_free(kind) || all[position].type == activation_);
}

void PluginV2::configurePlugin(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                               const nvinfer1::DynamicPluginTensorDesc*, int32_t) noexcept {
    Message message;
    Tensor tensors[kMaxTensors];
    bool good = num_inputs == num_inputs_;
    for (int32_t i = 0; good && i < num_inputs; ++i) {
        tensors[i] = tensor_of(inputs[i].desc, inputs[i].max);
    }
    good = good && check_tensors(spec_, fields_, tensors, nullptr, true, &message);
    status_of(good, message);  // this method cannot refuse; enqueue does
}

int32_t PluginV2::enqueue(const nvinfer1::PluginTensorDesc* input_descs,
                          const nvinfer1::PluginTensorDesc* output_descs, const void* const* inputs,
                          void* const* outputs, void*, cudaStream_t stream) noexcept {
    Message message;
    const Tensors in(input_descs, num_inputs_), out(output_descs, num_outputs_);
    const Mismatch mismatch = building_ ? Mismatch::kCopy : Mismatch::kRefuse;
    const bool good =
        run(spec_, fields_, in.all, out.all, inputs, outputs, mismatch, stream, &message);
    return status_of(good, message);
}

nvinfer1::IPluginV2* CreatorV2::createPlugin(
    const char*, const nvinfer1::PluginFieldCollection* collection) noexcept {
    Message message;
    Fields fields;
    if (status_of(read_fields(spec_, collection, &fields, &message), message) != 0) return nullptr;
    return new (std::nothrow) PluginV2(spec_, fields, true, v2_activation);
}

nvinfer1::IPluginV2* CreatorV2::deserializePlugin(const char*, const void* data,
                                                  size_t length) noexcept {
    Message message;
    Fields fields;
    if (length != sizeof(Fields)) {
        message.add("%s: the engine holds %zu bytes of fields, must be %zu", spec_.name, length,
                    sizeof(Fields));
        status_of(false, message);
        return nullptr;
    }
    std::memcpy(&fields, data, sizeof(Fields));
    if (status_of(check_fields(spec_, fields, &message), message) != 0) return nullptr;
    return new (std::nothrow) PluginV2(spec_, fields, false, v2_activation);
}

}  // namespace treewy::plugin
