// SPDX-License-Identifier: Apache-2.0
//
// The few functions of CUDA's runtime that the adapters call themselves, for the machine of
// host_cuda.h; and the contract as text, for the test that compares it with the Python module.
#include <cuda_runtime_api.h>

#include <cstring>
#include <string>

#include "../../tensorrt/plugins.h"

extern "C" cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t) {
    std::memset(target, value, bytes);
    return cudaSuccess;
}

extern "C" cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes,
                                       cudaMemcpyKind, cudaStream_t) {
    std::memcpy(target, source, bytes);
    return cudaSuccess;
}

extern "C" const char* cudaGetErrorString(cudaError_t) { return "error"; }

namespace {

using treewy::plugin::FieldSpec;
using treewy::plugin::FieldType;
using treewy::plugin::PluginSpec;
using treewy::plugin::TensorSpec;

constexpr const char* kKinds[] = {"activation", "gate",    "weight", "state",
                                  "stash",      "float32", "int32"};
constexpr const char* kSymbols[] = {"B", "N", "T", "L", "slots", "HK", "HV",
                                    "K", "V", "C", "W", "H",     "1"};

void add_tensor(const PluginSpec& spec, const char* role, const TensorSpec& tensor,
                std::string* text) {
    *text += std::string(role) + " " + tensor.name + " " + kKinds[static_cast<int>(tensor.kind)];
    for (int i = 0; i < tensor.rank(); ++i) {
        *text +=
            std::string(i == 0 ? " " : ",") + kSymbols[static_cast<int>(tensor.dims[i].symbol)];
        if (tensor.dims[i].plus == 1) *text += "+1";
        if (tensor.dims[i].plus == -1) *text += "-1";
    }
    if (tensor.when.field >= 0) {
        const FieldSpec& field = spec.fields[tensor.when.field];
        *text += std::string(" when ") + field.name + "=";
        *text += field.type == FieldType::kString ? field.choices[tensor.when.value]
                                                  : std::to_string(tensor.when.value);
    }
    if (tensor.in_place >= 0) *text += std::string(" in ") + spec.inputs[tensor.in_place].name;
    *text += "\n";
}

void add_field(const FieldSpec& field, std::string* text) {
    const bool number = field.type == FieldType::kInt32;
    *text += std::string("field ") + field.name + " " + (number ? "int32" : "string");
    for (const char* choice : field.choices) {
        if (choice != nullptr) *text += std::string(" ") + choice;
    }
    if (field.is_flag()) *text += " 0 1";
    if (field.default_value >= 0) {
        *text += " default ";
        *text += number ? std::to_string(field.default_value) : field.choices[field.default_value];
    }
    *text += "\n";
}

}  // namespace

// The tables, a line for every plugin, field, input and output.
extern "C" __attribute__((visibility("default"))) const char* treewy_plugin_tables() {
    static std::string text;
    text.clear();
    for (int i = 0; i < treewy::plugin::kNumPlugins; ++i) {
        const PluginSpec& spec = treewy::plugin::plugin_at(i);
        text += std::string("plugin ") + spec.name + "\n";
        for (int j = 0; spec.fields[j].name != nullptr; ++j) add_field(spec.fields[j], &text);
        for (int j = 0; spec.inputs[j].name != nullptr; ++j) {
            add_tensor(spec, "input", spec.inputs[j], &text);
        }
        for (int j = 0; spec.outputs[j].name != nullptr; ++j) {
            add_tensor(spec, "output", spec.outputs[j], &text);
        }
    }
    return text.c_str();
}
