"""Every symbol of TensorRT-LLM and TensorRT that the engine flow relies on, and a check of them.

One list as data: `docs/trtllm.md` has it as a table (a test compares the two), the double in the
tests is held to it, and `trtllm-treewy doctor --trtllm` checks it against what is installed. Read
from the library's public sources of versions 1.0 to 1.2; nothing of it was run.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

OLDEST, NEWEST = (1, 0), (1, 2)
ADVICE = 'pip install "tensorrt-llm>=1.0,<1.3" from NVIDIA\'s package index (docs/trtllm.md)'


@dataclass(frozen=True)
class Symbol:
    """A module's attribute that we use.

    Attributes:
        module: what is imported.
        name: in the module; dots go into a class.
        parameters: names that we pass to it.
        use: what for.
        read: the source it was read from (see docs/trtllm.md).
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    use: str = ""
    read: str = ""


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_LINEAR = "in_features out_features bias dtype tp_group tp_size"
_INPUTS = (
    "max_batch_size max_beam_width max_input_len max_seq_len max_num_tokens hidden_size "
    "num_kv_heads head_size num_layers kv_dtype kv_cache_type remove_input_padding "
    "use_gpt_attention_plugin use_gemm_plugin tokens_per_block gather_context_logits dtype "
    "num_heads mapping opt_num_tokens max_draft_len multiple_profiles"
)
_RANGES = (
    "max_batch_size max_beam_width max_input_len max_num_tokens max_draft_len opt_batch_size "
    "opt_num_tokens enable_ctx_gen_opt_profiles multiple_profiles kv_cache_type"
)
_PROFILES = "use_gpt_attention_plugin use_gemm_plugin remove_input_padding kv_cache_type"

