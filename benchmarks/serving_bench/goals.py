"""The goals of serving, judged from rows: against vLLM's figures, and against snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .points import NONE
from .split import Row, key_of, measured, ratios, split

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
    found = _against_vllm(rows)
    bound, headroom = split(rows)
    found.append(_throughput(bound, rows, "memory-bound: throughput of reconstruct", 1.5))
    found.append(_first_tokens(rows))
    found.append(_throughput(headroom, rows, "headroom: throughput of reconstruct", 0.99))
    found.append(_deferred(rows))
    found.append(_auto(rows))
    return found


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
    """Ours with chain 3 on the anchor's workload."""
    return [
        row
        for row in measured(rows)
        if (row["workload"], row["tree"]) == ("anchor", "3") and row["policy"] in OUR_BEST
    ]


def _named(who: str) -> str:
    return "run without speculation" if who == NONE else "MTP-3"


def _at_least(name: str, factor: float, ratio: float | None) -> Goal:
    if ratio is None:
        return Goal(name, f"at least {factor:g}x")
    return Goal(name, f"at least {factor:g}x", f"{ratio:.2f}x", ratio >= factor)


def _throughput(rows: Sequence[Row], all_rows: Sequence[Row], what: str, factor: float) -> Goal:
    name = f"{what} over snapshot, geometric mean"
    found = [r for r in ratios(rows, all_rows) if r["policy"] == "reconstruct"]
    return _at_least(name, factor, found[0]["throughput"] if found else None)


def _first_tokens(rows: Sequence[Row]) -> Goal:
    """At the tightest budget, the memory-bound points."""
    tightest = min((row["fraction"] for row in rows), default=None)
    tight = [row for row in split(rows)[0] if row["fraction"] == tightest]
    found = [r["ttft_p99"] for r in ratios(tight, rows) if r["policy"] == "reconstruct"]
    name = "memory-bound, tightest budget: p99 TTFT of snapshot over reconstruct, geometric mean"
    return _at_least(name, 10.0, 1 / found[0] if found and found[0] else None)


def _deferred(rows: Sequence[Row]) -> Goal:
    name = "deferred over reconstruct: the least ratio of throughputs at any point"
    other = {key_of(r): r for r in measured(rows) if r["policy"] == "reconstruct"}
    found = [
        r["output_tokens_per_second"] / other[key_of(r)]["output_tokens_per_second"]
        for r in measured(rows)
        if r["policy"] == "deferred" and key_of(r) in other
    ]
    return _at_least(name, 1.0, min(found, default=None))


def _auto(rows: Sequence[Row]) -> Goal:
    """`auto` against the better of chain 3 and no speculation, at points that are not cut short."""
    speed = {
        (*key_of(r)[:3], r["policy"], r["tree"]): r["output_tokens_per_second"]
        for r in measured(rows)
    }
    found = []
    for (*where, policy, tree), value in speed.items():
        rivals = [speed.get((*where, policy, "3")), speed.get((*where, NONE, NONE))]
        if tree == "auto" and all(rivals):
            found.append(value / max(r for r in rivals if r))
    name = "auto over the better of chain 3 and no speculation: the least ratio of throughputs"
    return _at_least(name, 0.98, min(found, default=None))
