"""A run as text: all points in two tables, ratios to snapshots, shares of time, notes, goals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trtllm_treewy.cli.sizes import format_size

from .goals import GPU, MODEL, Goal, goals
from .split import BASELINE, BOUND_SHARE, Row, of, ratios, split

POINT_COLUMNS = (
    "workload", "fraction", "load", "policy", "tree", "tokens/s", "TTFT p50", "TTFT p99",
    "TPOT p50", "TPOT p99", "at once", "peak", "slots", "preempted", "bound", "accepted",
    "states+stash", "KV used",
)  # fmt: skip
RATIO_COLUMNS = ("policy", "points", "tokens/s", "TTFT p99", "TPOT p50", "at once")


def text(run: Mapping[str, Any]) -> str:
    """Everything, as Markdown that is also readable as it is."""
    rows: Sequence[Row] = run["rows"]
    parts = [about(run["about"])]
    for title, chosen in zip(
        (
            f"Memory-bound points (snapshots: requests kept out more than {BOUND_SHARE:.0%} of the "
            "time)",
            "Points with headroom",
        ),
        split(rows),
        strict=True,
    ):
        parts.append(f"## {title}\n\n{table(POINT_COLUMNS, [point(row) for row in chosen])}")
        compared = ratios(chosen, rows)
        if compared:
            cells = [_ratio_cells(row) for row in compared]
            parts.append(
                f"Over `{BASELINE}` at the same points and trees, geometric means:\n\n"
                + table(RATIO_COLUMNS, cells)
            )
    parts += [part for part in (shares(rows), notes(rows, run.get("left_out", ()))) if part]
    if is_comparable(run["about"]):
        parts.append("## Goals\n\n" + goal_table(goals(rows)))
    else:
        parts.append(f"The goals are those of the whole {MODEL} on one {GPU}: not judged here.")
    return "\n\n".join(parts) + "\n"


def is_comparable(about: Mapping[str, Any]) -> bool:
    """Whether the goals, and vLLM's figures, are of this GPU, this model, and the whole of it."""
    settings = about["settings"]
    whole = settings["layers"] is None and settings["scale"] == 1.0
    return whole and settings["model"] == MODEL and about["device"] == GPU


def about(facts: Mapping[str, Any]) -> str:
    """What was measured, on what, when, and that acceptance is drawn."""
    settings = facts["settings"]
    laws = "; ".join(f"{tree}: {law}" for tree, law in facts["laws"].items())
    return (
        f"{settings['model']}, random weights in {settings['dtype']}, states in "
        f"{settings['state_dtype']}, on {facts['device'] or 'a CPU'} ({facts['date']}, torch "
        f"{facts['torch']}), {format_size(facts['memory'])} in all.\n"
        f"ACCEPTANCE IS SIMULATED: it is drawn by depth from these laws, and texts mean nothing. "
        f"{laws}\n"
        "Times are milliseconds. tokens/s are generated tokens over the whole run, "
        "prompts included."
    )


def point(row: Row) -> tuple[str, ...]:
    memory = row["memory"]
    return (
        row["workload"],
        f"{row['fraction']:g}",
        row["load"],
        row["policy"],
        row["tree"],
        f"{row['output_tokens_per_second']:.0f}"
        + "*" * bool(row["unfinished"])
        + "^" * bool(row.get("late")),
        *(_ms(of(row, *which)) for which in (("ttft", "p50"), ("ttft", "p99"))),
        *(_ms(of(row, *which)) for which in (("tpot", "p50"), ("tpot", "p99"))),
        f"{row['sequences_mean']:.0f}",
        str(row["sequences_peak"]),
        str(row["slots"]),
        str(row["preemptions"]),
        f"{row['memory_bound_share']:.0%}",
        f"{row['acceptance_length']:.2f}",
        format_size(memory["used_states_and_stash"]),
        format_size(memory["used_kv_cache"]),
    )


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.4g}"


def _ratio_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    names = ("throughput", "ttft_p99", "tpot_p50", "sequences")
    return (
        row["policy"],
        str(row["points"]),
        *("–" if row[name] is None else f"{row[name]:.3f}x" for name in names),
    )


def shares(rows: Sequence[Row]) -> str:
    """Share of the time that arrivals at a rate spend memory-bound, by budget."""
    open_loop = [row for row in rows if row.get("rate") is not None and "error" not in row]
    if not open_loop:
        return ""
    fractions = sorted({row["fraction"] for row in open_loop})
    found: dict[tuple[str, ...], dict[float, float]] = {}
    for row in open_loop:
        key = (row["workload"], row["load"], row["policy"], row["tree"])
        found.setdefault(key, {})[row["fraction"]] = row["memory_bound_share"]
    cells = [
        (*key, *(f"{by[f]:.1%}" if f in by else "–" for f in fractions))
        for key, by in found.items()
    ]
    columns = ("workload", "load", "policy", "tree", *(f"fraction {f:g}" for f in fractions))
    return f"## Share of the time that memory kept requests out\n\n{table(columns, cells)}"


def notes(rows: Sequence[Row], left_out: Sequence[str]) -> str:
    """What could not be measured or was left out, failed requests, and what the marks mean."""
    lines = [f"- {point}: left out, no time was left" for point in left_out]
    for row in rows:
        where = ", ".join(str(row[k]) for k in ("workload", "fraction", "load", "policy", "tree"))
        if "error" in row:
            lines.append(f"- {where}: {row['error']}")
        elif row["failed"]:
            lines.append(f"- {where}: {row['failed']} requests failed: {'; '.join(row['errors'])}")
    if any(row.get("unfinished") for row in rows):
        lines.append(
            "- \\* was cut at the time limit: its TTFT counts requests that still waited as if "
            "their first token had come then, and its TPOT is of those that ended."
        )
    settled = sorted({row["settle_seconds"] for row in rows if row.get("settle_seconds")})
    if settled:
        lines.append(
            f"- Loads ran for {settled[0]:.1f} to {settled[-1]:.1f} s before they were counted: "
            "tokens are those of the time after, first tokens those that came or had not come."
        )
    if any(row.get("late") for row in rows):
        lines.append("- ^ kernels were compiled, or steps captured, while it was measured.")
    return "## Notes\n\n" + "\n".join(lines) if lines else ""


def goal_table(found: Sequence[Goal]) -> str:
    met = {True: "met", False: "not met", None: "not measured"}
    cells = [(goal.name, goal.target, goal.measured or "–", met[goal.met]) for goal in found]
    return table(("goal", "target", "measured", ""), cells)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, aligned."""
    if not rows:
        return "none"
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    pad: Callable[[Sequence[str]], str] = lambda cells: " | ".join(  # noqa: E731
        cell.ljust(width) for cell, width in zip(cells, widths, strict=True)
    )
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([f"| {pad(columns)} |", f"|{rule}|", *(f"| {pad(row)} |" for row in rows)])
