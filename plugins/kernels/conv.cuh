// SPDX-License-Identifier: Apache-2.0
//
// What the convs share: channels of a thread, their filter, and what their launchers check.
//
//   y_t = silu(bias + sum over j < W of weight[:, j] x[tap j of t]),  channel by channel
//
// Tap W-1 is the node itself, the one before it its parent, and so on up the path; before the root
// come the rows of the window, newest first.
//
// Bits. Products are rounded, then added from the oldest tap to the node: one order, so that a path
// gives the same bits in whatever tree, prompt or commit it lies, and the bits of the torch
// reference up to SiLU. Products of two 16-bit values are exact in float32 (8 or 11 bits of
// significand each; but for subnormal ones), so that fused multiply-adds give those bits as well,
// in half the instructions.
#pragma once

#include "fragment.cuh"
#include "silu.cuh"

namespace treewy {

template <int kVec>
struct Channels {
    float x[kVec];
};

// ------------------------------------------------------------------ any width, any layout

template <int kVec, typename T>
__device__ __forceinline__ Channels<kVec> load_channels(const T* from) {
    const Vec<T, kVec> raw = load_vec<kVec>(from);
    Channels<kVec> out;
#pragma unroll
    for (int i = 0; i < kVec; ++i) out.x[i] = as_float(raw.x[i]);
    return out;
}

template <int kVec, typename T>
__device__ __forceinline__ void store_channels(T* to, const Channels<kVec>& value) {
    Vec<T, kVec> raw;
#pragma unroll
    for (int i = 0; i < kVec; ++i) raw.x[i] = from_float<T>(value.x[i]);
    store_vec<kVec>(to, raw);
}

// Weights and bias of a thread's channels, of any type.
template <int kVec>
struct Filter {
    static constexpr int kMaxWidth = TREEWY_MAX_CONV_WIDTH;
    float tap[kMaxWidth][kVec];
    float bias[kVec];
    bool has_bias;

    // `first` is the channel's index in the weights.
    __device__ __forceinline__ void load(const treewy_conv_weights& w, int64_t weight_offset,
                                         int64_t bias_offset, int channel) {
        has_bias = w.bias != nullptr;
        const int64_t first = weight_offset + static_cast<int64_t>(channel) * w.width;
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
#pragma unroll
            for (int j = 0; j < kMaxWidth; ++j) {
                tap[j][i] = 0.0f;
                if (j < w.width) {
                    tap[j][i] = load_as_float(w.weight, w.dtype, first + i * w.width + j);
                }
            }
            bias[i] = has_bias ? load_as_float(w.bias, w.dtype, bias_offset + channel + i) : 0.0f;
        }
    }

    // One more tap: rounded product, then sum, in the reference's order. Tap 0 starts the sum.
    __device__ __forceinline__ void add(int j, const Channels<kVec>& x, Channels<kVec>* sum) const {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
            const float product = __fmul_rn(x.x[i], tap[j][i]);
            sum->x[i] = j == 0 ? product : __fadd_rn(sum->x[i], product);
        }
    }

    template <typename T>
    __device__ __forceinline__ void finish(Channels<kVec>* sum) const {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
            if (has_bias) sum->x[i] = __fadd_rn(sum->x[i], bias[i]);
            sum->x[i] = silu<sizeof(T) == 4>(sum->x[i]);
        }
    }
};

// ------------------------------------------------------------------ columns
//
// The fast kernels: width 4, inputs, weights and windows of one type at 16-byte addresses. A lane
// has a column, the channels of 16 bytes; a warp 32 neighbouring ones, 512 bytes of a row.

inline constexpr int kColumnWidth = 4;                // W
inline constexpr int kRowBytes = kWarp * 16;          // of a warp's columns
inline constexpr int kWindowRows = kColumnWidth - 1;  // before the root

__device__ __forceinline__ uint4 load_column(const void* from) {
    return *static_cast<const uint4*>(from);
}

