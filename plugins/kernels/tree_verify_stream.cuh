// SPDX-License-Identifier: Apache-2.0
//
// Tree verification of many heads by blocks that stay: 9 or 17 nodes and more, without a history.
// The equations are those of tree_verify_kernel.cuh, the algebra that of tree_verify_inverse.cuh,
// whose T and M know nothing of the state. So a block takes 128 rows of V of one value head after
// the other (a turn each), and its warps work on different ones at the same time:
//
//     two groups of warps: copies, paths | norms | weights | T and M       turns i + 1, i + 2
//     the rows' warps:     S_0 [K; Q]^T | R | U and o | stores             turn i
//     copies of the state                                                  turns i + 1 ..
//
// The rows' products are those of warpgroups where there are such (warpgroup.cuh), with operands
// that the groups leave as these take them (tree_verify_columns.cuh).
//
// With few nodes (fills_ahead) copies and paths are the work of other warps, two for each group, so
// that a group has nothing to wait for.
//
// The groups take every other turn each. What they make of one lies in a stage, of which there are
// two to four; a stage is filled, read by the rows' warps, and filled again, by the other group
// where there are three. The state comes in parts of 128 bytes a row: a warp copies its own 16 rows
// of a part of the next state into the place of the part that it has just multiplied, so that
// nobody waits for anybody else there, and the memory is asked for the next state while this one is
// worked on.
//
// Nothing in the rows' work depends on the tree: pairs of node blocks without a path between them
// have weights of zero. Branches there would keep the compiler from mixing what does not depend on
// each other, and with two of these warps a scheduler that is all that hides latency.
//
// Floor: see tree_verify_kernel.cuh.
#pragma once

#include "tree_verify_stream_inputs.cuh"
#include "tree_verify_stream_nodes.cuh"
#include "tree_verify_stream_rows.cuh"

namespace treewy {

template <typename Types>
__global__ void __launch_bounds__(Types::kThreads, Types::kMinBlocks)
    tree_verify_stream_kernel(const __grid_constant__ VerifyArgs args) {
    if (Types::kAhead && !has_warpgroups()) return;  // not launched there, and so no code
    const int thread = static_cast<int>(threadIdx.x);
    follow_previous<Types>(args, work_of<Types>(args, first_turn(args)), thread);
    if (thread < Types::kRowThreads) {
        verify_turns<Types>(args, thread / kWarp, thread % kWarp);
    } else {
        const int own = thread - Types::kRowThreads;
        const int at = own % Types::kGroupThreads;
        const GroupPlace place{own / Types::kGroupThreads, at, at / kWarp, at % kWarp};
        if constexpr (!Types::kAhead) {
            prepare_turns<Types>(args, place);
        } else if (place.group < Types::kGroups) {
            prepare_ahead<Types>(args, place);
        } else {
            fill_stages<Types>(args, place.warp, place.lane);
        }
    }
}

}  // namespace treewy
