"""How many nodes the trees of a step may have: as many as there are, or what pays (`auto`).

Drafts cost time whether they are accepted or not: to make, and to verify. What a step of n nodes
costs depends on the batch and the device, what it brings on the text. `auto` measures both and
takes the n of the most tokens a second, n = 1 being plain decoding. It is never slower than plain
decoding by more than a small part, because what it spends on finding out comes from an allowance:
a part of the time that plain decoding would have taken for the same tokens. A step is chosen before
the last ones were heard of: the device has its trees drafted by then.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Protocol

from trtllm_treewy.draft_tree import DraftTree

# Weight of a new measurement in the running means; more where the last one is long ago.
RATE, RARE_RATE = 0.1, 0.5
# Rows of a step whose accepted lengths are worth that weight: those of few rows tell less.
ROWS = 13
# Rows that must have told what a size brings before that is believed.
TELLING = 16
# Part of plain decoding's time that may be lost on trying other sizes.
ALLOWANCE = 0.02
# What another size must promise before it is taken: choices at the edge do not flicker.
BETTER = 1.01
# What may be lost before plain decoding has run for long, in its steps; also the most that is
# put by: what good drafts won long ago must not pay for bad ones now.
CREDIT = 8.0
# Steps of one batch size after which another size is tried again; twice as many after each time
# that changed nothing, up to the last.
REVISIT, SELDOM = 64, 512
# Steps after which those that were asked for were heard of.
BEHIND = 4
# Part of the time that trying another size may cost, by what is known of it, in the long run.
TRIALS = 0.003


@dataclass(frozen=True)
class StepReport:
    """What a step of decoding rows came to.

    Attributes:
        rows: decoding rows in it.
        seconds: for drafting, verification and commit.
        trees: as verified, of the rows that may have drafts.
        paths: accepted nodes of each of them, the root first.
        whole: `seconds` run from the end of the step before it, the drafting of these trees and all
            that the host did among them; otherwise from its own start.
    """

    rows: int
    seconds: float
    trees: Sequence[DraftTree]
    paths: Sequence[Sequence[int]]
    whole: bool = True


class TreePolicy(Protocol):
    """Sets the node limit of each step, and learns from what came of it."""

    def limit(self, rows: int) -> int | None:
        """Nodes a tree may have in a step of `rows` trees; 1 is no drafts, None no limit.

        Asked once for each step that is to come, some of which are not run after all, and up to
        two steps ahead of what `observe` is told.
        """
        ...

    def observe(self, report: StepReport) -> None:
        """Takes note of a step."""
        ...


class FullTrees:
    """Static and dynamic trees as the drafter makes them."""

    def limit(self, rows: int) -> int | None:
        return None

    def observe(self, report: StepReport) -> None:
        """Nothing to learn."""


def choose_nodes(cost: Mapping[int, float], tokens: Mapping[int, float]) -> int:
    """The number of nodes with the most tokens a second.

    Args:
        cost: seconds of a step by nodes; 1 is there.
        tokens: tokens that a row gains in a step, by nodes; 1.0 where nothing is accepted.

    Returns:
        A key of `cost` that `tokens` has too; the smallest of equals.
    """
    return max(sorted(cost.keys() & tokens.keys()), key=lambda n: tokens[n] / cost[n])


class Acceptance:
    """Recent acceptance by depth, for every number of nodes a tree could have been cut to.

    A tree of m nodes says what any smaller one would have brought: nodes are taken best first by
    cumulative log probability, so the tree of n nodes holds the n best of them, and accepts the
    part of the accepted path that lies within. What a size brings is what the next smaller one does
    and its own part, so that steps of small trees tell of large ones too.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        # Parts of the rows that accepted a draft at depth d + 1, by size.
        self.by_depth: dict[int, list[float]] = {size: [] for size in sizes}
        # What a row gains over the next smaller size, and rows that have told.
        self._extra: dict[int, float] = {}
        self._told: dict[int, int] = {}

    def observe(
        self, trees: Sequence[DraftTree], paths: Sequence[Sequence[int]], rate: float = RATE
    ) -> None:
        """Takes note of the trees of a step and their accepted paths, root first.

        `rate` is the weight that a step of many rows has; it may be above 1 where the last one was
        long ago.
        """
        largest = max((tree.num_nodes for tree in trees), default=1)
        # Trees may be one object for many rows.
        by_tree = {id(tree): tree for tree in trees}
        ranked = {key: _ranks(tree) for key, tree in by_tree.items()}
        ranks = [ranked[id(tree)] for tree in trees]
        part = min(1.0, len(trees) / ROWS)
        rate = min(rate * part, RARE_RATE * part**0.5)
        below = [0] * len(trees)
        for size in sorted(self.by_depth):
            if not 1 < size <= largest:
                continue
            lengths = [
                sum(rank[node] < size for node in path[1:])
                for rank, path in zip(ranks, paths, strict=True)
            ]
            self._update(size, lengths, sum(lengths) - sum(below), rate)
            below = lengths

    def _update(self, size: int, lengths: Sequence[int], gained: int, rate: float) -> None:
        known, count, told = self.by_depth[size], len(lengths), self._told.get(size, 0)
        known.extend([0.0] * (max(lengths, default=0) - len(known)))
        rate = max(rate, count / (told + count))
        self._told[size] = told + count
        for depth in range(len(known)):
            part = sum(length > depth for length in lengths) / count
            known[depth] += rate * (part - known[depth])
        extra = self._extra.get(size, 0.0)
        self._extra[size] = extra + rate * (gained / count - extra)

    def rows(self, size: int) -> int:
        """Rows that have told what a size brings."""
        return self._told.get(size, 0)

    def tokens(self) -> dict[int, float]:
        """Tokens a row gains in a step, by size, where that was seen."""
        found, total = {1: 1.0}, 1.0
        for size in sorted(self._extra):
            total += self._extra[size]
            found[size] = total
        return found


