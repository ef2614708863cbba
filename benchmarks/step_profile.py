"""What a GPU did in some steps, from a profiler's events: by kind of kernel, and when nothing.

An event is a kernel or a copy. Those of one graph have one launch in common; any other is a launch
of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

GDN_VERIFY, GDN_COMMIT = "GDN verify", "GDN commit"
# Kinds of kernels by parts of their names, the first that fits.
KINDS = {
    "conv": ("conv", "save_windows"),
    GDN_VERIFY: ("tree_verify", "_verify"),
    GDN_COMMIT: ("update_states", "commit_inputs", "append_paths", "_histor", "_commit"),
    "attention": ("_attend", "_combine", "_append", "_place_heads"),
    "experts": ("_gate_up", "_down", "_route", "_tally", "_count", "_find_rows", "_sort"),
    "best tokens": ("_partial", "_merge", "greedy_accept", "reduce_kernel"),
    "norms": ("_rms", "_gated"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "gemv", "splitK"),
    "copies and the rest": ("",),
}


@dataclass(frozen=True)
class DeviceEvent:
    """A kernel or a copy: name, nanoseconds, and the number of the launch that it is part of."""

    name: str
    start: int
    duration: int
    launch: int


def device_events(profiler: Any) -> list[DeviceEvent]:
    """What torch's profiler saw on the device, in order."""
    events = [
        DeviceEvent(e.name(), e.start_ns(), e.duration_ns(), e.correlation_id())
        for e in profiler.profiler.kineto_results.events()
        if e.device_type() == torch.autograd.DeviceType.CUDA
    ]
    return sorted(events, key=lambda event: event.start)


def kind_of(name: str) -> str:
    """The kind of a kernel."""
    return next(kind for kind, parts in KINDS.items() if any(part in name for part in parts))


def kinds_ms(events: Sequence[DeviceEvent], steps: int) -> dict[str, float]:
    """Milliseconds of a step by kind; kinds that did not occur are left out."""
    found = dict.fromkeys(KINDS, 0)
    for event in events:
        found[kind_of(event.name)] += event.duration
    return {kind: round(spent / steps / 1e6, 4) for kind, spent in found.items() if spent}


def largest_ms(events: Sequence[DeviceEvent], steps: int, count: int = 12) -> dict[str, float]:
    """Milliseconds of a step by kernel, of those that took the most."""
    found: dict[str, int] = {}
    for event in events:
        found[event.name[:80]] = found.get(event.name[:80], 0) + event.duration
    top = sorted(found.items(), key=lambda item: -item[1])[:count]
    return {name: round(spent / steps / 1e6, 4) for name, spent in top}


def per_step(events: Sequence[DeviceEvent], steps: int) -> dict[str, float]:
    """`launches` of a step, of graphs, copies and kernels outside of graphs, and all `kernels`."""
    launches = len({event.launch for event in events})
    return {"launches": round(launches / steps, 1), "kernels": round(len(events) / steps, 1)}


def idle_parts(events: Sequence[DeviceEvent]) -> dict[str, float]:
    """Parts of the time between the first and the last event in which there was none.

    Returns:
        `idle_part`, all of it, and `idle_between_part`, that between launches. What is left lies
        between kernels of one graph.
    """
    if not events:
        return {"idle_part": 0.0, "idle_between_part": 0.0}
    idle, between = 0, 0
    reached, launch = events[0].start + events[0].duration, events[0].launch
    for event in events[1:]:
        gap = max(0, event.start - reached)
        idle += gap
        between += gap if event.launch != launch else 0
        reached, launch = max(reached, event.start + event.duration), event.launch
    whole = reached - events[0].start
    return {
        "idle_part": round(idle / whole, 4),
        "idle_between_part": round(between / whole, 4),
    }


def gdn_part(kinds: dict[str, float], step_ms: float) -> float:
    """The share of verification and commit of the recurrent states in a step of `step_ms`."""
    return round((kinds.get(GDN_VERIFY, 0.0) + kinds.get(GDN_COMMIT, 0.0)) / step_ms, 4)
