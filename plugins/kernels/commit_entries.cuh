// SPDX-License-Identifier: Apache-2.0
//
// Entries of an update, u and k of nodes or of a history, from memory to shared memory and into
// states: what the kernels of commit.cu and commit_stream.cu share.
#pragma once

#include "commit_update.h"

namespace treewy {

// A key in the registers of a warp: quads of columns, lane by lane.
template <int kQuadsOfLane>
struct RawKey {
    static constexpr int kQuads = kQuadsOfLane;
    RawFour quad[kQuads];
};

template <typename RawKey>
__device__ __forceinline__ RawKey load_key(const void* k, int dtype, int key_dim, bool aligned) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    RawKey key{};
#pragma unroll
    for (int i = 0; i < RawKey::kQuads; ++i) {
        const int q = i * kWarp + lane;
        if (4 * q < key_dim) key.quad[i] = load_four(element_at(k, dtype, 4 * q), dtype, aligned);
    }
    return key;
}

// The key, normalised if it was not, times `scale`, to its staged row.
template <int kVec, typename RawKey>
__device__ __forceinline__ void stage_key(const RawKey& raw, int dtype, bool normalize, float scale,
                                          int key_dim, float* row) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    Vec<float, 4> x[RawKey::kQuads];
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < RawKey::kQuads; ++i) {
        x[i] = four_as_float(raw.quad[i], dtype);
#pragma unroll
        for (int c = 0; c < 4; ++c) square += x[i].x[c] * x[i].x[c];
    }
    if (normalize) scale *= rsqrtf(warp_sum(square) + kNormEps);
#pragma unroll
    for (int i = 0; i < RawKey::kQuads; ++i) {
        const int q = i * kWarp + lane;
        if (4 * q >= key_dim) continue;
#pragma unroll
        for (int c = 0; c < 4; ++c) x[i].x[c] *= scale;
        store_vec<4>(row + staged_quarter<kVec>(q, key_dim), x[i]);
    }
}

// after += the staged entries' u k^T, for some of the thread's rows; `u_stride` from entry to
// entry.
template <int kCount, int kUnroll, typename Tile>
__device__ __forceinline__ void add_entries(float (&after)[kCount][Tile::kColumns], int count,
                                            const Tile& tile, int u_stride, const float* k_s,
                                            const float* u_s) {
#pragma unroll kUnroll
    for (int j = 0; j < count; ++j) {
        float k[Tile::kColumns];
        read_staged(k_s + j * tile.key_dim, tile, k);
        const Vec<float, kCount> u = load_vec<kCount>(u_s + j * u_stride);
#pragma unroll
        for (int r = 0; r < kCount; ++r) {
#pragma unroll
            for (int c = 0; c < Tile::kColumns; ++c) after[r][c] = fmaf(u.x[r], k[c], after[r][c]);
        }
    }
}

}  // namespace treewy
