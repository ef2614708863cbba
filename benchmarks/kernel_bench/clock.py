"""How times are taken on the GPU: graphs of calls over cold states, and the machine's rates.

Every case is captured as a CUDA graph of several calls, each over other slots of a pool far larger
than the L2 cache; the slots are drawn anew before every replay, so that states come from memory.
A time is the median of the replays over the calls of a graph.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from .floors import Rates

Call = Callable[[], object]
WARM_UP = 2
FLUSHED = 2**28  # bytes, more than any L2 cache
ALIGNMENT = 32  # slots of a call begin at a multiple of this many elements, which peers rely on


class Slots:
    """Slots of every call of a graph; those of a call are all different.

    Attributes:
        slot: int32 [calls, batch], written anew by `draw`.
    """

    def __init__(self, batch: int, calls: int, slots: int, device: str) -> None:
        if batch > slots:
            raise ValueError(f"a batch of {batch} takes as many slots, the pool has {slots}")
        self._order = torch.empty(calls, slots, device=device)
        width = -(-batch // ALIGNMENT) * ALIGNMENT
        wide = torch.zeros(calls, width, dtype=torch.int32, device=device)
        self.slot = wide[:, :batch]
        self.draw()

    def draw(self) -> None:
        self.slot.copy_(self._order.uniform_().argsort(-1)[:, : self.slot.shape[1]])


class GpuClock:
    """Times on the current CUDA device."""

    def __init__(self, replays: int = 15) -> None:
        self.replays = replays

    def us(self, calls: Sequence[Call], before: Call) -> float:
        """Median microseconds of one call; `before` runs ahead of every replay, outside the time.

        The calls run twice before they are measured: as they are, on a stream of their own, and
        into a graph.
        """
        graph = _capture(calls)
        times: list[float] = []
        for replay in range(self.replays + WARM_UP):
            before()
            torch.cuda.synchronize()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            if replay >= WARM_UP:
                times.append(start.elapsed_time(stop) * 1e3 / len(calls))
        return statistics.median(times)


def _capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def flusher(device: str) -> Call:
    """Writes over the L2 cache, for calls whose states cannot be drawn anew."""
    scratch = torch.empty(FLUSHED, dtype=torch.uint8, device=device)
    return scratch.zero_


def measure_rates() -> Rates:
    """What this GPU reaches."""
    return Rates(_read_bandwidth(), _product_rate())


def _read_bandwidth() -> float:
    """Bytes a second of a reduction over 4 GiB, or of a copy if that is faster."""
    data = torch.ones(2**30, device="cuda")
    other = torch.empty_like(data)
    size = data.numel() * data.element_size()
    read = size / _median_seconds(lambda: data.sum())
    copy = 2 * size / _median_seconds(lambda: other.copy_(data))
    return max(read, copy)


def _product_rate(side: int = 8192) -> float:
    """Operations a second of a product of bfloat16 matrices."""
    left, right = torch.randn(2, side, side, device="cuda").bfloat16()
    product = torch.empty_like(left)
    return 2 * side**3 / _median_seconds(lambda: torch.mm(left, right, out=product))


def _median_seconds(call: Call, repeats: int = 10) -> float:
    times: list[float] = []
    for _ in range(repeats + WARM_UP):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times[WARM_UP:])
