"""The two kinds of batch a model step runs over: prompts to prefill and trees to verify."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from . import topology, triton_ops

# Bytes at which the parts of one upload start: what kernels load at once.
ALIGNMENT = 16


def upload(x: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`, by a copy that waits for nothing."""
    if device.type != "cuda":
        return x.to(device)
    # The allocator of pinned memory keeps it until the copy is done.
    return x.pin_memory().to(device, non_blocking=True)


def upload_all(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Host tensors on `device` by one copy that waits for nothing, each contiguous and aligned."""
    if device.type != "cuda":
        return [part.to(device) for part in parts]
    return carve(_pack(parts, pinned=True).to(device, non_blocking=True), parts)


def upload_into(parts: Sequence[Tensor], buffer: Tensor) -> None:
    """The same into the front of `buffer`, uint8, where `carve` finds them."""
    host = _pack(parts, pinned=buffer.is_cuda)
    buffer[: host.numel()].copy_(host, non_blocking=True)


def packed_bytes(parts: Sequence[Tensor]) -> int:
    """Bytes of such parts in one upload."""
    return sum(-(-part.numel() * part.element_size() // ALIGNMENT) * ALIGNMENT for part in parts)


def carve(buffer: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Views of `buffer`, uint8, for the parts of one upload; of `parts` shape and type count."""
    views, at = [], 0
    for part in parts:
        size = part.numel() * part.element_size()
        views.append(buffer[at : at + size].view(part.dtype).view(part.shape))
        at += packed_bytes([part])
    return views


def _pack(parts: Sequence[Tensor], pinned: bool) -> Tensor:
    # The allocator of pinned memory keeps it until copies from it are done.
    host = torch.empty(packed_bytes(parts), dtype=torch.uint8, pin_memory=pinned)
    for place, part in zip(carve(host, parts), parts, strict=True):
        place.copy_(part)
    return host


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
        tokens, positions, starts, slot, context = upload_all(
            [
                torch.tensor(token_ids, dtype=torch.int64),
                positions_of(contexts, lengths),
                starts,
                torch.tensor(slots, dtype=torch.int32),
                torch.tensor(contexts, dtype=torch.int32),
            ],
            device,
        )
        batch = cls(
            token_ids=tokens,
            cu_seqlens=starts,
            slot=slot,
            context_lens=context,
            seq_lens_host=tuple(lengths),
            context_lens_host=tuple(contexts),
            slots_host=tuple(slots),
        )
        vars(batch)["positions"] = positions  # they came in the same copy
        return batch

    @cached_property
    def slots(self) -> list[int]:
        """Slots on the host; waits for the device where they are not known there."""
        return self.slot.tolist() if self.slots_host is None else list(self.slots_host)

    @cached_property
    def positions(self) -> Tensor:
        """Rotary position of each token, int64 [T]."""
        return upload(
            positions_of(self.context_lens_host, self.seq_lens_host), self.token_ids.device
        )


def positions_of(contexts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """`context .. context + length - 1` of each sequence in turn, int64 [T] on the host."""
    spans = [torch.arange(c, c + n) for c, n in zip(contexts, lengths, strict=True) if n]
    return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)


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
        return self._plan[0]

    @cached_property
    def depth(self) -> Tensor:
        """int32 [batch, N], the root at 0."""
        return self._plan[1]

    @cached_property
    def positions(self) -> Tensor:
        """Rotary position of each node, by depth and never by index, int64 [batch, N]."""
        return self._plan[2]

    @cached_property
    def _plan(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ancestors, depths and positions; one launch where there is a kernel."""
        if triton_ops.runs_on(self.parents):
            from .triton_ops.trees import plan_trees

            return plan_trees(self.parents.contiguous(), self.num_nodes, self.context_lens)
        ancestors = topology.ancestor_mask(self.parents, self.num_nodes)
        depth = topology.node_depth(ancestors)
        return ancestors, depth, (self.context_lens[:, None] + depth).long()
