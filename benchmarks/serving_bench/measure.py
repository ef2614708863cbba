"""A point: its load is made, warmed up to, run, and summed up."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from trtllm_treewy.bench.load import plan_load
from trtllm_treewy.bench.report import spread
from trtllm_treewy.outputs import AcceptanceStats

from .drive import SETTLE_MOST, Run, drive
from .engines import Built, memory_by_kind
from .points import Point
from .warm import Compiles, RandomTokens, captured, warm_up

# Counters of the engine that a point reports, by how much they grew.
COUNTED = (
    "steps", "preemptions", "recomputed_tokens", "prefilled_tokens", "graph_steps", "graph_misses",
    "pruned_trees", "executor_faults",
)  # fmt: skip


@dataclass(frozen=True)
class Effort:
    """How much is run for a point.

    Attributes:
        per_sequence, least, rate_seconds: requests: so many for each at once and no fewer than
            `least`, or those of so many seconds at a rate.
        seconds: after which a point is cut, None for never.
        seed: of loads.
        settle: seconds that a load runs before it is counted (see `drive`).
    """

    per_sequence: int
    least: int
    rate_seconds: float
    seconds: float | None
    seed: int
    settle: float = 0.0

    def repeated(self, number: int) -> Effort:
        """That of a repeat: other requests, the same for all that are compared."""
        return replace(self, seed=self.seed + number)

    def requests(self, point: Point) -> int:
        arrivals = point.arrivals
        if arrivals.rate is not None:
            return max(self.least, round(arrivals.rate * self.rate_seconds))
        return max(self.least, self.per_sequence * (arrivals.concurrency or 1))

    def cut(self, point: Point) -> float | None:
        """Seconds that are counted: at a rate, as long as requests come, if that is longer."""
        if self.seconds is None or point.arrivals.rate is None:
            return self.seconds
        return max(self.seconds, self.rate_seconds - self.settle)

    def most(self, point: Point) -> float:
        """Seconds that a point takes at most, beside what warms up; without a cut nobody knows."""
        return SETTLE_MOST * self.settle + (self.cut(point) or 0.0)


def measure(
    built: Built, point: Point, effort: Effort, vocab_size: int, compiles: Compiles | None = None
) -> dict[str, Any]:
    """Runs a point on its engine; its row.

    `compiles` counts the kernels that were compiled meanwhile, which the row then has.
    """
    spec = point.load(effort.requests(point), effort.seed)
    requests = plan_load(spec, " " * (1 << 16), RandomTokens(vocab_size, effort.seed))
    began = time.perf_counter()
    warm_up(built, point, vocab_size)
    warmed = time.perf_counter()
    late = _late(built, compiles)
    run = drive(
        built.engine,
        requests,
        spec,
        slots_by_memory=built.bound_by_memory,
        seconds=effort.cut(point),
        settle=effort.settle,
    )
    after = asdict(built.engine.stats)
    row = point.to_dict() | {"slots": built.slots, "slots_by_memory": built.bound_by_memory}
    row |= summarise(run)
    row |= {name: after[name] - run.before[name] for name in COUNTED}
    row["late"] = _late(built, compiles) - late
    row["warm_seconds"] = round(warmed - began, 3)
    row["memory"] = memory_by_kind(built, run.watch.peak_blocks, run.watch.peak_slots)
    return row


def _late(built: Built, compiles: Compiles | None) -> int:
    """Kernels and steps that were compiled and captured so far."""
    count = None if compiles is None else compiles.count
    return captured(built.engine) + (count or 0)


def summarise(run: Run) -> dict[str, Any]:
    """Numbers of a run; times in seconds."""
    done = [r for r in run.results if r.error is None]
    seconds, watch = max(run.seconds, 1e-9), run.watch
    stats = [r.stats for r in (*done, *run.unfinished) if r.stats is not None]
    prompt = sum(r.prompt_tokens for r in run.first_tokens() if r.arrivals)
    accepted = sum(stats, AcceptanceStats())
    return {
        "seconds": round(run.seconds, 4),
        "settle_seconds": round(run.start - run.began, 4),
        "completed": len(done),
        "unfinished": len(run.unfinished),
        "failed": len(run.results) - len(done),
        "errors": sorted({r.error for r in run.results if r.error})[:3],
        "output_tokens": run.tokens,
        "output_tokens_per_second": round(run.tokens / seconds, 3),
        "total_tokens_per_second": round((run.tokens + prompt) / seconds, 3),
        "ttft": spread(run.first_token_times()),
        "tpot": spread([r.tpot for r in done if r.tpot is not None]),
        "latency": spread([r.latency for r in done]),
        "acceptance_length": round(accepted.acceptance_length, 4),
        "sequences_peak": watch.peak_running,
        "sequences_mean": round(watch.running_seconds / max(watch.seconds, 1e-9), 3),
        "memory_bound_share": round(watch.bound_seconds / max(watch.seconds, 1e-9), 4),
    }
