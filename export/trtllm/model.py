"""The model class for TensorRT-LLM's engine flow. Imports tensorrt_llm, and registers itself.

`register` puts the architecture into the library's MODEL_MAP, which is asked for it when a config
is read, at a build and whenever an engine is opened, whatever class file was named. A process that
unpickles one of these classes imports this module, so workers know the architecture too.
"""

from __future__ import annotations

from typing import Any

from tensorrt_llm import models
from tensorrt_llm._common import default_net
from tensorrt_llm._utils import str_dtype_to_trt
from tensorrt_llm.functional import Tensor, gather_last_token_logits
from tensorrt_llm.layers import Attention, ColumnLinear, Embedding
from tensorrt_llm.models.modeling_utils import PretrainedConfig, PretrainedModel
from tensorrt_llm.module import Module, ModuleList

from trtllm_treewy.config import LINEAR
from trtllm_treewy.trtllm_config import ARCHITECTURE, KEY, checkpoint_ranks, model_config

from .inputs import Sizes, prepare_inputs
from .layers import (
    GatedAttention,
    GatedDeltaNet,
    Setting,
    StepInputs,
    WideRmsNorm,
    feed_forward,
)
from .settings import build_settings


class TreewyQwen3_5Config(PretrainedConfig):  # type: ignore[misc]
    """The library's config of a converted checkpoint.

    Raises:
        ValueError: it was not made by `convert-checkpoint`, is of another version, or asks for what
            these layers do not have.
    """

    def __init__(self, **settings: Any) -> None:
        model_config(settings, "config.json")
        checkpoint_ranks(settings, "config.json")
        super().__init__(**settings)

    @property
    def setting(self) -> Setting:
        """What layers are made for."""
        ours = {"architecture": self.architecture, KEY: getattr(self, KEY)}
        return Setting(
            whole=model_config(ours, "config.json"),
            dtype=self.dtype,
            max_position_embeddings=self.max_position_embeddings,
            mapping=self.mapping,
        )


