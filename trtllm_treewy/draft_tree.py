"""Draft trees on the host: fixed topologies, best-first growth, pruning, and the device batch.

Node 0 is the root, the last token already chosen; every other node is a drafted token. A node's
parent has a smaller index. Everything here is plain Python numbers, at most a few hundred a step;
`to_tree_batch` is the one place where trees become tensors.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, isnan

import torch

from .batch import TreeBatch, upload_all


def _check_parents(parent_ids: Sequence[int], name: str) -> None:
    """Raises ValueError unless `parent_ids` is one tree, parents before children."""
    if not parent_ids:
        raise ValueError(f"{name}: a tree has at least its root, got no nodes")
    if parent_ids[0] != -1:
        raise ValueError(f"{name}: node 0 is the root with parent -1, got parent {parent_ids[0]}")
    for node in range(1, len(parent_ids)):
        if not 0 <= parent_ids[node] < node:
            raise ValueError(
                f"{name}: node {node} needs a parent in [0, {node}) (one root, parents precede "
                f"children), got {parent_ids[node]}"
            )


def _children(parent_ids: Sequence[int]) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in parent_ids]
    for node in range(1, len(parent_ids)):
        children[parent_ids[node]].append(node)
    return children


def _depths(parent_ids: Sequence[int]) -> list[int]:
    depths = [0] * len(parent_ids)
    for node in range(1, len(parent_ids)):
        depths[node] = depths[parent_ids[node]] + 1
    return depths


def _cost(log_prob: float) -> float:
    """Sort key of a log probability, the best first; NaN ranks with the impossible."""
    return float("inf") if isnan(log_prob) else -log_prob


@dataclass(frozen=True)
class TreeTopology:
    """The shape of a draft tree, without tokens.

    Attributes:
        parent_ids: parent of each node, -1 for the root (node 0); parents precede children.

    Raises:
        ValueError: naming the node that breaks the rule.
    """

    parent_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_parents(self.parent_ids, "tree topology")

    @classmethod
    def from_widths(cls, widths: Sequence[int]) -> TreeTopology:
        """Every node of level d has `widths[d]` children; nodes are numbered level by level.

        `[3, 3, 3]` gives 1 + 3 + 9 + 27 = 40 nodes; `[]` gives the root alone.
        """
        parents = [-1]
        level = [0]
        for depth, width in enumerate(widths):
            if width < 1:
                raise ValueError(f"tree widths: width of level {depth} must be >= 1, got {width}")
            above = level
            level = list(range(len(parents), len(parents) + len(above) * width))
            parents += [parent for parent in above for _ in range(width)]
        return cls(tuple(parents))

    @classmethod
    def chain(cls, num_draft_tokens: int) -> TreeTopology:
        """The root and a chain of `num_draft_tokens` nodes below it."""
        if num_draft_tokens < 0:
            raise ValueError(f"chain: num_draft_tokens must be >= 0, got {num_draft_tokens}")
        return cls(tuple(range(-1, num_draft_tokens)))

    @classmethod
    def from_parents(cls, parent_ids: Sequence[int]) -> TreeTopology:
        """Any tree, given as the list of parents (root first, -1)."""
        return cls(tuple(int(parent) for parent in parent_ids))

    @property
    def num_nodes(self) -> int:
        """Nodes, the root included."""
        return len(self.parent_ids)

    @property
    def depth(self) -> int:
        """Depth of the deepest node; the root is at 0."""
        return max(self.depths)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node."""
        return tuple(_depths(self.parent_ids))

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node, by index."""
        return tuple(tuple(nodes) for nodes in _children(self.parent_ids))

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Nodes of each depth, by index; `levels[0]` is the root alone."""
        levels: list[list[int]] = [[] for _ in range(self.depth + 1)]
        for node, depth in enumerate(self.depths):
            levels[depth].append(node)
        return tuple(tuple(level) for level in levels)