class StepCost:
    """Measured seconds of a step, by batch and nodes; what was not measured lies on lines between.

    A running mean, with outliers (the first step of a shape compiles and allocates) cut to a
    multiple of it.
    """

    OUTLIER = 3.0

    def __init__(self) -> None:
        self._mean: dict[int, dict[int, float]] = {}
        self._count: dict[tuple[int, int], int] = {}
        self._whole: set[tuple[int, int]] = set()

    def observe(
        self, rows: int, nodes: int, seconds: float, rate: float = RATE, whole: bool = True
    ) -> None:
        """Takes note of one step; of one in part only where no whole one was seen."""
        measured = self._mean.setdefault(rows, {})
        if whole and (rows, nodes) not in self._whole:
            self._whole.add((rows, nodes))
            measured.pop(nodes, None)
            self._count.pop((rows, nodes), None)
        elif not whole and (rows, nodes) in self._whole:
            return
        count = self._count.get((rows, nodes), 0)
        self._count[rows, nodes] = count + 1
        if count <= 1:  # the second measurement replaces the first where it is smaller
            measured[nodes] = min(seconds, measured.get(nodes, seconds))
            return
        mean = measured[nodes]
        measured[nodes] = mean + rate * (min(seconds, self.OUTLIER * mean) - mean)

    def measured(self, rows: int, nodes: int) -> bool:
        """Whether such a step was seen often enough to go by."""
        return self._count.get((rows, nodes), 0) >= 2

    def at(self, rows: int, nodes: int) -> float | None:
        """Seconds of a step; None where no step of such a batch was seen."""
        known = self._mean.get(rows)
        if not known:
            return None
        if nodes in known:
            return known[nodes]
        below = max((n for n in known if n < nodes), default=None)
        above = min((n for n in known if n > nodes), default=None)
        if below is None:
            return known[min(known)]
        if above is None:
            # Beyond what was seen: at worst, in proportion to the nodes.
            return known[below] * nodes / below
        part = (nodes - below) / (above - below)
        return known[below] + part * (known[above] - known[below])


