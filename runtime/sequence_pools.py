"""What an executor holds for its sequences: states, KV cache and checkpoints, by slot."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trtllm_treewy.config import ModelConfig

from .executor import ExecutorLimits
from .kv_cache import KvCache
from .prefix_cache import CachedPrefix, Pages
from .state_manager import StateManager


def make_state_manager(
    config: ModelConfig,
    limits: ExecutorLimits,
    *,
    device: torch.device,
    activation_dtype: torch.dtype,
    state_dtype: torch.dtype,
    commit: str,
    history: int | None,
    stash: str,
    stash_dtype: torch.dtype | None,
    max_path: int | None = None,
) -> StateManager:
    """State pools and stash for `limits`."""
    return StateManager(
        config,
        num_slots=limits.max_batch_size,
        max_batch_size=limits.max_batch_size,
        max_nodes=limits.max_nodes,
        state_dtype=state_dtype,
        activation_dtype=activation_dtype,
        device=device,
        commit=commit,
        history_capacity=history,
        max_path=max_path,
        stash=stash,
        stash_dtype=stash_dtype,
        num_checkpoints=limits.num_checkpoints,
    )


def make_kv_cache(
    config: ModelConfig,
    limits: ExecutorLimits,
    *,
    device: torch.device,
    dtype: torch.dtype,
    num_layers: int | None = None,
) -> KvCache:
    """KV cache for `limits`: of `num_layers`, or of the attention layers and the MTP module's."""
    if num_layers is None:
        num_layers = len(config.attention_layers) + config.mtp_num_hidden_layers
    return KvCache(
        num_layers=num_layers,
        num_blocks=limits.num_blocks,
        block_size=limits.tokens_per_block,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
        num_slots=limits.max_batch_size,
        max_seq_len=limits.max_seq_len + limits.scratch_rows,
    )


class SequencePools:
    """The part of an `Executor` that does not depend on what runs the model.

    Args:
        config: the model's.
        limits: sizes of the pools.
        max_nodes: nodes that the state manager's stash is made for; those of `limits` unless given.
        kv_layers: layers of the KV cache; all of the model's and the MTP module's unless given.
        device, activation_dtype, state_dtype, kv_dtype: place and types of the pools.
        commit, history, max_path, stash, stash_dtype: see `StateManager`.
    """

    def __init__(
        self,
        config: ModelConfig,
        limits: ExecutorLimits,
        *,
        device: torch.device,
        activation_dtype: torch.dtype,
        state_dtype: torch.dtype,
        kv_dtype: torch.dtype,
        commit: str,
        history: int | None,
        stash: str,
        stash_dtype: torch.dtype | None,
        max_path: int | None = None,
        max_nodes: int | None = None,
        kv_layers: int | None = None,
    ) -> None:
        self.limits = limits
        self.device = device
        self.state = make_state_manager(
            config,
            limits if max_nodes is None else replace(limits, max_nodes=max_nodes),
            device=device,
            activation_dtype=activation_dtype,
            state_dtype=state_dtype,
            commit=commit,
            history=history,
            max_path=max_path,
            stash=stash,
            stash_dtype=stash_dtype,
        )
        self.kv_cache = make_kv_cache(
            config, limits, device=device, dtype=kv_dtype, num_layers=kv_layers
        )
        # Of the last token before each checkpoint: the MTP module's next entry pairs it with the
        # token that follows, which differs from sequence to sequence.
        self._checkpoint_hidden = torch.zeros(
            limits.num_checkpoints, config.hidden_size, dtype=activation_dtype, device=device
        )

    def close(self) -> None:
        """Nothing runs beside it."""

    @property
    def pages(self) -> Pages:
        return self.kv_cache

    def try_allocate(self, slot: int, num_tokens: int, prefix: CachedPrefix | None = None) -> bool:
        rows = num_tokens + self.limits.scratch_rows
        blocks = prefix.blocks if prefix is not None else ()
        if not self.kv_cache.try_share(slot, blocks, rows):
            return False
        self.state.allocate(slot)
        if prefix is not None:
            self.state.restore(slot, prefix.checkpoint)
        return True

    def try_extend(self, slot: int, num_tokens: int) -> bool:
        return self.kv_cache.try_reserve(slot, num_tokens + self.limits.scratch_rows)

    @torch.inference_mode()
    def save_checkpoint(self, slot: int, checkpoint: int, hidden: Tensor) -> None:
        self.state.save(slot, checkpoint)
        self._checkpoint_hidden[checkpoint] = hidden

    def checkpoint_hidden(self, checkpoint: int) -> Tensor:
        return self._checkpoint_hidden[checkpoint]

    def free(self, slot: int) -> None:
        self.kv_cache.free(slot)
        self.state.free(slot)
