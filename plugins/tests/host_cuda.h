// SPDX-License-Identifier: Apache-2.0
//
// The machine that the kernels see, played on a CPU, so that their real code runs in tests without
// a GPU: blocks one after the other, the threads of a block as fibers. Compile the .cu files as C++
// with -include of this file and -DTREEWY_ON_HOST.
//
// Made to find faults: blocks, and threads between two barriers, run in an order that changes all
// the time, so that a missing barrier or a race between blocks shows as a wrong result; shared
// memory starts as NaN or as junk and ends at a page that must not be touched; asynchronous copies
// and products of warpgroups land at once or not before they are waited for; a barrier that not all
// threads reach, or that some have been at in vain, stops the program. What it does not show:
// speed, and how memory orders accesses.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <bitset>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <vector>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__

namespace host_cuda {

enum class Wait { kNone, kBlock, kNamed, kWarp, kDone };

// A copy that is under way: it has happened for sure when it was waited for, and not before. Others
// have landed by then, on what may still have been read.
struct Copy {
    void* to;
    const void* from;
    int group;
};

// A product of a warpgroup that is under way, of a thread: as a copy. Its columns are read and its
// sums written when it lands, and its rows read where they are in shared memory; from registers
// they were read when it began, which is what the compiler sees to.
struct Product {
    float* sums;
    float rows[2][16];
    bool rows_described;
    uint64_t described;  // rows
    int first_row;       // of them, of this thread
    uint64_t columns;
    int count;
    int step;  // of the sums, from 8 columns to the next
    bool fresh;
    int group;
};

struct Fiber {
    std::vector<Copy> copies;
    int copy_group = 0;
    std::vector<Product> products;
    int product_group = 0;
    ucontext_t context;
    jmp_buf jump;
    std::vector<char> stack;
    Wait wait = Wait::kNone;
    int barrier = 0;  // the one that kNamed waits at
    bool started = false;
    int parity = 0;
    int vote_parity = 0;
};

constexpr int kMaxThreads = 1024;
constexpr size_t kSharedBytes = 227 * 1024;  // of a block, as on an H200
constexpr size_t kStackBytes = 128 * 1024;   // of a thread

// A barrier with a number of its own: threads that wait at it, and that only said they were there.
struct NamedBarrier {
    int arrived = 0;
    int expected = 0;
    std::bitset<kMaxThreads> who;
};

constexpr int kBarriers = 16;

struct Machine {
    NamedBarrier barriers[kBarriers];
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::function<void()> kernel;
    jmp_buf scheduler;
    int current = 0;
    int threads = 0;
    unsigned block = 0;
    int late = 0;  // the warp of the block that goes on only when nothing else can
    unsigned blocks_x = 1;
    uint64_t exchange[2][kMaxThreads];
    uint32_t operands[2][kMaxThreads][6];
    bool vote[2] = {false, false};
    unsigned char* shared = nullptr;
    int registers = 0;  // that threads raised beyond what others lowered
    uint64_t random = 0x9e3779b97f4a7c15u;
};

inline Machine machine;
inline int multiprocessors = 132;
inline bool warpgroups = true;        // whether the GPU has products of theirs
inline const char* last_kernel = "";  // mangled name of the kernel launched last

inline Fiber& fiber() { return *machine.fibers[machine.current]; }

inline unsigned next_random() {
    machine.random = machine.random * 6364136223846793005u + 1442695040888963407u;
    return static_cast<unsigned>(machine.random >> 33);
}

template <typename T>
void shuffle(std::vector<T>* items) {
    for (size_t i = items->size(); i > 1; --i)
        std::swap((*items)[i - 1], (*items)[next_random() % i]);
}

// `barrier`: its number, where there is one.
[[noreturn]] inline void die(const char* what, int barrier = 0) {
    std::fprintf(stderr, "host_cuda: %s (block %u, thread %d, barrier %d)\n", what, machine.block,
                 machine.current, barrier);
    std::abort();
}

inline void yield(Wait wait) {
    Fiber& fiber = host_cuda::fiber();
    fiber.wait = wait;
    if (_setjmp(fiber.jump) == 0) _longjmp(machine.scheduler, 1);
}

inline void fiber_main() {
    for (;;) {
        machine.kernel();
        yield(Wait::kDone);
    }
}

inline void resume(int thread) {
    machine.current = thread;
    Fiber& fiber = *machine.fibers[thread];
    fiber.wait = Wait::kNone;
    if (_setjmp(machine.scheduler) != 0) return;
    if (fiber.started) _longjmp(fiber.jump, 1);
    fiber.started = true;
    fiber.stack.resize(kStackBytes);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
    setcontext(&fiber.context);
}

inline void let_go(int first, int stop) {
    for (int t = first; t < stop; ++t) machine.fibers[t]->wait = Wait::kNone;
}

// Behind a barrier of the block too the late warp is late, as if it exchanged something there.
inline void hold_late() {
    const int first = 32 * machine.late, stop = std::min(first + 32, machine.threads);
    for (int t = first; t < stop; ++t) {
        if (machine.fibers[t]->wait != Wait::kBlock) return;
    }
    for (int t = first; t < stop; ++t) machine.fibers[t]->wait = Wait::kWarp;
}

// Lets go on: every warp whose 32 lanes all wait for one exchange, the block if all of its living
// threads are at a barrier, those at a named barrier that all have come to. One warp, another in
// every block, waits until nothing else can go on, so that others get as far ahead of it as they
// can.
inline bool release() {
    bool any = false, all_at_barrier = true, some_at_barrier = false;
    for (int id = 1; id < kBarriers; ++id) {
        NamedBarrier& barrier = machine.barriers[id];
        if (barrier.expected == 0 || barrier.arrived < barrier.expected) continue;
        if (barrier.arrived > barrier.expected) {
            die("more threads at a barrier than it is for", id);
        }
        for (int t = 0; t < machine.threads; ++t) {
            Fiber& fiber = *machine.fibers[t];
            if (fiber.wait == Wait::kNamed && fiber.barrier == id) fiber.wait = Wait::kNone;
        }
        barrier = {};
        any = true;
    }
    bool late_is_ready = false;
    for (int first = 0; first < machine.threads; first += 32) {
        const int stop = std::min(first + 32, machine.threads);
        bool warp_ready = true, warp_waits = false;
        for (int t = first; t < stop; ++t) {
            const Wait wait = machine.fibers[t]->wait;
            warp_waits |= wait == Wait::kWarp;
            warp_ready &= wait == Wait::kWarp;
            some_at_barrier |= wait == Wait::kBlock;
            all_at_barrier &= wait == Wait::kBlock || wait == Wait::kDone;
        }
        if (!warp_waits || !warp_ready) continue;
        if (first / 32 == machine.late) {
            late_is_ready = true;
            continue;
        }
        any = true;
        let_go(first, stop);
    }
    if (some_at_barrier && all_at_barrier) {
        any = true;
        hold_late();
        for (int t = 0; t < machine.threads; ++t) {
            if (machine.fibers[t]->wait == Wait::kBlock) machine.fibers[t]->wait = Wait::kNone;
        }
    }
    if (late_is_ready && !any) {
        any = true;
        let_go(32 * machine.late, std::min(32 * machine.late + 32, machine.threads));
    }
    return any;
}

inline void run_block(unsigned block) {
    machine.block = block;
    machine.late =
        static_cast<int>(next_random() % static_cast<unsigned>((machine.threads + 31) / 32));
    std::vector<int> order(machine.threads);
    std::iota(order.begin(), order.end(), 0);
    for (int t : order) {
        machine.fibers[t]->wait = Wait::kNone;
        machine.fibers[t]->copies.clear();
        machine.fibers[t]->products.clear();
    }
    for (;;) {
        shuffle(&order);
        bool alive = false;
        for (int t : order) {
            if (machine.fibers[t]->wait == Wait::kNone) resume(t);
            alive |= machine.fibers[t]->wait != Wait::kDone;
        }
        if (!alive) break;
        if (!release()) die("some threads wait at a barrier that others do not reach");
    }
    if (machine.registers > 0) die("threads raised their registers by more than others lowered");
    machine.registers = 0;
    for (int id = 1; id < kBarriers; ++id) {
        if (machine.barriers[id].arrived > 0) die("threads said they were at a barrier", id);
    }
}

// Shared memory of exactly `bytes`, with a page behind it that faults.
class SharedMemory {
  public:
    explicit SharedMemory(size_t bytes) : bytes_(bytes) {
        const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        const size_t whole = (bytes + page - 1) / page * page;
        mapped_ = whole + page;
        base_ = static_cast<unsigned char*>(
            mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (base_ == MAP_FAILED || mprotect(base_ + whole, page, PROT_NONE) != 0) die("no memory");
        start_ = base_ + whole - bytes;
    }
    ~SharedMemory() { munmap(base_, mapped_); }
    // NaN, or 0.75 in every type: a kernel that does its work again where NaN comes out would hide
    // that it read what nobody wrote.
    unsigned char* fill() {
        std::memset(start_, next_random() % 2 == 0 ? 0xff : 0x3f, bytes_);
        return start_;
    }

  private:
    size_t bytes_, mapped_;
    unsigned char *base_, *start_;
};

inline void run_grid(int64_t blocks, int threads, size_t shared, std::function<void()> kernel) {
    if (threads < 1 || threads > kMaxThreads) die("threads of a block");
    machine.threads = threads;
    machine.kernel = std::move(kernel);
    while (static_cast<int>(machine.fibers.size()) < threads) {
        machine.fibers.push_back(std::make_unique<Fiber>());
    }
    SharedMemory memory(shared);
    std::vector<unsigned> order(static_cast<size_t>(blocks));
    std::iota(order.begin(), order.end(), 0u);
    shuffle(&order);
    for (unsigned block : order) {
        machine.shared = memory.fill();
        run_block(block);
    }
}

struct ThreadIndex {
    unsigned x;
};
inline ThreadIndex thread_index() { return {static_cast<unsigned>(machine.current)}; }
struct BlockIndex {
    unsigned x, y;
};
inline BlockIndex block_index() {
    return {machine.block % machine.blocks_x, machine.block / machine.blocks_x};
}
inline ThreadIndex grid_dim() { return {machine.blocks_x}; }
inline ThreadIndex block_dim() { return {static_cast<unsigned>(machine.threads)}; }

// What the other lanes gave, once all lanes of the warp have given theirs.
template <typename T>
T exchange(T value, int lane) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    const int thread = machine.current, first = thread / 32 * 32;
    Fiber& fiber = host_cuda::fiber();
    uint64_t* slots = machine.exchange[fiber.parity];
    fiber.parity ^= 1;
    std::memcpy(&slots[thread], &value, sizeof(T));
    yield(Wait::kWarp);
    if (lane < 0 || lane > 31) return value;
    T out;
    std::memcpy(&out, &slots[first + lane], sizeof(T));
    return out;
}

inline int lane() { return machine.current % 32; }

inline float bfloat16_half(const uint32_t* words, int k) {
    const uint32_t bits = k % 2 == 0 ? words[0] << 16 : words[0] & 0xffff0000u;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

// sum += A B of mma.sync.m16n8k16: what each lane holds is said in kernels/fragment.cuh.
inline void mma(float (&sum)[4], const uint32_t (&operands)[6]) {
    const int thread = machine.current, first = thread / 32 * 32;
    Fiber& fiber = host_cuda::fiber();
    auto& all = machine.operands[fiber.parity];
    fiber.parity ^= 1;
    std::memcpy(all[thread], operands, sizeof(operands));
    yield(Wait::kWarp);
    const int g = lane() / 4, c = lane() % 4;
    for (int out = 0; out < 4; ++out) {
        const int row = g + out / 2 * 8, column = 2 * c + out % 2;
        double total = sum[out];
        for (int k = 0; k < 16; ++k) {
            // k of A and of B lies in lane k % 8 / 2 of its row's, or column's, group of four.
            const int a_lane = row % 8 * 4 + k % 8 / 2, b_lane = column * 4 + k % 8 / 2;
            const uint32_t* a = &all[first + a_lane][row / 8 + k / 8 * 2];
            const uint32_t* b = &all[first + b_lane][4 + k / 8];
            total += static_cast<double>(bfloat16_half(a, k)) * bfloat16_half(b, k);
        }
        sum[out] = static_cast<float>(total);
    }
}

// Rows g and g + 8 of operand A, 16 elements each, of which the lanes of a group of four have four.
inline void share_rows(const uint32_t (&a)[4], float (&rows)[2][16]) {
    const int thread = machine.current, first = thread - lane() % 4;
    Fiber& fiber = host_cuda::fiber();
    auto& all = machine.operands[fiber.parity];
    fiber.parity ^= 1;
    std::memcpy(all[thread], a, sizeof(a));
    yield(Wait::kWarp);
    for (int i = 0; i < 32; ++i) {
        const int row = i / 16, k = i % 16;
        rows[row][k] = bfloat16_half(&all[first + k % 8 / 2][row + k / 8 * 2], k);
    }
}

}  // namespace host_cuda

#define threadIdx (host_cuda::thread_index())
#define blockIdx (host_cuda::block_index())
#define blockDim (host_cuda::block_dim())
#define gridDim (host_cuda::grid_dim())

inline void __syncthreads() { host_cuda::yield(host_cuda::Wait::kBlock); }
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
    return host_cuda::exchange(value, lane);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    return host_cuda::exchange(value, host_cuda::lane() ^ mask);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int by) {
    return host_cuda::exchange(value, host_cuda::lane() - by);
}
inline void __syncwarp() { host_cuda::exchange(0, 0); }
inline int __any_sync(unsigned mask, int vote) {
    for (int step = 16; step > 0; step /= 2) vote |= __shfl_xor_sync(mask, vote != 0 ? 1 : 0, step);
    return vote != 0;
}
inline unsigned __ballot_sync(unsigned mask, int vote) {
    unsigned votes = vote != 0 ? 1u << host_cuda::lane() : 0u;
    for (int step = 16; step > 0; step /= 2) votes |= __shfl_xor_sync(mask, votes, step);
    return votes;
}
// Everyone votes, everyone reads, the vote is cleared; the next one is another, so none is mixed
// up.
inline int __syncthreads_or(int vote) {
    host_cuda::Fiber& fiber = host_cuda::fiber();
    const int slot = fiber.vote_parity;
    fiber.vote_parity ^= 1;
    host_cuda::machine.vote[slot] = host_cuda::machine.vote[slot] || vote != 0;
    host_cuda::yield(host_cuda::Wait::kBlock);
    const bool any = host_cuda::machine.vote[slot];
    host_cuda::yield(host_cuda::Wait::kBlock);
    host_cuda::machine.vote[slot] = false;
    return any;
}
inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>((uint64_t{a} * b) >> 32);
}
inline int atomicAdd(int* to, int value) {
    const int old = *to;
    *to += value;
    return old;
}
inline float __fmul_rn(float a, float b) { return a * b; }  // with -ffp-contract=off
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
#define rsqrtf(x) (1.0f / std::sqrt(x))
using std::max;
using std::min;

