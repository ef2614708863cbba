"""Drafters: propose a tree of likely continuations for each running sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trtllm_treewy.batch import PrefillBatch, upload, upload_all
from trtllm_treewy.draft_tree import DraftTree, DynamicTreeBuilder, TreeTopology

from .executor import Executor


@dataclass(frozen=True)
class DraftRoot:
    """A sequence to draft for: its slot, its last chosen token, its committed length."""

    slot: int
    token_id: int
    context_len: int


class Drafter(Protocol):
    """Proposes trees. It learns of verified tokens through `observe`, and of nothing else."""

    def observe(self, slot: int, token_ids: Sequence[int], hidden: Tensor) -> None:
        """Verified tokens of a sequence, in order.

        `hidden` [n, hidden] are the model's hidden states of n tokens, `token_ids` the n tokens
        that follow each of them.
        """
        ...

    def propose(self, roots: Sequence[DraftRoot], max_nodes: int | None = None) -> list[DraftTree]:
        """A tree for each root; node 0 is the root itself.

        `max_nodes` says how many nodes of each tree will be used; it may be larger.
        """
        ...

    def resume(self, slot: int, num_entries: int) -> None:
        """A new sequence starts in `slot`, with so many verified pairs in the cache already."""
        ...

    def settle(self, *slots: int) -> None:
        """Enters every verified pair of these sequences but the newest of each into the cache."""
        ...

    def forget(self, slot: int) -> None:
        """The sequence in `slot` has ended."""
        ...


class NullDrafter:
    """Plain decoding: every tree is its root."""

    def observe(self, slot: int, token_ids: Sequence[int], hidden: Tensor) -> None:
        """Nothing to learn."""

    def propose(self, roots: Sequence[DraftRoot], max_nodes: int | None = None) -> list[DraftTree]:
        return [DraftTree.root_only(root.token_id) for root in roots]

    def resume(self, slot: int, num_entries: int) -> None:
        """Nothing to keep in mind."""

    def settle(self, *slots: int) -> None:
        """Nothing to enter."""

    def forget(self, slot: int) -> None:
        """Nothing to forget."""


class MtpCache:
    """What the MTP module has seen of each sequence, and what it has yet to see.

    Entry t of a sequence pairs the hidden state of token t with token t+1. Verified pairs wait
    here until the next proposal, when all sequences' pairs are entered in one pass.
    """

    # Pairs that may wait when more come: hidden states of long texts are not held.
    MAX_PENDING = 256

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._length: dict[int, int] = {}
        self._pending: dict[int, _Pairs] = {}

    def add(self, slot: int, token_ids: Sequence[int], hidden: Tensor) -> None:
        """Takes verified pairs; enters those before them first where there are many."""
        pairs = self._pending.get(slot)
        if pairs is not None and len(pairs.token_ids) > self.MAX_PENDING:
            self.settle(slot)
            pairs = self._pending[slot]
        new = _Pairs(list(token_ids), hidden)
        self._pending[slot] = new if pairs is None else pairs.joined(new)

    def resume(self, slot: int, length: int) -> None:
        """The sequence in `slot` has `length` entries already."""
        self.drop(slot)
        self._length[slot] = length

    def settle(self, *slots: int) -> None:
        """Enters all pairs but the newest: its entry is what the next drafts start from.

        One pass for all of `slots`, each named once.
        """
        held = {slot: pairs for slot in slots if (pairs := self._pending.get(slot)) is not None}
        full = {slot: pairs for slot, pairs in held.items() if len(pairs.token_ids) > 1}
        if not full:
            return
        # Apart from the others, whose memory would be held with them.
        newest = torch.cat([pairs.hidden[-1:] for pairs in full.values()])
        for slot, pairs in full.items():
            self._pending[slot] = pairs.part(0, -1)
        self._executor.draft_enter(*self._take_all([*full]))
        for row, (slot, pairs) in enumerate(full.items()):
            self._pending[slot] = _Pairs(pairs.token_ids[-1:], newest[row : row + 1])

    def take(self, slot: int) -> tuple[list[int], Tensor]:
        """Takes the pending pairs of a sequence out: tokens, and hidden states [n, hidden]."""
        pairs = self._pending.pop(slot)
        self.drop(slot)
        return pairs.token_ids, pairs.hidden

    def drop(self, slot: int) -> None:
        self._length.pop(slot, None)
        self._pending.pop(slot, None)

    def extend(self, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Enters the pending pairs of `slots`.

        Returns:
            Logits [n, vocab] and hidden [n, hidden] of each sequence's last entry.

        Raises:
            ValueError: a slot has no pending pair, so there is nothing to draft from.
        """
        for slot in slots:
            if slot not in self._pending:
                raise ValueError(f"slot {slot} has no verified token to draft from")
        output = self._executor.draft_extend(*self._take_all(slots))
        return output.logits, output.hidden

    def _take_all(self, slots: Sequence[int]) -> tuple[PrefillBatch, Tensor]:
        """The pending pairs of `slots`, which have entered then: a batch, and hidden states."""
        pairs = [self._pending.pop(slot) for slot in slots]
        lengths = [len(some.token_ids) for some in pairs]
        contexts = [self._length.get(slot, 0) for slot in slots]
        for slot, context, length in zip(slots, contexts, lengths, strict=True):
            self._length[slot] = context + length
        token_ids = [token for some in pairs for token in some.token_ids]
        batch = PrefillBatch.pack(token_ids, lengths, slots, contexts, self._executor.device)
        return batch, torch.cat([some.hidden for some in pairs])


