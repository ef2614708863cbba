"""Verification that keeps the state of every node, and the commit that copies one.

What engines without TreeWY do, made as fast as theirs, so that `snapshot` is a fair baseline on a
GPU. A program has some rows of one head's state of one sequence, and walks the nodes in order:

    S_t = alpha_t S_p(t) + u_t k_t^T,  u_t = beta_t (v_t - alpha_t S_p(t) k_t),  o_t = S_t q_t

Rows of the state do not meet (each has its own v, u and o), so no program waits for another. Along
a chain S stays in registers; elsewhere the parent's snapshot is read again, which the same program
wrote. In all, a step with N nodes reads one state and writes N, a node beside its elder sibling
reads one more, and the commit reads and writes one: at least (N + 3) states of traffic for each
sequence, head and layer, where `reconstruct` has 3.

An engine that finds a sequence's state by an index instead of copying it saves 2 of these.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import processors

# Numbers of a warp's part of the state: a thread has 32 of them in registers, and the kernel 128
# registers, 16 warps on a multiprocessor. One warp has nobody to wait for.
TILE = 1024
# Numbers that a program of the commit copies.
COPIED = 4096


@triton.jit
def _decay(a, A_log, dt_bias):
    """exp of `-exp(A_log) softplus(a + dt_bias)`; both factors finite, and a NaN stays one."""
    x = a + dt_bias
    large = x > 20.0
    y = tl.exp(tl.where(large, 0.0, x))
    # log(1 + y) with the digits that 1 + y has lost, where y is small.
    rounded = 1.0 + y
    lost = rounded == 1.0
    log = tl.where(lost, y, tl.log(rounded) * (y / tl.where(lost, 1.0, rounded - 1.0)))
    rate = tl.exp(A_log)
    rate = tl.where(rate > 3.4028234e38, 3.4028234e38, rate)
    g = -rate * tl.where(large, x, log)
    alpha = tl.exp(tl.where(g < -1e4, -1e4, g))
    return tl.where(alpha < 1e-30, 0.0, alpha)


@triton.jit
def _normed(x):
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def _verify(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, state_ptr, slot_ptr, parent_ptr,
    count_ptr, out_ptr, kept_ptr, nodes, slots, scale, q_row, q_node, q_head, k_row, k_node, k_head,
    v_row, v_node, v_head, a_row, a_node, a_head, b_row, b_node, b_head, parent_row, state_slot,
    kept_row, kept_node, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    KEY_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    k = tl.arange(0, BLOCK_K)
    real_v, real_k = v < DIM, k < KEY_DIM
    real = real_v[:, None] & real_k[None, :]
    slot = tl.load(slot_ptr + row).to(tl.int64)
    count = tl.minimum(tl.load(count_ptr + row), nodes)
    count = tl.where((slot >= 0) & (slot < slots), count, 0)
    at = head * DIM * KEY_DIM + v[:, None] * KEY_DIM + k[None, :]
    before_ptr = state_ptr + slot * state_slot + at
    kept_ptr += row * kept_row + at
    out_ptr += (row * nodes * HEADS + head) * DIM + v
    q_ptr += row * q_row + head // GROUP * q_head + k
    k_ptr += row * k_row + head // GROUP * k_head + k
    v_ptr += row * v_row + head * v_head + v
    a_ptr += row * a_row + head * a_head
    b_ptr += row * b_row + head * b_head
    parent_ptr += row * parent_row
    A_log, dt_bias = tl.load(A_log_ptr + head), tl.load(dt_bias_ptr + head)
    wanted = (v < tl.where(count > 0, DIM, 0))[:, None] & real_k[None, :]
    state = tl.load(before_ptr, wanted, other=0.0).to(tl.float32)
    for t in range(count):
        parent = tl.load(parent_ptr + t)
        a = tl.load(a_ptr + t * a_node).to(tl.float32)
        b = tl.load(b_ptr + t * b_node).to(tl.float32)
        key = tl.load(k_ptr + t * k_node, real_k, other=0.0).to(tl.float32)
        query = tl.load(q_ptr + t * q_node, real_k, other=0.0).to(tl.float32)
        value = tl.load(v_ptr + t * v_node, real_v, other=0.0).to(tl.float32)
        if parent != t - 1:
            if (parent >= 0) & (parent < t):
                tl.debug_barrier()  # other threads of this program may have written it
                kept_at = kept_ptr + parent.to(tl.int64) * kept_node
                state = tl.load(kept_at, real, other=0.0).to(tl.float32)
            else:
                state = tl.load(before_ptr, real, other=0.0).to(tl.float32)
        key, query = _normed(key), _normed(query) * scale
        state = state * _decay(a, A_log, dt_bias)
        # The output by the state before the node, so that neither sum waits for the other.
        u = (1.0 / (1.0 + tl.exp(-b))) * (value - tl.sum(state * key[None, :], 1))
        out = tl.sum(state * query[None, :], 1) + u * tl.sum(key * query, 0)
        state += u[:, None] * key[None, :]
        kept = kept_ptr + tl.cast(t, tl.int64) * kept_node
        tl.store(kept, state.to(kept_ptr.dtype.element_ty), real)
        tl.store(out_ptr + t * HEADS * DIM, out.to(out_ptr.dtype.element_ty), real_v)
    for t in range(count, nodes):
        nothing = tl.zeros((BLOCK_V,), out_ptr.dtype.element_ty)
        tl.store(out_ptr + t * HEADS * DIM, nothing, real_v)


@triton.jit
def _commit(
    state_ptr, kept_ptr, slot_ptr, count_ptr, accepted_ptr, slots, size, state_layer, state_slot,
    kept_layer, kept_row, kept_node, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    node = tl.load(accepted_ptr + row).to(tl.int64)
    known = (slot >= 0) & (slot < slots)
    if known & (node >= 0) & (node < tl.load(count_ptr + row)):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        source = kept_ptr + layer * kept_layer + row * kept_row + node * kept_node
        x = tl.load(source + at, at < size)
        tl.store(state_ptr + layer * state_layer + slot * state_slot + at, x, at < size)


@dataclass(frozen=True)
class Tile:
    """Rows of a head's state [V, K] that a program has, and its warps."""

    rows: int
    warps: int


