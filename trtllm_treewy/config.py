"""Model configuration: the architecture numbers of a checkpoint, under Hugging Face's own names."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

SUPPORTED_MODEL_TYPES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
SUPPORTED_ARCHITECTURES = (
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
)
SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")
LINEAR, FULL = "linear_attention", "full_attention"

# What transformers (5.x, Qwen3_5TextConfig and Qwen3_5MoeTextConfig) assumes for an absent key.
_DENSE_DEFAULTS = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_MOE_DEFAULTS = {
    **{key: value for key, value in _DENSE_DEFAULTS.items() if key != "intermediate_size"},
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_DEFAULT_RMS_NORM_EPS = 1e-6
_DEFAULT_ROPE_THETA = 10000.0
_DEFAULT_PARTIAL_ROTARY_FACTOR = 0.25
_DEFAULT_FULL_ATTENTION_INTERVAL = 4

# No model comes near these; what lies beyond would fail later, as an overflow or out of memory.
_MAX_SIZE = 2**31 - 1
_MAX_LAYERS = 2**16
# Digits of the longest integer that is read: Python may be set to refuse more (640 at the least).
_MAX_DIGITS = 640


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a Qwen3.5 text model, dense or mixture of experts.

    `model_type` is `qwen3_5_text` or `qwen3_5_moe_text`. Sizes count elements. `intermediate_size`
    is 0 for a mixture of experts; `num_experts`, `num_experts_per_tok`, `moe_intermediate_size`
    and `shared_expert_intermediate_size` are 0 for a dense model. `dtype` is the type the
    checkpoint asks to be run in, by torch's name.

    Raises:
        ValueError: numbers that contradict each other, all of them named in one message.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    rope_theta: float
    partial_rotary_factor: float
    layer_types: tuple[str, ...]
    linear_conv_kernel_dim: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    mtp_num_hidden_layers: int
    dtype: str
    bos_token_id: int | None
    eos_token_id: tuple[int, ...]
    pad_token_id: int | None

    def __post_init__(self) -> None:
        problems = _contradictions(self)
        if problems:
            raise ValueError(_joined("model config", problems))

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def key_dim(self) -> int:
        """Channels of q, and of k, in a GDN layer: HK * K."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Channels of v in a GDN layer: HV * V."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the causal conv: q, k and v, in that order."""
        return 2 * self.key_dim + self.value_dim

    @property
    def rotary_dim(self) -> int:
        """Leading channels of an attention head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @cached_property
    def linear_layers(self) -> tuple[int, ...]:
        """Indices of the GDN layers among all layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == LINEAR)

    @cached_property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the full attention layers among all layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """Reads a Hugging Face config, flat or with the text model under `text_config`.

        Absent keys take transformers' defaults and keys that do not concern the text model are
        ignored. An absent `dtype` reads as float32, which loses nothing.

        Raises:
            ValueError: what this code cannot run, naming `source` and everything that is wrong.
        """
        reader = _Reader(raw)
        model_type = reader.model_type()
        if model_type is None:  # no point in judging the numbers of another architecture
            raise ValueError(_joined(source, reader.problems))
        fields = reader.fields(model_type)
        reader.refuse_unsupported()
        if fields["num_experts"]:
            reader.refuse_unsupported_experts()
        if reader.problems:
            raise ValueError(_joined(source, reader.problems))
        try:
            return cls(model_type=model_type, **fields)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> ModelConfig:
        """Reads `config.json` of a Hugging Face model directory, or of an engine's.

        Raises:
            FileNotFoundError: the directory or its config.json does not exist.
            ValueError: see `from_dict`; also a file that is not JSON, and quantised weights.
        """
        root = Path(directory)
        if not root.is_dir():
            raise FileNotFoundError(f"model directory {str(root)!r} does not exist")
        path = root / "config.json"
        raw = read_json(path)
        from .trtllm_config import ARCHITECTURE, ENGINE_KEY, model_config

        if ENGINE_KEY in raw:  # an engine of trtllm-build
            return model_config(raw[ENGINE_KEY], f"{path}: {ENGINE_KEY}")
        if raw.get("architecture") == ARCHITECTURE:
            raise ValueError(
                f"{root} is a converted checkpoint, for TensorRT-LLM: build an engine of it with "
                "trtllm-build, or give the checkpoint that it was converted from"
            )
        config = cls.from_dict(raw, source=str(path))
        sidecar = root / "hf_quant_config.json"
        if sidecar.is_file():
            raise ValueError(_quantised(str(sidecar), read_json(sidecar)))
        return config


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not UTF-8 JSON, or its top level is not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"), parse_int=_parsed_int)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def shipped_configs() -> dict[str, Path]:
    """Configs of well-known models that come with this package, by name (no weights)."""
    folder = Path(__file__).parent / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


class _Reader:
    """Typed access to a raw config; problems are collected so that one error lists them all."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.top = raw
        self.problems: list[str] = []
        nested = raw.get("text_config")
        if nested is not None and not isinstance(nested, Mapping):
            self.problems.append(f"text_config: expected an object, got {_shown(nested)}")
            nested = None
        self.text: Mapping[str, Any] = raw if nested is None else nested

    def model_type(self) -> str | None:
        """The text model's type, or None (and a problem) where it is not supported."""
        named = [level["model_type"] for level in (self.top, self.text) if "model_type" in level]
        wrong = [name for name in named if name not in SUPPORTED_MODEL_TYPES]
        if wrong or not named:
            got = _shown(wrong[0]) if wrong else "no model_type"
            expected = ", ".join(SUPPORTED_MODEL_TYPES)
            self.problems.append(f"unsupported model_type: expected one of {expected}, got {got}")
            return None
        return str(named[-1]).removesuffix("_text") + "_text"

    def fields(self, model_type: str) -> dict[str, Any]:
        """Every field of `ModelConfig` but `model_type`."""
        defaults = _MOE_DEFAULTS if model_type == "qwen3_5_moe_text" else _DENSE_DEFAULTS
        sizes = {key: self.integer(key, default) for key, default in defaults.items()}
        optional = set(_DENSE_DEFAULTS) | set(_MOE_DEFAULTS)
        rope = self.rope()
        return {
            **dict.fromkeys(optional, 0),
            **sizes,
            "rms_norm_eps": self.number("rms_norm_eps", self.text, _DEFAULT_RMS_NORM_EPS),
            "tie_word_embeddings": self.tie_word_embeddings(),
            "attention_bias": self.boolean("attention_bias", self.text, False),
            "rope_theta": self.number("rope_theta", rope, _DEFAULT_ROPE_THETA),
            "partial_rotary_factor": self.number(
                "partial_rotary_factor", rope, _DEFAULT_PARTIAL_ROTARY_FACTOR
            ),
            "layer_types": self.layer_types(sizes["num_hidden_layers"]),
            "mtp_num_hidden_layers": self.mtp_layers(),
            "dtype": self.dtype(),
            "bos_token_id": self.token_id("bos_token_id"),
            "eos_token_id": self.eos_token_id(),
            "pad_token_id": self.token_id("pad_token_id"),
        }

    def refuse_unsupported(self) -> None:
        """Problems for features that change the arithmetic and that the model does not have."""
        for key in ("quantization_config", "compression_config", "quantization"):
            if settings := self.either(key):
                self.problems.append(_quantised(key, settings))
                break
        named = self.top.get("architectures") or SUPPORTED_ARCHITECTURES
        if not isinstance(named, list | tuple) or not any(
            name in SUPPORTED_ARCHITECTURES for name in named
        ):
            self.wrong("architectures", f"one of {', '.join(SUPPORTED_ARCHITECTURES)}", self.top)
        if self.text.get("hidden_act", "silu") not in ("silu", "swish"):
            self.wrong("hidden_act", "'silu'")
        if not self.text.get("attn_output_gate", True):
            self.wrong("attn_output_gate", "true (attention layers are gated)")
        if self.either("mtp_use_dedicated_embeddings", False):
            self.wrong("mtp_use_dedicated_embeddings", "false (the MTP module shares embeddings)")

    def refuse_unsupported_experts(self) -> None:
        """Problems for mixture-of-experts variants that Qwen3.5 does not have."""
        if not self.text.get("norm_topk_prob", True):
            self.wrong("norm_topk_prob", "true (router weights are renormalised)")
        if self.text.get("mlp_only_layers"):
            self.wrong("mlp_only_layers", "none (every layer has experts)")
        if self.text.get("decoder_sparse_step", 1) != 1:
            self.wrong("decoder_sparse_step", "1 (every layer has experts)")

    def levels(self) -> list[Mapping[str, Any]]:
        """Text level first, then the wrapper where there is one."""
        return [self.text] if self.text is self.top else [self.text, self.top]

    def either(self, key: str, default: Any = None) -> Any:
        """The value at the text level, else at the wrapper's; null counts as absent."""
        for level in self.levels():
            if level.get(key) is not None:
                return level[key]
        return default

    def wrong(self, key: str, expected: str, level: Mapping[str, Any] | None = None) -> None:
        value = self.either(key) if level is None else level.get(key)
        self.problems.append(f"{key}: expected {expected}, got {_shown(value)}")

    def integer(self, key: str, default: int) -> int:
        value = self.text.get(key, default)
        if not _is_int(value) or not 0 < value <= _most(key):
            self.wrong(key, _expected_size(key, value), self.text)
            return default
        return value

    def number(self, key: str, level: Mapping[str, Any], default: float) -> float:
        value = level.get(key, default)
        number = _as_float(value)
        if number is None or not math.isfinite(number) or number <= 0:
            self.wrong(key, "a positive number", level)
            return default
        return number

    def boolean(self, key: str, level: Mapping[str, Any], default: bool) -> bool:
        value = level.get(key, default)
        if not isinstance(value, bool):
            self.wrong(key, "true or false", level)
            return default
        return value

    def tie_word_embeddings(self) -> bool:
        key = "tie_word_embeddings"
        values = [self.boolean(key, level, False) for level in self.levels() if key in level]
        if len(set(values)) > 1:
            self.problems.append(
                f"{key}: text_config says {_shown(values[0])} and the top level "
                f"{_shown(values[1])}; expected one answer"
            )
        return values[0] if values else False

    def layer_types(self, num_layers: int) -> tuple[str, ...]:
        """Explicit `layer_types`, else every `full_attention_interval`-th layer is attention."""
        kinds = self.text.get("layer_types")
        if kinds is None:
            interval = self.integer("full_attention_interval", _DEFAULT_FULL_ATTENTION_INTERVAL)
            return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(num_layers))
        if not isinstance(kinds, list | tuple) or not all(isinstance(kind, str) for kind in kinds):
            self.wrong("layer_types", "a list of strings", self.text)
            return (FULL,) * num_layers
        return tuple(kinds)

    def rope(self) -> dict[str, Any]:
        """Rotary parameters under their new names, wherever the config keeps them."""
        old_or_new = self.text.get("rope_scaling") or self.text.get("rope_parameters") or {}
        if not isinstance(old_or_new, Mapping):
            self.problems.append(f"rope_parameters: expected an object, got {_shown(old_or_new)}")
            old_or_new = {}
        keys = ("rope_theta", "partial_rotary_factor")
        outer = {key: self.text[key] for key in keys if self.text.get(key) is not None}
        rope = {**outer, **old_or_new}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            self.problems.append(f"rope_type: expected 'default', got {_shown(kind)}")
        return rope

    def mtp_layers(self) -> int:
        value = self.either("mtp_num_hidden_layers", 0)
        if not _is_int(value) or value not in (0, 1):
            self.wrong("mtp_num_hidden_layers", "0 or 1")
            return 0
        return value

    def dtype(self) -> str:
        value = self.either("dtype", self.either("torch_dtype", "float32"))
        name = value.removeprefix("torch.") if isinstance(value, str) else value
        if name not in SUPPORTED_DTYPES:
            self.problems.append(
                f"dtype: expected one of {', '.join(SUPPORTED_DTYPES)}, got {_shown(value)}"
            )
            return "float32"
        return name

    def token_id(self, key: str) -> int | None:
        value = self.either(key)
        if value is not None and not (_is_int(value) and value >= 0):
            self.wrong(key, "a token id or null")
            return None
        return value

    def eos_token_id(self) -> tuple[int, ...]:
        value = self.either("eos_token_id", [])
        ids = tuple(value) if isinstance(value, list | tuple) else (value,)
        if not all(_is_int(item) and item >= 0 for item in ids):
            self.wrong("eos_token_id", "a token id, a list of them, or null")
            return ()
        return ids


