"""The MTP drafters under random sampling: children are drawn where the greedy ones take the best.

The shape of a tree depends on the drafter's distributions and on nodes already drawn, never on
what a child's own draw brings; that is what acceptance by rejection rests on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trtllm_treewy.draft_tree import DraftTree, DynamicTreeBuilder
from trtllm_treewy.runtime.drafter import DraftRoot, MtpDynamicDrafter, MtpStaticDrafter

from .draft import SUPPORT, DraftRecord, draft_children
from .rows import SamplingRows


@dataclass(frozen=True)
class Proposal:
    """A tree for each root, and what its tokens were drawn from (None if all rows are greedy)."""

    trees: list[DraftTree]
    record: DraftRecord | None


@dataclass
class _Drawing:
    """A proposal in progress.

    Attributes:
        rows: settings of the roots.
        record: distributions of the nodes expanded so far.
        expanded: static trees: the node of each entry.
        depth: dynamic trees: of the nodes to be expanded next.
        entries: dynamic trees: of each row, the entries of its expanded nodes in order.
        paths: dynamic trees: of each row, the tokens below the root that lead to those nodes.
    """

    rows: SamplingRows
    record: DraftRecord
    expanded: list[int] = field(default_factory=list)
    depth: int = 0
    entries: list[list[int]] = field(default_factory=list)
    paths: list[list[list[int]]] = field(default_factory=list)


class _Drawer:
    """What both drafters share: the proposal in progress."""

    _drawing: _Drawing | None = None

    @contextmanager
    def _draw(self, rows: SamplingRows) -> Iterator[_Drawing]:
        size = len(rows)
        drawing = _Drawing(rows, DraftRecord(size))
        drawing.entries = [[] for _ in range(size)]
        drawing.paths = [[] for _ in range(size)]
        self._drawing = drawing
        try:
            yield drawing
        finally:
            self._drawing = None


class SamplingStaticDrafter(_Drawer, MtpStaticDrafter):
    """Fills a fixed topology: the k-th child of a node takes the k-th token drawn."""

    def propose_sampled(
        self, roots: Sequence[DraftRoot], rows: SamplingRows, max_nodes: int | None = None
    ) -> Proposal:
        """A tree for each root, drawn with the settings of its row.

        Args:
            roots: the sequences to draft for.
            rows: one for each root, in order; the root counted among its outputs.
            max_nodes: as for `propose`.
        """
        if rows.plain_greedy:
            return Proposal(self.propose(roots, max_nodes), None)
        with self._draw(rows) as drawing:
            trees = self.propose(roots, max_nodes)
        self._name(drawing, trees)
        return Proposal(trees, drawing.record)

    def _fill_children(
        self, parents: list[int], logits: Tensor, token_ids: Tensor, log_probs: Tensor
    ) -> None:
        drawing, topology = self._drawing, self._topology
        if drawing is None:
            super()._fill_children(parents, logits, token_ids, log_probs)
            return
        kids = [topology.children[node] for node in parents]
        children = draft_children(
            logits,
            drawing.rows,
            depth=topology.depths[parents[0]],
            count=max(len(ids) for ids in kids),
            numbers=torch.tensor(parents, device=logits.device),
            path_token_ids=token_ids[:, [self._path(node) for node in parents]],
            support=max(SUPPORT, *(len(ids) for ids in topology.children)),
        )
        drawing.record.add(children)
        drawing.expanded += parents
        for column, (node, ids) in enumerate(zip(parents, kids, strict=True)):
            token_ids[:, list(ids)] = children.token_ids[:, column, : len(ids)]
            scores = children.log_probs[:, column, : len(ids)]
            log_probs[:, list(ids)] = log_probs[:, node, None] + scores

    def _path(self, node: int) -> list[int]:
        """Nodes from the root's child to `node`."""
        path: list[int] = []
        while node > 0:
            path.insert(0, node)
            node = self._topology.parent_ids[node]
        return path

    def _name(self, drawing: _Drawing, trees: Sequence[DraftTree]) -> None:
        entry_of = {node: entry for entry, node in enumerate(drawing.expanded)}
        for node, entry in entry_of.items():
            if node == 0:
                continue
            parent = entry_of[self._topology.parent_ids[node]]
            for row, tree in enumerate(trees):
                drawing.record.name(row, entry, parent, tree.token_ids[node])


class SamplingDynamicDrafter(_Drawer, MtpDynamicDrafter):
    """Grows each tree best first by what the k-th child of a node is worth, whichever is drawn."""

    def propose_sampled(
        self, roots: Sequence[DraftRoot], rows: SamplingRows, max_nodes: int | None = None
    ) -> Proposal:
        """A tree for each root, drawn with the settings of its row.

        Args:
            roots: the sequences to draft for.
            rows: one for each root, in order; the root counted among its outputs.
            max_nodes: as for `propose`.
        """
        if rows.plain_greedy:
            return Proposal(self.propose(roots, max_nodes), None)
        with self._draw(rows) as drawing:
            trees = self.propose(roots, max_nodes)
        return Proposal(trees, drawing.record if drawing.depth else None)

    def _add_candidates(self, builders: Sequence[DynamicTreeBuilder], logits: Tensor) -> None:
        drawing = self._drawing
        if drawing is None:
            super()._add_candidates(builders, logits)
            return
        batch, width, vocab = logits.shape
        first = drawing.record.width
        paths = [self._enter(drawing, row, builder, first) for row, builder in enumerate(builders)]
        blank = [0] * drawing.depth
        padded = [[*some, *[blank] * (width - len(some))] for some in paths]
        children = draft_children(
            logits,
            drawing.rows,
            depth=drawing.depth,
            count=min(self._top_k, vocab),
            numbers=torch.arange(first, first + width, device=logits.device),
            path_token_ids=torch.tensor(padded, dtype=torch.int64, device=logits.device),
        )
        drawing.record.add(children)
        drawing.depth += 1
        tokens, scores = children.token_ids.tolist(), children.log_probs.tolist()
        for row, builder in enumerate(builders):
            count = len(builder.frontier)
            if count:
                builder.expand(tokens[row][:count], scores[row][:count])

    def _enter(
        self, drawing: _Drawing, row: int, builder: DynamicTreeBuilder, first: int
    ) -> list[list[int]]:
        """Names the frontier's nodes of a row; returns the tokens that lead to each."""
        entries, paths = drawing.entries[row], drawing.paths[row]
        for column, draft_row in enumerate(builder.frontier_rows):
            parent, token = builder.draft_parents[draft_row], builder.frontier_tokens[column]
            if parent >= 0:
                drawing.record.name(row, first + column, entries[parent], token)
            entries.append(first + column)
            paths.append([*paths[parent], token] if parent >= 0 else [])
        return [paths[draft_row] for draft_row in builder.frontier_rows]