extern "C" inline cudaError_t cudaGetLastError(void) { return cudaSuccess; }
extern "C" inline cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}
// For tests of kernels whose blocks stay: how many of them there are at most.
extern "C" __attribute__((used, visibility("default"))) inline void host_cuda_set_multiprocessors(
    int count) {
    host_cuda::multiprocessors = count;
}

// For tests of kernels that multiply by warpgroups: a GPU of 9.0, or one that has none.
extern "C" __attribute__((used, visibility("default"))) inline void host_cuda_set_warpgroups(
    int has_them) {
    host_cuda::warpgroups = has_them != 0;
}

extern "C" inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int) {
    *value = what == cudaDevAttrMaxSharedMemoryPerBlockOptin
                 ? static_cast<int>(host_cuda::kSharedBytes)
             : what == cudaDevAttrComputeCapabilityMajor ? (host_cuda::warpgroups ? 9 : 8)
                                                         : host_cuda::multiprocessors;
    return cudaSuccess;
}
extern "C" inline const char* cudaGetErrorString(cudaError_t) { return "error"; }
extern "C" inline const char* cudaGetErrorName(cudaError_t) { return "cudaError"; }

// For tests of which kernel a call gets.
extern "C" __attribute__((used, visibility("default"))) inline const char* host_cuda_last_kernel() {
    return host_cuda::last_kernel;
}

