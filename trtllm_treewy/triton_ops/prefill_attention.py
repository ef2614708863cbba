"""Causal attention of packed prompts over the paged KV cache.

The query of a sequence at position p attends its rows `0 .. p`, those of earlier chunks and of a
shared prefix included, and all of them are in the cache when this runs:

    out = sum over attended rows of exp(s - max s) v / sum of exp(s - max s),  s = scale * q k^T

A program has a tile of one sequence's tokens with the query heads of one key head, and walks over
the rows that they see: those that all of them see first, without any mask, then the diagonal. The
block table's entries are loaded one step ahead, so that the loads of keys and values can run ahead
of the products. Which tokens a tile has is listed once a batch on the host, the longest walks
first, and all layers share the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns of the list of tiles: first token in the batch, tokens, position of the first, slot.
COLUMNS = 4


@triton.jit
def _pages(table, rows, stop, PAGE: tl.constexpr):
    """Blocks of `rows`; those that are not read need none."""
    return tl.load(table + rows // PAGE, mask=rows < stop, other=0)


@triton.jit
def _soften(scores, top, factor):
    """Weights of a step's rows, the maximum behind it, and the factor of what came before."""
    higher = tl.maximum(top, tl.max(scores, 1) * factor)
    return tl.exp2(scores * factor - higher[:, None]), higher, tl.exp2(top - higher)


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, table_ptr, tile_ptr, out_ptr,
    factor, width, pool_rows, q_token, q_head,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % KV_HEADS
    tile = tile_ptr + tl.program_id(0) // KV_HEADS * 4
    first = tl.load(tile)
    count = tl.load(tile + 1)
    position = tl.load(tile + 2)
    slot = tl.load(tile + 3)
    index = tl.arange(0, BLOCK_M)
    t = index // GROUPS
    head = h * GROUPS + index % GROUPS
    d = tl.arange(0, BLOCK_D)
    real = t < count
    inner = real[:, None] & (d < DIM)[None, :]
    token = (first + t).to(tl.int64)

    stop = tl.where(slot >= 0, position + count, 0)
    # Up to here every row is attended by all.
    plain = tl.minimum(stop, (position + 1) // BLOCK_S * BLOCK_S)

    at = token[:, None] * q_token + head[:, None] * q_head + d[None, :]
    q = tl.load(q_ptr + at, mask=inner, other=0.0).to(k_ptr.dtype.element_ty)
    k_head = k_ptr + h.to(tl.int64) * pool_rows * DIM
    v_head = v_ptr + h.to(tl.int64) * pool_rows * DIM
    table = table_ptr + tl.maximum(slot, 0).to(tl.int64) * width

    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    column = tl.arange(0, BLOCK_S)
    page = _pages(table, column, stop, PAGE)
    for s in range(0, plain, BLOCK_S):
        row = page * PAGE + (s + column) % PAGE
        page = _pages(table, s + BLOCK_S + column, stop, PAGE)
        place = row[:, None] * DIM + d[None, :]
        if DIM == BLOCK_D:
            k = tl.load(k_head + place)
            v = tl.load(v_head + place)
        else:
            k = tl.load(k_head + place, mask=(d < DIM)[None, :], other=0.0)
            v = tl.load(v_head + place, mask=(d < DIM)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        lowest = tl.min(scores, 1)
        weights, top, fade = _soften(scores, top, factor)
        # Only a key that is not finite scores minus infinity; it must not count as one far away.
        fade = tl.where(lowest == float("-inf"), float("nan"), fade)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)

    for s in range(plain, stop, BLOCK_S):
        rows = s + column
        row = page * PAGE + rows % PAGE
        page = _pages(table, rows + BLOCK_S, stop, PAGE)
        place = row[:, None] * DIM + d[None, :]
        inside = (rows < stop)[:, None] & (d < DIM)[None, :]
        k = tl.load(k_head + place, mask=inside, other=0.0)
        v = tl.load(v_head + place, mask=inside, other=0.0)
        allowed = rows[None, :] <= (position + t)[:, None]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        lowest = tl.min(tl.where(allowed, scores, 0.0), 1)
        scores = tl.where(allowed, scores, float("-inf"))
        weights, top, fade = _soften(scores, top, factor)
        fade = tl.where(lowest == float("-inf"), float("nan"), fade)
        # A value that is not finite reaches those alone that attend its row.
        wide = v.to(tl.float32)
        broken = ~(tl.abs(wide) < float("inf"))
        bad = tl.max(broken.to(tl.int32), 1) > 0
        v = tl.where(broken, 0.0, wide).to(v.dtype)
        weights = tl.where(allowed & bad[None, :], float("nan"), weights)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)

    # One infinite value in a row of the cache spoils the whole output of who attends it.
    finite = tl.min((tl.abs(acc) < float("inf")).to(tl.int32), 1) > 0
    total = tl.where(finite, total, float("nan"))
    acc = tl.where((total == 0.0)[:, None], 0.0, acc / total[:, None])
    place = (token * KV_HEADS * GROUPS + head)[:, None] * DIM + d[None, :]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), inner)


