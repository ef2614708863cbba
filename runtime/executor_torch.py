"""Runs the model with torch operators: the only file that turns batches into device work.

Every executor has this interface, so the scheduler, the drafter and acceptance do not know which
one runs:

    prefill(batch)          -> logits of each prompt's last token, hidden states
    verify(tree)            -> logits and hidden states of every node; committed state untouched
    commit(tree, accepted)  -> state, conv state and KV cache move to the accepted nodes
    draft_extend, draft     -> the MTP module over verified tokens, and over nodes of a draft
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_treewy.batch import PrefillBatch, TreeBatch
from trtllm_treewy.config import ModelConfig
from trtllm_treewy.model import AttentionStep, Qwen3_5ForCausalLM

from .acceptance import Acceptance
from .kv_cache import KvCache
from .state_manager import StateManager


@dataclass(frozen=True)
class StepOutput:
    """`logits` [..., vocab] float32 and `hidden` [..., hidden], final-normed."""

    logits: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class ExecutorLimits:
    """What is allocated once, before the first request.

    Attributes:
        max_batch_size: sequences held at once; each has a state slot.
        max_seq_len: tokens of a sequence, prompt and output.
        max_nodes: nodes of a draft tree, root included.
        scratch_rows: cache rows of a sequence beyond its length, for nodes that are not verified
            yet: those of the tree, or of a draft in progress, whichever are more.
        num_blocks, tokens_per_block: the KV cache's pages.
    """

    max_batch_size: int
    max_seq_len: int
    max_nodes: int
    scratch_rows: int
    num_blocks: int
    tokens_per_block: int


def make_state_manager(
    config: ModelConfig,
    limits: ExecutorLimits,
    *,
    device: torch.device,
    activation_dtype: torch.dtype,
    state_dtype: torch.dtype,
    commit: str,
    history: int | None,
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
    """Owns the model, the state pools and the KV cache, on one device."""

    def __init__(
        self,
        model: Qwen3_5ForCausalLM,
        limits: ExecutorLimits,
        *,
        state_dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        state_commit: str = "reconstruct",
        deferred_history: int | None = None,
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
        )
        self.kv_cache = make_kv_cache(
            model.config, limits, device=self.device, dtype=kv_dtype or weight.dtype
        )
        # The MTP module's layers follow the model's in one cache: one block table serves both.
        self._first_mtp_layer = len(model.config.attention_layers)

    def try_allocate(self, slot: int, num_tokens: int) -> bool:
        """Takes a slot for a sequence of up to `num_tokens`; False if the KV cache is full."""
        if not self.kv_cache.try_reserve(slot, num_tokens + self.limits.scratch_rows):
            return False
        self.state.allocate(slot)
        return True

    def free(self, slot: int) -> None:
        """Gives the slot and its cache blocks back."""
        self.kv_cache.free(slot)
        self.state.free(slot)

    @torch.inference_mode()
    def prefill(self, batch: PrefillBatch) -> StepOutput:
        """Runs prompt tokens into state and cache.

        Returns:
            `logits` [batch, vocab] of each sequence's last token here, `hidden` [T, hidden].
        """
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
        """Scores every node of every tree; `logits` [batch, N, vocab], `hidden` [batch, N, H]."""
        hidden = self.model(
            tree.token_ids,
            tree.positions,
            self.state.verify(tree),
            self.kv_cache.verify(tree),
        )
        return StepOutput(self.model.logits(hidden), hidden)

    @torch.inference_mode()
    def commit(self, tree: TreeBatch, acceptance: Acceptance) -> None:
        """Moves each sequence to its accepted node; rows that accept nothing stay as they are."""
        self.state.commit(acceptance.accepted)
        self.kv_cache.compact(tree.slot, acceptance.path, tree.context_lens)

    def discard(self) -> None:
        """Forgets a verified tree that was not committed, if there is one."""
        self.state.discard()

    @torch.inference_mode()
    def draft_extend(self, batch: PrefillBatch, hidden: Tensor) -> StepOutput:
        """Enters verified tokens into the MTP module's cache.

        Args:
            batch: entry t of a sequence carries token t+1; `context_lens` counts entries.
            hidden: [T, hidden], the model's hidden state of token t.

        Returns:
            Logits [batch, vocab] and hidden [batch, hidden] of each sequence's last entry.
        """
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
        """Runs the MTP module over draft nodes, written provisionally after the verified entries.

        Args:
            token_ids, positions: int64 [batch, W].
            hidden: [batch, W, hidden], the parents' MTP outputs.
            slot: int32 [batch].
            write_offsets: int64 [batch, W], the cache row of each node in its sequence.
            mask: bool [batch, W, S], the rows each node sees, itself included.
        """
        step = self.kv_cache.step(slot, write_offsets, mask)
        attention = _LayersFrom(step, self._first_mtp_layer)
        out = self.model.draft(token_ids, hidden, positions, attention)
        return StepOutput(self.model.logits(out), out)
