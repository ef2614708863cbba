"""Partial rotary position embedding (the first `rotary_dim` channels of a head, half-split)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_frequencies(rotary_dim: int, theta: float, device: torch.device) -> Tensor:
    """float32 [rotary_dim / 2]: radians a token of each pair of channels."""
    exponent = torch.arange(0, rotary_dim, 2, device=device, dtype=torch.float32)
    return 1.0 / (theta ** (exponent / rotary_dim))


def rotary_tables(
    positions: Tensor, rotary_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine for `positions` [...]; each [..., 1, rotary_dim], the 1 for heads.

    Angles are formed in float32 whatever `dtype` is: a bf16 position loses whole tokens.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    inv_freq = rotary_frequencies(rotary_dim, theta, positions.device)
    angle = positions[..., None].to(wide) * inv_freq.to(wide)
    angle = torch.cat((angle, angle), dim=-1)[..., None, :]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first channels of `x` [..., heads, head_dim]; the others pass through."""
    rotary_dim = cos.shape[-1]
    rotated, passed = x[..., :rotary_dim], x[..., rotary_dim:]
    first, second = rotated.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return torch.cat((rotated * cos + turned * sin, passed), dim=-1)