__device__ __forceinline__ void store_column(void* to, const uint4& value) {
    *static_cast<uint4*>(to) = value;
}

// Rows `step` bytes apart, at a lane's column. Steps of a few rows fit 32 bits (has_short_rows).
struct ColumnRows {
    unsigned char* row0;
    int step;

    template <typename T>
    __device__ __forceinline__ ColumnRows(const T* at, int step)
        : row0(reinterpret_cast<unsigned char*>(const_cast<T*>(at))), step(step) {}
    __device__ __forceinline__ unsigned char* operator[](int row) const {
        return row0 + row * step;
    }
};

// 16 bytes of T as float32. They stay packed until they are used.
template <typename T>
__device__ __forceinline__ Channels<kPer16Bytes<T>> unpack(const uint4& raw) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    Channels<kPer16Bytes<T>> out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 4) {
            out.x[i] = __uint_as_float(words[i]);
        } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
            out.x[2 * i] = low_half(words[i]);
            out.x[2 * i + 1] = high_half(words[i]);
        } else {
            const __half2 pair = *reinterpret_cast<const __half2*>(&words[i]);
            out.x[2 * i] = __low2float(pair);
            out.x[2 * i + 1] = __high2float(pair);
        }
    }
    return out;
}

template <typename T>
__device__ __forceinline__ uint4 pack_columns(const Channels<kPer16Bytes<T>>& value) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 4) {
            words[i] = __float_as_uint(value.x[i]);
        } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
            words[i] = pack_bfloat16(value.x[2 * i], value.x[2 * i + 1]);
        } else {
            const __half2 pair = __floats2half2_rn(value.x[2 * i], value.x[2 * i + 1]);
            words[i] = *reinterpret_cast<const uint32_t*>(&pair);
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Weights of a column as they lie in memory; so they can be asked for before they are waited for.
struct ColumnWeights {
    uint4 raw[kColumnWidth];  // [kVec, W]: 64 bytes, whatever the type

    __device__ __forceinline__ void load(const void* from) {
#pragma unroll
        for (int i = 0; i < kColumnWidth; ++i) {
            raw[i] = load_column(static_cast<const uint4*>(from) + i);
        }
    }
};

template <typename T>
struct ColumnFilter {
    static constexpr int kVec = kPer16Bytes<T>;
    Channels<kVec> tap[kColumnWidth];
    const T* bias;  // of the column, or null; few convs have one, so that it takes no registers

    // `biases` need not be aligned.
    __device__ __forceinline__ void set(const ColumnWeights& weights, const void* biases,
                                        int channel) {
        bias = biases == nullptr ? nullptr : static_cast<const T*>(biases) + channel;
#pragma unroll
        for (int i = 0; i < kColumnWidth; ++i) {
            const Channels<kVec> some = unpack<T>(weights.raw[i]);
#pragma unroll
            for (int j = 0; j < kVec; ++j) {
                const int at = i * kVec + j;
                tap[at % kColumnWidth].x[at / kColumnWidth] = some.x[j];
            }
        }
    }

    __device__ __forceinline__ void add(int j, const Channels<kVec>& x, Channels<kVec>* sum) const {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
            if constexpr (sizeof(T) == 2) {
                sum->x[i] = j == 0 ? __fmul_rn(x.x[i], tap[j].x[i])
                                   : __fmaf_rn(x.x[i], tap[j].x[i], sum->x[i]);
            } else {
                const float product = __fmul_rn(x.x[i], tap[j].x[i]);
                sum->x[i] = j == 0 ? product : __fadd_rn(sum->x[i], product);
            }
        }
    }

    // Bias and SiLU.
    __device__ __forceinline__ uint4 finish(Channels<kVec> sum) const {
        if (bias != nullptr) {
#pragma unroll
            for (int i = 0; i < kVec; ++i) sum.x[i] = __fadd_rn(sum.x[i], as_float(bias[i]));
        }
#pragma unroll
        for (int i = 0; i < kVec; ++i) sum.x[i] = silu<sizeof(T) == 4>(sum.x[i]);
        return pack_columns<T>(sum);
    }
};

