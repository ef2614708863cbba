// SPDX-License-Identifier: Apache-2.0
//
// Drives the plugin library as TensorRT drives it, for tests: a C interface that Python calls.
// Opens the library by getCreators, gives it a logger, and calls the plugins' methods with symbolic
// and with real dimensions. A "node" is one plugin object.
#include <NvInferRuntime.h>
#include <NvInferVersion.h>
#include <dlfcn.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#define HOST_API extern "C" __attribute__((visibility("default")))

namespace {

using nvinfer1::DataType;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

std::mutex log_mutex;
std::string log_text;

struct Logger final : nvinfer1::ILogger {
    void log(Severity severity, const char* text) noexcept override {
        const std::lock_guard<std::mutex> lock(log_mutex);
        log_text += std::to_string(static_cast<int>(severity)) + " " + text + "\n";
    }
};

struct Finder final : nvinfer1::ILoggerFinder {
    nvinfer1::ILogger* findLogger() override { return &logger; }
    Logger logger;
};

// A dimension as a text: "2.1" is dimension 1 of input 2, "[64]" a constant.
struct Expression final : nvinfer1::IDimensionExpr {
    struct Text final : nvinfer1::apiv::VDimensionExpr {
        bool isConstant() const override { return text.front() == '['; }
        int64_t getConstantValue() const override { return std::stoll(text.substr(1)); }
        bool isSizeTensor() const override { return false; }
        std::string text;
    };
    explicit Expression(std::string text) {
        value.text = std::move(text);
        mImpl = &value;
    }
    Text value;
};

struct Builder final : nvinfer1::IExprBuilder {
    struct Maker final : nvinfer1::apiv::VExprBuilder {
        const nvinfer1::IDimensionExpr* constant(int64_t number) override {
            return make("[" + std::to_string(number) + "]");
        }
        const nvinfer1::IDimensionExpr* operation(nvinfer1::DimensionOperation,
                                                  const nvinfer1::IDimensionExpr&,
                                                  const nvinfer1::IDimensionExpr&) override {
            return make("operation");
        }
        const nvinfer1::IDimensionExpr* declareSizeTensor(
            int32_t, const nvinfer1::IDimensionExpr&, const nvinfer1::IDimensionExpr&) override {
            return make("size");
        }
        const nvinfer1::IDimensionExpr* make(std::string text) {
            all.push_back(std::make_unique<Expression>(std::move(text)));
            return all.back().get();
        }
        std::vector<std::unique_ptr<Expression>> all;
    };
    Builder() { mImpl = &maker; }
    Maker maker;
};

struct Node {
    nvinfer1::IPluginV3* plugin;
    nvinfer1::IPluginCreatorV3One* creator;

    template <typename Capability>
    Capability* get(nvinfer1::PluginCapabilityType type) const {
        return static_cast<Capability*>(plugin->getCapabilityInterface(type));
    }
    nvinfer1::IPluginV3OneCore* core() const {
        return get<nvinfer1::IPluginV3OneCore>(nvinfer1::PluginCapabilityType::kCORE);
    }
    nvinfer1::IPluginV3OneBuild* build() const {
        return get<nvinfer1::IPluginV3OneBuild>(nvinfer1::PluginCapabilityType::kBUILD);
    }
    nvinfer1::IPluginV3OneRuntime* runtime() const {
        return get<nvinfer1::IPluginV3OneRuntime>(nvinfer1::PluginCapabilityType::kRUNTIME);
    }
};

std::vector<nvinfer1::IPluginCreatorV3One*> creators;
std::string answer;

Node* node_of(nvinfer1::IPluginV3* plugin, nvinfer1::IPluginCreatorV3One* creator) {
    return plugin == nullptr ? nullptr : new Node{plugin, creator};
}

nvinfer1::Dims dims_of(int32_t rank, const int64_t* dims) {
    nvinfer1::Dims result{};
    result.nbDims = rank;
    for (int32_t i = 0; i < rank; ++i) result.d[i] = dims[i];
    return result;
}

PluginTensorDesc desc_of(int32_t type, int32_t format, int32_t rank, const int64_t* dims) {
    PluginTensorDesc desc{};
    desc.type = static_cast<DataType>(type);
    desc.format = static_cast<nvinfer1::TensorFormat>(format);
    desc.dims = dims_of(rank, dims);
    desc.scale = 1.0f;
    return desc;
}

// A field as it lies in an engine file: data of its own.
struct Stored {
    std::string name;
    std::vector<char> data;
    nvinfer1::PluginFieldType type;
    int32_t length;
};

size_t bytes_of(const nvinfer1::PluginField& field) {
    const bool text = field.type == nvinfer1::PluginFieldType::kCHAR;
    return static_cast<size_t>(field.length) * (text ? 1 : 4);
}

}  // namespace

