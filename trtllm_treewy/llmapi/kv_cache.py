"""The caches: the KV cache, the recurrent state, and the memory that they may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .fields import check_bool, check_int, check_one_of, construct, settings_of

OWNER = "KvCacheConfig"


@dataclass(frozen=True, kw_only=True)
class KvCacheConfig:
    """The caches: the paged KV cache of the attention layers, and the recurrent state's type.

    Attributes:
        max_tokens: tokens the KV cache holds over all sequences; None sizes it for
            `max_batch_size` sequences of the longest length, as far as memory allows.
        free_gpu_memory_fraction: part of the device's free memory (on the CPU, of the machine's)
            that weights, states, caches and steps may take together; 0.9 unless given.
        memory_bytes: the same in bytes; the smaller of both holds.
        enable_block_reuse: prefix caching: a prompt that starts like an earlier one takes its KV
            blocks and a saved recurrent state over, and computes the rest.
        max_checkpoints: recurrent states that the prefix cache keeps; by default as many as memory
            allows, up to two for each sequence of the batch.
        checkpoint_interval: tokens between the states that are kept of a long sequence, a multiple
            of `tokens_per_block` (1024 unless given). One more is kept at the last block boundary
            of every prompt, and one where a prompt leaves what it shares with others.
        tokens_per_block: tokens in one block of the KV cache.
        dtype: type of the KV cache: "auto" (the model's), "float32", "bfloat16" or "float16".
        mamba_ssm_cache_dtype: type of the recurrent state, under TensorRT-LLM's name: "auto" or
            "float32", or "bfloat16" for half the memory at less precision.

    Raises:
        ValueError: a value out of range or not supported in this version.
    """

    max_tokens: int | None = None
    free_gpu_memory_fraction: float | None = None
    memory_bytes: int | None = None
    enable_block_reuse: bool = False
    max_checkpoints: int | None = None
    checkpoint_interval: int | None = None
    tokens_per_block: int = 32
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    mamba_ssm_cache_dtype: Literal["auto", "float32", "bfloat16"] = "auto"

    def __post_init__(self) -> None:
        """Checks everything."""
        if self.max_tokens is not None:
            check_int(OWNER, "max_tokens", self.max_tokens, 1)
        check_int(OWNER, "tokens_per_block", self.tokens_per_block, 1)
        fraction = self.free_gpu_memory_fraction
        if fraction is not None and not (
            isinstance(fraction, (int, float))
            and not isinstance(fraction, bool)
            and 0 < fraction <= 1
        ):
            raise ValueError(
                f"{OWNER}: free_gpu_memory_fraction must be above 0 and at most 1, got {fraction!r}"
            )
        if self.memory_bytes is not None:
            check_int(OWNER, "memory_bytes", self.memory_bytes, 1)
        self._check_block_reuse()
        check_one_of(OWNER, "dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        states = ("auto", "float32", "bfloat16")
        check_one_of(OWNER, "mamba_ssm_cache_dtype", self.mamba_ssm_cache_dtype, states)

    def _check_block_reuse(self) -> None:
        check_bool(OWNER, "enable_block_reuse", self.enable_block_reuse)
        for name in ("max_checkpoints", "checkpoint_interval"):
            value = getattr(self, name)
            if value is None:
                continue
            check_int(OWNER, name, value, 1)
            if not self.enable_block_reuse:
                raise ValueError(f"{OWNER}: {name} needs enable_block_reuse=True")
        interval = self.checkpoint_interval
        if interval is not None and interval % self.tokens_per_block:
            raise ValueError(
                f"{OWNER}: checkpoint_interval must be a multiple of tokens_per_block "
                f"({self.tokens_per_block}), got {interval}"
            )

    @property
    def state_dtype(self) -> Literal["float32", "bfloat16"]:
        """Type of the recurrent state: float32 unless bfloat16 was asked for."""
        return "bfloat16" if self.mamba_ssm_cache_dtype == "bfloat16" else "float32"


def kv_cache_config_from(obj: KvCacheConfig | Mapping[str, Any] | None) -> KvCacheConfig:
    """What `LLM(kv_cache_config=...)` accepts, as the class; None means the defaults.

    Raises:
        ValueError: an unknown key or a bad value.
    """
    if obj is None:
        return KvCacheConfig()
    if isinstance(obj, KvCacheConfig):
        return obj
    return construct(
        KvCacheConfig, "kv_cache_config", settings_of(obj, "kv_cache_config", KvCacheConfig)
    )
