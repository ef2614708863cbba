"""The Gated DeltaNet mixer: projections, causal conv, gated delta rule, gated norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from .norm import RMSNormGated
from .steps import GdnStep


class GatedDeltaNet(nn.Module):
    """One GDN layer (arXiv 2412.06464) with the weight names of Qwen3.5 checkpoints.

    `A_log` and `dt_bias` stay float32 whatever the activation type, so that gates do.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_k_heads = config.linear_num_key_heads
        self.num_v_heads = config.linear_num_value_heads
        self.head_k_dim = config.linear_key_head_dim
        self.head_v_dim = config.linear_value_head_dim
        self.splits = [config.key_dim, config.key_dim, config.value_dim]
        hidden = config.hidden_size
        self.in_proj_qkv = nn.Linear(hidden, config.conv_dim, bias=False)
        self.in_proj_z = nn.Linear(hidden, config.value_dim, bias=False)
        self.in_proj_b = nn.Linear(hidden, self.num_v_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, self.num_v_heads, bias=False)
        # Holds the weight [conv_dim, 1, kernel] under the checkpoint's name; the step applies it.
        self.conv1d = nn.Conv1d(
            config.conv_dim,
            config.conv_dim,
            config.linear_conv_kernel_dim,
            groups=config.conv_dim,
            bias=False,
        )
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads).uniform_(0.01, 16.0).log_())
        self.dt_bias = nn.Parameter(torch.ones(self.num_v_heads))
        self.norm = RMSNormGated(self.head_v_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(config.value_dim, hidden, bias=False)

    def forward(self, x: Tensor, layer: int, step: GdnStep) -> Tensor:
        """`x` [..., hidden] to [..., hidden]; `layer` counts GDN layers."""
        lead = x.shape[:-1]
        mixed = step.conv(layer, self.in_proj_qkv(x), self.conv1d.weight.squeeze(1))
        # Views into the conv output: the operators read them strided, nothing is copied.
        q, k, v = mixed.split(self.splits, dim=-1)
        out = step.delta_rule(
            layer,
            q.unflatten(-1, (self.num_k_heads, self.head_k_dim)),
            k.unflatten(-1, (self.num_k_heads, self.head_k_dim)),
            v.unflatten(-1, (self.num_v_heads, self.head_v_dim)),
            self.in_proj_a(x),
            self.in_proj_b(x),
            self.A_log,
            self.dt_bias,
        )
        gate = self.in_proj_z(x).view(*lead, self.num_v_heads, self.head_v_dim)
        return self.out_proj(self.norm(out, gate).flatten(-2))