@dataclass(frozen=True)
class DraftTree:
    """A drafted tree of tokens.

    Attributes:
        token_ids: token of each node; node 0 is the last chosen token.
        parent_ids: parent of each node, -1 for the root; parents precede children.
        log_probs: natural log of the drafter's probability of the whole path from the root to
            the node; the root has 0.0. NaN ranks last.

    Raises:
        ValueError: for unequal lengths, or naming the node whose parent breaks the rule.
    """

    token_ids: tuple[int, ...]
    parent_ids: tuple[int, ...]
    log_probs: tuple[float, ...]

    def __post_init__(self) -> None:
        lengths = len(self.token_ids), len(self.parent_ids), len(self.log_probs)
        if len(set(lengths)) != 1:
            raise ValueError(
                "draft tree: token_ids, parent_ids and log_probs need one length, "
                f"got {lengths[0]}, {lengths[1]} and {lengths[2]}"
            )
        _check_parents(self.parent_ids, "draft tree")

    @classmethod
    def root_only(cls, token_id: int) -> DraftTree:
        """The tree of a step without drafts."""
        return cls((token_id,), (-1,), (0.0,))

    @property
    def num_nodes(self) -> int:
        """Nodes, the root included."""
        return len(self.token_ids)

    @property
    def depth(self) -> int:
        """Depth of the deepest node; the root is at 0."""
        return max(_depths(self.parent_ids))

    def prune(self, max_nodes: int) -> DraftTree:
        """The best subtree of at most `max_nodes` nodes, the root included, closed under ancestors.

        Best first by cumulative log probability, ties to the lower index; the nodes that stay
        keep their order and are renumbered.
        """
        if max_nodes < 1:
            raise ValueError(f"prune: max_nodes must be >= 1 (the root stays), got {max_nodes}")
        return self if self.num_nodes <= max_nodes else fit_to_budget([self], max_nodes)[0]

    def _subtree(self, nodes: Sequence[int]) -> DraftTree:
        """The tree of `nodes`, which are ascending and closed under ancestors."""
        new_index = {node: index for index, node in enumerate(nodes)}
        return DraftTree(
            tuple(self.token_ids[node] for node in nodes),
            (-1, *(new_index[self.parent_ids[node]] for node in nodes[1:])),
            tuple(self.log_probs[node] for node in nodes),
        )


def fit_to_budget(trees: Sequence[DraftTree], max_total_nodes: int) -> list[DraftTree]:
    """Prunes trees so that together they have at most `max_total_nodes` nodes.

    Every root stays; the rest of the budget goes to the best nodes of all trees by cumulative log
    probability, each tree staying closed under ancestors. Ties go to the lower node index, then
    to the earlier tree.

    Raises:
        ValueError: when the budget does not cover the roots.
    """
    if max_total_nodes < len(trees):
        raise ValueError(
            f"fit_to_budget: {len(trees)} trees need at least {len(trees)} nodes for their "
            f"roots, got max_total_nodes {max_total_nodes}; run fewer sequences or raise it"
        )
    if sum(tree.num_nodes for tree in trees) <= max_total_nodes:
        return list(trees)
    children = [_children(tree.parent_ids) for tree in trees]
    kept = [[0] for _ in trees]
    # A node enters the heap when its parent is taken, so the choice is closed under ancestors
    # whatever the scores.
    heap = [
        (_cost(tree.log_probs[node]), node, index)
        for index, tree in enumerate(trees)
        for node in children[index][0]
    ]
    heapq.heapify(heap)
    for _ in range(max_total_nodes - len(trees)):
        _, node, index = heapq.heappop(heap)
        kept[index].append(node)
        for child in children[index][node]:
            heapq.heappush(heap, (_cost(trees[index].log_probs[child]), child, index))
    return [tree._subtree(sorted(nodes)) for tree, nodes in zip(trees, kept, strict=True)]


