"""What the engine does, as Prometheus metrics.

Acceptance is the thing to watch: a drafter or a state that goes wrong shows there first, while the
text may look well for long. Everything below is named `treewy_*` and lives in a registry of its
own. Gauges and counters that the engine keeps itself (`EngineStats`) are read when they are asked
for; what an engine does not keep is left out, not shown as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from trtllm_treewy.outputs import AcceptanceStats

from .observer import EngineObserver
from .request import Request

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1)
_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
_TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072)

# Attribute of `engine.stats`, name of the metric, what it says. Gauges first, then what only grows.
_GAUGES = (
    ("kv_blocks_used", "treewy_kv_blocks_used", "Blocks of the KV cache that sequences hold."),
    ("kv_blocks_total", "treewy_kv_blocks", "Blocks of the KV cache."),
    ("kv_blocks_cached", "treewy_kv_blocks_cached", "Blocks that the prefix cache holds."),
    ("slots_used", "treewy_state_slots_used", "State slots that sequences hold."),
    ("slots_total", "treewy_state_slots", "State slots."),
    ("checkpoints_used", "treewy_checkpoints_used", "State checkpoints of the prefix cache."),
    ("checkpoints_total", "treewy_checkpoints", "State checkpoints that fit."),
)
_COUNTERS = (
    ("preemptions", "treewy_preemptions", "Sequences that had to give up their memory."),
    ("prefix_hits", "treewy_prefix_hits", "Prompts that found a part of themselves cached."),
    ("prefix_queries", "treewy_prefix_queries", "Prompts that were looked up."),
    ("prefix_queried_tokens", "treewy_prefix_queried_tokens", "Prompt tokens looked up."),
    ("prefix_hit_tokens", "treewy_prefix_hit_tokens", "Prompt tokens taken from the cache."),
    ("checkpoint_evictions", "treewy_checkpoint_evictions", "State checkpoints given up."),
    ("recomputed_tokens", "treewy_recomputed_tokens", "Tokens computed again."),
    ("pruned_trees", "treewy_pruned_trees", "Draft trees cut to the step's token budget."),
    ("pruned_tokens", "treewy_pruned_tokens", "Drafts cut off."),
    ("graph_steps", "treewy_graph_steps", "Decoding steps that ran as captured graphs."),
    ("graph_misses", "treewy_graph_misses", "Decoding steps that were not captured, or pruned."),
    ("executor_faults", "treewy_executor_faults", "Errors raised by the executor in a step."),
    ("non_finite_logits", "treewy_non_finite_logits", "Requests ended by logits that are none."),
)


class Metrics(EngineObserver):
    """Observer of an `AsyncEngine`, and the text of its `/metrics`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._told: dict[int, tuple[int, list[int], int]] = {}
        self._requests()
        self._latencies()
        self._acceptance()

    def _requests(self) -> None:
        registry = self.registry
        self._finished = Counter(
            "treewy_requests_finished", "Requests by reason.", ["reason"], registry=registry
        )
        self._refused = Counter(
            "treewy_requests_refused", "Requests not taken.", ["reason"], registry=registry
        )
        self._prompt_tokens = Counter(
            "treewy_prompt_tokens", "Prompt tokens of requests taken.", registry=registry
        )
        self._output_tokens = Counter(
            "treewy_generation_tokens", "Tokens generated.", registry=registry
        )
        self._failed_steps = Counter(
            "treewy_failed_steps", "Engine steps that raised.", registry=registry
        )
        self._prompt_length = Histogram(
            "treewy_request_prompt_tokens", "Prompt length.", buckets=_TOKENS, registry=registry
        )
        self._output_length = Histogram(
            "treewy_request_generation_tokens",
            "Output length of finished requests.",
            buckets=_TOKENS,
            registry=registry,
        )

    def _latencies(self) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"treewy_{name}", text, buckets=buckets, registry=self.registry)

        self._queue = histogram("queue_seconds", "From arrival to the first step with a slot.")
        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self._tpot = histogram(
            "time_per_output_token_seconds", "Mean over a request, after the first.", _PER_TOKEN
        )
        self._latency = histogram("request_seconds", "From arrival to the end.")
        self._step = histogram("step_seconds", "One engine step.")

    def _acceptance(self) -> None:
        registry = self.registry
        self._lengths = Histogram(
            "treewy_acceptance_length",
            "Tokens of one sequence in one verification step, the bonus included.",
            buckets=_LENGTHS,
            registry=registry,
        )
        self._verified = Counter(
            "treewy_verify_steps", "Verification steps, counted per sequence.", registry=registry
        )
        self._drafted = Counter("treewy_draft_tokens", "Drafts verified.", registry=registry)
        self._accepted = Counter(
            "treewy_accepted_tokens", "Drafts accepted, by depth.", ["depth"], registry=registry
        )

    # --- observer ---

    def queued(self, request: Request) -> None:
        """A request was taken."""
        self._prompt_tokens.inc(len(request.prompt_token_ids))
        self._prompt_length.observe(len(request.prompt_token_ids))

    def refused(self, reason: str) -> None:
        """A request was not taken."""
        self._refused.labels(reason).inc()

    def started(self, request: Request, queue_seconds: float) -> None:
        """A request got its slot."""
        self._queue.observe(queue_seconds)

    def first_token(self, request: Request, seconds: float) -> None:
        """A request has its first token."""
        self._ttft.observe(seconds)

    def advanced(self, request: Request, num_tokens: int) -> None:
        """A request has `num_tokens` more tokens."""
        self._output_tokens.inc(num_tokens)
        self._record_acceptance(request)

    def finished(
        self, request: Request, reason: str, seconds: float, per_token: float | None
    ) -> None:
        """A request has ended, however."""
        self._record_acceptance(request)
        self._told.pop(request.request_id, None)
        self._finished.labels(reason).inc()
        self._latency.observe(seconds)
        self._output_length.observe(len(request.output_token_ids))
        if per_token is not None:
            self._tpot.observe(per_token)

    def stepped(self, seconds: float, failed: bool) -> None:
        """The engine made a step, or failed to."""
        self._step.observe(seconds)
        if failed:
            self._failed_steps.inc()

    def _record_acceptance(self, request: Request) -> None:
        """Counts the verification steps since the last time, of a request that may have drafts.

        A step that accepted a draft at depth d accepted one at every depth above, so the counts by
        depth hold the whole distribution: `by_depth[d - 1] - by_depth[d]` steps accepted d.
        """
        if not request.speculation:
            return  # it asked for no drafts, and says nothing of the drafter
        stats: AcceptanceStats = request.stats
        steps, by_depth, drafted = self._told.get(request.request_id, (0, [], 0))
        if stats.num_steps == steps:
            return
        now = list(stats.accepted_per_depth)
        by_depth = by_depth + [0] * (len(now) - len(by_depth))
        new = [stats.num_steps - steps] + [a - b for a, b in zip(now, by_depth, strict=True)]
        self._told[request.request_id] = (stats.num_steps, now, stats.num_drafted)
        self._verified.inc(new[0])
        self._drafted.inc(stats.num_drafted - drafted)
        for depth, count in enumerate(new):
            if depth and count:
                self._accepted.labels(depth).inc(count)
            beyond = new[depth + 1] if depth + 1 < len(new) else 0
            for _ in range(count - beyond):
                self._lengths.observe(depth + 1)

    # --- exposition ---

    def watch(self, engine: Any) -> None:
        """Adds what an `AsyncEngine` and the engine in it say of themselves when asked."""
        self.registry.register(_EngineCollector(engine))

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineCollector:
    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        yield _gauge("treewy_requests_running", "Requests that hold a slot.", engine.num_running)
        yield _gauge("treewy_requests_waiting", "Requests without a slot.", engine.num_waiting)
        yield _gauge("treewy_engine_alive", "1 while requests can run.", int(engine.alive))
        stats = _stats_of(engine.engine)
        for attribute, name, text in _GAUGES:
            value = getattr(stats, attribute, None)
            if value is not None:
                yield _gauge(name, text, value)
        for attribute, name, text in _COUNTERS:
            value = getattr(stats, attribute, None)
            if value is not None:
                family = CounterMetricFamily(name, text)
                family.add_metric([], value)
                yield family
        drafted = getattr(stats, "drafted_per_depth", None)
        if drafted is not None:
            family = CounterMetricFamily(
                "treewy_drafted_trees", "Trees with a draft at this depth.", labels=["depth"]
            )
            for depth, count in enumerate(list(drafted), start=1):
                family.add_metric([str(depth)], count)
            yield family


def _stats_of(engine: Any) -> Any:
    """The engine's `stats`, an attribute or a method; None where there are none."""
    stats: Callable[[], Any] | Any = getattr(engine, "stats", None)
    return stats() if callable(stats) else stats


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)
