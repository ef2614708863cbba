"""The two RMS norms of Qwen3.5."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import triton_ops


def compute_dtype(x: Tensor) -> torch.dtype:
    """float32 for every activation type but float64, which stays."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class RMSNorm(nn.Module):
    """Zero-centred RMS norm: `x / rms(x) * (1 + weight)`, in float32, rounded once at the end."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        if triton_ops.serves(x):
            from ..triton_ops.norm import rms_norm

            return rms_norm(x, self.weight, self.eps)
        wide = x.to(compute_dtype(x))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.to(wide.dtype))).to(x.dtype)


class RMSNormGated(nn.Module):
    """Norm before gate, over one value head: `weight * x / rms(x) * silu(gate)`."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        if triton_ops.serves(x):
            from ..triton_ops.norm import gated_rms_norm

            return gated_rms_norm(x, gate, self.weight, self.eps)
        wide = x.to(compute_dtype(x))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        # The checkpoint was trained with the weight applied in the activation type.
        normed = self.weight * wide.to(x.dtype)
        return (normed * F.silu(gate.to(wide.dtype))).to(x.dtype)
