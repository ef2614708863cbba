"""The model's two RMS norms, each in one launch: see `trtllm_treewy.model.norm` for their twins."""

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
        warps = 8 if dim > 4096 else 4 if dim > 512 else 1
        _rms[(rows,)](
            x, weight, out, heads, row, head, dim, eps,
            SIZE=triton.next_power_of_2(dim), num_warps=warps,
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
