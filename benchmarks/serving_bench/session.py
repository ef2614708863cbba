"""A plan is measured: engines that are compared stand beside each other, and take turns.

Two runs of one point may differ by more than two policies do. So where points are repeated, engines
over one workload and memory fraction are kept together as far as the device holds them, and every
round has each load once on each of them: what slows the device down meets all alike.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .engines import Built, Ground, build_site, plan_site, release, wait
from .measure import Effort, measure
from .points import NONE, Arrivals, Plan, Point, Setting, Site
from .repeats import combine
from .ucache import PeerError
from .warm import Compiles, warm_prompts

# Sizes of captured steps where requests come at a rate.
RATE_BATCHES = (1, 4, 16, 64, 128)
# Share of the device's memory that engines beside each other may plan with.
TOGETHER = 0.94


class Clock:
    """The time that is left, by what points may take and took.

    Args:
        effort: of every point.
        end: when all of it shall be over, by `time.perf_counter`; None for never.
    """

    def __init__(self, effort: Effort, end: float | None) -> None:
        self.effort, self._end = effort, end
        self._took: dict[Point, float] = {}

    def has_time(self, point: Point) -> bool:
        """Whether the point ends in time if it begins now, as far as is known."""
        if self._end is None:
            return True
        most = max(self.effort.most(point), self._took.get(point, 0.0))
        return time.perf_counter() + most < self._end

    def note(self, point: Point, seconds: float) -> None:
        """That a point took so long, in which it may be repeated."""
        self._took[point] = seconds


@dataclass
class Session:
    """Measures points, and has them saved as they come.

    Attributes:
        ground: what all engines share.
        clock: says for what there is time.
        repeats: of every point.
        run: its "rows" and "left_out" are filled.
        save: called whenever they have changed.
        compiles: counts kernels that are compiled.
    """

    ground: Ground
    clock: Clock
    repeats: int
    run: dict[str, Any]
    save: Callable[[], None]
    compiles: Compiles | None = None
    _warmed: dict[bool, int] = field(default_factory=dict)
    _found: dict[Point, list[dict[str, Any]]] = field(default_factory=dict)

    def measure(self, plan: Plan) -> None:
        """All points, as far as there is time."""
        for group in self.groups(plan):
            self._measure_group(group)
            release(self.ground.device)

    def groups(self, plan: Plan) -> Iterator[Plan]:
        """Sites in a row that are compared and fit beside each other; alone without repeats."""
        group: Plan = {}
        held = 0
        for site, arrivals in plan.items():
            takes = self._takes(site, arrivals)
            first = next(iter(group), site)
            same = (first.workload, first.fraction) == (site.workload, site.fraction)
            alone = self.repeats == 1 or not same or held + takes > self._room(group)
            if group and alone:
                yield group
                group, held = {}, 0
            group[site] = arrivals
            held += takes
        if group:
            yield group

    def _takes(self, site: Site, arrivals: Sequence[Arrivals]) -> int:
        """Bytes of a site's engine beside the weights; 0 if it does not fit and is never built."""
        try:
            planned = plan_site(self.ground, site, *limits_of(arrivals))
        except MemoryError:
            return 0
        return planned.total - planned.weights

    def _room(self, group: Plan) -> int:
        """Bytes for the engines of a group, beside the weights."""
        site = next(iter(group), None)
        if site is None:
            return 0
        try:
            weights = plan_site(self.ground, site, *limits_of(group[site])).weights
        except MemoryError:
            return 0
        return int(TOGETHER * self.ground.memory) - weights

    def _measure_group(self, group: Plan) -> None:
        points = {site: [Point(site, load) for load in loads] for site, loads in group.items()}
        built: dict[Site, Built | str] = {}
        for site, wanted in points.items():
            if any(self.clock.has_time(point) for point in wanted):
                built[site] = self._build(site, group[site])
        for number in range(self.repeats):
            for site, engine in built.items():
                for point in points[site]:
                    self._measure_once(point, engine, number, len(built))
        for wanted in points.values():
            self._leave_out(wanted)
        wait(self.ground.device)  # a step may be under way whose buffers go now

    def _build(self, site: Site, arrivals: Sequence[Arrivals]) -> Built | str:
        """The engine; or why there is none."""
        started = time.perf_counter()
        try:
            built = build_site(self.ground, site, *limits_of(arrivals))
        except (MemoryError, torch.OutOfMemoryError) as error:
            return f"does not fit: {str(error)[:200]}"
        except PeerError as error:
            return str(error)[:200]
        say(f"{name_of(site)}: {built.slots} slots, {time.perf_counter() - started:.1f} s to build")
        self._warm(built, Point(site, arrivals[0]))
        return built

    def _warm(self, built: Built, point: Point) -> None:
        """Compiles the kernels of prompts, the drafter's too, unless an engine before has."""
        longest, drafts = point.site.workload.max_len, point.site.setting.policy != NONE
        done = max(self._warmed.get(True, 0), 0 if drafts else self._warmed.get(False, 0))
        if not self.ground.captured or longest <= done:
            return
        started = time.perf_counter()
        warm_prompts(built, point, self.ground.config.vocab_size)
        self._warmed[drafts] = longest
        say(
            f"prompts of up to {longest} tokens, which compiles their kernels: "
            f"{time.perf_counter() - started:.1f} s"
        )

    def _measure_once(self, point: Point, engine: Built | str, number: int, beside: int) -> None:
        """Adds a repeat of a point, unless there is no time, or nothing to repeat."""
        rows = self._found.get(point, [])
        if (rows and "error" in rows[-1]) or not self.clock.has_time(point):
            return
        began = time.perf_counter()
        row = self._row(point, engine, number) | {"engines": beside}
        self.clock.note(point, time.perf_counter() - began)
        self._found[point] = [*rows, row]
        self.run["rows"] = [combine(found) for found in self._found.values()]
        speed = row.get("output_tokens_per_second", row.get("error"))
        say(
            f"{named(row)}: {speed} tokens/s, {row.get('seconds', 0)} s after "
            f"{row.get('settle_seconds', 0)} s, and {row.get('warm_seconds', 0)} s to warm up"
        )
        self.save()

    def _row(self, point: Point, engine: Built | str, number: int) -> dict[str, Any]:
        if isinstance(engine, str):
            return point.to_dict() | {"error": engine}
        wait(self.ground.device)  # the last step of the engine before
        effort = self.clock.effort.repeated(number)
        try:
            return measure(engine, point, effort, self.ground.config.vocab_size, self.compiles)
        except (MemoryError, torch.OutOfMemoryError) as error:
            return point.to_dict() | {"error": f"ran out of memory: {str(error)[:200]}"}

    def _leave_out(self, points: Sequence[Point]) -> None:
        """Notes points, and rounds of points, that there was no time for."""
        for point in points:
            found = self._found.get(point, [])
            if len(found) == self.repeats or any("error" in row for row in found):
                continue
            rounds = f", rounds {len(found) + 1} to {self.repeats}" if found else ""
            self.run["left_out"].append(named(point.to_dict()) + rounds)
            say(f"{self.run['left_out'][-1]}: left out, no time is left of --seconds")
        self.save()


def limits_of(arrivals: Sequence[Arrivals]) -> tuple[list[int], int | None]:
    """Numbers of sequences whose steps are captured for these loads, and the most there can be."""
    closed = {load.concurrency for load in arrivals if load.concurrency is not None}
    if any(load.rate is not None for load in arrivals):
        return sorted(closed | set(RATE_BATCHES)), None
    return sorted(closed), max(closed)


def named(row: Mapping[str, Any]) -> str:
    """A point's name, by its row."""
    way = Setting(row["policy"], row["tree"]).name
    return f"{row['workload']}, fraction {row['fraction']:g}, {way}, {row['load']}"


def name_of(site: Site) -> str:
    """A site's name."""
    return f"{site.workload.name}, fraction {site.fraction:g}, {site.setting.name}"


def say(text: str) -> None:
    """To whoever watches."""
    print(text, file=sys.stderr, flush=True)
