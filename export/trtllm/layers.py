"""The layers of our models in TensorRT-LLM's own. Imports tensorrt_llm.

The library's attention has no output gate, and interleaves heads where it normalises q and k and
their numbers are equal. Both are done in the two projections around it instead: it calls
`self.qkv(x, ...)` first and `self.dense(context, ...)` last, and these are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tensorrt_llm.functional import Tensor, cast, concat, shape, sigmoid, silu, slice, split, view
from tensorrt_llm.layers import (
    Attention,
    AttentionMaskType,
    ColumnLinear,
    GatedMLP,
    PositionEmbeddingType,
    RmsNorm,
    RowLinear,
)
from tensorrt_llm.layers.moe import MoeConfig, SharedMoE
from tensorrt_llm.module import Module
from tensorrt_llm.parameter import Parameter

from trtllm_treewy import plugin_contract as plugins
from trtllm_treewy.config import ModelConfig
from trtllm_treewy.rank_config import shard_config

from .plugin_nodes import add_plugin


@dataclass(frozen=True)
class Setting:
    """What every layer is made for.

    Attributes:
        whole: the model's config.
        dtype: of weights and activations.
        max_position_embeddings: of the rotary tables.
        mapping: the library's, with this rank.
    """

    whole: ModelConfig
    dtype: str
    max_position_embeddings: int
    mapping: Any

    @property
    def part(self) -> ModelConfig:
        """The config of one rank's share."""
        return shard_config(self.whole, self.mapping.tp_size)

    @property
    def parallel(self) -> dict[str, Any]:
        """The arguments of a layer that is divided over ranks."""
        return {
            "dtype": self.dtype,
            "tp_group": self.mapping.tp_group,
            "tp_size": self.mapping.tp_size,
        }


@dataclass(frozen=True)
class StepInputs:
    """What a step's rows are: prompts packed first, then trees of as many columns each.

    Attributes:
        context_slot, cu_seqlens: int32 [prompts], [prompts + 1]; rows of the pools, and where each
            prompt begins.
        slot, parents, num_nodes: int32 [B], [B, N], [B] of the draft trees.
    """

    context_slot: Tensor
    cu_seqlens: Tensor
    slot: Tensor
    parents: Tensor
    num_nodes: Tensor