SYMBOLS: tuple[Symbol, ...] = (
    Symbol("tensorrt_llm.commands.build", "parse_arguments", (), "the command's parser", "B"),
    Symbol("tensorrt_llm.commands.build", "main", (), "the command", "B"),
    Symbol("tensorrt_llm.commands.build", "PluginConfig", (), "rebound to our subclass", "B"),
    Symbol("tensorrt_llm.builder", "PluginConfig", (), "rebound to our subclass", "E"),
    Symbol("tensorrt_llm.plugin.plugin", "PluginConfig", (), "base of our subclass", "P P0"),
    Symbol(
        "tensorrt_llm.plugin.plugin",
        "PluginConfig.from_arguments",
        ("args",),
        "flags, checked before the build",
        "P P0",
    ),
    Symbol("tensorrt_llm.plugin.plugin", "cli_plugin_args", (), "our flags are added", "P P0"),
    Symbol("tensorrt_llm.plugin.plugin", "add_plugin_argument", ("parser",), "makes flags", "P P0"),
    Symbol("tensorrt_llm._utils", "mpi_world_size", (), "one process or several", "B"),
    Symbol("tensorrt_llm._utils", "str_dtype_to_trt", ("dtype",), "types", "C"),
    Symbol("tensorrt_llm._common", "default_net", (), "the network's plugin_config", "C"),
    Symbol("tensorrt_llm._common", "default_trtnet", (), "add_plugin_v3", "C"),
    Symbol("tensorrt_llm.bindings", "KVCacheType.PAGED", (), "the one KV cache we build for", "G"),
    Symbol("tensorrt_llm.models", "MODEL_MAP", (), "our architecture is registered", "MM"),
    Symbol(
        "tensorrt_llm.models.modeling_utils",
        "PretrainedConfig",
        _names(
            "architecture dtype hidden_size num_hidden_layers num_attention_heads vocab_size "
            "hidden_act logits_dtype norm_epsilon position_embedding_type max_position_embeddings "
            "rotary_embedding_dim num_key_value_heads intermediate_size mapping quantization "
            "use_parallel_embedding embedding_sharding_dim head_size qk_layernorm"
        ),
        "base of our config class",
        "M",
    ),
    Symbol(
        "tensorrt_llm.models.modeling_utils",
        "PretrainedModel",
        ("config",),
        "base of our model class",
        "M",
    ),
    Symbol(
        "tensorrt_llm.models.modeling_utils",
        "PretrainedModel.from_checkpoint",
        ("ckpt_dir", "config"),
        "loads rank files",
        "M",
    ),
    Symbol(
        "tensorrt_llm.models.generation_mixin",
        "GenerationMixin.prepare_basic_inputs",
        _names(_INPUTS),
        "inputs of attention and logits",
        "G",
    ),
    Symbol(
        "tensorrt_llm.models.generation_mixin",
        "GenerationMixin.has_ctx_gen_opt_profiles",
        _names(_PROFILES),
        "number of profiles",
        "G",
    ),
    Symbol(
        "tensorrt_llm.models.generation_mixin",
        "GenerationMixin.get_profiles_ranges",
        _names(_RANGES),
        "number of profiles",
        "G",
    ),
    Symbol("tensorrt_llm.module", "Module", (), "base of our layers", "MO"),
    Symbol("tensorrt_llm.module", "ModuleList", ("modules",), "the layers", "MO"),
    Symbol("tensorrt_llm.parameter", "Parameter", ("shape", "dtype"), "weights of a plugin", "PM"),
    Symbol(
        "tensorrt_llm.layers",
        "Attention",
        _names(
            "local_layer_idx hidden_size num_attention_heads num_kv_heads max_position_embeddings "
            "attention_head_size attention_mask_type bias dtype position_embedding_type "
            "rotary_embedding_base rotary_embedding_percentage tp_group tp_size tp_rank "
            "qk_layernorm q_scaling"
        ),
        "rotary embedding, GPT attention plugin, tree mask",
        "A",
    ),
    Symbol(
        "tensorrt_llm.layers",
        "Attention.forward",
        _names("hidden_states use_cache spec_decoding_params kv_cache_params attention_params"),
        "calls self.qkv(x, ...) and self.dense(context, ...)",
        "A",
    ),
    Symbol(
        "tensorrt_llm.layers",
        "Attention.create_attention_const_params",
        ("model_cls", "config"),
        "rotary tables",
        "A",
    ),
    Symbol(
        "tensorrt_llm.layers",
        "Attention.fill_attention_params",
        ("model_cls", "attention_params"),
        "rotary tables",
        "A",
    ),
    Symbol("tensorrt_llm.layers", "AttentionMaskType.causal", (), "the mask of prompts", "A"),
    Symbol("tensorrt_llm.layers", "PositionEmbeddingType.rope_gpt_neox", (), "rotary", "A"),
    Symbol(
        "tensorrt_llm.layers",
        "AttentionParams",
        _names(
            "sequence_length context_lengths host_context_lengths max_context_length "
            "host_request_types host_runtime_perf_knobs host_context_progress"
        ),
        "inputs of attention",
        "A",
    ),
    Symbol(
        "tensorrt_llm.layers",
        "KeyValueCacheParams",
        _names(
            "past_key_value host_past_key_value_lengths host_max_attention_window_sizes "
            "host_sink_token_length kv_cache_block_offsets host_kv_cache_block_offsets "
            "host_kv_cache_pool_pointers host_kv_cache_pool_mapping cache_indirection"
        ),
        "inputs of attention",
        "A",
    ),
    Symbol(
        "tensorrt_llm.layers",
        "ColumnLinear",
        _names(f"{_LINEAR} gather_output"),
        "projections",
        "L",
    ),
    Symbol("tensorrt_llm.layers", "RowLinear", _names(_LINEAR), "projections", "L"),
    Symbol(
        "tensorrt_llm.layers",
        "Embedding",
        ("num_embeddings", "embedding_dim", "dtype"),
        "tokens",
        "EM",
    ),
    Symbol(
        "tensorrt_llm.layers", "RmsNorm", ("normalized_shape", "eps", "dtype"), "all norms", "N"
    ),
    Symbol(
        "tensorrt_llm.layers",
        "GatedMLP",
        _names("hidden_size ffn_hidden_size hidden_act bias dtype tp_group tp_size"),
        "dense feed-forward",
        "ML",
    ),
    Symbol(
        "tensorrt_llm.layers.moe",
        "MoeConfig",
        _names("num_experts shared_expert_intermediate_size top_k normalization_mode"),
        "experts",
        "MOE",
    ),
    Symbol(
        "tensorrt_llm.layers.moe",
        "MoeConfig.ExpertScaleNormalizationMode.RENORMALIZE",
        (),
        "routing weights sum to one",
        "MOE",
    ),
    Symbol(
        "tensorrt_llm.layers.moe",
        "SharedMoE",
        _names(
            "moe_config hidden_size ffn_hidden_size hidden_act mapping bias dtype tp_group "
            "tp_size use_shared_gate"
        ),
        "experts",
        "MOE",
    ),
    Symbol(
        "tensorrt_llm.functional",
        "Tensor",
        ("name", "dtype", "shape", "dim_range"),
        "our network inputs; mark_output, trt_tensor, dtype",
        "F",
    ),
    Symbol("tensorrt_llm.functional", "_create_tensor", (), "outputs of a plugin", "F"),
    Symbol("tensorrt_llm.functional", "_add_plugin_info", (), "fields of a plugin", "F"),
    Symbol("tensorrt_llm.functional", "cast", ("input", "dtype"), "types", "F"),
    Symbol("tensorrt_llm.functional", "concat", ("inputs", "dim"), "shapes and rows", "F"),
    Symbol(
        "tensorrt_llm.functional",
        "gather_last_token_logits",
        ("hidden_states", "last_token_ids", "remove_input_padding"),
        "rows of logits",
        "F",
    ),
    Symbol("tensorrt_llm.functional", "shape", ("input", "dim"), "sizes", "F"),
    Symbol("tensorrt_llm.functional", "sigmoid", (), "the output gate", "F"),
    Symbol("tensorrt_llm.functional", "silu", (), "the gated norm", "F"),
    Symbol("tensorrt_llm.functional", "slice", ("input", "starts", "sizes"), "rows", "F"),
    Symbol(
        "tensorrt_llm.functional",
        "split",
        ("tensor", "split_size_or_sections", "dim"),
        "projections",
        "F",
    ),
    Symbol(
        "tensorrt_llm.functional", "view", ("input", "shape", "zero_is_placeholder"), "heads", "F"
    ),
    Symbol("tensorrt", "get_plugin_registry", (), "our plugins' creators", "T"),
    Symbol("tensorrt", "PluginField", (), "fields", "T"),
    Symbol("tensorrt", "PluginFieldCollection", (), "fields", "T"),
    Symbol("tensorrt", "PluginFieldType.INT32", (), "fields", "T"),
    Symbol("tensorrt", "PluginFieldType.CHAR", (), "fields", "T"),
    Symbol("tensorrt", "TensorRTPhase.BUILD", (), "plugins of the V3 kind", "T"),
)


