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


def place(row: Row) -> tuple[Any, ...]:
    """What rows that are compared have in common beside the tree."""
    return (row["workload"], row["fraction"], row["load"])


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
        twins = [b for key, b in base.items() if key[:3] == place(row)] or [row]
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


def ratios(rows: Sequence[Row], all_rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each policy over snapshots at the same points and trees: geometric means.

    Args:
        rows: those that are compared.
        all_rows: where the baseline is looked up.

    Returns:
        For each policy: points, throughput (more is better), p99 TTFT, median TPOT and the means of
        sequences at once, each as a ratio to the baseline.
    """
    base = {key: row for key, row in baselines(all_rows).items() if measured([row])}
    found = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        pairs = [
            (row, base[key_of(row)])
            for row in rows
            if row["policy"] == policy and key_of(row) in base
        ]
        if policy in (NONE, BASELINE) or not pairs:
            continue
        found.append(
            {
                "policy": policy,
                "points": len(pairs),
                "throughput": mean_ratio(pairs, lambda r: r["output_tokens_per_second"]),
                "ttft_p99": mean_ratio(pairs, lambda r: of(r, "ttft", "p99")),
                "tpot_p50": mean_ratio(pairs, lambda r: of(r, "tpot", "p50")),
                "sequences": mean_ratio(pairs, lambda r: r["sequences_mean"]),
            }
        )
    return found


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
