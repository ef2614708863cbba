"""Results as text: a table for the terminal, and Markdown for the documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from .cases import Case
from .goals import Goal, goals
from .results import OPERATIONS, OURS, Results, Row

MARKS = {True: "yes", False: "no", None: "-"}
STASHES = {"fp32": "", "bf16": ", u bf16", "none": ", nothing kept", "snapshots": ", snapshots"}


def lines_by_batch(rows: Iterable[Row]) -> dict[tuple[str, ...], dict[int, Row]]:
    """Rows that differ in nothing but the batch, in the order found."""
    lines: dict[tuple[str, ...], dict[int, Row]] = {}
    for row in rows:
        lines.setdefault(_key(row), {})[row.case.batch] = row
    return lines


def _key(row: Row) -> tuple[str, ...]:
    case = replace(row.case, batch=0)
    return tuple(str(x) for x in (row.implementation, *vars(case).values()))


def describe(row: Row) -> str:
    """What a line of a table measures, without the batch."""
    case = row.case
    what = f"{case.nodes} tokens" if case.operation.startswith("prefill") else f"{case.nodes} nodes"
    if case.topology and case.operation in ("tree_verify", "tree_conv"):
        what = f"{case.topology}, {what}"
    if case.operation != "tree_verify":
        what = f"{OPERATIONS.get(case.operation, case.operation)}: {what}"
    if row.implementation != OURS:
        what = f"{row.implementation}: {what}"
    if case.stash == "snapshots" or (row.implementation == OURS and "inputs" not in case.operation):
        what += STASHES.get(case.stash, "")
    if case.tile != "auto":
        what += f", tile {case.tile}"
    return f"{what}, {case.state}" if case.state else what


def number(us: float) -> str:
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"


def cell(row: Row | None) -> str:
    """Microseconds, and the ratio to the floor where that says something."""
    if row is None:
        return ""
    if row.us is None:
        return "–"
    if row.ratio is None or row.ratio >= 20:
        return number(row.us)
    return f"{number(row.us)} ({row.ratio:.2f})"


def notes(rows: Iterable[Row]) -> list[str]:
    """Why rows have no time, each reason once."""
    reasons: dict[str, list[int]] = {}
    for row in rows:
        if row.us is None:
            reasons.setdefault(f"{describe(row)}: {row.note}", []).append(row.case.batch)
    return [f"{text} (batch {', '.join(map(str, b))})" for text, b in reasons.items()]


def print_report(results: Results) -> None:
    """The terminal's tables."""
    batches = sorted({row.case.batch for row in results.rows})
    print(f"{results.gpu}, {results.date}: reads {results.read_bandwidth / 1e12:.2f} TB/s")
    print("microseconds (ratio to the floor)")
    print(f"{'':58}" + "".join(f"{'B=' + str(batch):>15}" for batch in batches))
    for line in lines_by_batch(results.rows).values():
        title = describe(next(iter(line.values())))
        print(f"{title[:57]:58}" + "".join(f"{cell(line.get(b)):>15}" for b in batches))
    for name, reason in results.absent.items():
        print(f"absent: {name}: {reason}")
    for note in notes(results.rows):
        print(f"not timed: {note}")
    for text in [*_rates_of_prompts(results.rows), *faster_tiles(results.rows)]:
        print(text)
    print()
    for goal in goals(results):
        print(f"{MARKS[goal.met]:4}{goal.name}: {goal.measured}, {goal.target}")


def faster_tiles(rows: Sequence[Row], margin: float = 1.02) -> list[str]:
    """Cases that another way to cut blocks than the library's choice does faster, and by how much.

    Args:
        rows: measurements, those of all tiles.
        margin: by which factor, so that noise is left out.
    """
    ours = [row for row in rows if row.implementation == OURS]
    chosen = {row.case: row.us for row in ours if row.case.tile == "auto" and row.us}
    best: dict[Case, Row] = {}
    for row in ours:
        case = replace(row.case, tile="auto")
        if row.case.tile != "auto" and row.us and case in chosen:
            before = best.get(case)
            best[case] = row if before is None or row.us < (before.us or row.us) else before
    texts = []
    for case, row in best.items():
        gain = chosen[case] / row.us if row.us else 0.0
        if gain > margin:
            texts.append(f"{describe(row)}, batch {case.batch}: {gain:.2f}x faster than auto")
    return texts


def _rates_of_prompts(rows: Iterable[Row]) -> Iterator[str]:
    for row in rows:
        if row.case.operation == "prefill" and row.us:
            rate = row.case.nodes * row.case.batch / row.us
            yield f"prefill, {row.case.state}, batch {row.case.batch}: {rate:.2f}M tokens/s a layer"


# ------------------------------------------------------------------ Markdown


def markdown(results: Results) -> str:
    """Machine, times by kind, goals."""
    rows = [row for row in results.rows if row.case.tile == "auto"]
    verify = [r for r in rows if r.case.operation == "tree_verify"]
    ours = [r for r in verify if r.implementation == OURS]
    shown = [r for r in ours if r.case.topology == "tree" or r.case.nodes < 4]
    theirs = [r for r in verify if r.implementation != OURS]
    steps = [r for r in rows if r.case.operation.startswith("step_")]
    others = [r for r in rows if r not in verify and r not in steps]
    parts = [_machine(results)]
    for title, chosen in (
        ("tree verify", [r for r in shown if r.case.stash == "fp32"]),
        ("tree verify, other stashes", [r for r in shown if r.case.stash != "fp32"]),
        ("peers", theirs),
        ("whole steps", steps),
        ("other operations", others),
    ):
        if any(row.us is not None for row in chosen):
            parts.append(time_table(title, chosen))
    prompts = list(_rates_of_prompts(rows))
    parts += ["; ".join(prompts) + "."] if prompts else []
    parts.append(goal_table(goals(results)))
    missing = [f"{name} is absent ({reason})" for name, reason in results.absent.items()]
    missing += notes(rows)
    if missing:
        parts.append("Not timed:\n\n" + "\n".join(f"- {text}" for text in missing))
    return "\n\n".join(parts) + "\n"


def _machine(results: Results) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    rate = f", {results.matmul_rate / 1e12:.0f} TFLOP/s in bf16" if results.matmul_rate else ""
    driver = f", driver {results.driver}" if results.driver else ""
    return (
        f"{results.gpu}{driver}, {results.date}; {versions}. "
        f"Reads {results.read_bandwidth / 1e12:.2f} TB/s{rate}. "
        "Microseconds a layer; in brackets the ratio to the bytes' floor."
    )


def time_table(title: str, rows: Sequence[Row]) -> str:
    """A line for each thing measured, a column for each batch."""
    batches = sorted({row.case.batch for row in rows})
    table = [
        "| " + " | ".join([title, *(f"B={batch}" for batch in batches)]) + " |",
        "|" + "---|" * (len(batches) + 1),
    ]
    for line in lines_by_batch(rows).values():
        if any(row.us is not None for row in line.values()):
            first = describe(next(iter(line.values())))
            table.append("| " + " | ".join([first, *(cell(line.get(b)) for b in batches)]) + " |")
    return "\n".join(table)


def goal_table(found: Sequence[Goal]) -> str:
    lines = ["| goal | target | measured | met |", "|---|---|---|---|"]
    lines += [f"| {g.name} | {g.target} | {g.measured} | {MARKS[g.met]} |" for g in found]
    return "\n".join(lines)
