// SPDX-License-Identifier: Apache-2.0
#include "tensorrt_library.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <link.h>

#include <atomic>
#include <cstdio>
#include <cstring>

#include "contract.h"

namespace treewy::plugin {
namespace {

// ------------------------------------------------------------------ finding

constexpr int kMaxLibraries = 8;

struct Library {
    int32_t major = 0;
    void* (*get_registry)() = nullptr;
    void* (*get_logger)() = nullptr;
};

// 8600 is 8.6.0, 101401 is 10.14.1.
int32_t major_of(int32_t version) noexcept {
    return version >= 100000 ? version / 10000 : version / 1000;
}

template <typename Function>
Function symbol(void* handle, const char* name) noexcept {
    return reinterpret_cast<Function>(dlsym(handle, name));
}

bool read_library(void* handle, Library* library) noexcept {
    const auto version = symbol<int32_t (*)()>(handle, "getInferLibVersion");
    library->get_registry = symbol<void* (*)()>(handle, "getPluginRegistry");
    library->get_logger = symbol<void* (*)()>(handle, "getLogger");
    if (version == nullptr || library->get_registry == nullptr) return false;
    library->major = major_of(version());
    return true;
}

// The name without its folder.
const char* base_name(const char* path) noexcept {
    const char* slash = std::strrchr(path, '/');
    return slash == nullptr ? path : slash + 1;
}

bool is_tensorrt(const char* path) noexcept {
    return path != nullptr && std::strncmp(base_name(path), "libnvinfer", 10) == 0;
}

struct Libraries {
    int count = 0;
    Library all[kMaxLibraries];

    void add(const Library& library) noexcept {
        for (int i = 0; i < count; ++i) {
            if (all[i].get_registry == library.get_registry) return;
        }
        if (count < kMaxLibraries) all[count++] = library;
    }
};

struct Names {
    int count = 0;
    char all[kMaxLibraries][1024];
};

int collect_name(dl_phdr_info* info, size_t, void* data) {
    auto* names = static_cast<Names*>(data);
    if (is_tensorrt(info->dlpi_name) && names->count < kMaxLibraries) {
        std::snprintf(names->all[names->count++], sizeof(names->all[0]), "%s", info->dlpi_name);
    }
    return 0;
}

// Those whose symbols are global (a program that contains TensorRT among them), then all loaded
// libraries by name: one that was loaded privately, as by Triton or Python, is found only so.
void find_libraries(Libraries* libraries) noexcept {
    Library library;
    if (read_library(RTLD_DEFAULT, &library)) libraries->add(library);
    Names names;
    dl_iterate_phdr(collect_name, &names);
    for (int i = 0; i < names.count; ++i) {
        void* handle = dlopen(names.all[i], RTLD_LAZY | RTLD_NOLOAD);
        if (handle == nullptr) continue;
        if (read_library(handle, &library)) libraries->add(library);
        dlclose(handle);
    }
}

// ------------------------------------------------------------------ virtual tables

struct Layout {
    int32_t major;
    int log;               // ILogger::log
    int find_logger;       // ILoggerFinder::findLogger
    int register_creator;  // IPluginRegistry::registerCreator(IPluginCreatorInterface&, ...)
};

constexpr Layout kLayouts[] = {{10, 0, 0, 12}, {11, 4, 4, 8}};

const Layout* layout_of(int32_t major) noexcept {
    for (const Layout& layout : kLayouts) {
        if (layout.major == major) return &layout;
    }
    return nullptr;
}

// A virtual function of an object, as the C++ ABI of Linux has it.
template <typename Function>
Function method(void* object, int slot) noexcept {
    void** table = *static_cast<void***>(object);
    return reinterpret_cast<Function>(table[slot]);
}

// Major version of the TensorRT whose code an object has; 0 if that cannot be told.
int32_t major_of_object(void* object) noexcept {
    Dl_info info{};
    if (dladdr(*static_cast<void**>(object), &info) == 0 || info.dli_fname == nullptr) return 0;
    void* handle = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (handle == nullptr) return 0;
    const auto version = symbol<int32_t (*)()>(handle, "getInferLibVersion");
    const int32_t major = version == nullptr ? 0 : major_of(version());
    dlclose(handle);
    return major;
}

// ------------------------------------------------------------------ log

std::atomic<void*> finder_object{nullptr};
std::atomic<const Layout*> finder_layout{nullptr};

bool log_to(void* logger, const Layout* layout, nvinfer1::ILogger::Severity severity,
            const char* text) noexcept {
    if (logger == nullptr || layout == nullptr) return false;
    method<void (*)(void*, nvinfer1::ILogger::Severity, const char*)>(logger, layout->log)(
        logger, severity, text);
    return true;
}

bool log_by_finder(nvinfer1::ILogger::Severity severity, const char* text) noexcept {
    void* finder = finder_object.load(std::memory_order_acquire);
    const Layout* layout = finder_layout.load(std::memory_order_acquire);
    if (finder == nullptr || layout == nullptr) return false;
    void* logger = method<void* (*)(void*)>(finder, layout->find_logger)(finder);
    return log_to(logger, layout, severity, text);
}

void log(nvinfer1::ILogger::Severity severity, const char* text) noexcept {
    if (log_by_finder(severity, text)) return;
    Libraries libraries;
    find_libraries(&libraries);
    for (int i = 0; i < libraries.count; ++i) {
        const Library& library = libraries.all[i];
        if (library.get_logger == nullptr) continue;
        const Layout* layout = layout_of(library.major);
        if (layout != nullptr && log_to(library.get_logger(), layout, severity, text)) return;
    }
    std::fprintf(stderr, "%s\n", text);
}

// ------------------------------------------------------------------ registration

// Whether TensorRT is among the callers: it is loading this library, and asks for the creators.
bool is_loaded_by_tensorrt() noexcept {
    void* frames[64];
    const int count = backtrace(frames, 64);
    for (int i = 0; i < count; ++i) {
        Dl_info info{};
        if (dladdr(frames[i], &info) != 0 && is_tensorrt(info.dli_fname)) return true;
    }
    return false;
}

// Creators that a registry points to must stay.
void stay_loaded() noexcept {
    Dl_info info{};
    if (dladdr(reinterpret_cast<void*>(&stay_loaded), &info) != 0 && info.dli_fname != nullptr) {
        dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
    }
}

}  // namespace

void log_error(const char* text) noexcept { log(nvinfer1::ILogger::Severity::kERROR, text); }

void set_logger_finder(void* finder) noexcept {
    const Layout* layout = finder == nullptr ? nullptr : layout_of(major_of_object(finder));
    finder_object.store(nullptr, std::memory_order_release);
    finder_layout.store(layout, std::memory_order_release);
    if (layout != nullptr) finder_object.store(finder, std::memory_order_release);
}

void register_at_load(nvinfer1::IPluginCreatorInterface* const* creators, int32_t count) noexcept {
    if (is_loaded_by_tensorrt()) return;
    Libraries libraries;
    find_libraries(&libraries);
    bool registered = false;
    for (int i = 0; i < libraries.count; ++i) {
        const Layout* layout = layout_of(libraries.all[i].major);
        if (layout == nullptr) continue;
        void* registry = libraries.all[i].get_registry();
        if (registry == nullptr) continue;
        const auto add = method<bool (*)(void*, nvinfer1::IPluginCreatorInterface*, const char*)>(
            registry, layout->register_creator);
        for (int32_t j = 0; j < count; ++j) {
            registered = add(registry, creators[j], kNamespace) || registered;
        }
    }
    if (registered) stay_loaded();
}

}  // namespace treewy::plugin
