"""What all measurements share: the machine, the clock, the library's launches, the rows."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from trtllm_treewy import cuda_library

from .cases import Case, Dims
from .clock import Call, Slots
from .floors import Rates, work_of
from .results import OURS, Row

LAYER_CALLS = {"commit", "commit_inputs", "conv_commit", "step_reconstruct", "step_deferred"}
LAYER_CALLS |= {"step_deferred_apart", "deferred_append", "deferred_append_folded"}


class Clock(Protocol):
    """Takes times; see `clock.GpuClock`."""

    def us(self, calls: Sequence[Call], before: Call) -> float: ...


@dataclass
class Bench:
    """A run of the benchmark.

    Attributes:
        clock: takes the times.
        rates: the machine's, for the floors.
        dims: the layer's sizes.
        device: of the tensors.
        slots: of a pool of one layer.
        calls: in a graph.
        rows: what was measured so far.
    """

    clock: Clock
    rates: Rates
    dims: Dims = field(default_factory=Dims)
    device: str = "cuda"
    slots: int = 1024
    calls: int = 8
    rows: list[Row] = field(default_factory=list)

    def launch(self, name: str, params: ctypes.Structure) -> None:
        """An operation of the library on torch's current stream."""
        library = cuda_library.load_library()
        stream = torch.cuda.current_stream().cuda_stream if self.device == "cuda" else 0
        library.check(library.launchers[name](ctypes.addressof(params), stream))

    def call(self, name: str, params: ctypes.Structure) -> Call:
        return lambda: self.launch(name, params)

    def draw_slots(self, batch: int, calls: int | None = None, slots: int | None = None) -> Slots:
        return Slots(batch, calls or self.calls, slots or self.slots, self.device)

    def row(
        self,
        case: Case,
        us: float | None,
        *,
        implementation: str = OURS,
        error: float | None = None,
        note: str = "",
    ) -> Row:
        """A measurement beside its floors, both of one layer where the call serves all."""
        share = 1 / self.dims.layers if case.operation in LAYER_CALLS else 1
        work = work_of(self.dims, case).scaled(share)
        floors = self.rates.bytes_us(work), self.rates.operations_us(work)
        return Row(case, us, *floors, implementation, error, note)

    def measure(self, case: Case, time_case: Callable[[Bench, Case], float]) -> Row:
        """Time a case of ours; one refused, or too large, becomes a row with the reason."""
        try:
            row = self.row(case, time_case(self, case))
        except (ValueError, torch.OutOfMemoryError) as error:
            row = self.row(case, None, note=str(error))
        self.rows.append(row)
        return row

    def measure_all(
        self, title: str, cases: Sequence[Case], time_case: Callable[[Bench, Case], float]
    ) -> None:
        """Time cases of ours, and say how long that took."""
        start = time.monotonic()
        for case in cases:
            self.measure(case, time_case)
        self.say(f"{title}: {len(cases)} cases in {time.monotonic() - start:.1f} s")

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
