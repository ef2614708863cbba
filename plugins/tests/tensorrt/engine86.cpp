// SPDX-License-Identifier: Apache-2.0
//
// Builds and runs engines with TensorRT 8.6 around the plugins, behind a C interface that
// tests/engine_backends.py calls. libnvinfer.so.8 has to be loaded (RTLD_GLOBAL) before this.
#include <NvInfer.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../../tensorrt/plugins.h"
#include "fence_v2.h"
#include "plugin_v2.h"

#define ENGINE_API extern "C" __attribute__((visibility("default")))

namespace {

using namespace nvinfer1;

struct Logger final : ILogger {
    void log(Severity severity, const char* message) noexcept override {
        if (severity > wanted) return;
        const std::lock_guard<std::mutex> lock(mutex);
        // A file gets each line at once: a builder that crashes or hangs leaves what it said.
        if (file.is_open()) file << static_cast<int>(severity) << " " << message << std::endl;
        if (severity > Severity::kWARNING) return;
        text += std::to_string(static_cast<int>(severity)) + " " + message + "\n";
    }
    std::mutex mutex;
    std::string text;
    Severity wanted = Severity::kWARNING;
    std::ofstream file;
} logger;

std::string answer;

// Type of the plugins' activations, as plugin_v2.h says.
void set_activation(bool half) {
    treewy::plugin::v2_activation =
        half ? treewy::plugin::Type::kFloat16 : treewy::plugin::Type::kFloat32;
}

// A network while it is described.
struct Network {
    std::unique_ptr<IBuilder> builder;
    std::unique_ptr<INetworkDefinition> network;
    std::unique_ptr<IBuilderConfig> config;
    IOptimizationProfile* profile = nullptr;
    std::map<std::string, ITensor*> tensors;
    std::vector<std::unique_ptr<char[]>> weights;
};

struct Engine {
    std::unique_ptr<IRuntime> runtime;
    std::unique_ptr<ICudaEngine> engine;
};

Dims dims_of(int32_t rank, const int64_t* dims) {
    Dims result{};
    result.nbDims = rank;
    for (int32_t i = 0; i < rank; ++i) result.d[i] = static_cast<int32_t>(dims[i]);
    return result;
}

bool register_plugins() {
    static std::vector<std::unique_ptr<treewy::plugin::CreatorV2>> creators;
    if (!creators.empty()) return true;
    treewy::plugin::v2_logger = &logger;
    bool good = true;
    for (int i = 0; i < treewy::plugin::kNumPlugins; ++i) {
        creators.push_back(
            std::make_unique<treewy::plugin::CreatorV2>(treewy::plugin::plugin_at(i)));
        good = getPluginRegistry()->registerCreator(*creators.back(), "treewy") && good;
    }
    static treewy::plugin::FenceCreatorV2 fence;
    good = getPluginRegistry()->registerCreator(fence, "treewy") && good;
    return good;
}

// What IParser::getNbErrors and getError say, by their places in the table of virtual functions
// (NvOnnxParser.h of 8.6; IParserError: code, desc, file, line, func, node).
void log_parser_errors(void* parser) {
    using Count = int (*)(void*);
    using At = void* (*)(void*, int);
    using Text = const char* (*)(void*);
    void** const table = *static_cast<void***>(parser);
    const int count = reinterpret_cast<Count>(table[6])(parser);
    for (int i = 0; i < count; ++i) {
        void* error = reinterpret_cast<At>(table[7])(parser, i);
        if (error == nullptr) continue;
        void** const said = *static_cast<void***>(error);
        const std::string where = reinterpret_cast<Text>(said[4])(error);
        const std::string node = std::to_string(reinterpret_cast<Count>(said[5])(error));
        const std::string text = reinterpret_cast<Text>(said[1])(error);
        logger.log(ILogger::Severity::kERROR,
                   ("parser: node " + node + ", " + where + ": " + text).c_str());
    }
}

bool is_float(DataType type) { return type == DataType::kFLOAT || type == DataType::kHALF; }

// Layers whose type is given by what they are, and not by a choice of the builder.
bool chooses_type(LayerType type) {
    return type != LayerType::kCONSTANT && type != LayerType::kSHAPE && type != LayerType::kCAST &&
           type != LayerType::kPLUGIN_V2 && type != LayerType::kFILL;
}

// Asks for the types of `known` in one layer. Tensors without a name of the file, as inside a
// softmax, are of the type of the layer's first input.
bool constrain(ILayer& layer, std::map<const ITensor*, DataType>& known) {
    bool found = false;
    DataType type = DataType::kFLOAT;
    for (int32_t i = 0; i < layer.getNbInputs() && !found; ++i) {
        const auto entry = known.find(layer.getInput(i));
        if (entry == known.end()) continue;
        type = entry->second;
        found = true;
    }
    for (int32_t i = 0; i < layer.getNbOutputs(); ++i) {
        ITensor* tensor = layer.getOutput(i);
        if (known.count(tensor) != 0) {
            type = known[tensor];
            found = true;
        } else if (found && is_float(tensor->getType())) {
            known[tensor] = type;
        }
    }
    if (!found || !chooses_type(layer.getType())) return false;
    layer.setPrecision(type);
    for (int32_t i = 0; i < layer.getNbOutputs(); ++i) {
        const auto entry = known.find(layer.getOutput(i));
        if (entry != known.end()) layer.setOutputType(i, entry->second);
    }
    return true;
}

void set_types(ITensor* tensor, int32_t type) {
    tensor->setType(static_cast<DataType>(type));
    tensor->setAllowedFormats(1u << static_cast<uint32_t>(TensorFormat::kLINEAR));
}

}  // namespace

