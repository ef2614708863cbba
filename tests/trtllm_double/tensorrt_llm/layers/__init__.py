"""Double of the layers; weights and collectives as the contract says."""

from __future__ import annotations

from enum import Enum

import numpy as np
import torch

from ..functional import (
    allgather,
    allreduce,
    embedding,
    gpt_attention,
    matmul,
    rms_norm,
    silu,
    swiglu,
)
from ..module import Module
from ..parameter import Parameter


class AttentionMaskType(Enum):
    padding = 0
    causal = 1


class PositionEmbeddingType(Enum):
    learned_absolute = 0
    rope_gpt_neox = 2

    def is_rope(self):
        return self is PositionEmbeddingType.rope_gpt_neox

    @classmethod
    def from_string(cls, name):
        return cls[name]

    def __str__(self):
        return self.name


class _Linear(Module):
    def __init__(self, inner, outer, bias, dtype, tp_group, tp_size):
        super().__init__()
        self.in_features, self.out_features, self.dtype = inner, outer, dtype
        self.tp_group, self.tp_size = tp_group, tp_size
        self.weight = Parameter(shape=(outer, inner), dtype=dtype)
        if bias:
            self.bias = Parameter(shape=(outer,), dtype=dtype)
        else:
            self.register_parameter("bias", None)

    def multiply(self, x):
        return matmul(x, self.weight.value, transb=True)