def _contradictions(config: ModelConfig) -> list[str]:
    """What is wrong between the numbers of `config`."""
    sizes = _MOE_DEFAULTS if config.is_moe else _DENSE_DEFAULTS
    problems = [
        f"{key}: expected {_expected_size(key, size)}, got {_shown(size)}"
        for key in sizes
        if not 0 < (size := getattr(config, key)) <= _most(key)
    ]
    if problems:
        return problems
    for whole, part in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        count, divisor = getattr(config, whole), getattr(config, part)
        if count % divisor:
            problems.append(f"{whole}: expected a multiple of {part} ({divisor}), got {count}")
    if len(config.layer_types) != config.num_hidden_layers:
        problems.append(
            f"layer_types: expected {config.num_hidden_layers} entries (num_hidden_layers), "
            f"got {len(config.layer_types)}"
        )
    unknown = sorted(set(config.layer_types) - {LINEAR, FULL})
    if unknown:
        problems.append(f"layer_types: expected {LINEAR} or {FULL}, got {', '.join(unknown)}")
    if not 0 < config.partial_rotary_factor <= 1:
        problems.append(
            "partial_rotary_factor: expected a number above 0 and at most 1, got "
            f"{_shown(config.partial_rotary_factor)}"
        )
    elif config.rotary_dim % 2 or not 2 <= config.rotary_dim <= config.head_dim:
        problems.append(
            f"partial_rotary_factor: expected an even number of rotated channels between 2 and "
            f"head_dim ({config.head_dim}), got {config.partial_rotary_factor}, which gives "
            f"{config.rotary_dim}"
        )
    if config.num_experts_per_tok > config.num_experts:
        problems.append(
            f"num_experts_per_tok: expected at most num_experts ({config.num_experts}), "
            f"got {config.num_experts_per_tok}"
        )
    if any(not 0 <= token < config.vocab_size for token in config.eos_token_id):
        problems.append(
            f"eos_token_id: expected ids below vocab_size ({config.vocab_size}), "
            f"got {_shown(list(config.eos_token_id))}"
        )
    return problems