// This library stands in for libnvinfer: the plugins ask whoever owns a logger for its version.
HOST_API int32_t getInferLibVersion() noexcept { return NV_TENSORRT_VERSION; }

// What a tensor is to these functions: type, format and rank, and 8 dims (min, opt, max: 24).
struct HostTensor {
    int32_t type;
    int32_t format;
    int32_t rank;
    int32_t reserved;
    int64_t dims[24];
    void* data;
};

HOST_API const char* host_error() { return answer.c_str(); }

// Number of creators, or -1 and host_error().
HOST_API int32_t host_open(const char* path) {
    static Finder finder;
    void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        answer = dlerror();
        return -1;
    }
    using Get = nvinfer1::IPluginCreatorInterface* const* (*)(int32_t&);
    using Set = void (*)(nvinfer1::ILoggerFinder*);
    const auto get = reinterpret_cast<Get>(dlsym(handle, "getCreators"));
    const auto set = reinterpret_cast<Set>(dlsym(handle, "setLoggerFinder"));
    if (get == nullptr || set == nullptr) {
        answer = "getCreators or setLoggerFinder is missing";
        return -1;
    }
    set(&finder);
    int32_t count = 0;
    nvinfer1::IPluginCreatorInterface* const* found = get(count);
    creators.clear();
    for (int32_t i = 0; i < count; ++i) {
        if (std::strcmp(found[i]->getInterfaceInfo().kind, "PLUGIN CREATOR_V3ONE") != 0) continue;
        creators.push_back(static_cast<nvinfer1::IPluginCreatorV3One*>(found[i]));
    }
    return static_cast<int32_t>(creators.size());
}

// What was logged since the last call, a line each: severity, text.
HOST_API const char* host_log() {
    const std::lock_guard<std::mutex> lock(log_mutex);
    answer.swap(log_text);
    log_text.clear();
    return answer.c_str();
}

// "name namespace version field:type field:type ..."
HOST_API const char* host_creator(int32_t index) {
    nvinfer1::IPluginCreatorV3One* creator = creators.at(static_cast<size_t>(index));
    answer = std::string(creator->getPluginName()) + " " + creator->getPluginNamespace() + " " +
             creator->getPluginVersion();
    const nvinfer1::PluginFieldCollection* names = creator->getFieldNames();
    for (int32_t i = 0; i < names->nbFields; ++i) {
        answer += std::string(" ") + names->fields[i].name + ":" +
                  std::to_string(static_cast<int>(names->fields[i].type));
    }
    return answer.c_str();
}

// A node of the creator at `index`, or null and a line in the log.
HOST_API void* host_create(int32_t index, int32_t phase, int32_t count, const char* const* names,
                           const int32_t* types, const void* const* data, const int32_t* lengths) {
    std::vector<nvinfer1::PluginField> fields;
    for (int32_t i = 0; i < count; ++i) {
        fields.emplace_back(names[i], data[i], static_cast<nvinfer1::PluginFieldType>(types[i]),
                            lengths[i]);
    }
    const nvinfer1::PluginFieldCollection collection{count, fields.data()};
    nvinfer1::IPluginCreatorV3One* creator = creators.at(static_cast<size_t>(index));
    return node_of(
        creator->createPlugin("node", &collection, static_cast<nvinfer1::TensorRTPhase>(phase)),
        creator);
}

