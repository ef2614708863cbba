"""The goals of serving, judged from rows: against vLLM's figures, and against snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .compare import Budget, Pair, auto_over_best, by_budget, over
from .points import NONE, PEERS
from .split import Row, kind, measured

# vLLM 0.25.1 on one H200, 2026-11-29: Qwen3.5-35B-A3B, bf16 dummy weights, fp32 states, prefix
# caching off, 512 tokens in and 192 out; generated tokens a second of whole runs, by (speculation,
# memory fraction) and concurrency. MTP-3 keeps snapshots; synthetic acceptance length 3.24.
GPU = "NVIDIA H200"
ANCHOR = {
    (NONE, 0.9): {1: 222, 8: 889, 64: 2866, 256: 6090},
    ("mtp-3", 0.9): {1: 364, 8: 868, 64: 4990, 256: 4223},
    ("mtp-3", 0.65): {64: 4846, 128: 4443, 256: 4345},
}
OUR_BEST = ("reconstruct", "deferred")
MODEL = "qwen3.5-35b-a3b"


@dataclass(frozen=True)
class Goal:
    """A goal: its target and what was measured, as texts; met is None where nothing was."""

    name: str
    target: str
    measured: str = ""
    met: bool | None = None


def goals(rows: Sequence[Row]) -> list[Goal]:
    """All goals of serving, from the rows of a run of this model on this GPU."""
    budgets = by_budget(rows)
    bound = [b for b in budgets if b.bound]
    headroom = [b for b in budgets if not b.bound]
    deferred = "deferred over reconstruct at equal acceptance: the least ratio of throughputs"
    peers = "deferred over FlashInfer's u-cache at equal acceptance: the least ratio of throughputs"
    auto = "auto over the better of chain 3 and no speculation: the least ratio of throughputs"
    return [
        *_against_vllm(rows),
        _throughput(bound, "memory-bound: throughput of reconstruct", 1.5),
        _first_tokens(bound),
        _throughput(headroom, "headroom: throughput of reconstruct", 0.99),
        _least(over(rows, "deferred", "reconstruct"), deferred, 1.0),
        _least(over(rows, "deferred", PEERS[0]), peers, 1.0),
        _least(auto_over_best(rows), auto, 0.98),
    ]


def _against_vllm(rows: Sequence[Row]) -> list[Goal]:
    found = []
    for who, fraction, factor in (("mtp-3", 0.9, 2.0), ("mtp-3", 0.65, 2.0), (NONE, 0.9, 1.4)):
        found.append(_beats(rows, who, fraction, 256, factor))
    for fraction in (0.9, 0.65):
        low = [count for count in ANCHOR["mtp-3", fraction] if count <= 64]
        found += [_beats(rows, "mtp-3", fraction, count, 1.0) for count in low]
    peaks = [
        row["sequences_peak"]
        for row in _chains(rows)
        if row["fraction"] == 0.65 and row["concurrency"] and row["concurrency"] >= 200
    ]
    name, target = "anchor, fraction 0.65: sequences at once (vLLM: 58)", "at least 200"
    if not peaks:
        return [*found, Goal(name, target)]
    return [*found, Goal(name, target, str(max(peaks)), max(peaks) >= 200)]


def _beats(rows: Sequence[Row], who: str, fraction: float, count: int, factor: float) -> Goal:
    theirs = ANCHOR[who, fraction][count]
    ours = [
        row["output_tokens_per_second"]
        for row in _chains(rows)
        if (row["fraction"], row["concurrency"]) == (fraction, count)
    ]
    name = f"anchor, {count} at once, fraction {fraction:g}: over vLLM's {_named(who)} ({theirs})"
    return _at_least(name, factor, max(ours) / theirs if ours else None)


def _chains(rows: Sequence[Row]) -> list[Row]:
    """Ours with chain 3 on the anchor's workload: runs that are whole, as vLLM's are."""
    return [
        row
        for row in measured(rows)
        if (row["workload"], row["tree"]) == ("anchor", "3") and row["policy"] in OUR_BEST
        if kind(row) == "whole" and not row["unfinished"]
    ]


def _named(who: str) -> str:
    return "run without speculation" if who == NONE else "MTP-3"


def _at_least(name: str, factor: float, ratio: float | None) -> Goal:
    if ratio is None:
        return Goal(name, f"at least {factor:g}x")
    return Goal(name, f"at least {factor:g}x", f"{ratio:.2f}x", ratio >= factor)


def _throughput(found: Sequence[Budget], what: str, factor: float) -> Goal:
    """Over all budgets, of `reconstruct`."""
    name = f"{what} over snapshot, geometric mean"
    (every,) = [b for b in found if b.fraction is None and b.policy == "reconstruct"] or [None]
    if every is None:
        return _at_least(name, factor, None)
    goal = _at_least(name, factor, every.throughput)
    return replace(goal, measured=f"{goal.measured} ({_points(every)}, least {every.least:.2f}x)")


def _first_tokens(found: Sequence[Budget]) -> Goal:
    """At the tightest budget, the memory-bound points."""
    own = [b for b in found if b.fraction is not None and b.policy == "reconstruct"]
    tight = min(own, key=lambda b: b.fraction or 0.0, default=None)
    name = "memory-bound, tightest budget: p99 TTFT of snapshot over reconstruct, geometric mean"
    if tight is None or tight.first_tokens is None:
        return _at_least(name, 10.0, None)
    goal = _at_least(name, 10.0, tight.first_tokens)
    where = f"{_points(tight)} at {tight.fraction:g}"
    return replace(goal, measured=f"{goal.measured} ({where})")


def _points(found: Budget) -> str:
    return "1 point" if found.points == 1 else f"{found.points} points"


def _fair(found: Pair) -> float:
    """The ratio at equal acceptance, where there is one."""
    return found.ratio if found.equal is None else found.equal


def _spread(found: Pair) -> str:
    """Of the same ratio, the least and the greatest of the rounds."""
    low, high = found.equal_low, found.equal_high
    if low is None or high is None:
        low, high = found.low, found.high
    return f"; rounds {low:.2f} to {high:.2f}" if found.rounds > 1 else ""


def _least(pairs: Sequence[Pair], name: str, factor: float) -> Goal:
    """The least ratio at any point, and where it is."""
    worst = min(pairs, key=_fair, default=None)
    if worst is None:
        return _at_least(name, factor, None)
    goal = _at_least(name, factor, _fair(worst))
    where = f"{worst.row['workload']}, {worst.row['fraction']:g}, {worst.row['load']}"
    return replace(goal, measured=f"{goal.measured} ({where}{_spread(worst)})")
