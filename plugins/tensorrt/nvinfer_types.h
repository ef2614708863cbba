// SPDX-License-Identifier: Apache-2.0
//
// TensorRT's descriptions in the words of the contract; for every version of TensorRT.
#pragma once

#include <NvInferRuntime.h>

#include "contract.h"

namespace treewy::plugin {

inline Type type_of(nvinfer1::DataType type) noexcept {
    switch (type) {
        case nvinfer1::DataType::kFLOAT:
            return Type::kFloat32;
        case nvinfer1::DataType::kHALF:
            return Type::kFloat16;
        case nvinfer1::DataType::kINT32:
            return Type::kInt32;
#if NV_TENSORRT_MAJOR >= 9
        case nvinfer1::DataType::kBF16:
            return Type::kBFloat16;
#endif
        default:
            return Type::kOther;
    }
}

inline nvinfer1::DataType nvinfer_type(Type type) noexcept {
    switch (type) {
        case Type::kFloat16:
            return nvinfer1::DataType::kHALF;
        case Type::kInt32:
            return nvinfer1::DataType::kINT32;
#if NV_TENSORRT_MAJOR >= 9
        case Type::kBFloat16:
            return nvinfer1::DataType::kBF16;
#endif
        default:
            return nvinfer1::DataType::kFLOAT;
    }
}

inline Tensor tensor_of(const nvinfer1::PluginTensorDesc& desc,
                        const nvinfer1::Dims& dims) noexcept {
    Tensor tensor;
    tensor.type = type_of(desc.type);
    tensor.linear = desc.format == nvinfer1::TensorFormat::kLINEAR;
    tensor.rank = dims.nbDims < kMaxRank ? dims.nbDims : kMaxRank;
    for (int32_t i = 0; i < tensor.rank; ++i) tensor.dims[i] = dims.d[i];
    return tensor;
}

inline GivenField field_of(const nvinfer1::PluginField& field) noexcept {
    GivenType type = GivenType::kOther;
    if (field.type == nvinfer1::PluginFieldType::kINT32) type = GivenType::kInt32;
    if (field.type == nvinfer1::PluginFieldType::kCHAR) type = GivenType::kChar;
#if NV_TENSORRT_MAJOR >= 10
    if (field.type == nvinfer1::PluginFieldType::kINT64) type = GivenType::kInt64;
#endif
    return {field.name, field.data, type, field.length};
}

inline constexpr int kMaxGivenFields = 32;

// Fields from a collection; false with the reason.
inline bool read_fields(const PluginSpec& spec, const nvinfer1::PluginFieldCollection* collection,
                        Fields* fields, Message* message) noexcept {
    const int32_t count = collection == nullptr ? 0 : collection->nbFields;
    if (count < 0 || count > kMaxGivenFields || (count > 0 && collection->fields == nullptr)) {
        return message->add("%s: %d fields were given, which cannot be", spec.name, count);
    }
    GivenField given[kMaxGivenFields];
    for (int32_t i = 0; i < count; ++i) given[i] = field_of(collection->fields[i]);
    return parse_fields(spec, given, count, fields, message);
}

// The names and types that a creator offers.
class FieldNames {
  public:
    explicit FieldNames(const PluginSpec& spec) noexcept {
        int32_t count = 0;
        for (; spec.fields[count].name != nullptr; ++count) {
            const bool number = spec.fields[count].type == FieldType::kInt32;
            fields_[count] = {
                spec.fields[count].name, nullptr,
                number ? nvinfer1::PluginFieldType::kINT32 : nvinfer1::PluginFieldType::kCHAR, 1};
        }
        collection_.nbFields = count;
        collection_.fields = fields_;
    }
    FieldNames(const FieldNames&) = delete;
    FieldNames& operator=(const FieldNames&) = delete;

    const nvinfer1::PluginFieldCollection* get() const noexcept { return &collection_; }

  private:
    nvinfer1::PluginField fields_[kMaxFields];
    nvinfer1::PluginFieldCollection collection_{};
};

// The tensors of a call, at most kMaxTensors.
struct Tensors {
    Tensor all[kMaxTensors];

    Tensors(const nvinfer1::PluginTensorDesc* descs, int32_t count) noexcept {
        for (int32_t i = 0; i < count && i < kMaxTensors; ++i) {
            all[i] = tensor_of(descs[i], descs[i].dims);
        }
    }
};

}  // namespace treewy::plugin
