"""A picture of a run: time against nodes and against batch, with the floor and the peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .cases import STATES
from .recorded import DATE, GPU, TIMES
from .results import OURS, Results, Row

BATCH = 64  # of the panels over nodes
NODES = 16  # of the panels over batches
RECORDED = "edge-llm"
NAMES = {
    "flashinfer": "FlashInfer, chain",
    "flashinfer-snapshots": "FlashInfer, chain, snapshots",
    "sglang": "SGLang, snapshots",
    "treewy-snapshots": "our baseline, snapshots",
    "fla": "flash-linear-attention, chain",
    RECORDED: f"TensorRT Edge-LLM ({DATE})",
}
Series = dict[str, list[tuple[float, float]]]


def series_over_nodes(results: Results, state: str, batch: int = BATCH) -> Series:
    """Microseconds by nodes: our trees, their floor, and the peers."""
    return _series(results, state, "nodes", batch=batch)


def series_over_batches(results: Results, state: str, nodes: int = NODES) -> Series:
    """Microseconds by batch: our trees of 16 nodes, their floor, and peers of about as many."""
    return _series(results, state, "batch", nodes=nodes)


def _series(results: Results, state: str, x: str, **fixed: int) -> Series:
    found: Series = {}
    rows = [r for r in results.rows if r.us is not None and r.case.operation == "tree_verify"]
    for row in (r for r in rows if r.case.state == state and r.case.tile == "auto"):
        name = _name(row)
        if name and _fits(row, fixed):
            at = float(getattr(row.case, x))
            found.setdefault(name, []).append((at, float(row.us or 0)))
            if name == "trtllm-treewy":
                found.setdefault("floor (bytes)", []).append((at, row.floor_us))
    if state == "fp32" and rows and results.gpu == GPU:
        for (who, _, nodes), by_batch in TIMES.items():
            for batch, us in by_batch.items() if who == RECORDED else ():
                place = {"nodes": nodes, "batch": batch}
                if all(abs(place[key] - value) <= 1 for key, value in fixed.items()):
                    found.setdefault(NAMES[RECORDED], []).append((float(place[x]), us))
    return {name: sorted(points) for name, points in found.items()}


def _name(row: Row) -> str:
    """The line that a row belongs to; empty for none."""
    case = row.case
    if row.implementation != OURS:
        return NAMES.get(row.implementation, row.implementation)
    if case.topology == "chain" and case.nodes > 3:
        return ""
    return {"fp32": "trtllm-treewy", "none": "trtllm-treewy, input stash"}.get(case.stash, "")


def _fits(row: Row, fixed: dict[str, int]) -> bool:
    """Whether a row is at the fixed value; peers' trees of 15 nodes stand beside our 16."""
    slack = 0 if row.implementation == OURS or "nodes" not in fixed else 1
    return all(abs(getattr(row.case, key) - value) <= slack for key, value in fixed.items())


def plot(results: Results, path: str | Path) -> None:
    """Writes a picture in the format that the name ends with.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8.5))
    for column, state in enumerate(STATES):
        over_nodes = series_over_nodes(results, state)
        _draw(axes[0][column], over_nodes, f"{state} state, batch {BATCH}", "nodes")
        over_batches = series_over_batches(results, state)
        _draw(axes[1][column], over_batches, f"{state} state, {NODES} nodes", "batch")
    figure.suptitle(f"Tree verification, a layer of Qwen3.5-35B-A3B, {results.gpu}")
    figure.tight_layout()
    figure.savefig(path, dpi=130, metadata={"Date": None} if str(path).endswith("svg") else None)
    pyplot.close(figure)


def _draw(axis: Any, series: Series, title: str, xlabel: str) -> None:
    for name, points in series.items():
        style = ":" if name.startswith("floor") else "-" if name.startswith("trtllm") else "--"
        axis.plot(
            *zip(*points, strict=True),
            linestyle=style,
            marker="" if style == ":" else "o",
            label=name,
        )
    xs = [x for points in series.values() for x, _ in points]
    ticks = [2**power for power in range(9) if xs and min(xs) <= 2**power <= max(xs)]
    axis.set(title=title, xlabel=xlabel, ylabel="microseconds")
    axis.set(xscale="log", yscale="log")
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter("{x:g}")
    axis.grid(alpha=0.3)
    if series:
        axis.legend(fontsize="small")