HOST_API void host_destroy(void* node) {
    delete static_cast<Node*>(node)->plugin;
    delete static_cast<Node*>(node);
}

HOST_API void* host_clone(void* node) {
    const Node& from = *static_cast<Node*>(node);
    return node_of(from.plugin->clone(), from.creator);
}

HOST_API void* host_attach(void* node) {
    const Node& from = *static_cast<Node*>(node);
    return node_of(from.runtime()->attachToContext(nullptr), from.creator);
}

// A node as an engine file brings it back.
HOST_API void* host_reload(void* node) {
    const Node& from = *static_cast<Node*>(node);
    const nvinfer1::PluginFieldCollection* fields = from.runtime()->getFieldsToSerialize();
    std::vector<Stored> stored;
    for (int32_t i = 0; i < fields->nbFields; ++i) {
        const nvinfer1::PluginField& field = fields->fields[i];
        const char* data = static_cast<const char*>(field.data);
        stored.push_back({field.name, {data, data + bytes_of(field)}, field.type, field.length});
    }
    std::vector<nvinfer1::PluginField> given;
    for (const Stored& one : stored) {
        given.emplace_back(one.name.c_str(), one.data.data(), one.type, one.length);
    }
    const nvinfer1::PluginFieldCollection collection{static_cast<int32_t>(given.size()),
                                                     given.data()};
    return node_of(from.creator->createPlugin("", &collection, nvinfer1::TensorRTPhase::kRUNTIME),
                   from.creator);
}

// "name namespace version outputs | timing id | metadata | field=value ..."
HOST_API const char* host_describe(void* node) {
    const Node& from = *static_cast<Node*>(node);
    nvinfer1::IPluginV3OneBuild* build = from.build();
    answer = std::string(from.core()->getPluginName()) + " " + from.core()->getPluginNamespace() +
             " " + from.core()->getPluginVersion() + " " + std::to_string(build->getNbOutputs()) +
             "|" + build->getTimingCacheID() + "|" + build->getMetadataString() + "|";
    const nvinfer1::PluginFieldCollection* fields = from.runtime()->getFieldsToSerialize();
    for (int32_t i = 0; i < fields->nbFields; ++i) {
        const nvinfer1::PluginField& field = fields->fields[i];
        answer += i == 0 ? "" : " ";
        answer += std::string(field.name) + "=";
        if (field.type == nvinfer1::PluginFieldType::kCHAR) {
            answer.append(static_cast<const char*>(field.data), static_cast<size_t>(field.length));
        } else {
            answer += std::to_string(*static_cast<const int32_t*>(field.data));
        }
    }
    return answer.c_str();
}

HOST_API int64_t host_workspace(void* node) {
    return static_cast<int64_t>(
        static_cast<Node*>(node)->build()->getWorkspaceSize(nullptr, 0, nullptr, 0));
}

HOST_API int32_t host_output_types(void* node, int32_t num_inputs, const int32_t* inputs,
                                   int32_t num_outputs, int32_t* outputs) {
    std::vector<DataType> in, out(static_cast<size_t>(num_outputs));
    for (int32_t i = 0; i < num_inputs; ++i) in.push_back(static_cast<DataType>(inputs[i]));
    const int32_t status = static_cast<Node*>(node)->build()->getOutputDataTypes(
        out.data(), num_outputs, in.data(), num_inputs);
    for (int32_t i = 0; i < num_outputs; ++i) outputs[i] = static_cast<int32_t>(out[i]);
    return status;
}