@dataclass(frozen=True)
class _Pairs:
    """Consecutive pairs of a sequence: `token_ids` and `hidden` [len(token_ids), hidden]."""

    token_ids: list[int]
    hidden: Tensor

    def joined(self, later: _Pairs) -> _Pairs:
        return _Pairs([*self.token_ids, *later.token_ids], torch.cat([self.hidden, later.hidden]))

    def part(self, start: int, stop: int | None) -> _Pairs:
        return _Pairs(self.token_ids[start:stop], self.hidden[start:stop])


class DraftPass:
    """One proposal in progress: draft nodes run through the MTP module, level by level.

    Holds the provisional cache entries of the nodes expanded so far (the root's own entry is a
    verified one), and which of them each node sees: its ancestors and itself.
    """

    def __init__(self, executor: Executor, roots: Sequence[DraftRoot]) -> None:
        device = executor.device
        self._executor = executor
        self._slot, self._context = upload_all(
            [
                torch.tensor([r.slot for r in roots], dtype=torch.int32),
                torch.tensor([r.context_len for r in roots]),
            ],
            device,
        )
        self._max_context = max(r.context_len for r in roots)
        self._sees: Tensor = torch.zeros(len(roots), 0, 0, dtype=torch.bool, device=device)

    def expand(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        parents: Tensor,
        depth: int,
        valid: Tensor | None = None,
    ) -> _Level:
        """Runs the W nodes of one level.

        Args:
            token_ids: int64 [batch, W].
            hidden: [batch, W, hidden], MTP output of each node's parent.
            parents: int64 [batch, W], the parent's entry number, -1 where it is the root.
            depth: of these nodes; the root's children are at 1.
            valid: bool [batch, W], False for padding, which is neither stored nor seen.
        """
        batch, width = token_ids.shape
        first = self._sees.shape[1]
        sees = self._grow(parents, width)
        entry = torch.arange(first, first + width, device=parents.device)
        offset = self._context[:, None]
        row = torch.arange(self._max_context + first + width, device=parents.device)
        # Rows below the context are verified entries; the others are this draft's, by number.
        number = row[None] - offset
        drafted = sees[:, first:].gather(
            2, number.clamp(0, first + width - 1)[:, None].expand(batch, width, -1)
        )
        within = ((number >= 0) & (number < first + width))[:, None]
        mask = (number < 0)[:, None] | (within & drafted)
        write = (offset + entry).expand(batch, width)
        if valid is not None:
            write = torch.where(valid, write, -1)
        output = self._executor.draft(
            token_ids,
            hidden,
            (offset + depth - 1).expand(batch, width),
            self._slot,
            write,
            mask,
        )
        self._sees = sees
        return _Level(output.logits, output.hidden, entry)

    def _grow(self, parents: Tensor, width: int) -> Tensor:
        batch, first, _ = self._sees.shape
        sees = self._sees.new_zeros(batch, first + width, first + width)
        sees[:, :first, :first] = self._sees
        if first:
            inherited = self._sees.gather(
                1, parents.clamp(min=0)[..., None].expand(batch, width, first)
            )
            sees[:, first:, :first] = inherited & (parents >= 0)[..., None]
        own = torch.arange(first, first + width, device=sees.device)
        sees[:, own, own] = True
        return sees


@dataclass(frozen=True)
class _Level:
    """Output of one level: `logits` [batch, W, vocab], `hidden`, entry numbers [W]."""

    logits: Tensor
    hidden: Tensor
    entry: Tensor


class _MtpDrafter:
    """What the MTP drafters share: the module's cache, fed with verified tokens."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._cache = MtpCache(executor)

    @property
    def cache(self) -> MtpCache:
        """The module's cache: what each sequence has entered."""
        return self._cache

    def observe(self, slot: int, token_ids: Sequence[int], hidden: Tensor) -> None:
        self._cache.add(slot, token_ids, hidden)

    def resume(self, slot: int, num_entries: int) -> None:
        self._cache.resume(slot, num_entries)

    def settle(self, *slots: int) -> None:
        self._cache.settle(*slots)

    def forget(self, slot: int) -> None:
        self._cache.drop(slot)