def _quantised(where: str, settings: Any) -> str:
    """Refusal of quantised weights, naming the method where it can be found."""
    method: Any = None
    if isinstance(settings, Mapping):
        inner = settings.get("quantization")
        for level in (settings, inner if isinstance(inner, Mapping) else {}):
            for key in ("quant_method", "quant_algo", "mode", "format"):
                method = method or level.get(key)
    return (
        f"{where}: quantised weights ({method or 'unknown method'}) are not supported; expected a "
        f"checkpoint in {', '.join(SUPPORTED_DTYPES)}"
    )


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _most(key: str) -> int:
    return _MAX_LAYERS if key == "num_hidden_layers" else _MAX_SIZE


def _expected_size(key: str, value: Any) -> str:
    too_large = _is_int(value) and value > 0
    return f"a positive integer up to {_most(key)}" if too_large else "a positive integer"


def _as_float(value: Any) -> float | None:
    """A number as a float, infinite where it is too large; None if it is no number."""
    if not _is_int(value) and not isinstance(value, float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _parsed_int(digits: str) -> int | str:
    """An integer of a JSON file; too long a one stays text, to be refused by the key's reader."""
    if len(digits) <= _MAX_DIGITS:
        return int(digits)
    return f"{digits[:12]}... ({len(digits)} characters)"


def _shown(value: Any) -> str:
    """`value` as JSON would write it, shortened: errors speak the file's language."""
    try:
        text = json.dumps(value, default=repr)
    except (ValueError, RecursionError):  # digits beyond Python's limit, or nested too deeply
        return f"something too large to show ({type(value).__name__})"
    return text if len(text) <= 80 else text[:77] + "..."


def _joined(source: str, problems: list[str]) -> str:
    if len(problems) == 1:
        return f"{source}: {problems[0]}"
    return "\n".join([f"{source}: {len(problems)} problems", *(f"  {p}" for p in problems)])
