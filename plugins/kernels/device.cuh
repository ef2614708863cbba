// SPDX-License-Identifier: Apache-2.0
//
// What the simple kernels need of the machine: vectors of 16 bytes, types read as float32, sums
// over a warp, one way to launch. plugins/tests/host_cuda.h stands in for the machine where the
// kernels are tested on a CPU.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "common.cuh"
#include "walk.cuh"

namespace treewy {

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr float kNormEps = 1e-6f;  // of a key's or query's square

// ------------------------------------------------------------------ memory

// N elements loaded or stored at once.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
    T x[N];
};

template <int N, typename T>
__device__ __forceinline__ Vec<T, N> load_vec(const T* from) {
    return *reinterpret_cast<const Vec<T, N>*>(from);
}

template <int N, typename T>
__device__ __forceinline__ void store_vec(T* to, const Vec<T, N>& value) {
    *reinterpret_cast<Vec<T, N>*>(to) = value;
}

template <typename T>
inline constexpr int kPer16Bytes = 16 / static_cast<int>(sizeof(T));

__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float as_float(__half x) { return __half2float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
    return __float2half_rn(x);
}

// Element `at` of a tensor whose type the kernel was not compiled for; not for hot loops.
__device__ __forceinline__ float load_as_float(const void* data, int dtype, int64_t at) {
    if (dtype == TREEWY_FLOAT32) return static_cast<const float*>(data)[at];
    if (dtype == TREEWY_BFLOAT16) return as_float(static_cast<const __nv_bfloat16*>(data)[at]);
    return as_float(static_cast<const __half*>(data)[at]);
}

// ------------------------------------------------------------------ warps and blocks

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
    return x;
}

// Sum of the lanes before this one, and of all lanes.
__device__ __forceinline__ double warp_prefix(double x, double* total) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    double upto = x;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
        const double other = __shfl_up_sync(kAllLanes, upto, step);
        if (lane >= step) upto += other;
    }
    *total = __shfl_sync(kAllLanes, upto, kWarp - 1);
    const double before = __shfl_up_sync(kAllLanes, upto, 1);
    return lane == 0 ? 0.0 : before;
}

// Programmatic dependent launch. Every thread of a kernel that is launched with
// Start::kOverlapping calls wait_for_previous(), whatever it does, so that a kernel that has ended
// stands for all before it. What was read ahead of it may be out of date, and must not stay in L1.
__device__ __forceinline__ void wait_for_previous() {
#if !defined(TREEWY_ON_HOST) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel's blocks may take what room there is once all of this one's have started.
__device__ __forceinline__ void let_next_start() {
#if !defined(TREEWY_ON_HOST) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A kernel may have so much shared memory without being asked, its static and dynamic together. No
// kernel's static part is larger than kMostStatic.
inline constexpr size_t kSharedUnasked = 48 * 1024, kMostStatic = 18 * 1024;

#if !defined(TREEWY_ON_HOST)

// The block's dynamic shared memory. Its address is kept in a register, from where it comes cheaper
// than from the special registers that make it.
__device__ __forceinline__ unsigned char* shared_memory() {
    extern __shared__ __align__(16) unsigned char treewy_shared[];
    uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(treewy_shared));
    asm volatile("" : "+r"(base));
    return static_cast<unsigned char*>(__cvta_shared_to_generic(base));
}

// A load that begins where it is written, before the branches, copies and waits behind it.
__device__ __forceinline__ int32_t load_now(const int32_t* from) {
    int32_t value;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// Where something lies in shared memory, as instructions name it.
__device__ __forceinline__ uint32_t shared_address(const void* at) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// Asks L2 for `bytes` bytes, a multiple of 16, on GPUs that can be asked so (sm_90 and later).
__device__ __forceinline__ void prefetch_to_l2(const void* from, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)),
                 "r"(bytes)
                 : "memory");
#endif
}