@dataclass(frozen=True)
class Tiles:
    """Sizes of a launch: query rows (tokens times grouped heads) and cache rows of a step."""

    block_m: int
    block_s: int
    warps: int
    stages: int

    def tokens(self, groups: int) -> int:
        """Tokens of a tile where so many query heads share a key head."""
        return max(1, self.block_m // groups)


def choose_tiles(
    lengths: Sequence[int],
    kv_heads: int,
    groups: int,
    dim: int,
    processors: int,
    shared: int,
    element_bytes: int,
) -> Tiles:
    """Tiles for prompts of `lengths` tokens.

    128 query rows by 64 cache rows with 8 warps where prompts fill them and the GPU: queries, and
    keys and values of two steps, are 192 KiB at D = 256. Smaller where the prompts are short, where
    that would leave half of the GPU idle, and where a block may have less memory.

    Args:
        lengths: tokens of each sequence.
        kv_heads, groups, dim: key heads, query heads that share one, and D.
        processors: multiprocessors of the GPU.
        shared: bytes of shared memory that a block may have.
        element_bytes: of an element of the cache.
    """
    block_d = max(16, triton.next_power_of_2(dim))
    least = max(16, triton.next_power_of_2(groups))
    longest = max(lengths, default=1)
    block_m = min(128, max(least, triton.next_power_of_2(longest * groups)))
    block_s, stages = 64, 2
    if element_bytes == 4 and block_d > 64:
        # Exact products of float32 take registers: larger tiles spill by the kilobyte.
        block_m, block_s, stages = least, 16, 1

    def programs() -> int:
        tokens = max(1, block_m // groups)
        return kv_heads * sum(-(-length // tokens) for length in lengths)

    while block_m > max(64, least) and 2 * programs() <= processors:
        block_m //= 2
    # Queries, and keys and values of every step in flight; some is left to the compiler.
    while (block_m + 2 * stages * block_s) * block_d * element_bytes > shared - 16 * 1024:
        if block_m > max(64, least):
            block_m //= 2
        elif block_s > 32:
            block_s //= 2
        elif stages > 1:
            stages = 1
        elif block_m > least:
            block_m //= 2
        elif block_s > 16:
            block_s //= 2
        else:
            break
    warps = 4 if block_m == 16 and element_bytes < 4 else 8
    return Tiles(block_m, block_s, warps, stages)


def list_tiles(
    lengths: Sequence[int], contexts: Sequence[int], slots: Sequence[int], tokens: int
) -> Tensor:
    """The tiles of a batch, int32 [tiles, COLUMNS] on the host, the longest walks first.

    Args:
        lengths: tokens of each sequence in the batch, one sequence after the other.
        contexts: rows of each in the cache before them.
        slots: of each; -1 for one that is skipped, whose outputs are zero.
        tokens: of a tile, at most.
    """
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    tiles = [
        (start + offset, min(tokens, length - offset), context + offset, slot)
        for start, length, context, slot in zip(starts, lengths, contexts, slots, strict=False)
        for offset in range(0, length, tokens)
    ]
    tiles.sort(key=lambda tile: -(tile[1] + tile[2]) if tile[3] >= 0 else 0)
    return torch.tensor(tiles, dtype=torch.int32).reshape(-1, COLUMNS)


def prefill_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    listed: Tensor,
    scale: float,
    *,
    page: int,
    tiles: Tiles,
) -> Tensor:
    """Causal attention of every token over its sequence's rows in the cache, its own included.

    Args:
        q: [T, heads, D], last dimension contiguous.
        k_pool, v_pool: [kv_heads, rows, D], one layer's, contiguous, in q's type or another.
        block_table: int64 [slots, W], contiguous. All rows of the tiles' sequences have blocks.
        listed: int32 [tiles, 4], from `list_tiles` with `tiles.tokens(heads // kv_heads)`, on the
            device; every token of the batch is in one.
        scale: factor of the scores, above zero.
        page: rows of a block.
        tiles: sizes of the launch.

    Returns:
        [T, heads, D] in q's type; zero for tokens of slot -1. Scores and sums are float32; products
        take the pool's type, float32 exactly (no TF32). A query that attends a row with a value
        that is not finite gets NaN, and no other does.

    Raises:
        ValueError: a scale that is not above zero.
    """
    if not scale > 0:
        raise ValueError(f"attention of prompts: scale must be above zero, got {scale}")
    tokens, heads, dim = q.shape
    kv_heads, pool_rows, _ = k_pool.shape
    if q.stride(2) != 1:
        q = q.contiguous()
    out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
    if not listed.shape[0]:
        return out
    _attend[(listed.shape[0] * kv_heads,)](
        q, k_pool, v_pool, block_table, listed, out,
        scale * 1.4426950408889634, block_table.shape[1], pool_rows, q.stride(0), q.stride(1),
        KV_HEADS=kv_heads, GROUPS=heads // kv_heads, DIM=dim,
        BLOCK_D=max(16, triton.next_power_of_2(dim)), PAGE=page,
        BLOCK_M=tiles.block_m, BLOCK_S=tiles.block_s, PRECISION="ieee",
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out