// The last rows along a path, as they slide by.
template <typename T>
struct SlidingTaps {
    Channels<kPer16Bytes<T>> tap[kColumnWidth];  // oldest first; the last one is the node's own

    __device__ __forceinline__ void push(const Channels<kPer16Bytes<T>>& own) {
#pragma unroll
        for (int j = 0; j + 1 < kColumnWidth; ++j) tap[j] = tap[j + 1];
        tap[kColumnWidth - 1] = own;
    }

    // y of the row pushed last.
    __device__ __forceinline__ uint4 conv(const ColumnFilter<T>& filter) const {
        Channels<kPer16Bytes<T>> sum;
#pragma unroll
        for (int j = 0; j < kColumnWidth; ++j) filter.add(j, tap[j], &sum);
        return filter.finish(sum);
    }
};

// ------------------------------------------------------------------ host

template <typename Run>
treewy_status with_type(int dtype, const Run& run) {
    if (dtype == TREEWY_FLOAT32) return run(float{});
    if (dtype == TREEWY_BFLOAT16) return run(__nv_bfloat16{});
    return run(__half{});
}

// Whether rows at all multiples of the strides can be read 16 bytes at a time.
template <int kCount>
bool is_vector_layout(const void* data, int dtype, const int64_t (&strides)[kCount]) {
    const int64_t per_vector = 16 / dtype_bytes(dtype);
    for (const int64_t stride : strides) {
        if (stride % per_vector != 0) return false;
    }
    return is_aligned(data, 16);
}

// Whether offsets of `rows` rows fit 32 bits.
inline bool has_short_rows(int64_t stride, int dtype, int64_t rows) {
    const int64_t most = INT32_MAX / (dtype_bytes(dtype) * rows);
    return stride <= most && stride >= -most;
}

// Whether weights suit the fast kernels, whose inputs are of `dtype`.
inline bool is_column_filter(const treewy_conv_weights& weights, int dtype) {
    return weights.width == kColumnWidth && weights.dtype == dtype &&
           is_aligned(weights.weight, 16);
}

inline treewy_status check_conv(const char* name, int dtype, int channels, int width) {
    if (!is_float_dtype(dtype)) {
        return fail(TREEWY_UNSUPPORTED, "%s: dtype must be float32, bfloat16 or float16, got %d",
                    name, dtype);
    }
    if (channels < 1) {
        return fail(TREEWY_INVALID_ARGUMENT, "%s: channels must be at least 1, got %d", name,
                    channels);
    }
    if (width < 2 || width > TREEWY_MAX_CONV_WIDTH) {
        return fail(TREEWY_UNSUPPORTED, "%s: the conv's width must be in [2, %d], got %d", name,
                    TREEWY_MAX_CONV_WIDTH, width);
    }
    return TREEWY_OK;
}

inline treewy_status check_weights(const char* name, const treewy_conv_weights& weights) {
    if (weights.weight == nullptr) {
        return fail(TREEWY_INVALID_ARGUMENT, "%s: weight must not be null", name);
    }
    if (!is_float_dtype(weights.dtype)) {
        return fail(TREEWY_UNSUPPORTED,
                    "%s: weights.dtype must be float32, bfloat16 or float16, got %d", name,
                    weights.dtype);
    }
    return TREEWY_OK;
}

inline treewy_status check_pointers(const char* name, const void* x, const void* y,
                                    const void* conv_state) {
    if (x != nullptr && y != nullptr && conv_state != nullptr) return TREEWY_OK;
    return fail(TREEWY_INVALID_ARGUMENT, "%s: inputs, outputs and conv_state must not be null",
                name);
}

// Blocks, or warps, of `threads` that channels take, `vec` a thread.
inline int channel_blocks(int channels, int threads, int vec) {
    return static_cast<int>(ceil_div(channels, int64_t{threads} * vec));
}

}  // namespace treewy
