"""Rows beside what they are compared with: `auto`, deferred commits, snapshots, trees, budgets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .points import AUTO, NONE, PEERS
from .repeats import SPEED, rounds_of
from .split import BASELINE, Row, is_closed, key_of, mean_ratio, measured, of, place, split

CHAIN = "3"


@dataclass(frozen=True)
class Pair:
    """A row and what it is compared with.

    Attributes:
        row, base: the two.
        ratio: of throughputs; of repeats that took turns, the median of the rounds' ratios.
        low, high: the least and the greatest of the rounds; the ratio where there is one.
        first_tokens: p99 TTFT of the base over that of the row, above 1 where the row is faster;
            None where one has none.
        equal: as `ratio`, at equal acceptance: of throughputs over acceptance lengths. By the same
            tree and law those differ by chance alone. None where the trees differ.
        equal_low, equal_high: the least and the greatest of the rounds' of it, likewise.
    """

    row: Row
    base: Row
    ratio: float
    low: float
    high: float
    first_tokens: float | None
    equal: float | None
    equal_low: float | None
    equal_high: float | None

    @property
    def same_run(self) -> bool:
        """Whether both were measured in one run."""
        return self.row.get("run") == self.base.get("run")

    @property
    def rounds(self) -> int:
        """Ratios that the median is of."""
        return min(len(rounds_of(x)) for x in (self.row, self.base)) if self.same_run else 1


def pair(row: Row, base: Row) -> Pair:
    """Two rows that have figures."""
    found = by_round(row, base, lambda each: each[SPEED])
    equal: list[float] = []
    if row["tree"] == base["tree"]:
        equal = by_round(row, base, lambda each: each[SPEED] / each["acceptance_length"])
    tails = of(base, "ttft", "p99"), of(row, "ttft", "p99")
    return Pair(
        row,
        base,
        statistics.median(found),
        min(found),
        max(found),
        tails[0] / tails[1] if tails[0] and tails[1] else None,
        statistics.median(equal) if equal else None,
        min(equal, default=None),
        max(equal, default=None),
    )


def by_round(row: Row, base: Row, value: Callable[[Row], float]) -> list[float]:
    """Ratios of a value, round by round of one run, as many as both have; else of the two rows."""
    if row.get("run") != base.get("run"):
        return [value(row) / value(base)]
    rounds = zip(rounds_of(row), rounds_of(base), strict=False)
    return [value(mine) / value(other) for mine, other in rounds]


def over(rows: Sequence[Row], policy: str, other: str) -> list[Pair]:
    """One policy over another at the same points and trees."""
    base = {key_of(row): row for row in measured(rows) if row["policy"] == other}
    return [
        pair(row, base[key_of(row)])
        for row in measured(rows)
        if row["policy"] == policy and key_of(row) in base
    ]


def over_snapshots(rows: Sequence[Row]) -> list[Pair]:
    """Every other policy that drafts over snapshots, at the same points and trees."""
    policies = dict.fromkeys(row["policy"] for row in measured(rows))
    named = [policy for policy in policies if policy not in (NONE, BASELINE)]
    return [found for policy in named for found in over(rows, policy, BASELINE)]


def trees_over_chain(rows: Sequence[Row]) -> list[Pair]:
    """Fixed trees over the chain of 3, by the same policy."""
    chains = {(place(r), r["policy"]): r for r in measured(rows) if r["tree"] == CHAIN}
    return [
        pair(row, chains[place(row), row["policy"]])
        for row in measured(rows)
        if row["tree"] not in (CHAIN, AUTO, NONE) and (place(row), row["policy"]) in chains
    ]


def auto_over_best(rows: Sequence[Row]) -> list[Pair]:
    """`auto` over the better of the chain of 3 and no speculation, where both were measured."""
    chains = {(place(r), r["policy"]): r for r in measured(rows) if r["tree"] == CHAIN}
    plain = {place(row): row for row in measured(rows) if row["policy"] == NONE}
    found = []
    for row in measured(rows):
        rivals = [chains.get((place(row), row["policy"])), plain.get(place(row))]
        if row["tree"] == AUTO and None not in rivals:
            both = [pair(row, rival) for rival in rivals if rival is not None]
            found.append(min(both, key=lambda each: each.ratio))
    return found


@dataclass(frozen=True)
class Budget:
    """A policy over snapshots at the points of a memory fraction: geometric means.

    Attributes:
        fraction: of the memory; None for all.
        bound: whether they are its memory-bound points, or those with headroom.
        policy, points: which, and how many: so many requests at once, in closed loops.
        throughput: of the policy over snapshots, and `least` at any one of the points.
        first_tokens, token: p99 TTFT and median TPOT of snapshots over the policy's.
        sequences: the policy's mean of sequences at once over that of snapshots.
    """

    fraction: float | None
    bound: bool
    policy: str
    points: int
    throughput: float
    least: float
    first_tokens: float | None
    token: float | None
    sequences: float | None


def by_budget(rows: Sequence[Row]) -> list[Budget]:
    """Of every memory fraction and of all together, memory-bound points first."""
    found = []
    for bound, chosen in zip((True, False), split(rows), strict=True):
        inside = {id(row) for row in chosen}
        pairs = [p for p in over_snapshots(rows) if is_closed(p.row) and id(p.row) in inside]
        for policy in dict.fromkeys(p.row["policy"] for p in pairs):
            own = [p for p in pairs if p.row["policy"] == policy]
            for fraction in [*sorted({p.row["fraction"] for p in own}), None]:
                some = [p for p in own if fraction in (None, p.row["fraction"])]
                found.append(_budget(fraction, bound, policy, some))
    return found


def _budget(fraction: float | None, bound: bool, policy: str, pairs: Sequence[Pair]) -> Budget:
    both = [(p.row, p.base) for p in pairs]
    other = [(p.base, p.row) for p in pairs]
    return Budget(
        fraction,
        bound,
        policy,
        len(pairs),
        statistics.geometric_mean([p.ratio for p in pairs]),
        min(p.ratio for p in pairs),
        mean_ratio(other, lambda r: of(r, "ttft", "p99")),
        mean_ratio(other, lambda r: of(r, "tpot", "p50")),
        mean_ratio(both, lambda r: r["sequences_mean"]),
    )


@dataclass(frozen=True)
class Burst:
    """A load at a rate by memory fraction, as one policy takes it.

    Attributes:
        key: workload, load, policy, tree.
        shares: of the time that memory kept requests out, by fraction.
        first_tokens: p99 TTFT by fraction, seconds.
    """

    key: tuple[str, str, str, str]
    shares: dict[float, float]
    first_tokens: dict[float, float]


def bursts(rows: Iterable[Row]) -> list[Burst]:
    """All loads at a rate."""
    found: dict[tuple[str, str, str, str], Burst] = {}
    for row in rows:
        if is_closed(row) or "error" in row:
            continue
        key = (row["workload"], row["load"], row["policy"], row["tree"])
        burst = found.setdefault(key, Burst(key, {}, {}))
        burst.shares[row["fraction"]] = row["memory_bound_share"]
        tail = of(row, "ttft", "p99")
        if tail is not None:
            burst.first_tokens[row["fraction"]] = tail
    return list(found.values())


Select = Callable[[Sequence[Row]], list[Pair]]
# What is shown, in this order, by title.
COMPARISONS: tuple[tuple[str, Select], ...] = (
    ("`auto` over the better of chain 3 and no speculation", auto_over_best),
    ("`deferred` over `reconstruct`", lambda rows: over(rows, "deferred", "reconstruct")),
    (f"`deferred` over `{PEERS[0]}`", lambda rows: over(rows, "deferred", PEERS[0])),
    (f"Over `{BASELINE}`", over_snapshots),
    ("Trees over chain 3", trees_over_chain),
)
