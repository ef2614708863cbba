"""The model's two RMS norms, each in one launch, the sums before one included.

`trtllm_treewy.model.norm` has their twins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms(x_ptr, weight_ptr, out_ptr, heads, x_row, x_head, dim, eps, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, SIZE)
    real = d < dim
    at = x_ptr + row // heads * x_row + row % heads * x_head
    x = tl.load(at + d, real, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + d, real, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / dim + eps)
    y = x * scale * (1.0 + weight)
    tl.store(out_ptr + row * dim + d, y.to(out_ptr.dtype.element_ty), real)


@triton.jit
def _add_rms(
    x_ptr, y_ptr, shared_ptr, gate_ptr, weight_ptr, sum_ptr, out_ptr, dim, eps,
    y_row, shared_row, gate_row, PARTS: tl.constexpr, SHARED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, SIZE)
    real = d < dim
    kind = out_ptr.dtype.element_ty
    total = tl.zeros((SIZE,), tl.float32)
    for k in tl.static_range(PARTS):
        total += tl.load(y_ptr + row * y_row + k * dim + d, real, other=0.0).to(tl.float32)
    # Rounded where torch's operators round.
    total = total.to(kind).to(tl.float32)
    if SHARED:
        gate = tl.load(gate_ptr + row * gate_row).to(tl.float32)
        opened = (1.0 / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
        shared = tl.load(shared_ptr + row * shared_row + d, real, other=0.0).to(tl.float32)
        total = (total + (opened * shared).to(kind).to(tl.float32)).to(kind).to(tl.float32)
    x = tl.load(x_ptr + row * dim + d, real, other=0.0).to(tl.float32)
    x = (x + total).to(kind)
    tl.store(sum_ptr + row * dim + d, x, real)
    x = x.to(tl.float32)
    weight = tl.load(weight_ptr + d, real, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / dim + eps)
    tl.store(out_ptr + row * dim + d, (x * scale * (1.0 + weight)).to(kind), real)


@triton.jit
def _pair_rms(
    x_ptr, y_ptr, id_ptr, x_weight_ptr, y_weight_ptr, out_ptr, dim, eps,
    INDEXED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, SIZE)
    real = d < dim
    if tl.program_id(1) == 0:
        source = row
        if INDEXED:
            source = tl.load(id_ptr + row)
        x = tl.load(x_ptr + source * dim + d, real, other=0.0).to(tl.float32)
        weight = tl.load(x_weight_ptr + d, real, other=0.0).to(tl.float32)
    else:
        x = tl.load(y_ptr + row * dim + d, real, other=0.0).to(tl.float32)
        weight = tl.load(y_weight_ptr + d, real, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / dim + eps)
    y = x * scale * (1.0 + weight)
    at = out_ptr + (row * 2 + tl.program_id(1)) * dim + d
    tl.store(at, y.to(out_ptr.dtype.element_ty), real)


@triton.jit
def _gated(
    x_ptr, gate_ptr, weight_ptr, out_ptr, heads, gate_row, gate_head, dim, eps, SIZE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, SIZE)
    real = d < dim
    kind = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * dim + d, real, other=0.0).to(tl.float32)
    at = gate_ptr + row // heads * gate_row + row % heads * gate_head
    gate = tl.load(at + d, real, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + d, real, other=0.0)
    scale = tl.rsqrt(tl.sum(x * x, 0) / dim + eps)
    normed = (weight * (x * scale).to(kind)).to(kind).to(tl.float32)
    y = normed * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out_ptr + row * dim + d, y.to(kind), real)


def _by_head(x: Tensor) -> tuple[Tensor, int, int, int]:
    """x [..., heads, dim] with its heads and the strides of rows and heads; a copy if need be."""
    if x.stride(-1) != 1 or x.dim() < 2:
        x = x.contiguous()
    if x.dim() < 2:
        return x, 1, 0, 0
    heads, lead = x.shape[-2], x.shape[:-2]
    if lead.numel() > 1:
        strides, want = x.stride()[:-2], x.stride()[-3]
        for size, stride in zip(reversed(lead), reversed(strides), strict=True):
            if size > 1 and stride != want:
                x = x.contiguous()
                break
            want *= size
    row = x.stride(-3) if x.dim() > 2 else 0
    return x, heads, row, x.stride(-2)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * (1 + weight)` over the last dimension, in float32, rounded once."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dim = x.shape[-1]
    rows = x.numel() // max(dim, 1)
    if rows:
        x, heads, row, head = _by_head(x)
        warps = _warps(dim)
        _rms[(rows,)](
            x, weight, out, heads, row, head, dim, eps,
            SIZE=triton.next_power_of_2(dim), num_warps=warps,
        )  # fmt: skip
    return out


def _warps(dim: int) -> int:
    return 8 if dim > 4096 else 4 if dim > 512 else 1


def add_rms_norm(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    eps: float,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`x + sum over k of y[:, k] + sigmoid(gate) * shared`, and its `rms_norm`.

    Args:
        x: [T, H], contiguous.
        y: [T, parts, H] or [T, H], each row's parts contiguous.
        weight, eps: of the norm.
        shared: [T, H], last dimension contiguous, or None; with it `gate`.
        gate: [T].

    Returns:
        Both [T, H], each sum rounded where torch's operators round it.
    """
    rows, dim = x.shape
    total, out = torch.empty_like(x), torch.empty_like(x)
    if rows:
        # Eight warps from 2,048 channels on: a few rows leave the GPU empty, and wait for this.
        _add_rms[(rows,)](
            x, y, x if shared is None else shared, x if gate is None else gate, weight, total, out,
            dim, eps, y.stride(0), 0 if shared is None else shared.stride(0),
            0 if gate is None else gate.stride(0),
            PARTS=1 if y.dim() == 2 else y.shape[1], SHARED=shared is not None,
            SIZE=triton.next_power_of_2(dim), num_warps=8 if dim >= 2048 else _warps(dim),
        )  # fmt: skip
    return total, out


def norm_pair(
    x: Tensor,
    y: Tensor,
    x_weight: Tensor,
    y_weight: Tensor,
    eps: float,
    ids: Tensor | None = None,
) -> Tensor:
    """The `rms_norm` of x and of y side by side [T, 2 H].

    Args:
        x: [T, H] contiguous, or a table whose rows `ids` int64 [T] are taken.
        y: [T, H], contiguous.
        x_weight, y_weight, eps: of the norms.
        ids: in the table's range.
    """
    rows, dim = y.shape
    out = torch.empty(rows, 2 * dim, dtype=y.dtype, device=y.device)
    if rows:
        _pair_rms[(rows, 2)](
            x, y, x if ids is None else ids, x_weight, y_weight, out, dim, eps,
            INDEXED=ids is not None, SIZE=triton.next_power_of_2(dim), num_warps=_warps(dim),
        )  # fmt: skip
    return out


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * x / rms(x) * silu(gate)`, the product with the weight in x's type."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dim = x.shape[-1]
    rows = x.numel() // max(dim, 1)
    if rows:
        gate, heads, row, head = _by_head(gate)
        _gated[(rows,)](
            x.contiguous(), gate, weight, out, heads, row, head, dim, eps,
            SIZE=triton.next_power_of_2(dim), num_warps=1,
        )  # fmt: skip
    return out
