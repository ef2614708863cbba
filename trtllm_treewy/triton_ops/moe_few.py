"""The experts of a mixture for a few tokens: no sorting, and the shared expert among the others.

A program of the grid belongs to one (token, expert) pair, and works where that pair is the first of
BLOCK_M that share its expert: it finds the others by looking over all pairs. So an expert's weights
are read once for all its tokens, in two launches and nothing before them. The last programs have
the tokens themselves, for the shared expert:

    y[t, j] = weight[t, j] * down_e (silu(gate_e x[t]) * up_e x[t]),  e = expert[t, j]
    y[t, top_k] = down (silu(gate x[t]) * up x[t])

`norm.add_rms_norm` or `elementwise.mix` sums over j and opens the shared expert's gate. Every
program looks over all pairs, which is nothing for a few; `moe.run_experts` is for more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import processors

# On an H200 and Qwen3.5-35B-A3B 64 pairs are as fast this way as sorted, 256 slower (11.3 ms a step
# against 10.0).
MAX_PAIRS = 128
BLOCK_M = 16


@triton.jit
def _pairs_of(expert_ptr, pair, pairs, SIZE: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of a pair and up to BLOCK_M pairs that this one leads; none if it leads none."""
    at = tl.arange(0, SIZE)
    experts = tl.load(expert_ptr + at, at < pairs, other=-1)
    expert = tl.load(expert_ptr + pair)
    same = (experts == expert).to(tl.int32)
    rank = tl.cumsum(same, 0) - 1
    own = tl.sum(tl.where(at < pair, same, 0), 0)
    # A pair that leads none looks for ranks that there are not.
    wanted = tl.where(own % BLOCK_M == 0, own, -2 * BLOCK_M) + tl.arange(0, BLOCK_M)
    hit = (same[None, :] != 0) & (rank[None, :] == wanted[:, None])
    rows = tl.sum(tl.where(hit, at[None, :], 0), 1)
    real = tl.sum(hit.to(tl.int32), 1) > 0
    return expert, rows, real


