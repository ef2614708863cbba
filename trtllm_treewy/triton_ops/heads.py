"""Queries, keys and values on their way from the projections to attention, in one launch.

A token's packed projections are [heads, 2, D] of queries and gates, then keys and values [kv_heads,
D] each. A program has one head of one token: norm and rotary position of a query, which goes to a
tensor of its own; the same of a key, and a value, which go to their rows of the paged cache. Gates
stay where they are: attention reads them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _normed(x_ptr, weight_ptr, d, real, scale, kind):
    x = tl.load(x_ptr + d, real, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + d, real, other=0.0).to(tl.float32)
    return (x * scale * (1.0 + weight)).to(kind).to(tl.float32)


@triton.jit
def _turned(
    x_ptr, weight_ptr, frequency_ptr, position, d, eps, kind, DIM: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """The norm and the rotary position of one head, rounded as torch's operators do."""
    real = d < DIM
    x = tl.load(x_ptr + d, real, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)
    own = _normed(x_ptr, weight_ptr, d, real, scale, kind)
    turns = d < 2 * HALF
    other = _normed(x_ptr, weight_ptr, tl.where(d < HALF, d + HALF, d - HALF), turns, scale, kind)
    frequency = tl.load(frequency_ptr + d % HALF, turns, other=0.0)
    angle = position.to(tl.float32) * frequency
    cos, sin = tl.cos(angle).to(kind).to(tl.float32), tl.sin(angle).to(kind).to(tl.float32)
    other = tl.where(d < HALF, -other, other)
    turned = (own * cos).to(kind).to(tl.float32) + (other * sin).to(kind).to(tl.float32)
    return tl.where(turns, turned, own).to(kind)


@triton.jit
def _place_heads(
    packed_ptr, q_weight_ptr, k_weight_ptr, frequency_ptr, position_ptr, target_ptr,
    q_ptr, k_pool, v_pool, packed_row, pool_rows, q_eps, k_eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, SIZE)
    real = d < DIM
    kind = q_ptr.dtype.element_ty
    position = tl.load(position_ptr + token)
    row = packed_ptr + token * packed_row
    if head < HEADS:
        q = _turned(
            row + head * 2 * DIM, q_weight_ptr, frequency_ptr, position, d, q_eps, kind, DIM, HALF
        )
        tl.store(q_ptr + (token * HEADS + head) * DIM + d, q, real)
    else:
        target = tl.load(target_ptr + token)
        keys = row + HEADS * 2 * DIM
        h = head - HEADS
        if h < KV_HEADS:
            k = _turned(
                keys + h * DIM, k_weight_ptr, frequency_ptr, position, d, k_eps, kind, DIM, HALF
            )
            at = (h * pool_rows + target) * DIM + d
            tl.store(k_pool + at, k.to(k_pool.dtype.element_ty), real)
        else:
            v = tl.load(keys + h * DIM + d, real, other=0.0)
            at = ((h - KV_HEADS) * pool_rows + target) * DIM + d
            tl.store(v_pool + at, v.to(v_pool.dtype.element_ty), real)


def place_heads(
    packed: Tensor,
    q_norm: tuple[Tensor, float],
    k_norm: tuple[Tensor, float],
    frequencies: Tensor,
    positions: Tensor,
    target: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    heads: int,
) -> Tensor:
    """Puts keys and values of new tokens into one layer's pools, and gives their queries.

    Args:
        packed: [T, heads * 2 * D + 2 * kv_heads * D or more], last dimension contiguous.
        q_norm, k_norm: weight [D] and epsilon of each.
        frequencies: float32 [rotary_dim / 2].
        positions: int64 [T], contiguous.
        target: int64 [T], contiguous: physical rows; rows in the sink may repeat.
        k_pool, v_pool: [kv_heads, rows, D], contiguous, written in place.
        heads: of the queries.

    Returns:
        Queries [T, heads, D] in the type of `packed`.
    """
    kv_heads, pool_rows, dim = k_pool.shape
    tokens = packed.shape[0]
    q = torch.empty(tokens, heads, dim, dtype=packed.dtype, device=packed.device)
    if tokens:
        _place_heads[(tokens, heads + 2 * kv_heads)](
            packed, q_norm[0], k_norm[0], frequencies, positions, target, q, k_pool, v_pool,
            packed.stride(0), pool_rows, q_norm[1], k_norm[1],
            HEADS=heads, KV_HEADS=kv_heads, DIM=dim, SIZE=triton.next_power_of_2(dim),
            HALF=frequencies.shape[0], num_warps=2 if dim >= 128 else 1,
        )  # fmt: skip
    return q
