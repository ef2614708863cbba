"""A point: its load is made, warmed up to, run, and summed up."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from trtllm_treewy.bench.load import PlannedRequest, plan_load
from trtllm_treewy.bench.report import spread
from trtllm_treewy.outputs import AcceptanceStats

from .drive import Run, drive
from .engines import Built, memory_by_kind
from .points import AUTO, Point

# Counters of the engine that a point reports, by how much they grew.
COUNTED = (
    "steps", "preemptions", "recomputed_tokens", "prefilled_tokens", "graph_steps", "graph_misses",
    "pruned_trees", "executor_faults",
)  # fmt: skip
# Lengths of requests that only warm up, and how often: `auto` has more shapes to meet.
WARM_PROMPT, WARM_OUTPUT, WARM_OUTPUT_AUTO = 32, 24, 128


@dataclass(frozen=True)
class Effort:
    """How much is run for a point.

    Attributes:
        per_sequence, least, rate_seconds: requests: so many for each at once and no fewer than
            `least`, or those of so many seconds at a rate.
        seconds: after which a point is cut, None for never.
        seed: of loads.
    """

    per_sequence: int
    least: int
    rate_seconds: float
    seconds: float | None
    seed: int

    def requests(self, point: Point) -> int:
        arrivals = point.arrivals
        if arrivals.rate is not None:
            return max(self.least, round(arrivals.rate * self.rate_seconds))
        return max(self.least, self.per_sequence * (arrivals.concurrency or 1))


class RandomTokens:
    """Stands in for a tokenizer: prompts are random ids, which experts are routed evenly by."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size, self._seed = vocab_size, seed

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids, as many as the text has letters; what it says does not matter."""
        random = np.random.default_rng(self._seed)
        return [int(token) for token in random.integers(0, self._vocab_size, len(text))]


def measure(built: Built, point: Point, effort: Effort, vocab_size: int) -> dict[str, Any]:
    """Runs a point on its engine; its row."""
    spec = point.load(effort.requests(point), effort.seed)
    requests = plan_load(spec, " " * (1 << 16), RandomTokens(vocab_size, effort.seed))
    warm_up(built, point, vocab_size)
    before = asdict(built.engine.stats)
    run = drive(
        built.engine,
        requests,
        spec,
        slots_by_memory=built.bound_by_memory,
        seconds=effort.seconds,
    )
    after = asdict(built.engine.stats)
    row = point.to_dict() | {"slots": built.slots, "slots_by_memory": built.bound_by_memory}
    row |= summarise(run)
    row |= {name: after[name] - before[name] for name in COUNTED}
    row["memory"] = memory_by_kind(built, run.watch.peak_blocks, run.watch.peak_slots)
    return row


def warm_up(built: Built, point: Point, vocab_size: int) -> None:
    """Short requests at the point's concurrency: what compiles or is captured late, does so now."""
    limits = built.engine._executor.limits
    count = min(point.arrivals.concurrency or built.slots, built.slots)
    output = WARM_OUTPUT_AUTO if point.site.setting.tree == AUTO else WARM_OUTPUT
    output = max(1, min(output, limits.max_seq_len // 2))
    prompt = max(1, min(WARM_PROMPT, limits.max_seq_len - output))
    tokens = RandomTokens(vocab_size, 1).encode(" " * prompt, False)
    spec = replace(point.load(count, 0), request_rate=None, concurrency=count)
    drive(built.engine, [PlannedRequest(tokens, output, 0.0)] * count, spec)


def summarise(run: Run) -> dict[str, Any]:
    """Numbers of a run; times in seconds."""
    done = [r for r in run.results if r.error is None]
    seconds, watch = max(run.seconds, 1e-9), run.watch
    stats = [r.stats for r in (*done, *run.unfinished) if r.stats is not None]
    prompt = sum(r.prompt_tokens for r in (*done, *run.unfinished) if r.arrivals)
    accepted = sum(stats, AcceptanceStats())
    return {
        "seconds": round(run.seconds, 4),
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
