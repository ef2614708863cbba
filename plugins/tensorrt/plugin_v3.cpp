// SPDX-License-Identifier: Apache-2.0
//
// No method throws: what the contract refuses is logged and told by the returned value.
#include "plugin_v3.h"

#include <cstring>
#include <new>

#include "tensorrt_library.h"

namespace treewy::plugin {
namespace {

constexpr int32_t kFailed = 1;

// 0, or a failure that is logged.
int32_t status_of(bool good, const Message& message) noexcept {
    if (good) return 0;
    log_error(message.text());
    return kFailed;
}

void describe(const PluginSpec& spec, const Fields& fields, char* text, size_t size) noexcept {
    size_t used = 0;
    const auto advance = [&](int length) {
        used += length > 0 ? static_cast<size_t>(length) : 0;
        if (used >= size) used = size - 1;
    };
    advance(std::snprintf(text, size, "%s::%s %s", kNamespace, spec.name, kVersion));
    for (int32_t i = 0; spec.fields[i].name != nullptr; ++i) {
        const FieldSpec& field = spec.fields[i];
        if (field.type == FieldType::kString) {
            advance(std::snprintf(text + used, size - used, " %s=%s", field.name,
                                  field.choices[fields.value[i]]));
        } else {
            advance(std::snprintf(text + used, size - used, " %s=%d", field.name, fields.value[i]));
        }
    }
}

// A network may be wrong in a dimension that only the sizes of a profile show.
bool check_profile(const PluginSpec& spec, const Fields& fields,
                   const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                   const nvinfer1::Dims nvinfer1::DynamicPluginTensorDesc::* which,
                   Message* message) noexcept {
    Tensor tensors[kMaxTensors];
    for (int32_t i = 0; i < num_inputs; ++i)
        tensors[i] = tensor_of(inputs[i].desc, inputs[i].*which);
    return check_tensors(spec, fields, tensors, nullptr, true, message);
}

}  // namespace

Plugin::Plugin(const PluginSpec& spec, const Fields& fields, nvinfer1::TensorRTPhase phase) noexcept
    : spec_(spec),
      fields_(fields),
      phase_(phase),
      num_inputs_(Present(spec.inputs, fields).count),
      num_outputs_(Present(spec.outputs, fields).count) {
    describe(spec, fields, text_, sizeof(text_));
}

nvinfer1::InterfaceInfo Plugin::getInterfaceInfo() const noexcept {
    return nvinfer1::IPluginV3::getInterfaceInfo();
}

nvinfer1::IPluginCapability* Plugin::getCapabilityInterface(
    nvinfer1::PluginCapabilityType type) noexcept {
    switch (type) {
        case nvinfer1::PluginCapabilityType::kCORE:
            return static_cast<nvinfer1::IPluginV3OneCore*>(this);
        case nvinfer1::PluginCapabilityType::kBUILD:
            return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
        case nvinfer1::PluginCapabilityType::kRUNTIME:
            return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
    }
    return nullptr;
}

nvinfer1::IPluginV3* Plugin::clone() noexcept {
    auto* copy = new (std::nothrow) Plugin(spec_, fields_, phase_);
    if (copy == nullptr) log_error("treewy: no memory to clone a plugin");
    return copy;
}

const char* Plugin::getPluginName() const noexcept { return spec_.name; }
const char* Plugin::getPluginVersion() const noexcept { return kVersion; }
const char* Plugin::getPluginNamespace() const noexcept { return kNamespace; }

bool Plugin::has_counts(int32_t num_inputs, int32_t num_outputs, Message* message) const noexcept {
    if (num_inputs == num_inputs_ && num_outputs == num_outputs_) return true;
    return message->add("%s: takes %d inputs and gives %d outputs with these fields, not %d and %d",
                        spec_.name, num_inputs_, num_outputs_, num_inputs, num_outputs);
}

// ------------------------------------------------------------------ build

int32_t Plugin::getNbOutputs() const noexcept { return num_outputs_; }

int32_t Plugin::getOutputDataTypes(nvinfer1::DataType* types, int32_t num_outputs,
                                   const nvinfer1::DataType* input_types,
                                   int32_t num_inputs) const noexcept {
    Message message;
    Type inputs[kMaxTensors], outputs[kMaxTensors];
    bool good = has_counts(num_inputs, num_outputs, &message);
    if (good) {
        for (int32_t i = 0; i < num_inputs; ++i) inputs[i] = type_of(input_types[i]);
        good = output_types(spec_, fields_, inputs, num_inputs, outputs, &message);
    }
    if (good) {
        for (int32_t i = 0; i < num_outputs; ++i) types[i] = nvinfer_type(outputs[i]);
    }
    return status_of(good, message);
}

int32_t Plugin::getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t num_inputs,
                                const nvinfer1::DimsExprs*, int32_t, nvinfer1::DimsExprs* outputs,
                                int32_t num_outputs, nvinfer1::IExprBuilder& builder) noexcept {
    Message message;
    if (!has_counts(num_inputs, num_outputs, &message)) return status_of(false, message);
    const Present in(spec_.inputs, fields_), out(spec_.outputs, fields_);
    for (int32_t i = 0; i < num_inputs; ++i) {
        const TensorSpec& tensor = spec_.inputs[in.place[i]];
        if (inputs[i].nbDims == tensor.rank()) continue;
        message.add("%s: input %s has %d dimensions, must have %d", spec_.name, tensor.name,
                    inputs[i].nbDims, tensor.rank());
        return status_of(false, message);
    }
    for (int32_t i = 0; i < num_outputs; ++i) {
        outputs[i].nbDims = spec_.outputs[out.place[i]].rank();
        for (int32_t j = 0; j < outputs[i].nbDims; ++j) {
            OutputDim from;
            if (!output_dim(spec_, fields_, i, j, &from)) {
                message.add("%s: the size of output %d is not known", spec_.name, i);
                return status_of(false, message);
            }
            outputs[i].d[j] =
                from.input < 0 ? builder.constant(from.constant) : inputs[from.input].d[from.dim];
        }
    }
    return 0;
}