// Lets a kernel have `shared` bytes of dynamic shared memory: once and for all the most that the
// device gives, so that threads that launch it with other sizes do not undo each other's.
inline treewy_status allow_shared(const char* name, const void* kernel, size_t shared) {
    if (shared + kMostStatic <= kSharedUnasked) return TREEWY_OK;
    cudaFuncAttributes has;
    cudaError_t status = cudaFuncGetAttributes(&has, kernel);
    if (status == cudaSuccess && static_cast<size_t>(has.maxDynamicSharedSizeBytes) < shared) {
        int device = 0, most = 0;
        status = cudaGetDevice(&device);
        if (status == cudaSuccess) {
            status = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
        }
        if (status == cudaSuccess) {
            status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          most - static_cast<int>(has.sharedSizeBytes));
        }
    }
    return status == cudaSuccess ? TREEWY_OK : fail_cuda(name, status);
}

// Where the device has no such launches the attribute is left out, and where what runs has been
// compiled from the PTX of a device that has none: there is no wait in it. All kernels are compiled
// for the same devices, so that one of them says it for all; it is asked once for a device.
inline treewy_status overlaps(const char* name, const void* kernel, Start start, unsigned* count) {
    static std::atomic<int> known[32] = {};  // by device: 0 not asked yet, 1 no, 2 yes
    *count = 0;
    if (start == Start::kAfterPrevious) return TREEWY_OK;
    int device = 0, found = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status != cudaSuccess) return fail_cuda(name, status);
    const bool keeps = device < 32;
    if (keeps) found = known[device].load(std::memory_order_relaxed);
    if (found == 0) {
        cudaFuncAttributes has;
        status = cudaFuncGetAttributes(&has, kernel);
        if (status != cudaSuccess) return fail_cuda(name, status);
        found = has.ptxVersion >= 90 ? 2 : 1;
        if (keeps) known[device].store(found, std::memory_order_relaxed);
    }
    *count = found == 2 ? 1 : 0;
    return TREEWY_OK;
}

// Launches `kernel` with one parameter; `name` is the operation, for messages.
template <typename Params>
treewy_status launch(const char* name, void (*kernel)(Params), const Grid& grid, int threads,
                     size_t shared, treewy_stream stream, const Params& params,
                     Start start = Start::kAfterPrevious) {
    if (grid.x <= 0 || grid.y <= 0) return TREEWY_OK;
    const treewy_status fits = check_grid(name, grid);
    if (fits != TREEWY_OK) return fits;
    const void* function = reinterpret_cast<const void*>(kernel);
    const treewy_status allowed = allow_shared(name, function, shared);
    if (allowed != TREEWY_OK) return allowed;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &attribute;
    const treewy_status found = overlaps(name, function, start, &config.numAttrs);
    if (found != TREEWY_OK) return found;
    void* arguments[] = {const_cast<Params*>(&params)};
    const cudaError_t status = cudaLaunchKernelExC(&config, function, arguments);
    return status == cudaSuccess ? TREEWY_OK : fail_cuda(name, status);
}

#endif  // TREEWY_ON_HOST

// A hint, so that the status does not matter: most of L1 as shared memory, for more blocks.
template <typename Params>
void prefer_shared_memory(void (*kernel)(Params)) {
#if defined(TREEWY_ON_HOST)
    static_cast<void>(kernel);
#else
    static_cast<void>(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                           cudaFuncAttributePreferredSharedMemoryCarveout,
                                           cudaSharedmemCarveoutMaxShared));
#endif
}