ENGINE_API int32_t engine_version() { return getInferLibVersion(); }

ENGINE_API const char* engine_log() {
    const std::lock_guard<std::mutex> lock(logger.mutex);
    answer.swap(logger.text);
    logger.text.clear();
    return answer.c_str();
}

// All that TensorRT says from now on goes to a file as well, how it chooses its kernels included.
ENGINE_API int32_t engine_log_to(const char* path) {
    const std::lock_guard<std::mutex> lock(logger.mutex);
    logger.file.open(path);
    logger.wanted = ILogger::Severity::kVERBOSE;
    return logger.file.good() ? 0 : 1;
}

ENGINE_API void* network_new(int32_t half) {
    if (!register_plugins()) return nullptr;
    auto network = std::make_unique<Network>();
    network->builder.reset(createInferBuilder(logger));
    if (network->builder == nullptr) return nullptr;
    network->network.reset(network->builder->createNetworkV2(
        1u << static_cast<uint32_t>(NetworkDefinitionCreationFlag::kEXPLICIT_BATCH)));
    network->config.reset(network->builder->createBuilderConfig());
    network->profile = network->builder->createOptimizationProfile();
    network->config->setMemoryPoolLimit(MemoryPoolType::kWORKSPACE, size_t{1} << 30);
    // The wheel comes without cuBLAS and cuDNN.
    const TacticSources off = 1u << static_cast<uint32_t>(TacticSource::kCUBLAS) |
                              1u << static_cast<uint32_t>(TacticSource::kCUBLAS_LT) |
                              1u << static_cast<uint32_t>(TacticSource::kCUDNN);
    network->config->setTacticSources(network->config->getTacticSources() & ~off);
    if (half != 0) network->config->setFlag(BuilderFlag::kFP16);
    network->config->clearFlag(BuilderFlag::kTF32);
    set_activation(half != 0);
    // Several contexts of one engine at a time.
    network->config->setPreviewFeature(PreviewFeature::kPROFILE_SHARING_0806, true);
    return network.release();
}

