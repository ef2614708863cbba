"""Attention of draft trees over the paged KV cache, in one pass or split over the context.

A query attends the first `context_lens` rows of its sequence, and of the `E` entries behind them
those that `own` names: its ancestors and itself. With scores s = scale * q k^T:

    out = sum over attended rows of exp(s - max s) v / sum over attended rows of exp(s - max s)

A program has one sequence, one key head and BLOCK_M of its rows (queries times the query heads that
share the key head), and walks over the cache's rows BLOCK_S at a time, page by page through the
block table. Where that makes too few programs for the GPU, the rows of a sequence are divided among
`SPLITS` programs, and a second kernel puts their parts together by their log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import processors

MAX_SPLITS = 32


@triton.jit
def _walk(
    acc, top, total, q, k_head, v_head, table, own, rows, base, entries, num_blocks, width,
    factor, real, t, d,
    DIM: tl.constexpr, PAGE: tl.constexpr, TREE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of the cache's rows: the running maximum, sum and output after it."""
    block = rows // PAGE
    page = tl.load(table + block, mask=block < width, other=num_blocks)
    row = page * PAGE + rows % PAGE
    present = page < num_blocks
    if TREE:
        behind = rows - base
        inside = (behind >= 0) & (behind < entries)
        named = tl.load(
            own + t[:, None] * entries + behind[None, :],
            mask=real[:, None] & inside[None, :],
            other=0,
        )
        allowed = ((behind[None, :] < 0) | (named != 0)) & present[None, :]
        present = present & (behind < entries)
    at = row[:, None] * DIM + d[None, :]
    inner = present[:, None] & (d < DIM)[None, :]
    k = tl.load(k_head + at, mask=inner, other=0.0)
    v = tl.load(v_head + at, mask=inner, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor
    if TREE:
        scores = tl.where(allowed, scores, float("-inf"))
    else:
        scores = tl.where(present[None, :], scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - anchor[:, None])
    fade = tl.exp2(top - anchor)
    total = total * fade + tl.sum(weights, 1)
    if TREE:
        # A row that is not finite reaches those alone that attend it.
        wide = v.to(tl.float32)
        broken = ~(tl.abs(wide) < float("inf"))
        bad = tl.max(broken.to(tl.int32), 1) > 0
        v = tl.where(broken, 0.0, wide).to(v.dtype)
        weights = tl.where(allowed & bad[None, :], float("nan"), weights)
    acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return acc, higher, total


@triton.jit
def _opened(out, gate_ptr, at, mask, kind):
    """`out` times the sigmoid of its gate, rounded as torch's operators do."""
    gate = tl.load(gate_ptr + at, mask, other=0.0).to(tl.float32)
    opened = (1.0 / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    return out.to(kind).to(tl.float32) * opened


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, table_ptr, slot_ptr, base_ptr, own_ptr, gate_ptr, out_ptr, lse_ptr,
    factor, num_blocks, width, pool_rows, nq, entries, q_batch, q_node, q_head,
    own_batch, gate_batch, gate_node, gate_head, GATED: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    split = tl.program_id(2)
    b = pair // KV_HEADS
    h = pair % KV_HEADS
    index = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    t = index // GROUPS
    head = h * GROUPS + index % GROUPS
    d = tl.arange(0, BLOCK_D)
    real = t < nq

    slot = tl.load(slot_ptr + b)
    base = tl.load(base_ptr + b)
    length = tl.where(slot >= 0, base + entries, 0)
    part = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_S) * BLOCK_S
    start = split * part
    stop = tl.minimum(length, start + part)
    # Up to here every row is committed and attended by all.
    plain = tl.maximum(start, tl.minimum(stop, base // BLOCK_S * BLOCK_S))

    at = b.to(tl.int64) * q_batch + t[:, None] * q_node + head[:, None] * q_head + d[None, :]
    inner = real[:, None] & (d < DIM)[None, :]
    q = tl.load(q_ptr + at, mask=inner, other=0.0)
    k_head = k_ptr + h.to(tl.int64) * pool_rows * DIM
    v_head = v_ptr + h.to(tl.int64) * pool_rows * DIM
    q = q.to(k_ptr.dtype.element_ty)
    table = table_ptr + tl.maximum(slot, 0).to(tl.int64) * width
    own = own_ptr + b.to(tl.int64) * own_batch

    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    column = tl.arange(0, BLOCK_S)
    for s in range(start, plain, BLOCK_S):
        acc, top, total = _walk(
            acc, top, total, q, k_head, v_head, table, own, s + column, base, entries,
            num_blocks, width, factor, real, t, d, DIM, PAGE, False, PRECISION,
        )  # fmt: skip
    for s in range(plain, stop, BLOCK_S):
        acc, top, total = _walk(
            acc, top, total, q, k_head, v_head, table, own, s + column, base, entries,
            num_blocks, width, factor, real, t, d, DIM, PAGE, True, PRECISION,
        )  # fmt: skip

    acc = tl.where((total == 0.0)[:, None], 0.0, acc / total[:, None])
    place = (b.to(tl.int64) * nq + t) * KV_HEADS * GROUPS + head
    if SPLITS == 1:
        if GATED:
            at = b.to(tl.int64) * gate_batch + t[:, None] * gate_node
            at += head[:, None] * gate_head + d[None, :]
            acc = _opened(acc, gate_ptr, at, inner, out_ptr.dtype.element_ty)
        tl.store(
            out_ptr + place[:, None] * DIM + d[None, :], acc.to(out_ptr.dtype.element_ty), inner
        )
    else:
        place = place * SPLITS + split
        tl.store(out_ptr + place[:, None] * DIM + d[None, :], acc, inner)
        lse = tl.where(total == 0.0, float("-inf"), top + tl.log2(total))
        tl.store(lse_ptr + place, lse, real)


@triton.jit
def _combine(
    part_ptr, lse_ptr, gate_ptr, out_ptr, nq, heads, gate_batch, gate_node, gate_head,
    GATED: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, BLOCK_D)
    lse = tl.load(lse_ptr + place * SPLITS + split)
    top = tl.max(lse, 0)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(lse - anchor)
    at = (place * SPLITS + split)[:, None] * DIM + d[None, :]
    part = tl.load(part_ptr + at, (lse > float("-inf"))[:, None] & (d < DIM)[None, :], other=0.0)
    total = tl.sum(weight, 0)
    mixed = tl.sum(weight[:, None] * part, 0) / tl.where(total == 0.0, 1.0, total)
    if GATED:
        token = place // heads
        gate = token // nq * gate_batch + token % nq * gate_node + place % heads * gate_head
        mixed = _opened(mixed, gate_ptr, gate + d, d < DIM, out_ptr.dtype.element_ty)
    tl.store(out_ptr + place * DIM + d, mixed.to(out_ptr.dtype.element_ty), d < DIM)


@triton.jit
def _append(
    k_ptr, v_ptr, k_pool, v_pool, target_ptr, pool_rows, k_row, k_head, v_row, v_head,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + token)
    d = tl.arange(0, BLOCK_D)
    inner = d < DIM
    for h in tl.static_range(KV_HEADS):
        at = (h * pool_rows + target) * DIM + d
        k = tl.load(k_ptr + token * k_row + h * k_head + d, inner)
        v = tl.load(v_ptr + token * v_row + h * v_head + d, inner)
        tl.store(k_pool + at, k.to(k_pool.dtype.element_ty), inner)
        tl.store(v_pool + at, v.to(v_pool.dtype.element_ty), inner)


def append_rows(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, target: Tensor) -> None:
    """Writes new keys and values to their places in one layer's pools.

    Args:
        k, v: [B, Nq, kv_heads, D].
        k_pool, v_pool: [kv_heads, rows, D], contiguous, written in place.
        target: int64 [B, Nq], physical rows; rows in the sink may repeat.
    """
    heads, pool_rows, dim = k_pool.shape
    k, v = _by_token(k), _by_token(v)
    _append[(k.shape[0],)](
        k, v, k_pool, v_pool, target, pool_rows,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        KV_HEADS=heads, DIM=dim, BLOCK_D=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip


def _by_token(x: Tensor) -> Tensor:
    """[B, Nq, heads, D] as [B * Nq, heads, D], a view where the strides allow it."""
    x = x.flatten(0, 1)
    return x if x.stride(2) == 1 else x.contiguous()


@dataclass(frozen=True)
class Tiles:
    """Sizes of a launch."""

    block_m: int
    block_s: int
    splits: int
    warps: int
    stages: int


def choose_tiles(
    batch: int,
    kv_heads: int,
    rows: int,
    dim: int,
    max_rows: int,
    processors: int,
    shared: int,
    element_bytes: int,
) -> Tiles:
    """Tiles for `rows` query rows a key head, over caches of up to `max_rows` rows.

    The rows of a sequence are divided where the GPU would otherwise be half empty, and never
    further than 128 rows a part.

    Args:
        batch, kv_heads, rows, dim, max_rows: sizes of the call.
        processors: multiprocessors of the GPU.
        shared: bytes of shared memory that a block may have.
        element_bytes: of an element of the cache.
    """
    block_d = triton.next_power_of_2(dim)
    block_m = min(64, max(16, triton.next_power_of_2(rows)))
    stages, block_s = 2, 64
    if element_bytes == 4 and block_d > 64:
        # Exact products of float32 take registers: larger tiles spill by the kilobyte.
        block_m, block_s, stages = 16, 32, 1
    # Queries, and keys and values of every stage, with a quarter to spare.
    while (block_m + 2 * stages * block_s) * block_d * element_bytes > shared * 3 // 4:
        if block_s > 32:
            block_s //= 2
        elif stages > 1:
            stages = 1
        elif block_m > 16:
            block_m //= 2
        elif block_s > 16:
            block_s //= 2
        else:
            break
    programs = batch * kv_heads * -(-rows // block_m)
    splits = 1
    while splits < MAX_SPLITS and programs * splits < processors and splits * 256 <= max_rows:
        splits *= 2
    warps = 4 if block_m == 16 and element_bytes < 4 else 8
    return Tiles(block_m, block_s, splits, warps, stages)


def tree_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    slot: Tensor,
    context_lens: Tensor,
    own: Tensor,
    scale: float,
    *,
    page: int,
    num_blocks: int,
    max_rows: int | None = None,
    gate: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Attention of each query over its sequence's committed rows and its own entries.

    Args:
        q: [B, Nq, heads, D], last dimension contiguous.
        k_pool, v_pool: [kv_heads, rows, D], one layer's, contiguous, in q's type or another.
        block_table: int64 [slots, W], contiguous; `num_blocks` where there is no block, whose rows
            nobody attends.
        slot: int32 [B]; rows with -1 output zero.
        context_lens: int32 [B], rows that every query of a sequence attends.
        own: bool [B, Nq, E], each [Nq, E] contiguous: whether a query attends row
            `context_lens + e`.
        scale: factor of the scores.
        page: rows of a block.
        num_blocks: blocks of the pool; the next one is the sink.
        max_rows: the most rows that a sequence has, for the choice of tiles; W blocks by default.
        gate: like q, or None: outputs are multiplied with its sigmoid.
        tiles: sizes of the launch, instead of those that are chosen.

    Returns:
        [B, Nq, heads, D] in q's type; a query that attends nothing outputs zero. Scores and sums
        are float32; products take the pool's type, float32 exactly (no TF32).
    """
    batch, nq, heads, dim = q.shape
    kv_heads, pool_rows, _ = k_pool.shape
    groups = heads // kv_heads
    if q.stride(3) != 1:
        q = q.contiguous()
    opens = q if gate is None else gate if gate.stride(3) == 1 else gate.contiguous()
    gates = opens.stride()[:3]
    if tiles is None:
        most = block_table.shape[1] * page if max_rows is None else max_rows
        tiles = choose_tiles(
            batch, kv_heads, groups * nq, dim, most + own.shape[2], *processors(q.device),
            k_pool.element_size(),
        )  # fmt: skip
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    splits = tiles.splits
    part, lse = out, out
    if splits > 1:
        shape = (batch, nq, heads, splits)
        part = torch.empty((*shape, dim), dtype=torch.float32, device=q.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    block_d = triton.next_power_of_2(dim)
    grid = (batch * kv_heads, triton.cdiv(groups * nq, tiles.block_m), splits)
    _attend[grid](
        q, k_pool, v_pool, block_table, slot, context_lens, own.view(torch.uint8),
        opens, part, lse,
        scale * 1.4426950408889634, num_blocks, block_table.shape[1], pool_rows, nq, own.shape[2],
        q.stride(0), q.stride(1), q.stride(2), own.stride(0), *gates, GATED=gate is not None,
        KV_HEADS=kv_heads, GROUPS=groups, DIM=dim, BLOCK_D=max(16, block_d), PAGE=page,
        BLOCK_M=tiles.block_m, BLOCK_S=tiles.block_s, SPLITS=splits,
        PRECISION="ieee", num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if splits > 1:
        _combine[(batch * nq * heads,)](
            part, lse, opens, out, nq, heads, *gates, GATED=gate is not None,
            DIM=dim, BLOCK_D=block_d, SPLITS=splits, num_warps=4,
        )  # fmt: skip
    return out
