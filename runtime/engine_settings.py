"""What an engine is made by: model, speculation, caches and limits, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trtllm_treewy.config import ModelConfig
from trtllm_treewy.llmapi import CudaGraphConfig, KvCacheConfig, MTPDecodingConfig

from .commit_policy import choose_stash
from .memory_budget import MAX_AUTO_BATCH

# Host-side tables have a row for each slot.
MAX_BATCH_SIZE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of an engine, each valid by itself; `check` says whether they go together.

    Attributes:
        config: the model's, of the whole.
        speculation, cache: see `LLM`.
        dtype, device: activation type, and place of the model.
        max_batch_size: sequences decoded together, None for as many of the longest length as memory
            holds.
        max_auto_batch_size: and no more than so many then.
        max_seq_len, max_num_tokens: see `LLM`.
        graphs: which steps are captured, None for none; those of the torch executor alone can be.
    """

    config: ModelConfig
    speculation: MTPDecodingConfig
    cache: KvCacheConfig
    dtype: torch.dtype
    device: torch.device
    max_batch_size: int | None
    max_seq_len: int
    max_num_tokens: int
    max_auto_batch_size: int = MAX_AUTO_BATCH
    graphs: CudaGraphConfig | None = None

    def check(self) -> None:
        """Raises ValueError for limits that make no sense, or what the model cannot do."""
        self._check_speculation()
        self._check_limits()
        if self.stash_dtype == torch.bfloat16 and self.state_dtype != torch.bfloat16:
            raise ValueError(
                "speculative_config.stash_dtype='bfloat16' needs a bfloat16 state "
                f"(kv_cache_config.mamba_ssm_cache_dtype), which is {self.cache.state_dtype}"
            )

    @property
    def largest_auto_batch(self) -> int:
        """Most sequences at once where memory is no limit, and none were asked for."""
        # Every sequence has a token in each step.
        return min(self.max_auto_batch_size, self.max_num_tokens)

    @property
    def largest_batch(self) -> int:
        """Most sequences at once: as asked for, or where memory is no limit."""
        return self.max_batch_size or self.largest_auto_batch

    @property
    def state_dtype(self) -> torch.dtype:
        """Type of the recurrent state."""
        return _torch_dtype(self.cache.state_dtype)

    @property
    def kv_dtype(self) -> torch.dtype:
        """Type of the KV cache."""
        return self.dtype if self.cache.dtype == "auto" else _torch_dtype(self.cache.dtype)

    @property
    def stash(self) -> str:
        """What commits work from: see `commit_policy.make_policy`."""
        return choose_stash(self.speculation.stash)

    @property
    def stash_dtype(self) -> torch.dtype:
        """Type of the pseudo-values where they are kept."""
        return _torch_dtype(self.speculation.stash_dtype)

    @property
    def history(self) -> int | None:
        """Tokens of a slot's history, at least a tree's longest path; None where not deferred."""
        if self.speculation.state_commit != "deferred":
            return None
        return max(self.speculation.deferred_history, self.speculation.max_depth + 1)

    def _check_speculation(self) -> None:
        speculation, config = self.speculation, self.config
        if not speculation.enabled:
            return
        if not config.mtp_num_hidden_layers:
            raise ValueError(
                "speculative_config asks for MTP drafts, but the model has no MTP module "
                "(mtp_num_hidden_layers is 0)"
            )
        # A dynamic tree considers as many candidates as there are; a fixed one must be filled.
        if speculation.kind == "static" and speculation.top_k > config.vocab_size:
            raise ValueError(
                f"speculative_config drafts {speculation.top_k} tokens below a node, the "
                f"vocabulary has {config.vocab_size}"
            )

    def _check_limits(self) -> None:
        batch = self.max_batch_size
        check_limit("max_batch_size", 1 if batch is None else batch)
        check_limit("max_auto_batch_size", self.max_auto_batch_size)
        check_limit("max_seq_len", self.max_seq_len)
        check_limit("max_num_tokens", self.max_num_tokens)
        if batch is not None and batch > MAX_BATCH_SIZE:
            raise ValueError(f"max_batch_size is {batch}, expected at most {MAX_BATCH_SIZE}")
        if batch is not None and self.max_num_tokens < batch:
            raise ValueError(
                f"max_num_tokens is {self.max_num_tokens}, expected at least max_batch_size "
                f"({batch}): every sequence has one token a step"
            )
        if self.max_seq_len > self.config.max_position_embeddings:
            raise ValueError(
                f"max_seq_len is {self.max_seq_len}, expected at most the model's "
                f"max_position_embeddings ({self.config.max_position_embeddings})"
            )


def check_limit(name: str, value: Any) -> None:
    """Raises ValueError unless a limit is an integer above 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}")


def _torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
