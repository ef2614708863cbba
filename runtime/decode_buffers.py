"""Memory that captured steps read and write: its addresses never change, its contents do.

Views for a batch of B rows and N nodes are cut from the front of flat buffers, so every shape has
contiguous tensors and all shapes share them. What a sequence carries from step to step lies in rows
by slot; one row more takes the writes of padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_treewy.batch import TreeBatch, carve, packed_bytes, upload, upload_into


@dataclass(frozen=True)
class Arrival:
    """A sequence that captured steps take over.

    Attributes:
        slot: its slot.
        token: its root, and the token of the pair that the MTP module has not seen.
        hidden: [1, hidden] of that pair; None where nobody drafts for it.
    """

    slot: int
    token: int
    hidden: Tensor | None = None


@dataclass(frozen=True)
class BufferSizes:
    """What the buffers are made for.

    Attributes:
        slots: state slots.
        batch, nodes: rows and nodes of the largest captured step.
        path: nodes of the longest accepted path.
        drafts: nodes of a drafted tree, the root included; 1 without a drafter on the device.
        hidden: size of a hidden state.
    """

    slots: int
    batch: int
    nodes: int
    path: int
    drafts: int
    hidden: int

    def bytes(self, activation_bytes: int) -> int:
        """Device memory of the buffers."""
        per_node = 8 + 4 + 4 + self.hidden * activation_bytes
        per_row = 4 * 8 + 8 + 16 + self.path * 24 + 8 * self.nodes
        per_slot = 4 + self.path * (8 + self.hidden * activation_bytes) + self.drafts * 12
        rows = self.batch * (self.nodes * per_node + per_row)
        return rows + (self.slots + 1) * per_slot


class DecodeBuffers:
    """The buffers of all captured steps of an executor.

    Attributes:
        pending_tokens: int64 [slots + 1, path], pending_hidden [slots + 1, path, hidden] and
            pending_len int32 [slots + 1]: verified tokens whose pairs the MTP module has not seen
            when the step ends; pair j is a token and the hidden state of the one before it.
        tree_tokens, tree_scores: int64 and float32 [slots + 1, drafts], the tree drafted last;
            token 0 is the root.
    """

    def __init__(self, sizes: BufferSizes, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        batch, slots = sizes.batch, sizes.slots + 1

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        i32 = torch.int32
        # Slot, context and nodes of the step's rows, then slot and context of those to draft for.
        self._rows = zeros(5 * batch, dtype=i32)
        self._arrivals = zeros(packed_bytes(_arrivals(batch)), dtype=torch.uint8)
        self._tokens = zeros(batch * sizes.nodes)
        self._parents = zeros(batch * sizes.nodes, dtype=i32)
        self._scores = zeros(batch * sizes.nodes, dtype=torch.float32)
        self._hidden = zeros(batch * sizes.nodes * sizes.hidden, dtype=dtype)
        self._accepted, self._num_accepted = zeros(batch, dtype=i32), zeros(batch, dtype=i32)
        self._path, self._bonus = zeros(batch * sizes.path), zeros(batch)
        self._result = zeros(batch * (2 * sizes.path + 1 + 2 * sizes.nodes), dtype=i32)
        self.pending_tokens = zeros(slots, sizes.path)
        self.pending_hidden = zeros(slots, sizes.path, sizes.hidden, dtype=dtype)
        self.pending_len = zeros(slots, dtype=i32)
        self.tree_tokens = zeros(slots, sizes.drafts)
        self.tree_scores = zeros(slots, sizes.drafts, dtype=torch.float32)
        self.set_inert(batch)

    def set_inert(self, batch: int) -> None:
        """Makes every row of a batch padding, so that a step changes nothing."""
        self.load_rows(batch, [])
        self._tokens.zero_()
        self._parents.fill_(-1)
        self._accepted.fill_(-1)
        self._num_accepted.zero_()
        self._path.fill_(-1)
        self._bonus.fill_(-1)

    @contextmanager
    def inert(self, batch: int) -> Iterator[None]:
        """Padding alone within the block, for captures; behind it the rows that were there."""
        kept = self._rows.clone()
        self.set_inert(batch)
        try:
            yield
        finally:
            self._rows.copy_(kept)

    # ---- views

    def slot(self, batch: int) -> Tensor:
        """int32 [B], -1 for padding."""
        return self._rows[:batch]

    def context(self, batch: int) -> Tensor:
        """int32 [B], committed tokens."""
        return self._rows[batch : 2 * batch]

    def num_nodes(self, batch: int) -> Tensor:
        """int32 [B]."""
        return self._rows[2 * batch : 3 * batch]

    def tokens(self, batch: int, nodes: int) -> Tensor:
        """int64 [B, N]."""
        return self._tokens[: batch * nodes].view(batch, nodes)

    def parents(self, batch: int, nodes: int) -> Tensor:
        """int32 [B, N]."""
        return self._parents[: batch * nodes].view(batch, nodes)

    def scores(self, batch: int, nodes: int) -> Tensor:
        """float32 [B, N], the drafter's log probabilities of the trees that are verified."""
        return self._scores[: batch * nodes].view(batch, nodes)

    def hidden(self, batch: int, nodes: int) -> Tensor:
        """[B, N, hidden], of the tree verified last."""
        size = self.sizes.hidden
        return self._hidden[: batch * nodes * size].view(batch, nodes, size)

    def accepted(self, batch: int) -> Tensor:
        """int32 [B]."""
        return self._accepted[:batch]

    def num_accepted(self, batch: int) -> Tensor:
        """int32 [B]."""
        return self._num_accepted[:batch]

    def path(self, batch: int, nodes: int) -> Tensor:
        """int64 [B, P], P at most the longest path."""
        columns = min(nodes, self.sizes.path)
        return self._path[: batch * columns].view(batch, columns)

    def bonus(self, batch: int) -> Tensor:
        """int64 [B]."""
        return self._bonus[:batch]

    def result(self, batch: int, columns: int) -> Tensor:
        """int32 [B, columns], what the host is told of a step."""
        return self._result[: batch * columns].view(batch, columns)

    def draft_slot(self, batch: int) -> Tensor:
        """int32 [B], the rows to draft for."""
        return self._rows[3 * batch : 4 * batch]

    def draft_context(self, batch: int) -> Tensor:
        """int32 [B], their committed tokens."""
        return self._rows[4 * batch : 5 * batch]

    def arrivals(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of sequences that are taken over, [B] each: slots int32, those with a pair int32, tokens.

        Slots are -1 for padding, and for sequences without a pair among the second ones.
        """
        slot, paired, tokens = carve(self._arrivals, _arrivals(batch))
        return slot, paired, tokens

    def by_slot(self, slot: Tensor) -> Tensor:
        """int64 [B], the rows of the tables by slot; padding has the last one."""
        return torch.where(slot >= 0, slot, self.sizes.slots).long()

    def tree(self, batch: int, nodes: int, max_context: int) -> TreeBatch:
        """The trees of the step, as views."""
        return TreeBatch(
            token_ids=self.tokens(batch, nodes),
            parents=self.parents(batch, nodes),
            num_nodes=self.num_nodes(batch),
            slot=self.slot(batch),
            context_lens=self.context(batch),
            max_context=max_context,
        )

    # ---- from the host

    def load_rows(self, batch: int, rows: list[tuple[int, int, int]]) -> None:
        """Slot, context and nodes of each row; the others up to `batch` are padding.

        The rows to draft for are the same, so that a step finds its contexts there.
        """
        padded = rows + [(-1, 0, 0)] * (batch - len(rows))
        columns = torch.tensor(padded, dtype=torch.int32).T[[0, 1, 2, 0, 1]].flatten()
        self._rows[: 5 * batch].copy_(upload(columns, self.device))

    def load_nodes(self, batch: int, nodes: Sequence[int]) -> None:
        """Nodes of each row alone; padding keeps what it has, which is never looked at."""
        counts = torch.tensor(list(nodes), dtype=torch.int32)
        self.num_nodes(batch)[: len(nodes)].copy_(upload(counts, self.device))

    def load_draft_rows(self, batch: int, rows: list[tuple[int, int]]) -> None:
        """Slot and context of the rows to draft for, padded likewise."""
        padded = rows + [(-1, 0)] * (batch - len(rows))
        columns = torch.tensor(padded, dtype=torch.int32).T.contiguous().flatten()
        self._rows[3 * batch : 5 * batch].copy_(upload(columns, self.device))

    def load_arrivals(self, batch: int, arrivals: Sequence[Arrival]) -> None:
        """Sequences that are taken over, those with a pair first; by one copy, and one of pairs."""
        paired = [one.hidden for one in arrivals if one.hidden is not None]
        slots = [one.slot for one in arrivals] + [-1] * (batch - len(arrivals))
        tokens = [one.token for one in arrivals] + [0] * (batch - len(arrivals))
        pairs = slots[: len(paired)] + [-1] * (batch - len(paired))
        parts = [torch.tensor(x, dtype=torch.int32) for x in (slots, pairs)]
        upload_into([*parts, torch.tensor(tokens)], self._arrivals)
        if paired:
            torch.cat(paired, out=self.hidden(batch, 1)[: len(paired), 0])

    def load_tree(self, tree: TreeBatch, batch: int, nodes: int) -> None:
        """Trees that are on the device already, padded to the captured shape."""
        rows, width = tree.parents.shape
        self._rows[: 3 * batch].view(3, batch)[0].fill_(-1)
        self.context(batch).zero_()
        self.num_nodes(batch).zero_()
        self.slot(batch)[:rows] = tree.slot
        self.context(batch)[:rows] = tree.context_lens
        self.num_nodes(batch)[:rows] = tree.num_nodes
        self.tokens(batch, nodes).zero_()[:rows, :width] = tree.token_ids
        self.parents(batch, nodes).fill_(-1)[:rows, :width] = tree.parents


def _arrivals(batch: int) -> list[Tensor]:
    """The parts of one upload of arrivals, by shape and type."""
    kinds = (torch.int32, torch.int32, torch.int64)
    return [torch.empty(batch, dtype=kind, device="meta") for kind in kinds]
