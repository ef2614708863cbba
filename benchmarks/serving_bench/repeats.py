"""A point that was measured several times, as one row: the median, and what the others were."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

# What a row keeps of every repeat.
KEPT = ("output_tokens_per_second", "seconds", "acceptance_length", "memory_bound_share", "late")
SPEED = "output_tokens_per_second"


def combine(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row of a point's repeats, in their order.

    Its throughput is the median of all; everything else is that of the repeat whose throughput is
    the median, the lower of two. `repeats` has the figures of each, in the order of the rounds, so
    that rows of one round can be compared with each other. A single row stays as it is.

    Args:
        rows: at least one; those of repeats that failed count for nothing beside any that did not.
    """
    good = [row for row in rows if "error" not in row]
    if len(good) < 2:
        return dict(good[0] if good else rows[0])
    middle = sorted(good, key=lambda row: row[SPEED])[(len(good) - 1) // 2]
    return dict(middle) | {
        SPEED: round(statistics.median(row[SPEED] for row in good), 3),
        "repeats": [
            {name: row[name] for name in KEPT if name in row} | _tails(row) for row in good
        ],
    }


def _tails(row: Mapping[str, Any]) -> dict[str, float]:
    """What of a repeat's times is looked at."""
    found = {}
    for name, part in (("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50")):
        if row.get(name) is not None:
            found[f"{name}_{part}"] = row[name][part]
    return found


def rounds_of(row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Every repeat's figures, or the row itself."""
    return row.get("repeats") or [row]


def speeds(row: Mapping[str, Any]) -> list[float]:
    """Throughput of every repeat."""
    return [each[SPEED] for each in rounds_of(row)]