class DynamicTreeBuilder:
    """Grows one draft tree best first under a node budget, level by level.

    The drafter loops::

        builder = DynamicTreeBuilder(root_token, max_nodes=40, max_depth=6, top_k=8)
        while builder.frontier:
            token_ids, log_probs = draft(builder.frontier_tokens, ...)  # top-k lists, one a node
            builder.expand(token_ids, log_probs)
        tree = builder.build()

    Each `expand` turns the children of the frontier into candidates; the next frontier is the
    best `top_k` of them by cumulative log probability. `build` takes the best `max_nodes - 1`
    candidates of all levels. A candidate that `max_nodes - 1` others beat already is not
    expanded: neither it nor a child of it can be in the tree, so the frontier may end early.
    With `top_k >= max_nodes - 1` the result is the best tree over the drafter's whole
    distribution. Ties go to the candidate that came first.

    Candidates are numbered as they come, the root 0. Impossible ones (log probability -inf or
    NaN) are dropped.
    """

    def __init__(self, root_token: int, *, max_nodes: int, max_depth: int, top_k: int) -> None:
        for name, value in (("max_nodes", max_nodes), ("top_k", top_k)):
            if value < 1:
                raise ValueError(f"dynamic tree: {name} must be >= 1, got {value}")
        if max_depth < 0:
            raise ValueError(f"dynamic tree: max_depth must be >= 0, got {max_depth}")
        self.max_nodes = max_nodes
        self.max_depth = max_depth
        self.top_k = top_k
        self._tokens = [root_token]
        self._parents = [-1]
        self._log_probs = [0.0]
        # The best max_nodes - 1 candidates so far, a heap of (log prob, -index), the worst first.
        self._best: list[tuple[float, int]] = []
        self._depth = 0
        self._expanded: list[int] = []
        self._draft_row: dict[int, int] = {}
        self._draft_parents: list[int] = []
        self._frontier: tuple[int, ...] = ()
        if max_depth > 0 and max_nodes > 1:
            self._set_frontier([0])

    @property
    def frontier(self) -> tuple[int, ...]:
        """Candidates to expand next, ascending; empty when the tree is complete."""
        return self._frontier

    @property
    def frontier_tokens(self) -> tuple[int, ...]:
        """Token of each frontier node."""
        return tuple(self._tokens[node] for node in self._frontier)

    @property
    def draft_parents(self) -> tuple[int, ...]:
        """Parent of every node the drafter has run or is about to run, in the order it runs them.

        Entry i is the i-th node handed out in a frontier (the root first, -1) and its value the
        position of its parent in the same order. The last `len(frontier)` entries are the
        frontier. Parents come first, so this is a tree as everywhere else.
        """
        return tuple(self._draft_parents)

    @property
    def frontier_rows(self) -> tuple[int, ...]:
        """Position of each frontier node in `draft_parents`."""
        end = len(self._draft_parents)
        return tuple(range(end - len(self._frontier), end))

    def expand(
        self, token_ids: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]
    ) -> None:
        """Adds the children of the frontier and chooses the next frontier.

        Args:
            token_ids: one list of candidate tokens for each frontier node.
            log_probs: the drafter's log probability of each of them given its parent.
        """
        if not len(token_ids) == len(log_probs) == len(self._frontier):
            raise ValueError(
                f"dynamic tree: expand needs one list for each of {len(self._frontier)} frontier "
                f"nodes, got {len(token_ids)} token lists and {len(log_probs)} log prob lists"
            )
        first = len(self._tokens)
        for parent, tokens, scores in zip(self._frontier, token_ids, log_probs, strict=True):
            if len(tokens) != len(scores):
                raise ValueError(
                    f"dynamic tree: candidate {parent} got {len(tokens)} tokens and "
                    f"{len(scores)} log probs"
                )
            for token, score in zip(tokens, scores, strict=True):
                self._add(parent, token, score)
        self._depth += 1
        new = sorted((-score, -order) for score, order in self._best if -order >= first)
        nodes = sorted(index for _, index in new[: self.top_k])
        self._set_frontier(nodes if self._depth < self.max_depth else [])

    def build(self) -> DraftTree:
        """The root and the best `max_nodes - 1` candidates, level by level."""
        nodes = [0, *sorted(-order for _, order in self._best)]
        new_index = {node: index for index, node in enumerate(nodes)}
        return DraftTree(
            tuple(self._tokens[node] for node in nodes),
            (-1, *(new_index[self._parents[node]] for node in nodes[1:])),
            tuple(self._log_probs[node] for node in nodes),
        )

    def _add(self, parent: int, token: int, log_prob: float) -> None:
        if not isfinite(log_prob):
            return
        # A child never ranks before its parent, so the best candidates are closed under ancestors.
        entry = (self._log_probs[parent] + min(log_prob, 0.0), -len(self._tokens))
        if len(self._best) < self.max_nodes - 1:
            heapq.heappush(self._best, entry)
        elif entry > self._best[0]:
            heapq.heapreplace(self._best, entry)
        else:
            return
        self._tokens.append(token)
        self._parents.append(parent)
        self._log_probs.append(entry[0])

    def _set_frontier(self, nodes: Sequence[int]) -> None:
        for node in nodes:
            parent = self._parents[node]
            self._draft_row[node] = len(self._draft_parents)
            self._draft_parents.append(self._draft_row[parent] if parent >= 0 else -1)
        self._frontier = tuple(nodes)