ENGINE_API void network_delete(void* handle) { delete static_cast<Network*>(handle); }

// dims: min, opt and max, 8 each; a dimension whose min and max differ is dynamic.
ENGINE_API int32_t network_input(void* handle, const char* name, int32_t type, int32_t rank,
                                 const int64_t* dims) {
    auto& self = *static_cast<Network*>(handle);
    const Dims low = dims_of(rank, dims), opt = dims_of(rank, dims + 8),
               high = dims_of(rank, dims + 16);
    Dims shape = low;
    for (int32_t i = 0; i < rank; ++i) {
        if (low.d[i] != high.d[i]) shape.d[i] = -1;
    }
    ITensor* tensor = self.network->addInput(name, static_cast<DataType>(type), shape);
    if (tensor == nullptr) return 1;
    set_types(tensor, type);
    self.tensors[name] = tensor;
    const bool good = self.profile->setDimensions(name, OptProfileSelector::kMIN, low) &&
                      self.profile->setDimensions(name, OptProfileSelector::kOPT, opt) &&
                      self.profile->setDimensions(name, OptProfileSelector::kMAX, high);
    return good ? 0 : 1;
}

ENGINE_API int32_t network_constant(void* handle, const char* name, int32_t type, int32_t rank,
                                    const int64_t* dims, const void* data, int64_t bytes) {
    auto& self = *static_cast<Network*>(handle);
    self.weights.push_back(std::make_unique<char[]>(static_cast<size_t>(bytes)));
    std::memcpy(self.weights.back().get(), data, static_cast<size_t>(bytes));
    int64_t count = 1;
    for (int32_t i = 0; i < rank; ++i) count *= dims[i];
    const Weights weights{static_cast<DataType>(type), self.weights.back().get(), count};
    IConstantLayer* layer = self.network->addConstant(dims_of(rank, dims), weights);
    if (layer == nullptr) return 1;
    self.tensors[name] = layer->getOutput(0);
    return 0;
}

// The sum of two tensors, by a kernel of TensorRT's own.
ENGINE_API int32_t network_sum(void* handle, const char* name, const char* left,
                               const char* right) {
    auto& self = *static_cast<Network*>(handle);
    IElementWiseLayer* layer = self.network->addElementWise(
        *self.tensors.at(left), *self.tensors.at(right), ElementWiseOperation::kSUM);
    if (layer == nullptr) return 1;
    self.tensors[name] = layer->getOutput(0);
    return 0;
}

// Fields as for host_create of plugin_host.cpp; names of inputs and outputs.
ENGINE_API int32_t network_plugin(void* handle, const char* plugin, int32_t count,
                                  const char* const* names, const int32_t* types,
                                  const void* const* data, const int32_t* lengths,
                                  int32_t num_inputs, const char* const* inputs,
                                  int32_t num_outputs, const char* const* outputs) {
    auto& self = *static_cast<Network*>(handle);
    std::vector<PluginField> fields;
    for (int32_t i = 0; i < count; ++i) {
        fields.emplace_back(names[i], data[i], static_cast<PluginFieldType>(types[i]), lengths[i]);
    }
    const PluginFieldCollection collection{count, fields.data()};
    IPluginCreator* creator = getPluginRegistry()->getPluginCreator(plugin, "1", "treewy");
    if (creator == nullptr) return 1;
    IPluginV2* made = creator->createPlugin(plugin, &collection);
    if (made == nullptr) return 2;
    std::vector<ITensor*> tensors;
    for (int32_t i = 0; i < num_inputs; ++i) tensors.push_back(self.tensors.at(inputs[i]));
    IPluginV2Layer* layer = self.network->addPluginV2(tensors.data(), num_inputs, *made);
    made->destroy();
    if (layer == nullptr || layer->getNbOutputs() != num_outputs) return 3;
    layer->setName(outputs[0]);
    for (int32_t i = 0; i < num_outputs; ++i) self.tensors[outputs[i]] = layer->getOutput(i);
    return 0;
}

