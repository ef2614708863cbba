"""The experts of a mixture as two grouped products, without the host.

Rows are (token, expert) pairs. They are sorted by expert into tiles of BLOCK_M rows each of one
expert, the last of an expert's tiles partly empty; how many tiles there are only the device knows,
so the grid has as many as there can be, and those beyond do nothing.

    y[t, j] = weight[t, j] * down_e (silu(gate_e x[t]) * up_e x[t]),  e = expert[t, j]

and the sum over j follows (`elementwise.mix`). The order of a tile's rows does not matter: no row
reaches another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import processors

# Rows from which counting is divided among programs: one alone takes 35 us for 2,048 rows of 256
# experts on an H200, a tenth of the experts' own time.
TALLY_FROM = 256


@triton.jit
def _route(
    logit_ptr, weight_ptr, expert_ptr, experts, logit_row,
    TOP: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, SIZE)
    x = tl.load(logit_ptr + token * logit_row + ids, ids < experts, other=float("-inf"))
    x = x.to(tl.float32)
    x = tl.exp(x - tl.max(x, 0))
    whole = tl.sum(x, 0)
    # A row with a NaN is one of zeros: it takes the first experts, and its weights are 0 / 0. NaN
    # themselves would not last, because a maximum passes over them.
    x = tl.where(whole == whole, x / whole, 0.0)
    x = tl.where(ids < experts, x, -1.0)
    place = tl.arange(0, PADDED)
    chosen = tl.zeros((PADDED,), tl.float32)
    total = 0.0
    for k in tl.static_range(TOP):
        best = tl.max(x, 0)
        expert = tl.min(tl.where(x == best, ids, SIZE), 0)
        tl.store(expert_ptr + token * TOP + k, expert)
        chosen = tl.where(place == k, best, chosen)
        total += best
        x = tl.where(ids == expert, -1.0, x)
    out = (chosen / total).to(weight_ptr.dtype.element_ty)
    tl.store(weight_ptr + token * TOP + place, out, place < TOP)


@triton.jit
def _tally(expert_ptr, tally_ptr, rows, CHUNK: tl.constexpr):
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    real = at < rows
    expert = tl.load(expert_ptr + at, real, other=0)
    tl.atomic_add(tally_ptr + expert, 1, mask=real)


@triton.jit
def _count(
    expert_ptr, tally_ptr, start_ptr, tile_ptr, cursor_ptr, rows,
    TALLIED: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Where each expert's rows start, and where its tiles end."""
    ids = tl.arange(0, EXPERTS)
    if TALLIED:
        counts = tl.load(tally_ptr + ids)
    else:
        counts = tl.zeros((EXPERTS,), tl.int32)
        for first in range(0, rows, CHUNK):
            at = first + tl.arange(0, CHUNK)
            expert = tl.load(expert_ptr + at, at < rows, other=-1)
            counts += tl.sum((expert[:, None] == ids[None, :]).to(tl.int32), 0)
    ends = tl.cumsum(counts, 0)
    tiles = tl.cumsum((counts + BLOCK_M - 1) // BLOCK_M, 0)
    tl.store(start_ptr + ids, ends - counts)
    tl.store(cursor_ptr + ids, ends - counts)
    tl.store(tile_ptr + ids, tiles)
    tl.store(start_ptr + EXPERTS, rows)


@triton.jit
def _sort(expert_ptr, cursor_ptr, order_ptr, rows, CHUNK: tl.constexpr):
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    real = at < rows
    expert = tl.load(expert_ptr + at, real, other=0)
    place = tl.atomic_add(cursor_ptr + expert, 1, mask=real)
    tl.store(order_ptr + place, at, real)


@triton.jit
def _find_rows(start_ptr, tile_ptr, order_ptr, tile, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of a tile, its rows and which of them are real; expert EXPERTS beyond the last."""
    ids = tl.arange(0, EXPERTS)
    tiles = tl.load(tile_ptr + ids)
    expert = tl.sum((tiles <= tile).to(tl.int32), 0)
    before = tl.max(tl.where(tiles <= tile, tiles, 0), 0)
    here = tl.minimum(expert, EXPERTS - 1)
    start = tl.load(start_ptr + here) + (tile - before) * BLOCK_M
    stop = tl.where(expert < EXPERTS, tl.load(start_ptr + here + 1), start)
    place = start + tl.arange(0, BLOCK_M)
    real = place < stop
    row = tl.load(order_ptr + place, real, other=0)
    return expert, place, row, real


@triton.jit
def _gate_up(
    x_ptr, w_ptr, out_ptr, start_ptr, tile_ptr, order_ptr, hidden, inner, x_row,
    TOP: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    expert, place, row, real = _find_rows(start_ptr, tile_ptr, order_ptr, tile, EXPERTS, BLOCK_M)
    if expert < EXPERTS:
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        x_at = x_ptr + (row // TOP).to(tl.int64)[:, None] * x_row + k[None, :]
        w_at = w_ptr + expert.to(tl.int64) * 2 * inner * hidden + n[None, :] * hidden + k[:, None]
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        inside = (n < inner)[None, :]
        for first in range(0, hidden, BLOCK_K):
            left = first + k < hidden
            x = tl.load(x_at + first, real[:, None] & left[None, :], other=0.0)
            mask = left[:, None] & inside
            gate_w = tl.load(w_at + first, mask, other=0.0)
            up_w = tl.load(w_at + first + inner * hidden, mask, other=0.0)
            gate = tl.dot(x, gate_w, gate, input_precision=PRECISION)
            up = tl.dot(x, up_w, up, input_precision=PRECISION)
        # Rounded where the model's own products would be.
        kind = out_ptr.dtype.element_ty
        gate = gate.to(kind).to(tl.float32)
        mixed = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * up.to(kind).to(tl.float32)
        at = out_ptr + place.to(tl.int64)[:, None] * inner + n[None, :]
        tl.store(at, mixed.to(kind), real[:, None] & inside)


@triton.jit
def _down(
    x_ptr, w_ptr, weight_ptr, out_ptr, start_ptr, tile_ptr, order_ptr, inner, hidden,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    expert, place, row, real = _find_rows(start_ptr, tile_ptr, order_ptr, tile, EXPERTS, BLOCK_M)
    if expert < EXPERTS:
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        x_at = x_ptr + place.to(tl.int64)[:, None] * inner + k[None, :]
        w_at = w_ptr + expert.to(tl.int64) * hidden * inner + n[None, :] * inner + k[:, None]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        inside = (n < hidden)[None, :]
        for first in range(0, inner, BLOCK_K):
            left = first + k < inner
            x = tl.load(x_at + first, real[:, None] & left[None, :], other=0.0)
            w = tl.load(w_at + first, left[:, None] & inside, other=0.0)
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
        weight = tl.load(weight_ptr + row, real, other=0.0).to(tl.float32)
        kind = out_ptr.dtype.element_ty
        y = acc.to(kind).to(tl.float32) * weight[:, None]
        at = out_ptr + row.to(tl.int64)[:, None] * hidden + n[None, :]
        tl.store(at, y.to(kind), real[:, None] & inside)


@dataclass(frozen=True)
class Tiles:
    """Sizes of both products: rows, columns, and the depth of a step.

    With `wide_down` the second product takes twice the columns: it has one sum where the first has
    two, and a wider tile reads its rows from the L2 cache half as often.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    wide_down: bool = False


def choose_tiles(rows: int, experts: int, wide: bool, shared: int) -> Tiles:
    """Tiles for `rows` (token, expert) pairs over `experts`.

    Prompts (256 rows an expert for 8,192 tokens of Qwen3.5-35B-A3B) take tiles of 128 rows by 256
    columns in both products, with 192 KiB in flight: smaller ones wait for the L2 cache. An
    expert's tiles lie side by side in the grid, so its weights come from memory once.

    Args:
        rows, experts: sizes of the call.
        wide: 32-bit types.
        shared: bytes of shared memory that a block may have.
    """
    each = rows / experts
    if wide:
        return Tiles(16 if each <= 16 else 32, 32, 32, 4, 2)
    stages = 3 if shared >= 160 * 1024 else 2
    if each <= 16:
        return Tiles(16, 64, 128, 4, stages)
    if each <= 48:
        return Tiles(32, 64, 128, 4, stages)
    if each <= 96 or stages == 2:
        return Tiles(64, 128, 64, 4, stages)
    if shared >= 4 * (128 + 256) * 64 * 2 + 16 * 1024:
        return Tiles(128, 128, 64, 8, 4, wide_down=True)
    return Tiles(128, 128, 64, 8, stages)


def route(logits: Tensor, top_k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Softmax over all experts, then the best `top_k`, renormalised to sum to one.

    Args:
        logits: [T, E], last dimension contiguous.
        top_k: experts of a token; ties go to the lower number.
        dtype: of the weights.

    Returns:
        Weights [T, top_k] and experts int32 [T, top_k], the best first. A row with a NaN has NaN
        weights, and the first experts.
    """
    tokens, experts = logits.shape
    weights = torch.empty(tokens, top_k, dtype=dtype, device=logits.device)
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    if tokens:
        _route[(tokens,)](
            logits, weights, ids, experts, logits.stride(0),
            TOP=top_k, PADDED=triton.next_power_of_2(top_k),
            SIZE=triton.next_power_of_2(experts), num_warps=4,
        )  # fmt: skip
    return weights, ids


def run_experts(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    tiles: Tiles | None = None,
) -> Tensor:
    """Each token's experts, weighted.

    Args:
        x: [T, H], last dimension contiguous.
        weights: [T, top_k] in x's type.
        experts: int32 [T, top_k].
        gate_up, down: [E, 2I, H] and [E, H, I], contiguous, in x's type.
        tiles: sizes of the launches, instead of those that are chosen.

    Returns:
        [T, top_k, H] in x's type; products are summed in float32.
    """
    tokens, hidden = x.shape
    top, (num_experts, _, inner) = experts.shape[1], down.shape
    rows = tokens * top
    if not rows:
        return x.new_zeros(tokens, top, hidden)
    if tiles is None:
        tiles = choose_tiles(rows, num_experts, x.element_size() == 4, processors(x.device)[1])
    size, device = triton.next_power_of_2(num_experts), x.device
    start, tile_ends, cursor = torch.empty(3, size + 1, dtype=torch.int32, device=device).unbind()
    order = torch.empty(rows, dtype=torch.int32, device=device)
    # A few rows are counted by one program; many first, by all.
    tally = start
    if rows > TALLY_FROM:
        tally = torch.zeros(size, dtype=torch.int32, device=device)
        _tally[(triton.cdiv(rows, 256),)](experts, tally, rows, CHUNK=256, num_warps=4)
    chunk = max(16, min(triton.next_power_of_2(rows), 16384 // size, 64))
    _count[(1,)](
        experts, tally, start, tile_ends, cursor, rows, TALLIED=rows > TALLY_FROM,
        EXPERTS=size, BLOCK_M=tiles.block_m, CHUNK=chunk, num_warps=8,
    )  # fmt: skip
    _sort[(triton.cdiv(rows, 256),)](experts, cursor, order, rows, CHUNK=256, num_warps=4)
    most = rows // tiles.block_m + min(num_experts, rows)
    middle = torch.empty(rows, inner, dtype=x.dtype, device=device)
    out = torch.empty(rows, hidden, dtype=x.dtype, device=device)
    sizes = dict(
        EXPERTS=size, BLOCK_M=tiles.block_m, BLOCK_K=tiles.block_k, PRECISION="ieee",
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    _gate_up[(triton.cdiv(inner, tiles.block_n), most)](
        x, gate_up, middle, start, tile_ends, order, hidden, inner, x.stride(0), TOP=top,
        BLOCK_N=tiles.block_n, **sizes,
    )  # fmt: skip
    columns = tiles.block_n * (2 if tiles.wide_down else 1)
    _down[(triton.cdiv(hidden, columns), most)](
        middle, down, weights, out, start, tile_ends, order, inner, hidden,
        BLOCK_N=columns, **sizes,
    )  # fmt: skip
    return out.view(tokens, top, hidden)
