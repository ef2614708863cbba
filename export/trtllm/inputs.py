"""The inputs of our engines as TensorRT-LLM tensors. Imports tensorrt_llm.

The library's own come from its GenerationMixin, told of the attention layers alone; ours are made
here from `trtllm_treewy.trtllm_bindings`, which the runtime reads too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tensorrt_llm._common import default_net
from tensorrt_llm._utils import str_dtype_to_trt
from tensorrt_llm.bindings import KVCacheType
from tensorrt_llm.functional import Tensor
from tensorrt_llm.layers import AttentionParams, KeyValueCacheParams
from tensorrt_llm.models.generation_mixin import GenerationMixin

from trtllm_treewy.trtllm_bindings import EngineBinding, state_inputs, tree_inputs

from .layers import Setting, StepInputs
from .settings import BuildSettings

Range = tuple[int, int, int]


@dataclass(frozen=True)
class Sizes:
    """The largest that an engine takes."""

    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_num_tokens: int
    opt_num_tokens: int | None


def prepare_inputs(
    model: GenerationMixin,
    setting: Setting,
    build: BuildSettings,
    sizes: Sizes,
    gather_context_logits: bool,
) -> dict[str, Any]:
    """The keyword arguments of the model's `forward`, as network inputs."""
    config, net = setting.whole, default_net().plugin_config
    common = _limits(sizes, build, net)
    # Rows of a tree are in the cache before they are accepted.
    longest = sizes.max_seq_len + build.draft_len
    made = _basic_inputs(model, setting, net, longest, gather_context_logits, common)
    profiles = _profiles(common, net)
    ranges = _ranges(sizes, build)
    ours = {
        x.name: _tensor(x, ranges, profiles)
        for x in [*tree_inputs(), *state_inputs(setting.part, build.plugin_dtype)]
    }
    return {
        "input_ids": made["input_ids"],
        "position_ids": made["position_ids"],
        "last_token_ids": made["last_token_ids"],
        "kv_cache_params": _kv_cache(made),
        "attention_params": _attention(made, sizes.max_input_len),
        "spec_decoding_params": made["spec_decoding_params"],
        "step": StepInputs(*(ours[x.name] for x in tree_inputs())),
        "conv_states": [ours[f"past_conv_state_{i}"] for i in config.linear_layers],
        "rnn_states": [ours[f"past_rnn_state_{i}"] for i in config.linear_layers],
    }


def _limits(sizes: Sizes, build: BuildSettings, net: Any) -> dict[str, Any]:
    """What the library makes both the inputs and their profiles by."""
    return {
        "max_batch_size": sizes.max_batch_size,
        "max_beam_width": 1,
        "max_input_len": sizes.max_input_len,
        "max_num_tokens": sizes.max_num_tokens,
        "opt_num_tokens": sizes.opt_num_tokens,
        "max_draft_len": build.draft_len,
        "multiple_profiles": net.multiple_profiles,
        "kv_cache_type": KVCacheType.PAGED,
    }


def _basic_inputs(
    model: GenerationMixin,
    setting: Setting,
    net: Any,
    max_seq_len: int,
    gather_context_logits: bool,
    limits: dict[str, Any],
) -> dict[str, Any]:
    """The library's own inputs: those of tokens, attention and logits."""
    config = setting.whole
    made: dict[str, Any] = model.prepare_basic_inputs(
        **limits,
        max_seq_len=max_seq_len,
        hidden_size=config.hidden_size,
        num_kv_heads=config.num_key_value_heads,
        head_size=config.head_dim,
        num_layers=len(config.attention_layers),
        kv_dtype=str_dtype_to_trt(setting.dtype),
        remove_input_padding=True,
        use_gpt_attention_plugin=net.gpt_attention_plugin,
        use_gemm_plugin=net.gemm_plugin,
        tokens_per_block=net.tokens_per_block,
        gather_context_logits=gather_context_logits,
        dtype=str_dtype_to_trt(setting.dtype),
        num_heads=config.num_attention_heads,
        mapping=setting.mapping,
    )
    return made


def _profiles(common: dict[str, Any], net: Any) -> int:
    """How many profiles the library makes, so that our inputs have as many."""
    two = GenerationMixin.has_ctx_gen_opt_profiles(
        use_gpt_attention_plugin=net.gpt_attention_plugin,
        use_gemm_plugin=net.gemm_plugin,
        remove_input_padding=True,
        kv_cache_type=KVCacheType.PAGED,
    )
    count, _ = GenerationMixin.get_profiles_ranges(
        **common, opt_batch_size=None, enable_ctx_gen_opt_profiles=two
    )
    return int(count)


def _ranges(sizes: Sizes, build: BuildSettings) -> dict[str, Range]:
    """Least, usual and largest of our dynamic dimensions; a step may be prompts or trees only."""
    batch, nodes = sizes.max_batch_size, build.max_nodes
    return {
        "P": (0, 1, batch),
        "P+1": (1, 2, batch + 1),
        "B": (0, (batch + 1) // 2, batch),
        "N": (1, nodes, nodes),
        "slots": (1, batch, batch),
    }


def _tensor(binding: EngineBinding, ranges: dict[str, Range], profiles: int) -> Tensor:
    """A network input; dimensions of one name have one range everywhere."""
    dims: OrderedDict[str, Sequence[Any]] = OrderedDict()
    for axis, size in enumerate(binding.shape):
        if isinstance(size, int):
            dims[f"{binding.name}_{axis}"] = [size] * profiles
        else:
            dims[f"treewy_{size}"] = [list(ranges[size])] * profiles
    return Tensor(
        name=binding.name,
        dtype=str_dtype_to_trt(binding.dtype),
        shape=[size if isinstance(size, int) else -1 for size in binding.shape],
        dim_range=dims,
    )


def _kv_cache(made: dict[str, Any]) -> KeyValueCacheParams:
    names = (
        "past_key_value",
        "host_past_key_value_lengths",
        "host_max_attention_window_sizes",
        "host_sink_token_length",
        "kv_cache_block_offsets",
        "host_kv_cache_block_offsets",
        "host_kv_cache_pool_pointers",
        "host_kv_cache_pool_mapping",
        "cache_indirection",
    )
    return KeyValueCacheParams(**{name: made[name] for name in names})


def _attention(made: dict[str, Any], max_input_len: int) -> AttentionParams:
    names = (
        "sequence_length",
        "context_lengths",
        "host_context_lengths",
        "host_request_types",
        "host_runtime_perf_knobs",
        "host_context_progress",
    )
    return AttentionParams(max_context_length=max_input_len, **{name: made[name] for name in names})