ENGINE_API int32_t network_output(void* handle, const char* name, int32_t type) {
    auto& self = *static_cast<Network*>(handle);
    ITensor* tensor = self.tensors.at(name);
    tensor->setName(name);
    self.network->markOutput(*tensor);
    set_types(tensor, type);
    return 0;
}

// Takes the network from an ONNX file, by the parser of TensorRT 8.6 (its library is at `parser`).
// Profiles come from network_profile. The parser's own header is not needed for two functions.
ENGINE_API int32_t network_parse(void* handle, const char* parser, const void* model,
                                 int64_t bytes) {
    auto& self = *static_cast<Network*>(handle);
    void* library = dlopen(parser, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        logger.log(ILogger::Severity::kERROR, dlerror());
        return 1;
    }
    using Create = void* (*)(void*, void*, int32_t);
    const auto create = reinterpret_cast<Create>(dlsym(library, "createNvOnnxParser_INTERNAL"));
    if (create == nullptr) return 2;
    void* object = create(self.network.get(), &logger, 100);  // version 0.1.0
    if (object == nullptr) return 3;
    using Parse = bool (*)(void*, const void*, size_t, const char*);
    const auto parse = reinterpret_cast<Parse>((*static_cast<void***>(object))[0]);
    // The parser is kept: what it parsed points into it.
    if (!parse(object, model, static_cast<size_t>(bytes), nullptr)) {
        log_parser_errors(object);
        return 4;
    }
    for (int32_t i = 0; i < self.network->getNbInputs(); ++i) {
        set_types(self.network->getInput(i),
                  static_cast<int32_t>(self.network->getInput(i)->getType()));
    }
    for (int32_t i = 0; i < self.network->getNbOutputs(); ++i) {
        set_types(self.network->getOutput(i),
                  static_cast<int32_t>(self.network->getOutput(i)->getType()));
    }
    return 0;
}

// Bytes that a kernel may take beside its tensors, in place of 1 GiB.
ENGINE_API void network_workspace(void* handle, int64_t bytes) {
    static_cast<Network*>(handle)->config->setMemoryPoolLimit(MemoryPoolType::kWORKSPACE,
                                                              static_cast<size_t>(bytes));
}

// Lets the builder use cuBLAS, which has to be found as libcublas.so.12 and libcublasLt.so.12.
ENGINE_API void network_cublas(void* handle) {
    auto& config = *static_cast<Network*>(handle)->config;
    const TacticSources on = 1u << static_cast<uint32_t>(TacticSource::kCUBLAS) |
                             1u << static_cast<uint32_t>(TacticSource::kCUBLAS_LT);
    config.setTacticSources(config.getTacticSources() | on);
}

// How much the builder may search, 0 to 5.
ENGINE_API void network_level(void* handle, int32_t level) {
    static_cast<Network*>(handle)->config->setBuilderOptimizationLevel(level);
}

// Asks the builder to compute in the types of the file, as TensorRT 8.6 would else choose them: in
// `names` the float tensors, with a type each. Returns the number of layers that have one now.
ENGINE_API int32_t network_types(void* handle, int32_t count, const char* const* names,
                                 const int32_t* types) {
    auto& self = *static_cast<Network*>(handle);
    std::map<std::string, DataType> wanted;
    for (int32_t i = 0; i < count; ++i) wanted[names[i]] = static_cast<DataType>(types[i]);
    std::map<const ITensor*, DataType> known;
    const auto note = [&](const ITensor* tensor) {
        const auto entry = wanted.find(tensor->getName());
        if (entry != wanted.end()) known[tensor] = entry->second;
    };
    for (int32_t i = 0; i < self.network->getNbInputs(); ++i) note(self.network->getInput(i));
    for (int32_t i = 0; i < self.network->getNbLayers(); ++i) {
        ILayer* layer = self.network->getLayer(i);
        for (int32_t j = 0; j < layer->getNbOutputs(); ++j) note(layer->getOutput(j));
    }
    int32_t done = 0;
    for (int32_t i = 0; i < self.network->getNbLayers(); ++i) {
        done += constrain(*self.network->getLayer(i), known) ? 1 : 0;
    }
    self.config->setFlag(BuilderFlag::kPREFER_PRECISION_CONSTRAINTS);
    return done;
}