class MtpStaticDrafter(_MtpDrafter):
    """Fills a fixed topology: the k-th child of a node takes the module's k-th best token."""

    def __init__(self, executor: Executor, topology: TreeTopology) -> None:
        super().__init__(executor)
        self._topology = topology

    @torch.inference_mode()
    def propose(self, roots: Sequence[DraftRoot], max_nodes: int | None = None) -> list[DraftTree]:
        topology = self._topology
        device = self._executor.device
        logits, hidden = self._cache.extend([root.slot for root in roots])
        token_ids = torch.zeros(len(roots), topology.num_nodes, dtype=torch.int64, device=device)
        token_ids[:, 0] = upload(torch.tensor([root.token_id for root in roots]), device)
        log_probs = torch.zeros(len(roots), topology.num_nodes, device=device)
        drafting = DraftPass(self._executor, roots)
        # Nodes with children, their entry numbers in the draft, and their MTP outputs.
        parents, entry_of = [0], {0: -1}
        logits, hidden = logits[:, None], hidden[:, None]
        for depth in range(1, topology.depth + 1):
            self._fill_children(parents, logits, token_ids, log_probs)
            if depth == topology.depth:
                break
            nodes = [n for n in topology.levels[depth] if topology.children[n]]
            source = [parents.index(topology.parent_ids[n]) for n in nodes]
            entries = [entry_of[topology.parent_ids[n]] for n in nodes]
            level = drafting.expand(
                token_ids[:, nodes],
                hidden[:, source],
                upload(torch.tensor(entries), device).expand(len(roots), -1),
                depth,
            )
            logits, hidden, parents = level.logits, level.hidden, nodes
            entry_of = dict(zip(nodes, level.entry.tolist(), strict=True))
        return [
            DraftTree(tuple(tokens), topology.parent_ids, tuple(scores))
            for tokens, scores in zip(token_ids.tolist(), log_probs.tolist(), strict=True)
        ]

    def _fill_children(
        self, parents: list[int], logits: Tensor, token_ids: Tensor, log_probs: Tensor
    ) -> None:
        """Gives the children of `parents` their tokens and cumulative log probabilities."""
        children = [self._topology.children[node] for node in parents]
        widest = max(len(kids) for kids in children)
        scores, tokens = torch.log_softmax(logits, dim=-1).topk(widest, dim=-1)
        for column, (node, kids) in enumerate(zip(parents, children, strict=True)):
            ids = list(kids)
            token_ids[:, ids] = tokens[:, column, : len(ids)]
            log_probs[:, ids] = log_probs[:, node, None] + scores[:, column, : len(ids)]


class MtpDynamicDrafter(_MtpDrafter):
    """Grows each tree best first, by the module's own confidence, under a node budget."""

    def __init__(self, executor: Executor, *, max_nodes: int, max_depth: int, top_k: int) -> None:
        super().__init__(executor)
        self._max_nodes, self._max_depth, self._top_k = max_nodes, max_depth, top_k

    @torch.inference_mode()
    def propose(self, roots: Sequence[DraftRoot], max_nodes: int | None = None) -> list[DraftTree]:
        most = self._max_nodes if max_nodes is None else min(max_nodes, self._max_nodes)
        builders = [
            DynamicTreeBuilder(
                root.token_id,
                max_nodes=most,
                max_depth=self._max_depth,
                top_k=self._top_k,
            )
            for root in roots
        ]
        logits, hidden = self._cache.extend([root.slot for root in roots])
        level = _Level(logits[:, None], hidden[:, None], torch.tensor([-1]))
        drafting = DraftPass(self._executor, roots)
        for depth in range(1, self._max_depth + 1):
            above = [builder.frontier_rows for builder in builders]
            self._add_candidates(builders, level.logits)
            if not any(builder.frontier for builder in builders):
                break
            level = self._run_frontier(builders, above, level, drafting, depth)
        return [builder.build() for builder in builders]

    def _add_candidates(self, builders: Sequence[DynamicTreeBuilder], logits: Tensor) -> None:
        best = torch.log_softmax(logits, dim=-1).topk(min(self._top_k, logits.shape[-1]), dim=-1)
        scores, tokens = best.values.tolist(), best.indices.tolist()
        for row, builder in enumerate(builders):
            count = len(builder.frontier)
            if count:
                builder.expand(tokens[row][:count], scores[row][:count])

    def _run_frontier(
        self,
        builders: Sequence[DynamicTreeBuilder],
        above: Sequence[Sequence[int]],
        level: _Level,
        drafting: DraftPass,
        depth: int,
    ) -> _Level:
        """Runs every builder's frontier, padded to the widest; `above` are the rows of `level`."""
        device = self._executor.device
        width = max(len(builder.frontier) for builder in builders)
        tokens = torch.zeros(len(builders), width, dtype=torch.int64)
        source = torch.zeros(len(builders), width, dtype=torch.int64)
        valid = torch.zeros(len(builders), width, dtype=torch.bool)
        for row, builder in enumerate(builders):
            for column, draft_row in enumerate(builder.frontier_rows):
                tokens[row, column] = builder.frontier_tokens[column]
                source[row, column] = above[row].index(builder.draft_parents[draft_row])
                valid[row, column] = True
        tokens, source, valid = upload_all([tokens, source, valid], device)
        hidden = level.hidden.gather(1, source[..., None].expand(-1, -1, level.hidden.shape[-1]))
        return drafting.expand(tokens, hidden, level.entry.to(device)[source], depth, valid)