def to_tree_batch(
    trees: Sequence[DraftTree],
    slots: Sequence[int],
    context_lens: Sequence[int],
    device: torch.device | str,
    *,
    pad_nodes_to: int | None = None,
    pad_batch_to: int | None = None,
) -> TreeBatch:
    """Puts one tree for each sequence into a device batch.

    Args:
        trees: the trees of the batch.
        slots: state slot of each sequence; -1 makes it a padded row.
        context_lens: committed tokens of each sequence.
        device: where the tensors go.
        pad_nodes_to: nodes of each row (a bucket size); the largest tree where not given.
        pad_batch_to: rows of the batch; padded rows have slot -1 and no nodes.

    Raises:
        ValueError: for unequal lengths, a slot used twice, or a bucket that is too small.
    """
    rows, width = _check_batch(trees, slots, context_lens, pad_nodes_to, pad_batch_to)
    pad_rows = rows - len(trees)
    blank_tokens, blank_parents = [0] * width, [-1] * width
    tokens = [[*tree.token_ids, *blank_tokens[tree.num_nodes :]] for tree in trees]
    parents = [[*tree.parent_ids, *blank_parents[tree.num_nodes :]] for tree in trees]
    num_nodes = [tree.num_nodes for tree in trees] + [0] * pad_rows

    def int32(values: Sequence[object]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    parts = [
        torch.tensor(tokens + [blank_tokens] * pad_rows),
        int32(parents + [blank_parents] * pad_rows),
        int32(num_nodes),
        int32([*slots, *[-1] * pad_rows]),
        int32([*context_lens, *[0] * pad_rows]),
    ]
    token_ids, parent_ids, counts, slot, context = upload_all(parts, torch.device(device))
    return TreeBatch(
        token_ids, parent_ids, counts, slot, context, max_context=max(context_lens, default=0)
    )


def _check_batch(
    trees: Sequence[DraftTree],
    slots: Sequence[int],
    context_lens: Sequence[int],
    pad_nodes_to: int | None,
    pad_batch_to: int | None,
) -> tuple[int, int]:
    """Rows and nodes a row of the batch; raises ValueError as `to_tree_batch` says."""
    if not len(trees) == len(slots) == len(context_lens):
        raise ValueError(
            "tree batch: trees, slots and context_lens need one length, "
            f"got {len(trees)}, {len(slots)} and {len(context_lens)}"
        )
    rows = len(trees) if pad_batch_to is None else pad_batch_to
    if rows < max(len(trees), 1):
        raise ValueError(f"tree batch: {len(trees)} trees do not make a batch of {rows} rows")
    largest = max((tree.num_nodes for tree in trees), default=1)
    width = largest if pad_nodes_to is None else pad_nodes_to
    if width < largest:
        raise ValueError(
            f"tree batch: a tree of {largest} nodes does not fit pad_nodes_to {width}; "
            "prune it or raise pad_nodes_to"
        )
    used = [slot for slot in slots if slot >= 0]
    if min(slots, default=0) < -1 or len(set(used)) != len(used):
        raise ValueError(f"tree batch: slots must be distinct and >= 0 (or -1), got {list(slots)}")
    if min(context_lens, default=0) < 0:
        raise ValueError(f"tree batch: context_lens must be >= 0, got {list(context_lens)}")
    return rows, width
