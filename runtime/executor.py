"""What an executor is: the device work of a step behind one interface.

The scheduler, the drafter, acceptance and the engine know this interface, and not which executor
runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trtllm_treewy.batch import PrefillBatch, TreeBatch

from .acceptance import Acceptance
from .prefix_cache import CachedPrefix, Pages


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
        num_checkpoints: states that the prefix cache can keep; 0 without it.
    """

    max_batch_size: int
    max_seq_len: int
    max_nodes: int
    scratch_rows: int
    num_blocks: int
    tokens_per_block: int
    num_checkpoints: int = 0


@dataclass(frozen=True)
class ExecutorSource:
    """An executor that is yet to be made, and what it takes beside the pools.

    Attributes:
        make: makes it, once its limits are known.
        weights, steps: bytes of its weights, and of all that its steps need, for given limits.
        max_batch_size: the most sequences that it takes.
    """

    make: Callable[[ExecutorLimits], Executor]
    weights: Callable[[ExecutorLimits], int]
    steps: Callable[[ExecutorLimits], int]
    max_batch_size: int


class Executor(Protocol):
    """Owns a model, its state pools and its KV cache on one device."""

    limits: ExecutorLimits
    device: torch.device

    @property
    def pages(self) -> Pages:
        """The KV cache's blocks: how many are free, and who holds them."""
        ...

    def try_allocate(self, slot: int, num_tokens: int, prefix: CachedPrefix | None = None) -> bool:
        """Takes a slot, and rows for `num_tokens` and a tree; False if the KV cache is full.

        With `prefix` the sequence starts from its rows and its state, else from nothing.
        """
        ...

    def try_extend(self, slot: int, num_tokens: int) -> bool:
        """Rows for `num_tokens` and a tree in a slot that is taken; False if the cache is full."""
        ...

    def save_checkpoint(self, slot: int, checkpoint: int, hidden: Tensor) -> None:
        """Keeps the slot's state, and `hidden` [hidden], the model's after its last token."""
        ...

    def checkpoint_hidden(self, checkpoint: int) -> Tensor:
        """The hidden state [hidden] that was saved with a checkpoint."""
        ...

    def free(self, slot: int) -> None:
        """Gives the slot and its cache blocks back."""
        ...

    def prefill(self, batch: PrefillBatch) -> StepOutput:
        """Runs prompt tokens into state and cache.

        Returns:
            `logits` [batch, vocab] of each sequence's last token here, `hidden` [T, hidden].
        """
        ...

    def verify(self, tree: TreeBatch) -> StepOutput:
        """Scores every node of every tree; committed state stays as it is.

        Returns:
            `logits` [batch, N, vocab] and `hidden` [batch, N, hidden].
        """
        ...

    def commit(self, tree: TreeBatch, acceptance: Acceptance) -> None:
        """Moves each sequence to its accepted node; rows that accept nothing stay as they are."""
        ...

    def discard(self) -> None:
        """Forgets a verified tree that was not committed, if there is one."""
        ...

    def close(self) -> None:
        """Ends what runs beside it; safe to call twice. No other call may follow."""
        ...

    def draft_extend(self, batch: PrefillBatch, hidden: Tensor) -> StepOutput:
        """Enters verified tokens into the MTP module's cache.

        Args:
            batch: entry t of a sequence carries token t+1; `context_lens` counts entries.
            hidden: [T, hidden], the model's hidden state of token t.

        Returns:
            Logits [batch, vocab] and hidden [batch, hidden] of each sequence's last entry.
        """
        ...

    def draft_enter(self, batch: PrefillBatch, hidden: Tensor) -> None:
        """Enters them as `draft_extend` does, for later: nothing is drafted from the last ones."""
        ...

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
            write_offsets: int64 [batch, W], the cache row of each node in its sequence, -1 for
                none.
            mask: bool [batch, W, S], the rows each node sees, itself included.

        Returns:
            `logits` [batch, W, vocab] and `hidden` [batch, W, hidden].
        """
        ...
