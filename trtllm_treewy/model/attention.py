"""Full attention with an output gate, q/k norm, partial rotary and grouped KV heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from .norm import RMSNorm
from .rotary import apply_rotary
from .steps import AttentionStep, StoringStep


class GatedAttention(nn.Module):
    """`o_proj(attention(q, k, v) * sigmoid(gate))`.

    `q_proj` yields query and gate interleaved per head: [heads, 2, head_dim] in memory order.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        hidden, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(hidden, self.num_heads * self.head_dim * 2, bias=bias)
        self.k_proj = nn.Linear(hidden, self.num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, hidden, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], layer: int, step: AttentionStep
    ) -> Tensor:
        """`x` [..., hidden] to [..., hidden]; `layer` counts attention layers."""
        lead = x.shape[:-1]
        q, gate = self.q_proj(x).view(*lead, self.num_heads, 2 * self.head_dim).chunk(2, dim=-1)
        k, v = self._keys_and_values(x, rotary)
        q = apply_rotary(self.q_norm(q), *rotary)
        out = step.attend(layer, q, k, v, self.scale)
        return self.o_proj((out * torch.sigmoid(gate)).flatten(-2))

    def store(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], layer: int, step: StoringStep
    ) -> None:
        """Keys and values of `x` [..., hidden] alone, for those that come later."""
        step.store(layer, *self._keys_and_values(x, rotary))

    def _keys_and_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        lead = x.shape[:-1]
        k = self.k_proj(x).view(*lead, self.num_kv_heads, self.head_dim)
        v = self.v_proj(x).view(*lead, self.num_kv_heads, self.head_dim)
        return apply_rotary(self.k_norm(k), *rotary), v
