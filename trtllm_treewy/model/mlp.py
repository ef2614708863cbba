"""The feed-forward blocks: dense SwiGLU and the sparse mixture of experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import triton_ops
from ..config import ModelConfig
from .norm import compute_dtype


class MLP(nn.Module):
    """`down_proj(silu(gate_proj(x)) * up_proj(x))`."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if triton_ops.serves(gate):
            from ..triton_ops.elementwise import silu_mul

            mixed = silu_mul(gate.flatten(0, -2), up.flatten(0, -2))
            return self.down_proj(mixed.view_as(gate))
        return self.down_proj(F.silu(gate) * up)


class Router(nn.Module):
    """Softmax over all experts, then the best `top_k`, renormalised to sum to one."""

    def __init__(self, hidden_size: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.zeros(num_experts, hidden_size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`x` [T, hidden] to weights [T, top_k] in x's type and expert ids [T, top_k]."""
        logits = F.linear(x, self.weight)
        if triton_ops.serves(logits):
            from ..triton_ops.moe import route

            return route(logits, self.top_k, x.dtype)
        probs = torch.softmax(logits, dim=-1, dtype=compute_dtype(x))
        weights, experts = probs.topk(self.top_k, dim=-1)
        return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), experts


class Experts(nn.Module):
    """All experts' weights, fused: `gate_up_proj` [E, 2I, H], `down_proj` [E, H, I]."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(
            torch.empty(num_experts, 2 * intermediate_size, hidden_size)
        )
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Weighted sum of each token's experts; tokens are grouped so each expert runs once."""
        if triton_ops.serves(x):
            return self.each(x, weights, experts).sum(1)
        out = torch.zeros_like(x)
        order = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=self.down_proj.shape[0]).tolist()
        token = order // experts.shape[1]
        weight = weights.flatten()[order, None]
        start = 0
        for expert, count in enumerate(counts):
            if not count:
                continue
            rows = token[start : start + count]
            gate, up = F.linear(x[rows], self.gate_up_proj[expert]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.down_proj[expert])
            out.index_add_(0, rows, y * weight[start : start + count])
            start += count
        return out

    def each(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The weighted experts before they are summed [T, top_k, H], by Triton's kernels."""
        from ..triton_ops.moe import run_experts

        return run_experts(x, weights, experts.int(), self.gate_up_proj, self.down_proj)


class SparseMoE(nn.Module):
    """Routed experts plus a shared expert behind a sigmoid gate."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.gate = Router(hidden, config.num_experts, config.num_experts_per_tok)
        self.experts = Experts(config.num_experts, hidden, config.moe_intermediate_size)
        self.shared_expert = MLP(hidden, config.shared_expert_intermediate_size)
        self.shared_expert_gate = nn.Linear(hidden, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, experts = self.gate(flat)
        gate, shared = self.shared_expert_gate(flat), self.shared_expert(flat)
        if triton_ops.serves(flat):
            from ..triton_ops.elementwise import mix

            return mix(self.experts.each(flat, weights, experts), shared, gate).view_as(x)
        shared = torch.sigmoid(gate) * shared
        return (self.experts(flat, weights, experts) + shared).view_as(x)


def feed_forward(config: ModelConfig) -> nn.Module:
    """The block that `config` asks for."""
    if config.is_moe:
        return SparseMoE(config)
    return MLP(config.hidden_size, config.intermediate_size)
