"""The two kinds of batch a model step runs over: prompts to prefill and trees to verify."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from . import topology


def upload(x: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`, by a copy that waits for nothing."""
    if device.type != "cuda":
        return x.to(device)
    # The allocator of pinned memory keeps it until the copy is done.
    return x.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class PrefillBatch:
    """Prompt tokens (or a chunk of them) of several sequences, packed without padding.

    Attributes:
        token_ids: int64 [T], the sequences one after the other.
        cu_seqlens: int32 [batch + 1], where each sequence starts in `token_ids`.
        slot: int32 [batch], the state slot of each sequence; -1 rows are skipped.
        context_lens: int32 [batch], tokens of the sequence that are in the caches already.
        seq_lens_host, context_lens_host: the same as Python ints, so that nothing synchronises.
        slots_host: `slot` as Python ints, where they are known.
    """

    token_ids: Tensor
    cu_seqlens: Tensor
    slot: Tensor
    context_lens: Tensor
    seq_lens_host: tuple[int, ...]
    context_lens_host: tuple[int, ...]
    slots_host: tuple[int, ...] | None = None

    @classmethod
    def pack(
        cls,
        token_ids: Sequence[int],
        lengths: Sequence[int],
        slots: Sequence[int],
        contexts: Sequence[int],
        device: torch.device,
    ) -> PrefillBatch:
        """The batch of sequences given as Python ints, their tokens one after the other."""
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(
            token_ids=upload(torch.tensor(token_ids, dtype=torch.int64), device),
            cu_seqlens=upload(starts, device),
            slot=upload(torch.tensor(slots, dtype=torch.int32), device),
            context_lens=upload(torch.tensor(contexts, dtype=torch.int32), device),
            seq_lens_host=tuple(lengths),
            context_lens_host=tuple(contexts),
            slots_host=tuple(slots),
        )

    @property
    def slots(self) -> list[int]:
        """Slots on the host; waits for the device where they are not known there."""
        return self.slot.tolist() if self.slots_host is None else list(self.slots_host)

    @cached_property
    def positions(self) -> Tensor:
        """Rotary position of each token, int64 [T]."""
        spans = [
            torch.arange(context, context + length)
            for context, length in zip(self.context_lens_host, self.seq_lens_host, strict=True)
        ]
        return upload(torch.cat(spans), self.token_ids.device)


@dataclass(frozen=True)
class TreeBatch:
    """One draft tree for each running sequence; the root is a chosen token not yet in the state.

    Attributes:
        token_ids: int64 [batch, N].
        parents: int32 [batch, N], topological order, root first with parent -1.
        num_nodes: int32 [batch]; nodes at or beyond it are padding.
        slot: int32 [batch], -1 for a padded row.
        context_lens: int32 [batch], committed tokens of each sequence.
        max_context: the largest of `context_lens`, as a Python int.
    """

    token_ids: Tensor
    parents: Tensor
    num_nodes: Tensor
    slot: Tensor
    context_lens: Tensor
    max_context: int

    @cached_property
    def ancestors(self) -> Tensor:
        """bool [batch, N, N], ancestor or self; computed once a step.

        Attention, depths and positions, and acceptance use it. The operators `torch.ops.treewy.*`
        take `parents` and make their own plan of the trees (`op_inputs.py`).
        """
        return topology.ancestor_mask(self.parents, self.num_nodes)

    @cached_property
    def depth(self) -> Tensor:
        """int32 [batch, N], the root at 0."""
        return topology.node_depth(self.ancestors)

    @cached_property
    def positions(self) -> Tensor:
        """Rotary position of each node, by depth and never by index, int64 [batch, N]."""
        return (self.context_lens[:, None] + self.depth).long()