ENGINE_API int32_t network_profile(void* handle, const char* name, int32_t rank,
                                   const int64_t* dims) {
    auto& self = *static_cast<Network*>(handle);
    const bool good =
        self.profile->setDimensions(name, OptProfileSelector::kMIN, dims_of(rank, dims)) &&
        self.profile->setDimensions(name, OptProfileSelector::kOPT, dims_of(rank, dims + 8)) &&
        self.profile->setDimensions(name, OptProfileSelector::kMAX, dims_of(rank, dims + 16));
    return good ? 0 : 1;
}

// Builds, and writes the engine to a file.
ENGINE_API int32_t network_build(void* handle, const char* path) {
    auto& self = *static_cast<Network*>(handle);
    if (self.config->addOptimizationProfile(self.profile) < 0) return 1;
    const std::unique_ptr<IHostMemory> plan(
        self.builder->buildSerializedNetwork(*self.network, *self.config));
    if (plan == nullptr) return 2;
    std::ofstream file(path, std::ios::binary);
    file.write(static_cast<const char*>(plan->data()), static_cast<std::streamsize>(plan->size()));
    return file.good() ? 0 : 3;
}

// `half`: whether the plugins' activations are float16.
ENGINE_API void* engine_load(const char* path, int32_t half) {
    set_activation(half != 0);
    if (!register_plugins()) return nullptr;
    std::ifstream file(path, std::ios::binary);
    const std::string plan((std::istreambuf_iterator<char>(file)), {});
    auto engine = std::make_unique<Engine>();
    engine->runtime.reset(createInferRuntime(logger));
    if (engine->runtime == nullptr) return nullptr;
    engine->engine.reset(engine->runtime->deserializeCudaEngine(plan.data(), plan.size()));
    return engine->engine == nullptr ? nullptr : engine.release();
}

ENGINE_API void engine_delete(void* handle) { delete static_cast<Engine*>(handle); }

// The name of a tensor of the engine; null behind the last.
ENGINE_API const char* engine_tensor(void* handle, int32_t index) {
    const auto& engine = static_cast<Engine*>(handle)->engine;
    return index < engine->getNbIOTensors() ? engine->getIOTensorName(index) : nullptr;
}

ENGINE_API int32_t engine_is_input(void* handle, const char* name) {
    const auto& engine = static_cast<Engine*>(handle)->engine;
    return engine->getTensorIOMode(name) == TensorIOMode::kINPUT ? 1 : 0;
}

ENGINE_API void* context_new(void* handle) {
    return static_cast<Engine*>(handle)->engine->createExecutionContext();
}

ENGINE_API void context_delete(void* handle) { delete static_cast<IExecutionContext*>(handle); }

ENGINE_API int32_t context_shape(void* handle, const char* name, int32_t rank,
                                 const int64_t* dims) {
    auto* context = static_cast<IExecutionContext*>(handle);
    return context->setInputShape(name, dims_of(rank, dims)) ? 0 : 1;
}

ENGINE_API int32_t context_address(void* handle, const char* name, void* address) {
    return static_cast<IExecutionContext*>(handle)->setTensorAddress(name, address) ? 0 : 1;
}

ENGINE_API int32_t context_enqueue(void* handle, void* stream) {
    auto* context = static_cast<IExecutionContext*>(handle);
    return context->enqueueV3(static_cast<cudaStream_t>(stream)) ? 0 : 1;
}
