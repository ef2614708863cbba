"""The config.json of a TensorRT-LLM checkpoint, and of an engine built from one, of our models.

Written by `export/trtllm/convert.py`, read by the model class and by the runtime. What the library
itself reads stands under the library's names; the object `treewy` has our `ModelConfig`, field by
field, so that nothing has to be guessed back from theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from .config import LINEAR, SUPPORTED_DTYPES, ModelConfig

ARCHITECTURE = "TreewyQwen3_5ForCausalLM"
KEY = "treewy"
FORMAT = 1
# Where an engine's config.json keeps the checkpoint's.
ENGINE_KEY = "pretrained_config"
# The MTP module with embedding and head, whole and as the Hugging Face checkpoint names them.
DRAFT_FILE = "draft.safetensors"
# Our layer types in the library's words: its C++ runtime takes any other for attention.
RECURRENT, ATTENTION = "recurrent", "attention"
STATE_DTYPE = "float32"


def checkpoint_config(
    config: ModelConfig, dtype: str, ranks: int, max_position_embeddings: int | None = None
) -> dict[str, Any]:
    """The config.json of a checkpoint.

    Args:
        config: the whole model's.
        dtype: of weights and activations, by torch's name.
        ranks: of tensor parallelism.
        max_position_embeddings: positions that rotary tables are made for; None: the model's.
    """
    positions = max_position_embeddings or config.max_position_embeddings
    return {
        "architecture": ARCHITECTURE,
        "dtype": dtype,
        "logits_dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_size": config.head_dim,
        "intermediate_size": config.intermediate_size or config.moe_intermediate_size,
        "hidden_act": "swiglu" if config.is_moe else "silu",
        "norm_epsilon": config.rms_norm_eps,
        "max_position_embeddings": positions,
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": config.rope_theta,
        "rotary_pct": config.partial_rotary_factor,
        "rotary_dim": config.rotary_dim,
        "rotary_embedding_dim": config.rotary_dim,
        "rotary_scaling": None,
        "qk_layernorm": True,
        "attn_bias": config.attention_bias,
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "mapping": {
            "world_size": ranks,
            "tp_size": ranks,
            "pp_size": 1,
            "moe_tp_size": ranks,
            "moe_ep_size": 1,
        },
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        **_recurrent(config),
        **_experts(config),
        KEY: {"format": FORMAT, "model_config": asdict(config)},
    }


def _recurrent(config: ModelConfig) -> dict[str, Any]:
    """The library's names for recurrent layers; its state is [heads, state_size, head_size]."""
    kinds = [RECURRENT if kind == LINEAR else ATTENTION for kind in config.layer_types]
    return {
        "layer_types": kinds,
        "conv_kernel": config.linear_conv_kernel_dim,
        "rnn_conv_dim_size": config.conv_dim,
        "rnn_hidden_size": config.linear_num_value_heads * config.linear_key_head_dim,
        "rnn_head_size": config.linear_key_head_dim,
        "state_size": config.linear_value_head_dim,
        "state_dtype": STATE_DTYPE,
    }


def _experts(config: ModelConfig) -> dict[str, Any]:
    if not config.is_moe:
        return {}
    return {
        "moe": {
            "num_experts": config.num_experts,
            "top_k": config.num_experts_per_tok,
            "shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        },
        "moe_intermediate_size": config.moe_intermediate_size,
    }


def model_config(raw: Any, source: str) -> ModelConfig:
    """Our `ModelConfig` of a checkpoint's config.json, or of an engine's `pretrained_config`.

    Args:
        raw: the object.
        source: what to call it in errors.

    Raises:
        ValueError: it is of another model or another version of this package.
    """
    if not isinstance(raw, Mapping):
        raise ValueError(f"{source}: expected an object, got {raw!r}")
    architecture = raw.get("architecture")
    if architecture != ARCHITECTURE:
        raise ValueError(f"{source}: architecture is {architecture!r}, expected {ARCHITECTURE}")
    ours = raw.get(KEY)
    if not isinstance(ours, Mapping) or ours.get("format") != FORMAT:
        found = ours.get("format") if isinstance(ours, Mapping) else ours
        raise ValueError(
            f"{source}: {KEY} has format {found!r}, this version reads {FORMAT}: convert it again"
        )
    values = ours.get("model_config")
    known = {field.name for field in fields(ModelConfig)}
    if not isinstance(values, Mapping) or values.keys() != known:
        odd = sorted(known ^ (values.keys() if isinstance(values, Mapping) else set()))
        raise ValueError(f"{source}: {KEY}.model_config: missing or unknown: {', '.join(odd)}")
    for field in fields(ModelConfig):
        if not _fits(str(field.type), values[field.name]):
            raise ValueError(
                f"{source}: {KEY}.model_config.{field.name} must be {field.type}, got "
                f"{values[field.name]!r}: convert it again"
            )
    lists = {name: tuple(values[name]) for name in ("layer_types", "eos_token_id")}
    try:
        return ModelConfig(**{**values, **lists})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: {error}") from None


def _fits(kind: str, value: Any) -> bool:
    """Whether a value of JSON can be that of a field of `ModelConfig` with this annotation."""
    if kind.startswith("tuple["):
        item = kind.removeprefix("tuple[").partition(",")[0]
        return isinstance(value, list | tuple) and all(_fits(item, x) for x in value)
    if value is None:
        return kind.endswith("None")
    if isinstance(value, bool):
        return kind == "bool"
    types: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}
    return isinstance(value, types.get(kind.partition(" ")[0], ()))


def checkpoint_ranks(raw: Mapping[str, Any], source: str) -> int:
    """The tensor parallel size of a config.json.

    Raises:
        ValueError: the mapping has anything but tensor parallelism, a type we do not run, or
            quantised weights.
    """
    mapping = raw.get("mapping")
    ranks = mapping.get("tp_size") if isinstance(mapping, Mapping) else None
    if not isinstance(mapping, Mapping) or type(ranks) is not int or ranks < 1:
        raise ValueError(f"{source}: expected a mapping with tp_size, got {mapping!r}")
    if mapping.get("world_size") != ranks or mapping.get("moe_ep_size", 1) not in (1, -1):
        raise ValueError(
            f"{source}: expected tensor parallelism alone (world_size = tp_size, moe_ep_size 1), "
            f"got {dict(mapping)}"
        )
    if raw.get("dtype") not in SUPPORTED_DTYPES:
        raise ValueError(
            f"{source}: dtype must be one of {', '.join(SUPPORTED_DTYPES)}, got {raw.get('dtype')}"
        )
    quantization = raw.get("quantization") or {}
    if not isinstance(quantization, Mapping):
        raise ValueError(f"{source}: quantization must be an object, got {quantization!r}")
    quantised = quantization.get("quant_algo")
    if quantised is not None:
        raise ValueError(f"{source}: quant_algo is {quantised}, expected none")
    return ranks