class Block(Module):  # type: ignore[misc]
    """Pre-norm residual block: a GDN or attention mixer, then a feed-forward block."""

    def __init__(self, setting: Setting, layer: int) -> None:
        super().__init__()
        config = setting.whole
        self.is_linear = config.layer_types[layer] == LINEAR
        if self.is_linear:
            self.gdn = GatedDeltaNet(setting)
        else:
            self.attention = GatedAttention(setting, config.attention_layers.index(layer))
        self.input_layernorm = WideRmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_layernorm = WideRmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = feed_forward(setting)

    def mix(
        self, x: Tensor, pools: tuple[Tensor, Tensor] | None, step: StepInputs, attention: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The mixer's output [tokens, hidden], and what leaves the network."""
        normed = self.input_layernorm(x)
        if pools is not None:
            mixed, present = self.gdn(normed, step, *pools)
            return mixed, present
        mixed, _ = self.attention(normed, use_cache=True, **attention)
        return mixed, {}

    def forward(
        self, x: Tensor, pools: tuple[Tensor, Tensor] | None, step: StepInputs, attention: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`x` [tokens, hidden] to the same, and what leaves the network."""
        mixed, present = self.mix(x, pools, step, attention)
        x = x + mixed
        return x + self.mlp(self.post_layernorm(x)), present


class Transformer(Module):  # type: ignore[misc]
    """Embedding, blocks and the last norm."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        config = setting.whole
        self.linear_layers = config.linear_layers
        self.vocab_embedding = Embedding(config.vocab_size, config.hidden_size, dtype=setting.dtype)
        self.layers = ModuleList(
            [Block(setting, layer) for layer in range(config.num_hidden_layers)]
        )
        self.ln_f = WideRmsNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        input_ids: Tensor,
        pools: list[tuple[Tensor, Tensor]],
        step: StepInputs,
        attention: dict[str, Any],
    ) -> tuple[Tensor, dict[int, dict[str, Tensor]]]:
        """Hidden states [tokens, hidden], and what leaves the network by GDN layer."""
        x = self.vocab_embedding(input_ids)
        by_layer = dict(zip(self.linear_layers, pools, strict=True))
        presents = {}
        for layer, block in enumerate(self.layers):
            x, present = block(x, by_layer.get(layer), step, attention)
            if present:
                presents[layer] = present
        return self.ln_f(x), presents


class TreewyQwen3_5ForCausalLM(PretrainedModel):  # type: ignore[misc]
    """Qwen3.5, dense or with experts: prompts and draft trees in one network."""

    config_class = TreewyQwen3_5Config

    def __init__(self, config: TreewyQwen3_5Config) -> None:
        super().__init__(config)
        setting = config.setting
        self.dtype = str_dtype_to_trt(config.dtype)
        self.logits_dtype = str_dtype_to_trt(config.logits_dtype)
        self.gather_context_logits = False
        self.position_embedding_type = config.position_embedding_type
        Attention.create_attention_const_params(self, config)
        self.transformer = Transformer(setting)
        self.lm_head = ColumnLinear(
            config.hidden_size,
            config.vocab_size,
            bias=False,
            gather_output=True,
            **setting.parallel,
        )

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        last_token_ids: Tensor | None,
        kv_cache_params: Any,
        attention_params: Any,
        spec_decoding_params: Any,
        step: StepInputs,
        conv_states: list[Tensor],
        rnn_states: list[Tensor],
    ) -> Tensor:
        """Marks the outputs of `trtllm_bindings.engine_outputs`; returns the logits."""
        attention = {
            "kv_cache_params": kv_cache_params,
            "attention_params": Attention.fill_attention_params(self, attention_params),
            "spec_decoding_params": spec_decoding_params,
        }
        pools = list(zip(conv_states, rnn_states, strict=True))
        hidden, presents = self.transformer(input_ids, pools, step, attention)
        hidden.mark_output("treewy_hidden_states", self.dtype)
        for layer, present in presents.items():
            for name, tensor in present.items():
                prefix = "" if name.startswith("present_") else "treewy_"
                tensor.mark_output(f"{prefix}{name}_{layer}", tensor.dtype)
        rows = hidden
        if not self.gather_context_logits:
            rows = gather_last_token_logits(hidden, last_token_ids, True)
        logits = self.lm_head(rows)
        logits.mark_output("logits", self.logits_dtype)
        return logits

    def prepare_inputs(
        self,
        max_batch_size: int,
        max_input_len: int,
        max_seq_len: int,
        max_num_tokens: int,
        use_cache: bool,
        max_beam_width: int = 1,
        opt_num_tokens: int | None = None,
        prompt_embedding_table_size: int = 0,
        max_draft_len: int = 0,
        speculative_decoding_draft_tokens_external: bool = False,
        gather_context_logits: bool = False,
        **others: Any,
    ) -> dict[str, Any]:
        """The keyword arguments of `forward`. The library passes these names.

        Raises:
            ValueError: the flags ask for what these layers do not have.
        """
        if others.get("lora_target_modules") or not use_cache:
            raise ValueError("LoRA, or a network without KV cache: not supported by these layers")
        build = build_settings(
            default_net().plugin_config,
            self.config.dtype,
            max_draft_len=max_draft_len,
            max_beam_width=max_beam_width,
            max_num_tokens=max_num_tokens,
            gather_context_logits=gather_context_logits,
            prompt_embedding_table_size=prompt_embedding_table_size,
            draft_tokens_external=speculative_decoding_draft_tokens_external,
        )
        self.gather_context_logits = gather_context_logits
        sizes = Sizes(max_batch_size, max_input_len, max_seq_len, max_num_tokens, opt_num_tokens)
        return prepare_inputs(self, self.config.setting, build, sizes, gather_context_logits)


def register() -> None:
    """Makes the architecture known to the library."""
    models.MODEL_MAP[ARCHITECTURE] = TreewyQwen3_5ForCausalLM


register()

__all__ = ["TreewyQwen3_5Config", "TreewyQwen3_5ForCausalLM", "register"]
