// SPDX-License-Identifier: Apache-2.0
//
// Products of the nodes of a turn with each other by warpgroups, of at most 32: four warps multiply
// keys and queries, as they lie in a stage, with keys. They stay in the warps' registers until they
// are weights.
#pragma once

#include "tree_verify_inverse.cuh"

namespace treewy {

// Warp w has the nodes 8 w .. : in its lane (g, c) the products of node g of these, key and query,
// with the keys 8 j + 2 c and the next.
template <typename Types>
struct TurnProducts {
    static constexpr int kColumns = kNodeBlock * Types::kNodeBlocks;
    static_assert(Types::kHalves <= Types::kGroupWarps);

    float keys[kColumns / 2];

    // Starts sums = rows columns^T, rows being all keys and queries.
    static __device__ __forceinline__ void start(const Shared& shared, const unsigned char* columns,
                                                 float (&sums)[kColumns / 2]) {
        constexpr int kSteps = kSwappedRow / 32;  // of a panel
#pragma unroll
        for (int step = 0; step < Types::kKeyDim / 16; ++step) {
            const int at = step / kSteps * kPanelBytes<Types> + step % kSteps * 32;
            const uint64_t a = describe<Columns::kSwapped>(shared.keys + at);
            const uint64_t b = describe<Columns::kEveryOther>(columns + at);
            if (step == 0) {
                start_product<kColumns, true>(sums, a, b);
            } else {
                start_product<kColumns, false>(sums, a, b);
            }
        }
        close_products();
    }

    // All products; stores the norms that their diagonals are.
    __device__ __forceinline__ void multiply(const Shared& shared, int warp, int lane) {
        float queries[kColumns / 2];  // of keys and queries with queries
        open_products();
        start(shared, shared.queries, queries);
        start(shared, shared.keys, keys);
        wait_products<1>();
        store_norms<2>(shared.query_norm, queries, key_scale<Types::kKeyDim>(), warp, lane);
        wait_products<0>();
        store_norms<0>(shared.key_norm, keys, 1.0f, warp, lane);
    }

    // scale / |x| of the warp's nodes, from the diagonal of the products of keys with keys, or
    // (kRow 2) of queries with queries.
    template <int kRow>
    static __device__ __forceinline__ void store_norms(float* to, const float (&sums)[kColumns / 2],
                                                       float scale, int warp, int lane) {
        const int g = lane / 4;
        float square = 0.0f;
#pragma unroll
        for (int j = 0; j < Types::kHalves; ++j) {
            if (j == warp) square = g % 2 == 0 ? sums[4 * j + kRow] : sums[4 * j + kRow + 1];
        }
        if (g / 2 != lane % 4 || warp >= Types::kHalves) return;
        to[8 * warp + g] = inverse_norm(square, scale);
    }

    // Makes weights of them, once all norms are there.
    __device__ __forceinline__ void weigh(const Shared& shared, int warp, int lane) const {
#pragma unroll
        for (int b = 0; b < Types::kNodeBlocks; ++b) {
            if (warp / 2 < b || warp >= 2 * Types::kNodeBlocks) continue;
            PairCoefficients pair{};
            if (warp < Types::kHalves && is_related(shared, warp / 2, b)) {
                PairProducts products;
#pragma unroll
                for (int i = 0; i < 8; ++i) products.x[i / 4][i % 4] = keys[8 * b + i];
                pair = weigh_products<Types>(shared, warp, b, products, lane);
            }
            store_pair<Types>(shared, warp, b, pair, lane);
        }
    }
};

}  // namespace treewy