class Linear(_Linear):
    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        dtype=None,
        tp_group=None,
        tp_size=1,
        gather_output=True,
        is_qkv=False,
    ):
        super().__init__(in_features, out_features // tp_size, bias, dtype, tp_group, tp_size)
        self.gather_output = gather_output

    def forward(self, x, lora_runtime_params=None, lora_hidden_state=None, **kwargs):
        x = self.multiply(x)
        if self.bias is not None:
            x = x + self.bias.value
        if self.gather_output and self.tp_size > 1:
            x = allgather(x, self.tp_group, gather_dim=1)
        return x


ColumnLinear = Linear


class RowLinear(_Linear):
    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        dtype=None,
        tp_group=None,
        tp_size=1,
        is_expert=False,
    ):
        super().__init__(in_features // tp_size, out_features, bias, dtype, tp_group, tp_size)
        self.is_expert = is_expert

    def forward(self, x, lora_runtime_params=None, lora_hidden_state=None, all_reduce_params=None):
        x = self.multiply(x)
        if self.tp_size > 1 and self.tp_group is not None and not self.is_expert:
            x = allreduce(x, self.tp_group, all_reduce_params)
        return x if self.bias is None else x + self.bias.value


class Embedding(Module):
    def __init__(self, num_embeddings, embedding_dim, dtype=None, tp_size=1, tp_group=None):
        super().__init__()
        self.weight = Parameter(shape=(num_embeddings, embedding_dim), dtype=dtype)

    def forward(self, x):
        return embedding(x, self.weight.value)


class RmsNorm(Module):
    def __init__(
        self, normalized_shape, num_groups=1, eps=1e-6, elementwise_affine=True, dtype=None
    ):
        super().__init__()
        self.normalized_shape = (normalized_shape,)
        self.num_groups, self.eps = num_groups, eps
        self.weight = Parameter(shape=self.normalized_shape, dtype=dtype)

    def forward(self, x, normalized_shape=None):
        shape = self.normalized_shape if normalized_shape is None else normalized_shape
        return rms_norm(x, shape, self.num_groups, self.weight.value, self.eps)


class GatedMLP(Module):
    def __init__(
        self,
        hidden_size,
        ffn_hidden_size,
        hidden_act,
        bias=True,
        dtype=None,
        tp_group=None,
        tp_size=1,
    ):
        super().__init__()
        assert hidden_act in ("silu", "gelu")
        assert hidden_act == "silu"
        column = (hidden_size, ffn_hidden_size, bias, dtype, tp_group, tp_size, False)
        self.fc, self.gate = ColumnLinear(*column), ColumnLinear(*column)
        self.proj = RowLinear(ffn_hidden_size, hidden_size, bias, dtype, tp_group, tp_size)

    def forward(self, x, lora_layer_params=None):
        return self.proj(silu(self.fc(x)) * self.gate(x))


class FusedGatedMLP(Module):
    """What the builder puts in place of GatedMLP: both first projections in one, gate first."""

    def __init__(self, mlp):
        super().__init__()
        fc = mlp.fc
        inner, outer = fc.in_features, 2 * fc.out_features * fc.tp_size
        self.fused_fc = ColumnLinear(
            inner, outer, False, fc.dtype, fc.tp_group, fc.tp_size, gather_output=False
        )
        self.fused_fc.weight.value = torch.cat([mlp.gate.weight.raw_value, fc.weight.raw_value])
        self.proj = mlp.proj

    def forward(self, x, lora_layer_params=None):
        return self.proj(swiglu(self.fused_fc(x)))


class MLP(Module):
    def __init__(
        self, hidden_size, ffn_hidden_size, hidden_act, bias, dtype, tp_group, tp_size, is_expert
    ):
        super().__init__()
        assert hidden_act == "swiglu"
        self.fc = ColumnLinear(
            hidden_size, 2 * ffn_hidden_size, bias, dtype, tp_group, tp_size, gather_output=False
        )
        self.proj = RowLinear(
            ffn_hidden_size, hidden_size, bias, dtype, tp_group, tp_size, is_expert=is_expert
        )

    def forward(self, x, lora_layer_params=None):
        return self.proj(swiglu(self.fc(x)))


class SpecDecodingParams:
    def __init__(
        self,
        spec_decoding_is_generation_length_variable=False,
        spec_decoding_max_generation_length=1,
        spec_decoding_generation_lengths=None,
        spec_decoding_position_offsets=None,
        spec_decoding_packed_mask=None,
        spec_decoding_use=None,
    ):
        self.__dict__.update({k: v for k, v in locals().items() if k != "self"})


class AttentionParams:
    def __init__(
        self,
        sequence_length=None,
        context_lengths=None,
        host_context_lengths=None,
        max_context_length=None,
        host_request_types=None,
        encoder_input_lengths=None,
        encoder_max_input_length=None,
        host_runtime_perf_knobs=None,
        host_context_progress=None,
    ):
        self.__dict__.update({k: v for k, v in locals().items() if k != "self"})
        self.rotary_cos_sin = None


class KeyValueCacheParams:
    def __init__(
        self,
        past_key_value=None,
        host_past_key_value_lengths=None,
        host_max_attention_window_sizes=None,
        host_sink_token_length=None,
        kv_cache_block_offsets=None,
        host_kv_cache_block_offsets=None,
        host_kv_cache_pool_pointers=None,
        host_kv_cache_pool_mapping=None,
        cache_indirection=None,
        past_key_value_length=None,
    ):
        self.__dict__.update({k: v for k, v in locals().items() if k != "self"})


class Attention(Module):
    def __init__(
        self,
        *,
        local_layer_idx,
        hidden_size,
        num_attention_heads,
        num_kv_heads=None,
        max_position_embeddings=1024,
        attention_head_size=None,
        qk_layernorm=False,
        attention_mask_type=AttentionMaskType.padding,
        bias=True,
        dtype=None,
        position_embedding_type=PositionEmbeddingType.learned_absolute,
        rotary_embedding_base=10000.0,
        rotary_embedding_scaling=None,
        rotary_embedding_percentage=1.0,
        tp_group=None,
        tp_size=1,
        tp_rank=0,
        q_scaling=1.0,
        dense_bias=None,
    ):
        super().__init__()
        assert not qk_layernorm, "interleaves heads where q and kv heads are equal"
        self.local_layer_idx, self.q_scaling = local_layer_idx, q_scaling
        self.heads = num_attention_heads // tp_size
        self.kv_heads = (num_kv_heads + tp_size - 1) // tp_size
        self.dim = attention_head_size or hidden_size // num_attention_heads
        self.rotary_dim = int(self.dim * rotary_embedding_percentage)
        self.mask_type, self.tp_size, self.tp_rank = attention_mask_type, tp_size, tp_rank
        self.position_embedding_type = position_embedding_type
        width = (self.heads + 2 * self.kv_heads) * self.dim * tp_size
        self.qkv = ColumnLinear(hidden_size, width, bias, dtype, tp_group, tp_size, False)
        self.dense = RowLinear(
            num_attention_heads * self.dim, hidden_size, bias, dtype, tp_group, tp_size
        )

    @staticmethod
    def create_attention_const_params(model_cls, config):
        dim, count = config.rotary_dim, config.max_position_embeddings
        frequency = 1.0 / config.rotary_base ** (np.arange(0, dim, 2) / dim)
        angle = np.arange(count)[:, None] * frequency.astype(np.float32)[None]
        table = np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32).reshape(1, -1)
        parameter = Parameter(table, dtype="float32", is_buffer=True)
        model_cls.register_parameter("embed_positions_for_gpt_attention", parameter)

    @staticmethod
    def fill_attention_params(model_cls, attention_params):
        assert model_cls.position_embedding_type.is_rope()
        attention_params.rotary_cos_sin = model_cls.embed_positions_for_gpt_attention.value
        return attention_params

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        attention_packed_mask=None,
        use_cache=False,
        spec_decoding_params=None,
        mrope_params=None,
        kv_cache_params=None,
        attention_params=None,
        lora_layer_params=None,
        all_reduce_params=None,
    ):
        assert self.mask_type is AttentionMaskType.causal, "Plugin only support masked MHA."
        spec = spec_decoding_params or SpecDecodingParams()
        qkv = self.qkv(hidden_states, None)
        assert qkv.ndim() == 2
        kv = {k: v for k, v in kv_cache_params.__dict__.items() if k != "past_key_value_length"}
        params = {
            name: getattr(attention_params, name)
            for name in (
                "sequence_length",
                "context_lengths",
                "host_context_lengths",
                "max_context_length",
                "host_request_types",
                "host_runtime_perf_knobs",
                "host_context_progress",
                "rotary_cos_sin",
            )
        }
        tree = dict(spec.__dict__)
        tree.pop("spec_decoding_is_generation_length_variable")
        context, past = gpt_attention(
            qkv=qkv,
            layer_idx=self.local_layer_idx,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            hidden_size_per_head=self.dim,
            q_scaling=self.q_scaling,
            rotary_embedding_dim=self.rotary_dim,
            tp_size=self.tp_size,
            tp_rank=self.tp_rank,
            **{**kv, "past_key_value": kv["past_key_value"][0]},
            **params,
            **tree,
        )
        context = self.dense(context, lora_runtime_params=None, all_reduce_params=all_reduce_params)
        return (context, past) if use_cache else context