class AutoTrees:
    """Takes the number of nodes that measured best, and finds out within an allowance.

    Args:
        sizes: numbers of nodes to choose from, 1 (no drafts) and the largest among them.
        batches: batch sizes that costs are kept for; a batch counts as the next larger one.
        allowance: part of plain decoding's time that may be lost on finding out.
        max_tokens: nodes of all trees of a step; sizes that would be more are never asked for.

    Attributes:
        acceptance: recent acceptance by size and depth.
        cost: measured step times.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        batches: Sequence[int],
        allowance: float = ALLOWANCE,
        max_tokens: int | None = None,
    ) -> None:
        if 1 not in sizes:
            raise ValueError(f"tree sizes must hold 1, decoding without drafts, got {list(sizes)}")
        if not allowance > 0:
            raise ValueError(f"allowance must be above 0, got {allowance}")
        self.sizes, self._batches = tuple(sorted(sizes)), tuple(sorted(batches))
        self._allowance, self._max_tokens = allowance, max_tokens
        self.acceptance = Acceptance(self.sizes)
        self.cost = StepCost()
        # Steps of plain decoding that may be lost yet; None until such a step was measured.
        self._balance: float | None = None
        # By batch and size: steps since it was run; after how many it is tried again, and how many
        # of these are left.
        self._since: dict[tuple[int, int], int] = {}
        self._period: dict[tuple[int, int], int] = {}
        self._left: dict[tuple[int, int], int] = {}
        self._choice: dict[int, int] = {}
        # Steps that were told of, and when unknown sizes were asked for, how many times in a row.
        self._steps = 0
        self._asked: dict[tuple[int, int], int] = {}
        self._asked_at: dict[tuple[int, int], int] = {}

    def limit(self, rows: int) -> int | None:
        batch = self._batch(rows)
        if self._balance is None or self._seconds(batch, 1) is None:
            return 1
        sizes = self._fitting(rows)
        trial = self._trial(batch, sizes, self._balance)
        if trial is not None:
            return trial
        return self._choose(batch, sizes, self._balance)

    def best(self, rows: int) -> int:
        """What the measurements say, without trying anything out."""
        costs = self._costs(self._batch(rows), self._fitting(rows))
        return choose_nodes(costs, self.acceptance.tokens()) if costs else 1

    def observe(self, report: StepReport) -> None:
        if not report.trees:
            return
        self._steps += 1
        batch = self._batch(report.rows)
        size = self._size(max(tree.num_nodes for tree in report.trees))
        since = self._since.get((batch, size), 0)
        rate = RATE * (1 + since / 8)
        self.cost.observe(batch, size, report.seconds, min(rate, RARE_RATE), report.whole)
        if size > 1:
            self.acceptance.observe(report.trees, report.paths, rate)
        plain = self._seconds(batch, 1)
        if plain:
            gained = sum(len(path) for path in report.paths) / len(report.paths)
            won = gained * (1 + self._allowance) - report.seconds / plain
            before = CREDIT if self._balance is None else self._balance
            self._balance = min(before + (won if size > 1 else self._allowance), CREDIT)
        for other in self.sizes:
            self._since[batch, other] = self._since.get((batch, other), 0) + 1
            self._left[batch, other] = self._left.get((batch, other), REVISIT) - 1
        self._since[batch, size] = 0
        self._left[batch, size] = self._period.get((batch, size), REVISIT)

    def _choose(self, batch: int, sizes: Sequence[int], balance: float) -> int:
        """The best size of which a step may bring nothing; the last one, where it is as good."""
        costs, tokens = self._costs(batch, sizes), self.acceptance.tokens()
        plain = costs[1]
        costs = {n: c for n, c in costs.items() if n == 1 or c / plain - 1 <= balance}
        best, last = choose_nodes(costs, tokens), self._choice.get(batch)
        if last is not None and last in costs and last in tokens:
            if tokens[best] / costs[best] < BETTER * tokens[last] / costs[last]:
                return last
            for size in self.sizes:
                self._period.pop((batch, size), None)
        self._choice[batch] = best
        return best

    def _trial(self, batch: int, sizes: Sequence[int], balance: float) -> int | None:
        """A size worth a look, if the balance covers a step of it that brings nothing.

        Sizes that nothing is known of come first, the smallest before the others, since its cost
        says what the next can cost at most. Then what was not seen for long: plain decoding, and
        the largest tree that can be afforded, which says what the smaller ones would bring.
        """
        plain = self._seconds(batch, 1)
        if plain is None:
            return None

        def affordable(size: int) -> bool:
            cost = self._seconds(batch, size)
            return cost is not None and cost / plain - 1 <= balance

        for size in sizes:
            if not self._known(batch, size):
                if not self._promises(batch, sizes, size):
                    break
                return self._ask(batch, size) if affordable(size) else None
        stale = [n for n in sizes if self._is_stale(batch, sizes, n)]
        trial = 1 if 1 in stale else max((n for n in stale if affordable(n)), default=None)
        if trial is not None:
            # Once: steps are asked for before this one is heard of.
            period = min(2 * self._period.get((batch, trial), REVISIT), SELDOM)
            self._period[batch, trial] = self._left[batch, trial] = period
        return trial

    def _ask(self, batch: int, size: int) -> int | None:
        """A size that is to be measured, and its acceptance; None while that is under way."""
        asked, wanted = self._asked.get((batch, size), 0), max(2, -(-TELLING // batch))
        if asked >= wanted and self._steps < self._asked_at[batch, size] + BEHIND:
            return None
        self._asked[batch, size] = asked % wanted + 1
        self._asked_at[batch, size] = self._steps
        return size

    def _promises(self, batch: int, sizes: Sequence[int], size: int) -> bool:
        """Whether an unknown size may be the best: nodes bring less the more there are of them."""
        tokens = self.acceptance.tokens()
        below = [n for n in sizes if n < size and n in tokens]
        if size == 1 or len(below) < 2 or self.cost.at(batch, below[-1]) is None:
            return True
        last, before = below[-1], below[-2]
        each = (tokens[last] - tokens[before]) / (last - before)
        costs = self._costs(batch, sizes)
        best = choose_nodes(costs, tokens)
        least = self._seconds(batch, last) or 0.0
        return (tokens[last] + each * (size - last)) * costs[best] > tokens[best] * least

    def _is_stale(self, batch: int, sizes: Sequence[int], size: int) -> bool:
        """Whether a size was not seen for so long that it is worth what it is likely to lose."""
        if self._left.get((batch, size), REVISIT) > 0:
            return False
        costs, tokens = self._costs(batch, sizes), self.acceptance.tokens()
        if size not in costs:
            return False
        best = choose_nodes(costs, tokens)
        gained = tokens.get(size, 1.0) / tokens[best] * costs[best]
        return TRIALS * self._since.get((batch, size), 0) >= (costs[size] - gained) / costs[best]

    def _fitting(self, rows: int) -> list[int]:
        """The sizes that a step of so many rows has the tokens for."""
        most = self._max_tokens
        return [n for n in self.sizes if n == 1 or most is None or rows * n <= most]

    def _costs(self, batch: int, sizes: Sequence[int]) -> dict[int, float]:
        return {n: c for n in sizes if (c := self._seconds(batch, n)) is not None}

    def _known(self, batch: int, size: int) -> bool:
        """Whether such a step was measured, or one of a batch like it, and what it brings."""
        if size > 1 and self.acceptance.rows(size) < TELLING:
            return False
        return self.cost.measured(batch, size) or self._like(batch, size) is not None

    def _like(self, batch: int, size: int) -> int | None:
        """The next batch, up to twice or half as large, of which this size was measured."""
        near = [
            other
            for other in self._batches
            if max(other, batch) <= 2 * min(other, batch) and self.cost.measured(other, size)
        ]
        return min(near, key=lambda other: max(other, batch) / min(other, batch), default=None)

    def _seconds(self, batch: int, size: int) -> float | None:
        """Seconds of a step: measured, or those of a batch like it, in proportion; None unknown."""
        like = None if self.cost.measured(batch, size) else self._like(batch, size)
        if like is None:
            return self.cost.at(batch, size)
        scales = [
            ours / theirs
            for n in self.sizes
            if self.cost.measured(batch, n)
            and self.cost.measured(like, n)
            and (ours := self.cost.at(batch, n))
            and (theirs := self.cost.at(like, n))
        ]
        seconds = self.cost.at(like, size)
        assert seconds is not None
        return seconds * (sum(scales) / len(scales) if scales else 1.0)

    def _batch(self, rows: int) -> int:
        return next((b for b in self._batches if b >= rows), self._batches[-1])

    def _size(self, nodes: int) -> int:
        return next((n for n in self.sizes if n >= nodes), self.sizes[-1])


def cut_to_depth(tree: DraftTree, depth: int) -> DraftTree:
    """The nodes of `tree` down to `depth`; the root is at 0."""
    if tree.depth <= depth:
        return tree
    depths, kept = [0] * tree.num_nodes, [0]
    for node in range(1, tree.num_nodes):
        depths[node] = depths[tree.parent_ids[node]] + 1
        if depths[node] <= depth:
            kept.append(node)
    index = {node: place for place, node in enumerate(kept)}
    return DraftTree(
        tuple(tree.token_ids[node] for node in kept),
        (-1, *(index[tree.parent_ids[node]] for node in kept[1:])),
        tuple(tree.log_probs[node] for node in kept),
    )


def _ranks(tree: DraftTree) -> list[int]:
    """Place of each node when they are taken best first, as `fit_to_budget` does; the root's 0."""
    children: list[list[int]] = [[] for _ in tree.parent_ids]
    for node in range(1, tree.num_nodes):
        children[tree.parent_ids[node]].append(node)
    ranks, heap = [0] * tree.num_nodes, [(0.0, 0)]
    for place in range(tree.num_nodes):
        _, node = heapq.heappop(heap)
        ranks[node] = place
        for child in children[node]:
            score = tree.log_probs[child]
            heapq.heappush(heap, (float("inf") if isnan(score) else -score, child))
    return ranks
