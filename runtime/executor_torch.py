"""The executor that runs the model with torch operators, on a CPU or a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_treewy.batch import PrefillBatch, TreeBatch
from trtllm_treewy.config import ModelConfig
from trtllm_treewy.model import AttentionStep, Qwen3_5ForCausalLM

from .acceptance import Acceptance
from .commit_policy import PSEUDO_VALUES
from .executor import ExecutorLimits, StepOutput
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
        stash=stash,
        stash_dtype=stash_dtype,
        num_checkpoints=limits.num_checkpoints,
    )


def make_kv_cache(
    config: ModelConfig, limits: ExecutorLimits, *, device: torch.device, dtype: torch.dtype
) -> KvCache:
    """KV cache of the attention layers and of the MTP module's, for `limits`."""
    return KvCache(
        num_layers=len(config.attention_layers) + config.mtp_num_hidden_layers,
        num_blocks=limits.num_blocks,
        block_size=limits.tokens_per_block,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
        num_slots=limits.max_batch_size,
        max_seq_len=limits.max_seq_len + limits.scratch_rows,
    )


class _LayersFrom:
    """An attention step whose layer 0 is a later layer of the cache (the MTP module's)."""

    def __init__(self, step: AttentionStep, first: int) -> None:
        self._step, self._first = step, first

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return self._step.attend(self._first + layer, q, k, v, scale)


class TorchExecutor:
    """The `Executor` over torch operators: owns the model, the state pools and the KV cache."""

    def __init__(
        self,
        model: Qwen3_5ForCausalLM,
        limits: ExecutorLimits,
        *,
        state_dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        state_commit: str = "reconstruct",
        deferred_history: int | None = None,
        stash: str = PSEUDO_VALUES,
        stash_dtype: torch.dtype | None = None,
    ) -> None:
        weight = model.model.embed_tokens.weight
        self.model = model.eval()
        self.limits = limits
        self.device = weight.device
        self.state = make_state_manager(
            model.config,
            limits,
            device=self.device,
            activation_dtype=weight.dtype,
            state_dtype=state_dtype,
            commit=state_commit,
            history=deferred_history,
            stash=stash,
            stash_dtype=stash_dtype,
        )
        self.kv_cache = make_kv_cache(
            model.config, limits, device=self.device, dtype=kv_dtype or weight.dtype
        )
        # The MTP module's layers follow the model's in one cache: one block table serves both.
        self._first_mtp_layer = len(model.config.attention_layers)

        # Of the last token before each checkpoint: the MTP module's next entry pairs it with the
        # token that follows, which differs from sequence to sequence.
        self._checkpoint_hidden = torch.zeros(
            limits.num_checkpoints, weight.shape[1], dtype=weight.dtype, device=self.device
        )

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

    @torch.inference_mode()
    def prefill(self, batch: PrefillBatch) -> StepOutput:
        hidden = self.model(
            batch.token_ids,
            batch.positions,
            self.state.prefill(batch),
            self.kv_cache.prefill(batch),
        )
        last = batch.cu_seqlens[1:].long() - 1
        return StepOutput(self.model.logits(hidden[last]), hidden)

    @torch.inference_mode()
    def verify(self, tree: TreeBatch) -> StepOutput:
        hidden = self.model(
            tree.token_ids,
            tree.positions,
            self.state.verify(tree),
            self.kv_cache.verify(tree),
        )
        return StepOutput(self.model.logits(hidden), hidden)

    @torch.inference_mode()
    def commit(self, tree: TreeBatch, acceptance: Acceptance) -> None:
        self.state.commit(acceptance.accepted)
        self.kv_cache.compact(tree.slot, acceptance.path, tree.context_lens)

    def discard(self) -> None:
        self.state.discard()

    @torch.inference_mode()
    def draft_extend(self, batch: PrefillBatch, hidden: Tensor) -> StepOutput:
        attention = _LayersFrom(self.kv_cache.prefill(batch), self._first_mtp_layer)
        out = self.model.draft(batch.token_ids, hidden, batch.positions, attention)
        last = out[batch.cu_seqlens[1:].long() - 1]
        return StepOutput(self.model.logits(last), last)

    @torch.inference_mode()
    def draft(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        slot: Tensor,
        write_offsets: Tensor,
        mask: Tensor,
    ) -> StepOutput:
        step = self.kv_cache.step(slot, write_offsets, mask)
        attention = _LayersFrom(step, self._first_mtp_layer)
        out = self.model.draft(token_ids, hidden, positions, attention)
        return StepOutput(self.model.logits(out), out)