// ------------------------------------------------------------------ what launchers check

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline bool is_aligned(const void* pointer, size_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

inline bool is_float_dtype(int32_t dtype) {
    return dtype == TREEWY_FLOAT32 || dtype == TREEWY_BFLOAT16 || dtype == TREEWY_FLOAT16;
}

inline int dtype_bytes(int32_t dtype) { return dtype == TREEWY_FLOAT32 ? 4 : 2; }

inline treewy_status fail_null(const char* name) {
    return fail(TREEWY_INVALID_ARGUMENT, "%s: params must not be null", name);
}

inline treewy_status check_tree(const char* name, const treewy_tree& tree) {
    if (tree.batch < 0 || tree.max_nodes < 1 || tree.num_slots < 0) {
        return fail(TREEWY_INVALID_ARGUMENT,
                    "%s: batch and num_slots must be >= 0 and max_nodes >= 1, got %d, %lld and %d",
                    name, tree.batch, static_cast<long long>(tree.num_slots), tree.max_nodes);
    }
    if (tree.max_nodes > TREEWY_MAX_NODES) {
        return fail(TREEWY_UNSUPPORTED, "%s: max_nodes is %d, at most %d", name, tree.max_nodes,
                    TREEWY_MAX_NODES);
    }
    if (tree.slot == nullptr || tree.parents == nullptr || tree.num_nodes == nullptr) {
        return fail(TREEWY_INVALID_ARGUMENT, "%s: slot, parents and num_nodes must not be null",
                    name);
    }
    return TREEWY_OK;
}

inline treewy_status check_packed(const char* name, const treewy_packed& packed) {
    if (packed.batch < 0 || packed.tokens < 0 || packed.num_slots < 0) {
        return fail(TREEWY_INVALID_ARGUMENT,
                    "%s: batch, tokens and num_slots must be >= 0, got %d, %lld and %lld", name,
                    packed.batch, static_cast<long long>(packed.tokens),
                    static_cast<long long>(packed.num_slots));
    }
    if (packed.slot == nullptr || packed.cu_seqlens == nullptr) {
        return fail(TREEWY_INVALID_ARGUMENT, "%s: slot and cu_seqlens must not be null", name);
    }
    return TREEWY_OK;
}

inline treewy_status check_head_dim(const char* name, const char* which, int32_t dim) {
    if (dim >= 8 && dim % 8 == 0 && dim <= TREEWY_MAX_HEAD_DIM) return TREEWY_OK;
    return fail(TREEWY_UNSUPPORTED, "%s: %s is %d, must be a multiple of 8 and at most %d", name,
                which, dim, TREEWY_MAX_HEAD_DIM);
}

inline treewy_status check_state_pool(const char* name, const treewy_state_pool& pool) {
    if (pool.dtype != TREEWY_FLOAT32 && pool.dtype != TREEWY_BFLOAT16) {
        return fail(TREEWY_UNSUPPORTED, "%s: the state must be float32 or bfloat16, got dtype %d",
                    name, pool.dtype);
    }
    if (pool.layers < 0 || pool.key_heads < 1 || pool.value_heads < 1 ||
        pool.value_heads % pool.key_heads != 0) {
        return fail(TREEWY_INVALID_ARGUMENT,
                    "%s: value_heads must be a multiple of key_heads and layers >= 0, got %d, %d "
                    "and %d",
                    name, pool.value_heads, pool.key_heads, pool.layers);
    }
    treewy_status status = check_head_dim(name, "key_dim", pool.key_dim);
    if (status == TREEWY_OK) status = check_head_dim(name, "value_dim", pool.value_dim);
    if (status != TREEWY_OK) return status;
    const int64_t per_vector = 16 / dtype_bytes(pool.dtype);
    if (pool.data == nullptr || !is_aligned(pool.data, 16) || pool.slot_stride % per_vector != 0 ||
        (pool.layers > 1 && pool.layer_stride % per_vector != 0)) {
        return fail(TREEWY_INVALID_ARGUMENT,
                    "%s: the state and its layer and slot strides must be multiples of 16 bytes "
                    "and not null, got %p, %lld and %lld elements",
                    name, pool.data, static_cast<long long>(pool.layer_stride),
                    static_cast<long long>(pool.slot_stride));
    }
    return TREEWY_OK;
}

}  // namespace treewy