def choose_tile(programs: int, dim: int, key_dim: int, multiprocessors: int) -> Tile:
    """A warp's part of the state, smaller where that would leave the GPU half empty.

    Args:
        programs: sequences times heads.
        dim, key_dim: V and K.
        multiprocessors: of the GPU.
    """
    width = triton.next_power_of_2(key_dim)
    rows = max(1, min(TILE // width, triton.next_power_of_2(dim)))
    while rows > 4 and programs * triton.cdiv(dim, rows) < 4 * multiprocessors:
        rows //= 2
    return Tile(rows, max(1, min(8, rows * width // TILE)))


def verify_snapshots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    *,
    states: Tensor,
    tile: Tile | None = None,
) -> Tensor:
    """`treewy::tree_verify_snapshot` whose states go where the caller keeps them, in one launch.

    Args:
        q, k: raw [B, N, HK, K]. v: [B, N, HV, V]. a, b: raw gates [B, N, HV]. Any strides.
        A_log, dt_bias: [HV].
        state: one layer's pool [slots, HV, V, K], each slot's contiguous.
        slot: int32 [B]. parents: int32 [B, N]. num_nodes: int32 [B].
        states: [B, N, HV, V, K] in the state's type, each node's contiguous; written for the real
            nodes of rows that have a slot. The others keep what they hold.
        tile: size of the launch, instead of the one that is chosen.

    Returns:
        out [B, N, HV, V] in v's type, zeros for padded nodes and rows. A node that does not follow
        its parent directly continues from the parent's state as stored: rounded, where states have
        16 bits. The operator continues from it unrounded.
    """
    (batch, nodes, heads, dim), key_dim = v.shape, q.shape[3]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not out.numel():
        return out
    if tile is None:
        tile = choose_tile(batch * heads, dim, key_dim, processors(v.device)[0])
    q, k, v, parents = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, parents))
    _verify[(triton.cdiv(dim, tile.rows), heads, batch)](
        q, k, v, a, b, A_log, dt_bias, state, slot, parents, num_nodes, out, states, nodes,
        state.shape[0], key_dim**-0.5, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        *a.stride(), *b.stride(), parents.stride(0), state.stride(0), *states.stride()[:2],
        HEADS=heads, GROUP=heads // q.shape[2], DIM=dim, KEY_DIM=key_dim, BLOCK_V=tile.rows,
        BLOCK_K=triton.next_power_of_2(key_dim), num_warps=tile.warps, num_stages=1,
    )  # fmt: skip
    return out


def commit_snapshots(
    state: Tensor,
    slot: Tensor,
    num_nodes: Tensor,
    accepted: Tensor,
    states: Tensor,
) -> None:
    """`treewy::commit_snapshot` for all layers in one launch.

    Args:
        state: the pool [L, slots, HV, V, K], each slot's contiguous, written in place.
        slot, num_nodes: int32 [B], those of the tree.
        accepted: int32 [B]; rows whose node is not one of their tree's keep every bit.
        states: [L, B, N, HV, V, K] of `verify_snapshots`.
    """
    layers, slots = state.shape[:2]
    batch, size = slot.shape[0], state[0, 0].numel() if state.numel() else 0
    if batch and size:
        _commit[(triton.cdiv(size, COPIED), batch, layers)](
            state, states, slot, num_nodes, accepted, slots, size, *state.stride()[:2],
            *states.stride()[:3], BLOCK=COPIED, num_warps=4,
        )  # fmt: skip
