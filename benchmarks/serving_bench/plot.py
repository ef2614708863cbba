"""Pictures of a run: throughput and first tokens by concurrency, memory-bound time by budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .points import Setting
from .split import Row, kind, measured, of

Lines = dict[str, list[tuple[float, float]]]


def draw(rows: Sequence[Row], path: Path) -> None:
    """A row of panels for each workload and memory fraction; one more for arrivals at a rate.

    Raises:
        ValueError: nothing was measured, or matplotlib knows no such kind of file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = _panels(measured(rows))
    if not panels:
        raise ValueError("no point has figures, so there is nothing to plot")
    figure, grid = pyplot.subplots(
        len(panels), 3, figsize=(13, 3.4 * len(panels)), layout="constrained", squeeze=False
    )
    for row_of_axes, (title, columns) in zip(grid, panels, strict=True):
        for axes, (label, x_label, lines) in zip(row_of_axes, columns, strict=True):
            _panel(axes, f"{title}: {label}", x_label, lines)
    try:
        figure.savefig(path, dpi=130)
    finally:
        pyplot.close(figure)


def _panel(axes: Any, title: str, x_label: str, lines: Lines) -> None:
    for name, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=name)
    axes.set(title=title, xlabel=x_label)
    axes.title.set_fontsize(8)
    axes.grid(alpha=0.3)
    if lines:
        axes.legend(fontsize=6)
        if x_label == "requests at once":
            axes.set_xscale("log", base=2)
    else:
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes)


def _panels(rows: Sequence[Row]) -> list[tuple[str, list[tuple[str, str, Lines]]]]:
    closed = [row for row in rows if row["rate"] is None]
    panels = []
    for workload, fraction in dict.fromkeys((r["workload"], r["fraction"]) for r in closed):
        here = [r for r in closed if (r["workload"], r["fraction"]) == (workload, fraction)]
        x, by = "requests at once", "concurrency"
        columns = [
            ("tokens/s", x, lines_of(here, by, lambda r: r["output_tokens_per_second"])),
            ("p99 TTFT, s", x, lines_of(here, by, lambda r: of(r, "ttft", "p99"))),
            ("sequences at once", x, lines_of(here, by, lambda r: r["sequences_mean"])),
        ]
        panels.append((f"{workload}, fraction {fraction:g}", columns))
    opened = [row for row in rows if row["rate"] is not None]
    for workload, load in dict.fromkeys((r["workload"], r["load"]) for r in opened):
        here = [r for r in opened if (r["workload"], r["load"]) == (workload, load)]
        x, by = "memory fraction", "fraction"
        columns = [
            ("memory-bound time", x, lines_of(here, by, lambda r: r["memory_bound_share"])),
            ("p99 TTFT, s", x, lines_of(here, by, lambda r: of(r, "ttft", "p99"))),
            ("tokens/s", x, lines_of(here, by, lambda r: r["output_tokens_per_second"])),
        ]
        panels.append((f"{workload}, {load}", columns))
    return panels


def lines_of(rows: Sequence[Row], by: str, value: Callable[[Row], float | None]) -> Lines:
    """A line for each way to decode: its values over `by`, where it has any."""
    lines: Lines = {}
    for row in rows:
        found = value(row)
        if found is not None:
            name = Setting(row["policy"], row["tree"]).name + ", steady" * (kind(row) == "steady")
            lines.setdefault(name, []).append((float(row[by]), float(found)))
    return lines