@triton.jit
def _gate_up_tile(
    x_ptr, w_ptr, out_ptr, token, row, real, n, hidden, inner, x_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + token.to(tl.int64)[:, None] * x_row + k[None, :]
    w_at = w_ptr + n[None, :] * hidden + k[:, None]
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
    at = out_ptr + row.to(tl.int64)[:, None] * inner + n[None, :]
    tl.store(at, mixed.to(kind), real[:, None] & inside)


@triton.jit
def _down_tile(
    x_ptr, w_ptr, row, real, n, inner, hidden,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + row.to(tl.int64)[:, None] * inner + k[None, :]
    w_at = w_ptr + n[None, :] * inner + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    inside = (n < hidden)[None, :]
    for first in range(0, inner, BLOCK_K):
        left = first + k < inner
        x = tl.load(x_at + first, real[:, None] & left[None, :], other=0.0)
        w = tl.load(w_at + first, left[:, None] & inside, other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _gate_up(
    x_ptr, expert_ptr, w_ptr, shared_w_ptr, out_ptr, shared_ptr, tokens, hidden, inner,
    shared_inner, x_row, TOP: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    pairs = tokens * TOP
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if pair < pairs:
        expert, row, real = _pairs_of(expert_ptr, pair, pairs, SIZE, BLOCK_M)
        if (tl.max(real.to(tl.int32), 0) > 0) & (tl.program_id(0) * BLOCK_N < inner):
            _gate_up_tile(
                x_ptr, w_ptr + expert.to(tl.int64) * 2 * inner * hidden, out_ptr, row // TOP, row,
                real, n, hidden, inner, x_row, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
            )  # fmt: skip
    else:
        row = (pair - pairs) * BLOCK_M + tl.arange(0, BLOCK_M)
        if tl.program_id(0) * BLOCK_N < shared_inner:
            _gate_up_tile(
                x_ptr, shared_w_ptr, shared_ptr, row, row, row < tokens, n, hidden, shared_inner,
                x_row, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
            )  # fmt: skip


@triton.jit
def _down(
    x_ptr, shared_ptr, expert_ptr, w_ptr, shared_w_ptr, weight_ptr, out_ptr, tokens, hidden, inner,
    shared_inner, TOP: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    pairs = tokens * TOP
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    kind = out_ptr.dtype.element_ty
    if pair < pairs:
        expert, row, real = _pairs_of(expert_ptr, pair, pairs, SIZE, BLOCK_M)
        if tl.max(real.to(tl.int32), 0) > 0:
            acc = _down_tile(
                x_ptr, w_ptr + expert.to(tl.int64) * hidden * inner, row, real, n, inner, hidden,
                BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
            )  # fmt: skip
            weight = tl.load(weight_ptr + row, real, other=0.0).to(tl.float32)
            y = acc.to(kind).to(tl.float32) * weight[:, None]
            at = out_ptr + (row + row // TOP).to(tl.int64)[:, None] * hidden + n[None, :]
            tl.store(at, y.to(kind), real[:, None] & (n < hidden)[None, :])
    else:
        row = (pair - pairs) * BLOCK_M + tl.arange(0, BLOCK_M)
        real = row < tokens
        acc = _down_tile(
            shared_ptr, shared_w_ptr, row, real, n, shared_inner, hidden,
            BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
        )  # fmt: skip
        at = out_ptr + (row * (TOP + 1) + TOP).to(tl.int64)[:, None] * hidden + n[None, :]
        tl.store(at, acc.to(kind), real[:, None] & (n < hidden)[None, :])


@dataclass(frozen=True)
class Tiles:
    """Columns and depth of a program's step, in the first product and in the second."""

    up_n: int
    up_k: int
    down_n: int
    down_k: int
    warps: int
    stages: int


def choose_tiles(pairs: int, inner: int, wide: bool, multiprocessors: int, shared: int) -> Tiles:
    """Tiles for `pairs` of a token and an expert, so that every multiprocessor has work.

    Args:
        pairs, inner: sizes of the call; the shared expert's tokens are not counted.
        wide: 32-bit types.
        multiprocessors, shared: of the GPU, and bytes of shared memory that a block may have.
    """
    if wide:
        return Tiles(32, 32, 32, 32, 4, 2)
    stages = 4 if shared >= 160 * 1024 else 2
    up_n = 64
    while up_n > 32 and pairs * -(-inner // up_n) < 2 * multiprocessors:
        up_n //= 2
    return Tiles(up_n, 128, 32 if up_n < 64 else 64, 128, 4, stages)


def takes(pairs: int) -> bool:
    """Whether these kernels are for so many pairs."""
    return pairs <= MAX_PAIRS


def run_few_experts(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared_gate_up: Tensor,
    shared_down: Tensor,
    tiles: Tiles | None = None,
) -> Tensor:
    """Each token's experts, weighted, and behind them the shared expert, as it is.

    Args:
        x: [T, H], last dimension contiguous; T * top_k at most MAX_PAIRS.
        weights: [T, top_k] in x's type.
        experts: int32 [T, top_k].
        gate_up, down: [E, 2I, H] and [E, H, I], contiguous, in x's type.
        shared_gate_up, shared_down: [2J, H] and [H, J], likewise.
        tiles: sizes of the launches, instead of those that are chosen.

    Returns:
        [T, top_k + 1, H] in x's type; products are summed in float32.
    """
    (tokens, hidden), top = x.shape, experts.shape[1]
    pairs, inner, shared_inner = tokens * top, down.shape[2], shared_down.shape[1]
    if not takes(pairs):
        raise ValueError(f"at most {MAX_PAIRS} pairs of token and expert, got {pairs}")
    out = torch.empty(tokens, top + 1, hidden, dtype=x.dtype, device=x.device)
    if not pairs:
        return out
    if tiles is None:
        tiles = choose_tiles(pairs, inner, x.element_size() == 4, *processors(x.device))
    middle = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    of_shared = torch.empty(tokens, shared_inner, dtype=x.dtype, device=x.device)
    programs = pairs + triton.cdiv(tokens, BLOCK_M)
    sizes = dict(
        TOP=top, SIZE=triton.next_power_of_2(pairs), BLOCK_M=BLOCK_M, PRECISION="ieee",
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    _gate_up[(triton.cdiv(max(inner, shared_inner), tiles.up_n), programs)](
        x, experts, gate_up, shared_gate_up, middle, of_shared, tokens, hidden, inner,
        shared_inner, x.stride(0), BLOCK_N=tiles.up_n, BLOCK_K=tiles.up_k, **sizes,
    )  # fmt: skip
    _down[(triton.cdiv(hidden, tiles.down_n), programs)](
        middle, of_shared, experts, down, shared_down, weights, out, tokens, hidden, inner,
        shared_inner, BLOCK_N=tiles.down_n, BLOCK_K=tiles.down_k, **sizes,
    )  # fmt: skip
    return out