#include "../kernels/common.cuh"

namespace treewy {

inline unsigned char* shared_memory() { return host_cuda::machine.shared; }

inline void copy_async(void* shared, const void* global) {
    host_cuda::Fiber& fiber = host_cuda::fiber();
    if (host_cuda::next_random() % 2 == 0) {
        std::memcpy(shared, global, 16);
    } else {
        fiber.copies.push_back({shared, global, fiber.copy_group});
    }
}
inline void copy_async_or_zero(void* shared, const void* global, bool real) {
    static const unsigned char zeros[16] = {};
    copy_async(shared, real ? global : zeros);
}
inline int32_t load_now(const int32_t* from) { return *from; }
inline void commit_copies() { ++host_cuda::fiber().copy_group; }
template <int kLater>
void wait_copies() {
    host_cuda::Fiber& fiber = host_cuda::fiber();
    std::vector<host_cuda::Copy> later;
    for (const host_cuda::Copy& copy : fiber.copies) {
        if (copy.group < fiber.copy_group - kLater) {
            std::memcpy(copy.to, copy.from, 16);
        } else {
            later.push_back(copy);
        }
    }
    fiber.copies.swap(later);
}
inline void load_matrices(uint32_t (&words)[4], const unsigned char* row) {
    const int lane = host_cuda::lane();
    for (int i = 0; i < 4; ++i) {
        const unsigned char* from = host_cuda::exchange(row, 8 * i + lane / 4);
        std::memcpy(&words[i], from + 4 * (lane % 4), 4);
    }
}
inline void load_transposed(uint32_t (&words)[4], const unsigned char* row) {
    const int lane = host_cuda::lane();
    for (int i = 0; i < 4; ++i) {
        uint16_t halves[2];
        for (int j = 0; j < 2; ++j) {
            const unsigned char* from = host_cuda::exchange(row, 8 * i + 2 * (lane % 4) + j);
            std::memcpy(&halves[j], from + 2 * (lane / 4), 2);
        }
        words[i] = halves[0] | static_cast<uint32_t>(halves[1]) << 16;
    }
}
inline uint32_t transpose_matrix(uint32_t word) {
    const int g = host_cuda::lane() / 4, c = host_cuda::lane() % 4, shift = g % 2 * 16;
    const uint32_t low = host_cuda::exchange(word, 4 * (2 * c) + g / 2) >> shift;
    const uint32_t high = host_cuda::exchange(word, 4 * (2 * c + 1) + g / 2) >> shift;
    return (low & 0xffffu) | high << 16;
}
inline float fast_exp2(float x) { return std::exp2(x); }
inline float fast_reciprocal(float x) { return 1.0f / x; }
inline void arrive_at(int id, int threads) {
    host_cuda::yield(host_cuda::Wait::kWarp);  // where a warp may be late
    host_cuda::NamedBarrier& barrier = host_cuda::machine.barriers[id];
    if (barrier.arrived > 0 && barrier.expected != threads) {
        host_cuda::die("threads of a barrier", id);
    }
    // A thread that only says that it is there may come again before the others have come once.
    if (barrier.who[host_cuda::machine.current]) {
        host_cuda::die("a thread twice at a barrier", id);
    }
    barrier.who.set(host_cuda::machine.current);
    barrier.expected = threads;
    ++barrier.arrived;
}
inline void sync_at(int id, int threads) {
    arrive_at(id, threads);
    host_cuda::fiber().barrier = id;
    host_cuda::yield(host_cuda::Wait::kNamed);
}
template <int kThreads>
void arrive_at(int id) {
    arrive_at(id, kThreads);
}
template <int kThreads>
void sync_at(int id) {
    sync_at(id, kThreads);
}
inline void mma(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                uint32_t b1) {
    host_cuda::mma(sum, {a0, a1, a2, a3, b0, b1});
}

inline void mma_half(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
    host_cuda::mma(sum, {a0, a1, 0, 0, b0, 0});
}

inline uint32_t shared_address(const void* at) {
    return static_cast<uint32_t>(static_cast<const unsigned char*>(at) - shared_memory());
}

inline void open_products() {}
inline void close_products() { ++host_cuda::fiber().product_group; }
inline void show_to_products() {}
// Of a thread, of kernels that share them out anew and have a multiprocessor for themselves.
inline int launch_registers() { return 64 * 1024 / static_cast<int>(blockDim.x) / 8 * 8; }
// The registers of a block are what it was launched with: who raises its own waits until others
// have lowered theirs, here for what all of them come to in the end.
template <int kCount>
void lower_registers() {
    host_cuda::machine.registers -= launch_registers() - kCount;
}
template <int kCount>
void raise_registers() {
    host_cuda::machine.registers += kCount - launch_registers();
}

// The 4 bytes at `word` of 16-byte chunk `chunk` (of two) of column `column` that a descriptor
// says.
inline uint32_t described_word(uint64_t columns, int column, int chunk, int word) {
    const uint32_t start = static_cast<uint32_t>(columns & 0x3fff) << 4;
    const uint32_t across = static_cast<uint32_t>(columns >> 16 & 0x3fff) << 4;
    const uint32_t down = static_cast<uint32_t>(columns >> 32 & 0x3fff) << 4;
    const bool swapped = columns >> 62 == 1;
    const uint32_t row = column % 8 * (swapped ? 128 : 16), below = column / 8 * down;
    uint32_t at = start + below + row + chunk * (swapped ? 16 : across);
    if (swapped) at ^= (at >> 7 & 7) << 4;
    uint32_t value;
    std::memcpy(&value, shared_memory() + at + 4 * word, 4);
    return value;
}
inline void land(const host_cuda::Product& landing) {
    const int c = host_cuda::lane() % 4;
    host_cuda::Product product = landing;
    for (int i = 0; product.rows_described && i < 32; i += 2) {
        const uint32_t pair = described_word(product.described, product.first_row + i / 16 * 8,
                                             i % 16 / 8, i % 8 / 2);
        product.rows[i / 16][i % 16] = host_cuda::bfloat16_half(&pair, 0);
        product.rows[i / 16][i % 16 + 1] = host_cuda::bfloat16_half(&pair, 1);
    }
    for (int i = 0; i < product.count / 2; ++i) {
        const int column = i / 4 * 8 + 2 * c + i % 2;
        float& sum = product.sums[i / 4 * product.step + i % 4];
        double total = product.fresh ? 0.0f : sum;
        for (int k = 0; k < 16; k += 2) {
            const uint32_t pair = described_word(product.columns, column, k / 8, k % 8 / 2);
            const float* row = product.rows[i / 2 % 2];
            total += static_cast<double>(row[k]) * host_cuda::bfloat16_half(&pair, 0);
            total += static_cast<double>(row[k + 1]) * host_cuda::bfloat16_half(&pair, 1);
        }
        sum = static_cast<float>(total);
    }
}
// Products of a thread land in order, those of all groups but the last kLater.
template <int kLater>
void wait_products() {
    host_cuda::Fiber& fiber = host_cuda::fiber();
    size_t landed = 0;
    for (; landed < fiber.products.size(); ++landed) {
        if (fiber.products[landed].group >= fiber.product_group - kLater) break;
        land(fiber.products[landed]);
    }
    fiber.products.erase(fiber.products.begin(),
                         fiber.products.begin() + static_cast<std::ptrdiff_t>(landed));
}
inline void begin_product(const host_cuda::Product& product) {
    host_cuda::Fiber& fiber = host_cuda::fiber();
    fiber.products.push_back(product);
    if (host_cuda::next_random() % 2 == 0) return;
    for (const host_cuda::Product& one : fiber.products) land(one);
    fiber.products.clear();
}
// Of each warp by itself.
template <int kCount, bool kFresh, int kFirst = 0, int kStep = 4, int kSums>
void start_product(float (&d)[kSums], const uint32_t (&a)[4], uint64_t b) {
    static_assert(kFirst + (kCount / 8 - 1) * kStep < kSums);
    const int group = host_cuda::fiber().product_group;
    host_cuda::Product product{d + kFirst, {}, false, 0, 0, b, kCount, kStep, kFresh, group};
    host_cuda::share_rows(a, product.rows);
    begin_product(product);
}
template <int kCount, bool kFresh, int kFirst = 0, int kStep = 4, int kSums>
void start_product(float (&d)[kSums], uint64_t a, uint64_t b) {
    static_assert(kFirst + (kCount / 8 - 1) * kStep < kSums);
    const int group = host_cuda::fiber().product_group;
    const int row = static_cast<int>(threadIdx.x) / 32 % 4 * 16 + host_cuda::lane() / 4;
    begin_product({d + kFirst, {}, true, a, row, b, kCount, kStep, kFresh, group});
}

template <typename Params>
treewy_status launch(const char* name, void (*kernel)(Params), const Grid& grid, int threads,
                     size_t shared, treewy_stream, const Params& params,
                     Start = Start::kAfterPrevious) {
    if (grid.x <= 0 || grid.y <= 0) return TREEWY_OK;
    const treewy_status fits = check_grid(name, grid);
    if (fits != TREEWY_OK) return fits;
    if (shared > host_cuda::kSharedBytes) {
        return fail(TREEWY_UNSUPPORTED, "%s: a launch with %zu bytes of shared memory", name,
                    shared);
    }
    Dl_info found{};
    const bool named = dladdr(reinterpret_cast<const void*>(kernel), &found) != 0;
    host_cuda::last_kernel = named && found.dli_sname != nullptr ? found.dli_sname : "";
    host_cuda::machine.blocks_x = static_cast<unsigned>(grid.x);
    host_cuda::run_grid(grid.x * grid.y, threads, shared, [&] { kernel(params); });
    return TREEWY_OK;
}

}  // namespace treewy