class WideRmsNorm(RmsNorm):  # type: ignore[misc]
    """x / rms(x) * weight in float32, rounded once; the weight holds one plus the checkpoint's."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__(normalized_shape=dim, eps=eps, dtype="float32")

    def forward(self, x: Tensor, normalized_shape: Any = None) -> Tensor:
        """`x` [..., dim]; returns the same shape and type."""
        return cast(super().forward(cast(x, "float32"), normalized_shape), x.dtype)


class Gate:
    """The output gate on its way from the first projection of attention to the last."""

    value: Tensor | None = None


class GatedQkv(ColumnLinear):  # type: ignore[misc]
    """Query, key and value, the first two normalised by head; keeps the gate aside."""

    def __init__(self, setting: Setting, gate: Gate) -> None:
        config, part = setting.whole, setting.part
        query, key = (
            n * part.head_dim for n in (part.num_attention_heads, part.num_key_value_heads)
        )
        super().__init__(
            in_features=config.hidden_size,
            out_features=2 * (query + key) * setting.mapping.tp_size,
            bias=config.attention_bias,
            gather_output=False,
            **setting.parallel,
        )
        self.query, self.key, self.dim = query, key, part.head_dim
        self.gate_holder = gate
        self.q_layernorm = WideRmsNorm(self.dim, config.rms_norm_eps)
        self.k_layernorm = WideRmsNorm(self.dim, config.rms_norm_eps)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`x` [tokens, hidden] to [tokens, query + 2 key]."""
        projected = super().forward(x, *args, **kwargs)
        sizes = [self.query, self.key, self.key, self.query]
        q, k, v, self.gate_holder.value = split(projected, sizes, dim=1)
        q = self._normed(self.q_layernorm, q, self.query)
        k = self._normed(self.k_layernorm, k, self.key)
        return concat([q, k, v], dim=1)

    def _normed(self, norm: WideRmsNorm, x: Tensor, width: int) -> Tensor:
        tokens = shape(x, 0)
        heads = view(x, concat([tokens, width // self.dim, self.dim]), zero_is_placeholder=False)
        return view(norm(heads), concat([tokens, width]), zero_is_placeholder=False)


class GatedDense(RowLinear):  # type: ignore[misc]
    """The last projection, of `context * sigmoid(gate)`."""

    def __init__(self, setting: Setting, gate: Gate) -> None:
        config = setting.whole
        super().__init__(
            in_features=config.num_attention_heads * config.head_dim,
            out_features=config.hidden_size,
            bias=config.attention_bias,
            **setting.parallel,
        )
        self.gate_holder = gate

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`x` [tokens, heads * dim] to [tokens, hidden]."""
        gate, self.gate_holder.value = self.gate_holder.value, None
        if gate is None:
            raise RuntimeError("attention did not call its first projection: see docs/trtllm.md")
        return super().forward(x * sigmoid(gate), *args, **kwargs)


class GatedAttention(Attention):  # type: ignore[misc]
    """The library's attention, between our two projections; `index` counts attention layers."""

    def __init__(self, setting: Setting, index: int) -> None:
        config = setting.whole
        super().__init__(
            local_layer_idx=index,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            attention_head_size=config.head_dim,
            max_position_embeddings=setting.max_position_embeddings,
            attention_mask_type=AttentionMaskType.causal,
            bias=config.attention_bias,
            position_embedding_type=PositionEmbeddingType.rope_gpt_neox,
            rotary_embedding_base=config.rope_theta,
            rotary_embedding_percentage=config.rotary_dim / config.head_dim,
            qk_layernorm=False,
            q_scaling=1.0,
            tp_rank=setting.mapping.tp_rank,
            **setting.parallel,
        )
        gate = Gate()
        self.qkv = GatedQkv(setting, gate)
        self.dense = GatedDense(setting, gate)


class GatedDeltaNet(Module):  # type: ignore[misc]
    """A GDN layer: library projections around our plugins, for prompts and for draft trees."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        config, part = setting.whole, setting.part
        self.part = part
        sizes = {
            "in_proj_qkv": config.conv_dim,
            "in_proj_z": config.value_dim,
            "in_proj_a": config.linear_num_value_heads,
            "in_proj_b": config.linear_num_value_heads,
        }
        for name, size in sizes.items():
            layer = ColumnLinear(
                config.hidden_size, size, bias=False, gather_output=False, **setting.parallel
            )
            setattr(self, name, layer)
        width = config.linear_conv_kernel_dim
        self.conv_weight = Parameter(shape=(part.conv_dim, width), dtype=setting.dtype)
        heads = (part.linear_num_value_heads,)
        self.A_log = Parameter(shape=heads, dtype="float32")
        self.dt_bias = Parameter(shape=heads, dtype="float32")
        self.norm = RmsNorm(
            normalized_shape=config.linear_value_head_dim,
            eps=config.rms_norm_eps,
            dtype=setting.dtype,
        )
        self.out_proj = RowLinear(
            config.value_dim, config.hidden_size, bias=False, **setting.parallel
        )

    def forward(
        self, x: Tensor, step: StepInputs, conv_state: Tensor, state: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The layer's output and what leaves the network.

        Args:
            x: [tokens, hidden].
            step: which rows are prompts and which trees.
            conv_state, state: the pools of this layer, network inputs; the type of `conv_state` is
                the type in which the plugins work.

        Returns:
            [tokens, hidden]; `present_conv_state`, `present_rnn_state` (in place of the pools) and
            what a commit needs of the trees: `conv_x`, `k`, `u`, `g`.
        """
        part, dtype = self.part, conv_state.dtype
        rows, nodes = shape(step.parents, 0), shape(step.parents, 1)
        prompt = shape(x, 0) - rows * nodes
        a_log, dt_bias = self.A_log.value, self.dt_bias.value
        weight = cast(self.conv_weight.value, dtype)
        mixed = cast(self.in_proj_qkv(x), dtype)
        a, b = cast(self.in_proj_a(x), dtype), cast(self.in_proj_b(x), dtype)
        packed = step.context_slot, step.cu_seqlens
        tree = step.slot, step.parents, step.num_nodes

        def prompts(y: Tensor, width: int) -> Tensor:
            return slice(y, [0, 0], concat([prompt, width]))

        def trees(y: Tensor, width: int) -> Tensor:
            flat = slice(y, concat([prompt, 0]), concat([rows * nodes, width]))
            return view(flat, concat([rows, nodes, width]), zero_is_placeholder=False)

        heads = part.linear_num_value_heads
        y, conv_out = add_plugin(
            plugins.PREFILL_CONV, [prompts(mixed, part.conv_dim), conv_state, weight, *packed]
        )
        gates = prompts(a, heads), prompts(b, heads), a_log, dt_bias
        of_prompts, state_out = add_plugin(
            plugins.PREFILL, [y, *gates, state, *packed], **self._heads()
        )
        conv_x = trees(mixed, part.conv_dim)
        y = add_plugin(plugins.CONV, [conv_x, conv_state, weight, *tree])[0]
        gates = trees(a, heads), trees(b, heads), a_log, dt_bias
        of_trees, u, g = add_plugin(plugins.VERIFY, [y, *gates, state, *tree], **self._heads())
        present = {
            "present_conv_state": conv_out,
            "present_rnn_state": state_out,
            "conv_x": conv_x,
            "k": self._keys(y, rows, nodes),
            "u": u,
            "g": g,
        }
        return self._gated(x, of_prompts, of_trees, prompt, rows * nodes), present

    def _heads(self) -> dict[str, int | str]:
        part = self.part
        return {
            "num_k_heads": part.linear_num_key_heads,
            "num_v_heads": part.linear_num_value_heads,
            "head_k_dim": part.linear_key_head_dim,
            "head_v_dim": part.linear_value_head_dim,
        }

    def _keys(self, y: Tensor, rows: Tensor, nodes: Tensor) -> Tensor:
        """[B, N, HK, K] of the conv's output [B, N, C]."""
        part = self.part
        keys = slice(y, [0, 0, part.key_dim], concat([rows, nodes, part.key_dim]))
        sizes = concat([rows, nodes, part.linear_num_key_heads, part.linear_key_head_dim])
        return view(keys, sizes, zero_is_placeholder=False)

    def _gated(
        self, x: Tensor, of_prompts: Tensor, of_trees: Tensor, prompt: Tensor, rows: Tensor
    ) -> Tensor:
        """Norm before gate by value head, and the last projection."""
        part = self.part
        heads, dim = part.linear_num_value_heads, part.linear_value_head_dim

        def flat(y: Tensor, count: Tensor) -> Tensor:
            return view(y, concat([count, heads, dim]), zero_is_placeholder=False)

        out = concat([flat(of_prompts, prompt), flat(of_trees, rows)], dim=0)
        z = self.in_proj_z(x)
        gate = flat(z, shape(x, 0))
        normed = cast(self.norm(cast(out, z.dtype)), "float32")
        gated = cast(normed * silu(cast(gate, "float32")), z.dtype)
        return self.out_proj(
            view(gated, concat([shape(x, 0), heads * dim]), zero_is_placeholder=False)
        )


def feed_forward(setting: Setting) -> Module:
    """The block that the config asks for."""
    config = setting.whole
    if not config.is_moe:
        return GatedMLP(
            hidden_size=config.hidden_size,
            ffn_hidden_size=config.intermediate_size,
            hidden_act="silu",
            bias=False,
            **setting.parallel,
        )
    experts = MoeConfig(
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        shared_expert_intermediate_size=config.shared_expert_intermediate_size,
        normalization_mode=MoeConfig.ExpertScaleNormalizationMode.RENORMALIZE,
    )
    return SharedMoE(
        moe_config=experts,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.moe_intermediate_size,
        hidden_act="swiglu",
        mapping=setting.mapping,
        bias=False,
        use_shared_gate=True,
        **setting.parallel,
    )
