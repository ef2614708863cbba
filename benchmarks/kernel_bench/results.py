"""Measurements, and the JSON file that holds them with the machine they were taken on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .cases import Case

OURS = "treewy"
# Names in tables. A time is of one layer, also where one launch serves all.
OPERATIONS = {
    "tree_verify": "tree verify",
    "commit": "commit of all layers",
    "commit_inputs": "commit of all layers from inputs",
    "step_reconstruct": "step, reconstruct",
    "step_deferred": "step, deferred (mean of a period)",
    "step_deferred_apart": "step, deferred, folds by the commit (mean of a period)",
    "deferred_verify": "tree verify behind a history",
    "deferred_fold": "tree verify that folds a full history",
    "deferred_append": "deferred commit of all layers, nothing to fold",
    "deferred_append_folded": "deferred commit of all layers behind folds",
    "tree_conv": "tree conv",
    "conv_commit": "conv commit of all layers",
    "prefill": "prefill",
    "prefill_conv": "conv of prompts",
    "greedy_accept": "greedy acceptance (a step)",
}
CASE_FIELDS = tuple(f.name for f in fields(Case))


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        case: what was measured.
        us: median microseconds, or None where it was not measured; `note` then says why.
        floor_us: bytes of the case at the measured bandwidth.
        operations_us: operations of the case at the measured rate.
        implementation: "treewy" or a peer's name.
        error: relative error of a peer's output against the reference, where it was checked.
        note: why there is no time.
    """

    case: Case
    us: float | None
    floor_us: float
    operations_us: float = 0.0
    implementation: str = OURS
    error: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Time over the floor of bytes."""
        return None if self.us is None or self.floor_us <= 0 else self.us / self.floor_us

    def to_dict(self) -> dict[str, Any]:
        rest = {key: value for key, value in asdict(self).items() if key != "case"}
        return {**asdict(self.case), **rest, "ratio": self.ratio}

    @staticmethod
    def from_dict(record: dict[str, Any]) -> Row:
        case = Case(**{key: record[key] for key in CASE_FIELDS if key in record})
        names = [f.name for f in fields(Row) if f.name != "case"]
        return Row(case, **{key: record[key] for key in names if key in record})


@dataclass
class Results:
    """A run: the machine and what was measured on it.

    Attributes:
        gpu, driver, date: the machine and the day, ISO 8601.
        read_bandwidth: bytes a second.
        matmul_rate: operations a second of a bfloat16 product.
        versions: of Python, torch, CUDA, Triton and the peers.
        absent: peers that could not be imported, and why.
        rows: measurements.
    """

    gpu: str
    date: str
    read_bandwidth: float
    matmul_rate: float = 0.0
    driver: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def find(self, *, implementation: str = OURS, **wanted: Any) -> Iterator[Row]:
        """Rows with a time whose case has these values; the tile is the library's choice."""
        wanted.setdefault("tile", "auto")
        for row in self.rows:
            is_at = all(getattr(row.case, key) == value for key, value in wanted.items())
            if is_at and row.us is not None and row.implementation == implementation:
                yield row

    def us(self, *, implementation: str = OURS, **wanted: Any) -> float | None:
        """The time of the first such row, or None."""
        for row in self.find(implementation=implementation, **wanted):
            return row.us
        return None

    def save(self, path: str | Path) -> None:
        record = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "rows"}
        record["rows"] = [row.to_dict() for row in self.rows]
        Path(path).write_text(json.dumps(record, indent=1) + "\n")

    @staticmethod
    def load(path: str | Path) -> Results:
        """Read what `save` wrote.

        Raises:
            ValueError: the file is no result of this benchmark.
        """
        try:
            record = json.loads(Path(path).read_text())
            known = {f.name for f in fields(Results)}
            found = {key: value for key, value in record.items() if key in known}
            found["rows"] = [Row.from_dict(row) for row in record["rows"]]
            return Results(**found)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no result of this benchmark: {error}") from error