bool Plugin::supportsFormatCombination(int32_t position,
                                       const nvinfer1::DynamicPluginTensorDesc* tensors,
                                       int32_t num_inputs, int32_t num_outputs) noexcept {
    if (num_inputs != num_inputs_ || num_outputs != num_outputs_) return false;
    Tensor all[2 * kMaxTensors];
    for (int32_t i = 0; i <= position; ++i)
        all[i] = tensor_of(tensors[i].desc, tensors[i].desc.dims);
    return supports(spec_, fields_, position, all);
}

int32_t Plugin::configurePlugin(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                                const nvinfer1::DynamicPluginTensorDesc*,
                                int32_t num_outputs) noexcept {
    using Desc = nvinfer1::DynamicPluginTensorDesc;
    Message message;
    const bool good = has_counts(num_inputs, num_outputs, &message) &&
                      check_profile(spec_, fields_, inputs, num_inputs, &Desc::min, &message) &&
                      check_profile(spec_, fields_, inputs, num_inputs, &Desc::opt, &message) &&
                      check_profile(spec_, fields_, inputs, num_inputs, &Desc::max, &message);
    return status_of(good, message);
}

const char* Plugin::getTimingCacheID() noexcept { return text_; }
const char* Plugin::getMetadataString() noexcept { return text_; }

// ------------------------------------------------------------------ runtime

int32_t Plugin::onShapeChange(const nvinfer1::PluginTensorDesc* inputs, int32_t num_inputs,
                              const nvinfer1::PluginTensorDesc* outputs,
                              int32_t num_outputs) noexcept {
    Message message;
    bool good = has_counts(num_inputs, num_outputs, &message);
    if (good) {
        const Tensors in(inputs, num_inputs), out(outputs, num_outputs);
        good = check_tensors(spec_, fields_, in.all, out.all, false, &message);
    }
    return status_of(good, message);
}

int32_t Plugin::enqueue(const nvinfer1::PluginTensorDesc* input_descs,
                        const nvinfer1::PluginTensorDesc* output_descs, const void* const* inputs,
                        void* const* outputs, void*, cudaStream_t stream) noexcept {
    Message message;
    const Tensors in(input_descs, num_inputs_), out(output_descs, num_outputs_);
    // A builder times layers with buffers of its own; an engine has those that it was given.
    const Mismatch mismatch =
        phase_ == nvinfer1::TensorRTPhase::kBUILD ? Mismatch::kCopy : Mismatch::kRefuse;
    const bool good =
        run(spec_, fields_, in.all, out.all, inputs, outputs, mismatch, stream, &message);
    return status_of(good, message);
}

nvinfer1::IPluginV3* Plugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept {
    return clone();  // nothing is taken from a context
}

const nvinfer1::PluginFieldCollection* Plugin::getFieldsToSerialize() noexcept {
    // Made anew at every call, so that it points into this object and not into one it was cloned
    // of.
    int32_t count = 0;
    for (; spec_.fields[count].name != nullptr; ++count) {
        const FieldSpec& field = spec_.fields[count];
        if (field.type == FieldType::kString) {
            const char* text = field.choices[fields_.value[count]];
            serialized_[count] = {field.name, text, nvinfer1::PluginFieldType::kCHAR,
                                  static_cast<int32_t>(std::strlen(text))};
        } else {
            serialized_[count] = {field.name, &fields_.value[count],
                                  nvinfer1::PluginFieldType::kINT32, 1};
        }
    }
    collection_.nbFields = count;
    collection_.fields = serialized_;
    return &collection_;
}

// ------------------------------------------------------------------ creator

nvinfer1::IPluginV3* Creator::createPlugin(const char*,
                                           const nvinfer1::PluginFieldCollection* collection,
                                           nvinfer1::TensorRTPhase phase) noexcept {
    Message message;
    Fields fields;
    if (!read_fields(spec_, collection, &fields, &message)) {
        log_error(message.text());
        return nullptr;
    }
    auto* plugin = new (std::nothrow) Plugin(spec_, fields, phase);
    if (plugin == nullptr) log_error("treewy: no memory to create a plugin");
    return plugin;
}

const nvinfer1::PluginFieldCollection* Creator::getFieldNames() noexcept { return names_.get(); }
const char* Creator::getPluginName() const noexcept { return spec_.name; }
const char* Creator::getPluginVersion() const noexcept { return kVersion; }
const char* Creator::getPluginNamespace() const noexcept { return kNamespace; }

}  // namespace treewy::plugin