@dataclass(frozen=True)
class Finding:
    """What a check of one symbol found; `problem` is empty where it is as expected."""

    symbol: Symbol
    problem: str

    def __str__(self) -> str:
        name = f"{self.symbol.module}.{self.symbol.name}"
        return f"{name}: {self.problem}" if self.problem else name


def check(symbols: Sequence[Symbol] = SYMBOLS) -> list[Finding]:
    """Imports what is installed and compares; raises nothing."""
    return [Finding(symbol, _problem(symbol)) for symbol in symbols]


def _problem(symbol: Symbol) -> str:
    try:
        value: Any = importlib.import_module(symbol.module)
    except Exception as error:  # a broken installation raises whatever it likes
        return f"cannot be imported ({type(error).__name__}: {str(error).splitlines()[:1]})"
    for part in symbol.name.split("."):
        if not hasattr(value, part):
            return "missing"
        value = getattr(value, part)
    return _missing_parameters(value, symbol.parameters) if symbol.parameters else ""


def _missing_parameters(value: Callable[..., Any], names: Sequence[str]) -> str:
    try:
        parameters = inspect.signature(value).parameters
    except (TypeError, ValueError):
        return "its parameters cannot be read"
    kinds = {parameter.kind for parameter in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds and not set(names) & parameters.keys():
        return ""
    missing = [name for name in names if name not in parameters]
    if missing and inspect.Parameter.VAR_KEYWORD not in kinds:
        return f"takes no parameter {', '.join(missing)}"
    return ""


def version_problem(version: str | None) -> str:
    """Why this version has no engine flow that we know; empty where it has."""
    if version is None:
        return f"tensorrt_llm is not installed: {ADVICE}"
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        return f"tensorrt_llm has version {version!r}, expected 1.0 to 1.2: {ADVICE}"
    pair = int(found[1]), int(found[2])
    if pair > NEWEST:
        return (
            f"tensorrt_llm is {version}, and its engine flow ended with 1.2: {ADVICE}; for later "
            "ones see the custom module in docs/trtllm.md"
        )
    if pair < OLDEST:
        return f"tensorrt_llm is {version}, expected 1.0 to 1.2: {ADVICE}"
    return ""
