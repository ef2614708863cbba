"""Double of the experts, routed and shared."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from ..functional import allreduce, cast, record, sigmoid
from ..module import Module
from ..parameter import Parameter
from . import MLP, RowLinear


@dataclass
class MoeConfig:
    class ExpertScaleNormalizationMode(IntEnum):
        NONE = 0
        RENORMALIZE = 1

    num_experts: int = 0
    shared_expert_intermediate_size: int = 0
    top_k: int = 0
    normalization_mode: ExpertScaleNormalizationMode = ExpertScaleNormalizationMode.RENORMALIZE


class _Experts(Module):
    def __init__(self, shape, dtype):
        super().__init__()
        self.weight = Parameter(shape=shape, dtype=dtype)


class SharedMoE(Module):
    def __init__(
        self,
        moe_config,
        hidden_size,
        ffn_hidden_size,
        hidden_act,
        mapping=None,
        bias=True,
        dtype=None,
        tp_group=None,
        tp_size=1,
        use_shared_gate=False,
        use_side_stream=False,
    ):
        super().__init__()
        assert hidden_act == "swiglu" and not bias and use_shared_gate
        self.moe_config, self.tp_group, self.tp_size = moe_config, tp_group, tp_size
        experts, inner = moe_config.num_experts, ffn_hidden_size // mapping.moe_tp_size
        self.router = RowLinear(hidden_size, experts, bias=False, dtype="float32")
        self.fc = _Experts((experts, 2 * inner, hidden_size), dtype)
        self.proj = _Experts((experts, hidden_size, inner), dtype)
        shared = moe_config.shared_expert_intermediate_size
        self.shared_expert = MLP(
            hidden_size, shared, hidden_act, False, dtype, tp_group, tp_size, is_expert=True
        )
        self.shared_expert_gate = RowLinear(hidden_size, 1, bias=False, dtype=dtype)

    def forward(self, x, lora_layer_params=None):
        routing = self.router(cast(x, "float32"))
        top_k, mode = self.moe_config.top_k, self.moe_config.normalization_mode

        def run(x, routing, up_gate, down):
            weights, chosen = routing.softmax(-1).topk(top_k, -1)
            if mode == MoeConfig.ExpertScaleNormalizationMode.RENORMALIZE:
                weights = weights / weights.sum(-1, keepdim=True)
            both = torch.einsum("th,tkih->tki", x, up_gate[chosen])
            up, gate = both.chunk(2, -1)
            out = torch.einsum("tki,tkhi->tkh", torch.nn.functional.silu(gate) * up, down[chosen])
            return (out * weights[..., None].to(x.dtype)).sum(1)

        fields = {"top_k": top_k, "normalization_mode": int(mode)}
        inputs = [x, routing, self.fc.weight.value, self.proj.weight.value]
        routed = record("MixtureOfExperts", inputs, x.shape, run, fields=fields)
        shared = sigmoid(self.shared_expert_gate(x, None)) * self.shared_expert(x)
        out = routed + shared
        return allreduce(out, self.tp_group) if self.tp_size > 1 else out
