"""Points where memory is short and points with headroom, and what the policies make of each.

A point is memory-bound where full snapshots are: its workload, memory, load and tree under the
policy `snapshot` spend more than a twentieth of the time with requests kept out by memory. So all
policies are compared on the same two sets. Where there was no such run, a point's own share counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .points import NONE

BOUND_SHARE = 0.05
BASELINE = "snapshot"
Row = Mapping[str, Any]


def kind(row: Row) -> str:
    """What a row's figures are of: a window of a "steady" state, or a "whole" run."""
    return "steady" if row.get("settle_seconds") else "whole"


def place(row: Row) -> tuple[Any, ...]:
    """What rows that are compared have in common beside the tree."""
    return (row["workload"], row["fraction"], row["load"], kind(row))


def is_closed(row: Row) -> bool:
    """Whether so many requests are at once: at a rate, throughput is that of the arrivals."""
    return row.get("rate") is None


def measured(rows: Iterable[Row]) -> list[Row]:
    """Rows that have figures."""
    return [row for row in rows if "error" not in row and row.get("output_tokens")]


def baselines(rows: Sequence[Row]) -> dict[tuple[Any, ...], Row]:
    """Rows of the baseline, by place and tree; the rows that did not fit at all too."""
    return {key_of(row): row for row in rows if row["policy"] == BASELINE}


def key_of(row: Row) -> tuple[Any, ...]:
    return (*place(row), row["tree"])


def is_bound(row: Row, base: Mapping[tuple[Any, ...], Row]) -> bool:
    """Whether memory is short at the row's point."""
    twin = base.get(key_of(row), row)
    if row["policy"] == NONE:
        # Without drafts there is no snapshot to compare with: the point is bound if any tree's is.
        twins = [b for key, b in base.items() if key[:-1] == place(row)] or [row]
        return any(_short(b) for b in twins)
    return _short(twin)


def _short(row: Row) -> bool:
    """Whether a row's own run was short of memory; one that did not fit was."""
    return "error" in row or row.get("memory_bound_share", 0.0) > BOUND_SHARE


def split(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Measured rows: memory-bound ones, and those with headroom."""
    base = baselines(rows)
    bound = [row for row in measured(rows) if is_bound(row, base)]
    return bound, [row for row in measured(rows) if not is_bound(row, base)]


def of(row: Row, name: str, part: str) -> float | None:
    """A percentile of a row, None where there was nothing to take it of."""
    spread = row.get(name)
    return None if spread is None else float(spread[part])


def mean_ratio(
    pairs: Sequence[tuple[Row, Row]], value: Callable[[Row], float | None]
) -> float | None:
    """Geometric mean of the first's value over the second's, where both have one above 0."""
    logs = [
        math.log(mine / other)
        for mine, other in ((value(a), value(b)) for a, b in pairs)
        if mine and other
    ]
    return math.exp(sum(logs) / len(logs)) if logs else None
