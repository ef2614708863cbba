"""A run as text: all points in two tables, ratios to snapshots, shares of time, notes, goals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trtllm_treewy.cli.sizes import format_size

from .compare import COMPARISONS, Budget, Burst, Pair, bursts, by_budget
from .goals import GPU, MODEL, Goal, goals
from .points import Setting
from .repeats import speeds
from .split import BASELINE, BOUND_SHARE, Row, kind, of, split

POINT_COLUMNS = (
    "workload", "fraction", "load", "policy", "tree", "tokens/s", "TTFT p50", "TTFT p99",
    "TPOT p50", "TPOT p99", "at once", "peak", "slots", "preempted", "bound", "accepted",
    "states+stash", "KV used",
)  # fmt: skip
PAIR_COLUMNS = (
    "workload", "fraction", "load", "this", "over", "tokens/s", "its", "ratio", "rounds",
    "at equal acceptance", "its TTFT p99 over",
)  # fmt: skip
BUDGET_COLUMNS = (
    "fraction", "points", "policy", "number", "tokens/s", "least", "its TTFT p99 over",
    "its TPOT p50 over", "at once",
)  # fmt: skip


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
    extra = (comparisons(rows), shares(rows), notes(rows, run.get("left_out", ())))
    parts += [part for part in extra if part]
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
        _load(row),
        row["policy"],
        row["tree"],
        _speed(row),
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


def _load(row: Row) -> str:
    """Its load, and whether it is a window of it."""
    return row["load"] + ", steady" * (kind(row) == "steady")


def _speed(row: Row) -> str:
    """Throughput with its marks; of repeats the least and the greatest, and how many."""
    found = f"{row['output_tokens_per_second']:.0f}"
    found += "*" * bool(row["unfinished"]) + "^" * bool(row.get("late"))
    every = speeds(row)
    if len(every) > 1:
        found += f" ({min(every):.0f} to {max(every):.0f}, {len(every)})"
    return found


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.4g}"


def comparisons(rows: Sequence[Row]) -> str:
    """Pairs of rows by title, and geometric means by budget."""
    parts = []
    for title, select in COMPARISONS:
        pairs = select(rows)
        if pairs:
            parts.append(f"{title}:\n\n{table(PAIR_COLUMNS, [_pair_cells(p) for p in pairs])}")
    budgets = [_budget_cells(found) for found in by_budget(rows)]
    if budgets:
        parts.append(
            f"Geometric means over `{BASELINE}` by memory fraction, requests at a rate not among "
            f"them:\n\n{table(BUDGET_COLUMNS, budgets)}"
        )
    if any(not p.same_run for _, select in COMPARISONS for p in select(rows)):
        parts.append("† of two runs, which differ by more than policies may.")
    return "## Comparisons\n\n" + "\n\n".join(parts) if parts else ""


def _pair_cells(found: Pair) -> tuple[str, ...]:
    row, base = found.row, found.base
    return (
        row["workload"],
        f"{row['fraction']:g}",
        _load(row),
        *(Setting(r["policy"], r["tree"]).name for r in (row, base)),
        *(f"{r['output_tokens_per_second']:.0f}" for r in (row, base)),
        f"{found.ratio:.3f}x" + "†" * (not found.same_run),
        f"{found.low:.3f} to {found.high:.3f}, {found.rounds}" if found.rounds > 1 else "–",
        "–" if found.equal is None else f"{found.equal:.3f}x",
        "–" if found.first_tokens is None else f"{found.first_tokens:.2f}x",
    )


def _budget_cells(found: Budget) -> tuple[str, ...]:
    return (
        "all" if found.fraction is None else f"{found.fraction:g}",
        "memory-bound" if found.bound else "headroom",
        found.policy,
        str(found.points),
        f"{found.throughput:.3f}x",
        f"{found.least:.3f}x",
        *("–" if ratio is None else f"{ratio:.2f}x" for ratio in (found.first_tokens, found.token)),
        "–" if found.sequences is None else f"{found.sequences:.2f}x",
    )


def shares(rows: Sequence[Row]) -> str:
    """Share of the time that arrivals at a rate spend memory-bound, and p99 TTFT, by budget."""
    found = bursts(rows)
    if not found:
        return ""
    fractions = sorted({fraction for burst in found for fraction in burst.shares})
    columns = ("workload", "load", "policy", "tree", *(f"fraction {f:g}" for f in fractions))

    def cells(values: Callable[[Burst], Mapping[float, float]], form: Callable[[float], str]):
        return [
            (*b.key, *(form(values(b)[f]) if f in values(b) else "–" for f in fractions))
            for b in found
        ]

    held = table(columns, cells(lambda b: b.shares, lambda share: f"{share:.1%}"))
    tails = table(columns, cells(lambda b: b.first_tokens, _ms))
    return (
        f"## Share of the time that memory kept requests out\n\n{held}\n\n"
        f"p99 TTFT of the same, milliseconds:\n\n{tails}"
    )


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
    if any(len(speeds(row)) > 1 for row in rows if "error" not in row):
        lines.append(
            "- Points were repeated: tokens/s are the median, in brackets the least, the greatest "
            "and how many; the rest of a row is of the median one. Ratios are medians of rounds."
        )
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
