"""The routed experts for a graph: what `model.mlp.Experts` computes, without a loop on the host."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trtllm_treewy.model.mlp import Experts


class GatheredExperts(nn.Module):
    """Gathers the weights of each token's experts, so that only those are read.

    Parameters and result are those of `Experts`. It takes top_k * 3 * I * H elements of scratch a
    token, so a graph over long prompts of a model with large experts should be given few at a time.
    """

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.gate_up_proj = experts.gate_up_proj
        self.down_proj = experts.down_proj

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """`x` [T, H], `weights` and `experts` [T, top_k] to [T, H]."""
        pairs = torch.matmul(self.gate_up_proj[experts], x[:, None, :, None])  # [T, top_k, 2I, 1]
        gate, up = pairs.chunk(2, dim=-2)
        y = torch.matmul(self.down_proj[experts], F.silu(gate) * up)
        return (y.squeeze(-1) * weights[..., None]).sum(1)


def replace_experts(model: nn.Module) -> None:
    """Puts `GatheredExperts` in the place of all `Experts` of a model that is to be traced."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Experts):
                setattr(module, name, GatheredExperts(child))