// Shapes of the outputs, "0.0,0.1,[4],[64];...", or null and a line in the log.
HOST_API const char* host_output_shapes(void* node, int32_t num_inputs, const int32_t* ranks,
                                        int32_t num_outputs) {
    Builder builder;
    std::vector<nvinfer1::DimsExprs> in(static_cast<size_t>(num_inputs)),
        out(static_cast<size_t>(num_outputs));
    for (int32_t i = 0; i < num_inputs; ++i) {
        in[i].nbDims = ranks[i];
        for (int32_t j = 0; j < ranks[i]; ++j) {
            in[i].d[j] = builder.maker.make(std::to_string(i) + "." + std::to_string(j));
        }
    }
    if (static_cast<Node*>(node)->build()->getOutputShapes(in.data(), num_inputs, nullptr, 0,
                                                           out.data(), num_outputs, builder) != 0) {
        return nullptr;
    }
    answer.clear();
    for (const nvinfer1::DimsExprs& shape : out) {
        answer += answer.empty() ? "" : ";";
        for (int32_t j = 0; j < shape.nbDims; ++j) {
            answer += j == 0 ? "" : ",";
            answer += static_cast<const Expression*>(shape.d[j])->value.text;
        }
    }
    return answer.c_str();
}

namespace {

std::vector<DynamicPluginTensorDesc> dynamic_descs(int32_t count, const HostTensor* tensors) {
    std::vector<DynamicPluginTensorDesc> descs;
    for (int32_t i = 0; i < count; ++i) {
        const HostTensor& t = tensors[i];
        DynamicPluginTensorDesc desc{};
        desc.min = dims_of(t.rank, t.dims);
        desc.opt = dims_of(t.rank, t.dims + 8);
        desc.max = dims_of(t.rank, t.dims + 16);
        desc.desc = desc_of(t.type, t.format, t.rank, t.dims);
        for (int32_t j = 0; j < t.rank; ++j) {
            if (desc.min.d[j] != desc.max.d[j]) desc.desc.dims.d[j] = -1;
        }
        descs.push_back(desc);
    }
    return descs;
}

}  // namespace

HOST_API int32_t host_supports(void* node, int32_t position, const HostTensor* tensors,
                               int32_t num_inputs, int32_t num_outputs) {
    const auto descs = dynamic_descs(num_inputs + num_outputs, tensors);
    return static_cast<Node*>(node)->build()->supportsFormatCombination(position, descs.data(),
                                                                        num_inputs, num_outputs);
}

HOST_API int32_t host_configure(void* node, const HostTensor* tensors, int32_t num_inputs,
                                int32_t num_outputs) {
    const auto descs = dynamic_descs(num_inputs + num_outputs, tensors);
    return static_cast<Node*>(node)->build()->configurePlugin(
        descs.data(), num_inputs, descs.data() + num_inputs, num_outputs);
}

// onShapeChange (unless `steps` is 2) and enqueue (unless it is 1). 0, 1 or 2: what failed.
HOST_API int32_t host_run(void* node, const HostTensor* tensors, int32_t num_inputs,
                          int32_t num_outputs, int32_t steps, void* stream) {
    std::vector<PluginTensorDesc> descs;
    std::vector<const void*> inputs;
    std::vector<void*> outputs;
    for (int32_t i = 0; i < num_inputs + num_outputs; ++i) {
        const HostTensor& t = tensors[i];
        descs.push_back(desc_of(t.type, t.format, t.rank, t.dims));
        if (i < num_inputs) {
            inputs.push_back(t.data);
        } else {
            outputs.push_back(t.data);
        }
    }
    nvinfer1::IPluginV3OneRuntime* runtime = static_cast<Node*>(node)->runtime();
    const PluginTensorDesc* output_descs = descs.data() + num_inputs;
    if (steps != 2 &&
        runtime->onShapeChange(descs.data(), num_inputs, output_descs, num_outputs) != 0) {
        return 1;
    }
    if (steps != 1 && runtime->enqueue(descs.data(), output_descs, inputs.data(), outputs.data(),
                                       nullptr, static_cast<cudaStream_t>(stream)) != 0) {
        return 2;
    }
    return 0;
}
