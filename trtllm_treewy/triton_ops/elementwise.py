"""What lies between the products of a feed-forward block, one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _silu_mul(gate_ptr, up_ptr, out_ptr, gate_row, up_row, dim, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    real = d < dim
    kind = out_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + row * gate_row + d, real, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + d, real, other=0.0).to(tl.float32)
    # Rounded in between, as torch's two operators do.
    y = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * up
    tl.store(out_ptr + row * dim + d, y.to(kind), real)


@triton.jit
def _mix(
    y_ptr, shared_ptr, gate_ptr, out_ptr, dim, y_row, shared_row, gate_row,
    TOP: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    real = d < dim
    kind = out_ptr.dtype.element_ty
    total = tl.zeros((SIZE,), tl.float32)
    for k in tl.static_range(TOP):
        y = tl.load(y_ptr + token * y_row + k * dim + d, real, other=0.0)
        total += y.to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_row).to(tl.float32)
    shared = tl.load(shared_ptr + token * shared_row + d, real, other=0.0).to(tl.float32)
    opened = (1.0 / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    total = total.to(kind).to(tl.float32) + (opened * shared).to(kind).to(tl.float32)
    tl.store(out_ptr + token * dim + d, total.to(kind), real)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, both [T, I] with a contiguous last dimension, rounded as in torch."""
    rows, dim = gate.shape
    out = torch.empty(rows, dim, dtype=gate.dtype, device=gate.device)
    if rows:
        size = min(1024, triton.next_power_of_2(dim))
        _silu_mul[(rows, triton.cdiv(dim, size))](
            gate, up, out, gate.stride(0), up.stride(0), dim, SIZE=size, num_warps=4
        )
    return out


def mix(y: Tensor, shared: Tensor, gate: Tensor) -> Tensor:
    """`sum over k of y[:, k] + sigmoid(gate) * shared`, rounded as in torch.

    Args:
        y: [T, top_k, H], the routed experts' weighted outputs, a row's contiguous.
        shared: [T, H], last dimension contiguous.
        gate: [T, 1].
    """
    tokens, top, dim = y.shape
    out = torch.empty(tokens, dim, dtype=y.dtype, device=y.device)
    if tokens:
        size = min(1024, triton.next_power_of_2(dim))
        _mix[(tokens, triton.cdiv(dim, size))](
            y, shared, gate, out, dim, y.stride(0), shared.stride(0), gate.stride(0),
            TOP=top, SIZE=size, num_warps=4,
        )  # fmt: skip
    return out
