"""Runs a load on an engine, step by step in this thread, and watches what it holds meanwhile.

The engine is stepped as `LLM.generate` does it, without the asynchronous front and its texts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from trtllm_treewy.bench.load import LoadSpec, PlannedRequest
from trtllm_treewy.bench.target import RequestResult
from trtllm_treewy.runtime.engine import Engine
from trtllm_treewy.runtime.request import Request
from trtllm_treewy.sampling_params import SamplingParams

# Longest wait for the next request in one go, seconds.
NAP = 0.05
# A load that is given time to settle takes at most so many times that.
SETTLE_MOST = 5


@dataclass
class Watch:
    """What the engine held, weighted by time.

    Attributes:
        slots_by_memory: whether memory, and not the load, set the number of slots.
        seconds: watched.
        bound_seconds: those of them in which a request waited that memory kept out, or a sequence
            lost its memory.
        running_seconds: sequences that ran, summed over time.
        peak_running, peak_blocks, peak_slots: the most at one time.
    """

    slots_by_memory: bool
    seconds: float = 0.0
    bound_seconds: float = 0.0
    running_seconds: float = 0.0
    peak_running: int = 0
    peak_blocks: int = 0
    peak_slots: int = 0
    _preemptions: int = 0
    _ended: int = 0

    @classmethod
    def over(cls, engine: Engine, slots_by_memory: bool) -> Watch:
        """A watch that begins now."""
        stats = engine.stats
        return cls(slots_by_memory, _preemptions=stats.preemptions, _ended=_ended(engine))

    def note(self, engine: Engine, seconds: float) -> None:
        """Takes note of a step, or of a time without one."""
        stats = engine.stats
        preempted = stats.preemptions > self._preemptions
        ended, self._ended = _ended(engine) - self._ended, _ended(engine)
        self._preemptions = stats.preemptions
        # Who waited beside a free slot waited for KV blocks; slots of those that ended in this
        # step were not free yet. Without one, memory kept it out only if it set their number.
        by_memory = self.slots_by_memory or stats.slots_used + ended < stats.slots_total
        self.seconds += seconds
        self.bound_seconds += seconds * (preempted or (stats.waiting > 0 and by_memory))
        self.running_seconds += seconds * stats.running
        self.peak_running = max(self.peak_running, stats.running)
        self.peak_blocks = max(self.peak_blocks, stats.kv_blocks_used)
        self.peak_slots = max(self.peak_slots, stats.slots_used)


def _ended(engine: Engine) -> int:
    stats = engine.stats
    return stats.requests_finished + stats.requests_cancelled + stats.requests_failed


@dataclass
class Run:
    """A load that ran.

    Attributes:
        began: when.
        start: of what is counted, the same unless the load was given time to settle.
        watch: what the engine held.
        before: the engine's counters at `start`.
        seconds: from `start` to the last token, or until it was cut.
        results: of requests that ended.
        unfinished: of those that had not, where it was cut: without a first token, `arrivals` is
            empty.
        tokens: generated, those of unfinished requests among them.
    """

    began: float
    start: float
    watch: Watch
    before: dict[str, Any]
    seconds: float = 0.0
    results: list[RequestResult] = field(default_factory=list)
    unfinished: list[RequestResult] = field(default_factory=list)
    tokens: int = 0

    @classmethod
    def of(cls, engine: Engine, now: float, slots_by_memory: bool) -> Run:
        """A run that begins now."""
        return cls(now, now, Watch.over(engine, slots_by_memory), asdict(engine.stats))

    def settle(self, engine: Engine, now: float) -> None:
        """Forgets what was: everything is counted from now on."""
        self.start, self.before = now, asdict(engine.stats)
        self.watch = Watch.over(engine, self.watch.slots_by_memory)
        self.results.clear()

    def first_tokens(self) -> list[RequestResult]:
        """Requests whose first token came since `start`, or never."""
        done = [r for r in self.results if r.error is None]
        return [
            r for r in (*done, *self.unfinished) if not r.arrivals or r.arrivals[0] >= self.start
        ]

    def first_token_times(self) -> list[float]:
        """Seconds to those first tokens; of requests cut before theirs, how long they waited."""
        end = self.start + self.seconds
        return [r.ttft if r.arrivals else end - r.sent for r in self.first_tokens()]


def drive(
    engine: Engine,
    requests: Sequence[PlannedRequest],
    spec: LoadSpec,
    *,
    slots_by_memory: bool = False,
    seconds: float | None = None,
    settle: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Run:
    """Runs `requests`, at their times or so many at once, to their end or for `seconds`.

    Args:
        engine: without requests.
        requests: with prompts of token ids, in the order of their times.
        spec: says which of the two it is.
        slots_by_memory: see `Watch`.
        seconds: after which what is left is cancelled, counted from when the load has settled.
        settle: how long the load runs before it is counted (see `_is_settled`). Requests that end
            sooner are forgotten, and so are first tokens that come sooner; where the whole load
            ends sooner, all of it counts.
        clock, sleep: seconds; the clock must be the engine's.
    """
    run = Run.of(engine, clock(), slots_by_memory)
    pending, opened = deque(requests), dict[int, tuple[Request, RequestResult]]()
    seen = run.start
    while pending or opened:
        now = clock() - run.began
        settled = not settle or run.start > run.began
        if not settled and _is_settled(engine, spec, opened, run, now, settle):
            settled, seen = True, run.began + now
            run.settle(engine, seen)
        if seconds is not None and settled and now >= run.start - run.began + seconds:
            break
        _send(engine, spec, pending, opened, run, now)
        if engine.has_work:
            engine.step()
            _collect(opened, run)
        elif pending and spec.request_rate is not None:
            sleep(min(NAP, max(0.0, pending[0].at - now)))
        now_seen = clock()
        run.watch.note(engine, now_seen - seen)
        seen = now_seen
    _cut(engine, opened, run)
    _measure_length(run, clock())
    run.tokens = engine.stats.generated_tokens - run.before["generated_tokens"]
    return run


def _is_settled(
    engine: Engine,
    spec: LoadSpec,
    opened: dict[int, tuple[Request, RequestResult]],
    run: Run,
    now: float,
    settle: float,
) -> bool:
    """Whether a load that began `now` seconds ago shall be counted from now on.

    After `settle` seconds, and when the first requests, as many as fit at once, have had a first
    token, for which it waits up to SETTLE_MOST times as long: many long prompts at the beginning
    take their time.
    """
    if now < settle or spec.request_rate is not None:
        return now >= settle
    fit = min(spec.concurrency, engine.stats.slots_total)
    first = run.before["requests_added"] + fit
    late = any(r.first_token_at is None for number, (r, _) in opened.items() if number < first)
    return not late or now >= SETTLE_MOST * settle


def _send(
    engine: Engine,
    spec: LoadSpec,
    pending: deque[PlannedRequest],
    opened: dict[int, tuple[Request, RequestResult]],
    run: Run,
    now: float,
) -> None:
    while pending:
        closed = spec.request_rate is None
        if len(opened) >= spec.concurrency if closed else pending[0].at > now:
            return
        planned = pending.popleft()
        # A step may have been under way when a request was due: it has waited since then.
        result = RequestResult(run.began + (now if closed else planned.at))
        request = Request(
            engine.stats.requests_added,
            tuple(planned.prompt),  # type: ignore[arg-type]
            SamplingParams(max_tokens=planned.output_len, ignore_eos=True),
        )
        try:
            engine.add(request)
        except ValueError as error:
            result.error = str(error)
            run.results.append(result)
            continue
        opened[request.request_id] = (request, result)


def _collect(opened: dict[int, tuple[Request, RequestResult]], run: Run) -> None:
    """Moves what has ended from `opened` to the results."""
    ended = [number for number, (request, _) in opened.items() if request.finished]
    for number in ended:
        request, result = opened.pop(number)
        _fill(request, result)
        result.error = request.error
        run.results.append(result)


def _fill(request: Request, result: RequestResult) -> None:
    times = (request.first_token_at, request.finished_at)
    result.arrivals = [at for at in times if at is not None and request.first_token_at is not None]
    result.prompt_tokens = len(request.prompt_token_ids)
    result.output_tokens = len(request.output_token_ids)
    result.stats = request.stats


def _cut(engine: Engine, opened: dict[int, tuple[Request, RequestResult]], run: Run) -> None:
    engine.cancel([request for request, _ in opened.values()])
    for request, result in opened.values():
        _fill(request, result)
        run.unfinished.append(result)


def _measure_length(run: Run, now: float) -> None:
    ends = [r.arrivals[-1] for r in run.results if r.arrivals]
    end = now if run.unfinished or not ends else max(ends)
    run.seconds = end - run.start
