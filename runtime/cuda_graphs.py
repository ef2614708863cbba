"""CUDA graphs: functions over static buffers, captured once and replayed.

What is captured takes no arguments and returns nothing: it reads and writes buffers whose addresses
do not change, and nothing that a step brings is on the host. `RecordedCalls` stands in where there
is no GPU: the same functions over the same buffers, called instead of replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

# Calls before a capture: kernels compile, allocate and choose in the first ones.
WARM_UP_CALLS = 2


class GraphRunner(Protocol):
    """Keeps functions by key, and runs them."""

    def record(self, key: Hashable, function: Callable[[], None]) -> None:
        """Takes a function; its buffers hold inert values, since it is called."""
        ...

    def replay(self, key: Hashable) -> None:
        """Runs a function that was recorded; KeyError if there is none."""
        ...

    def __contains__(self, key: Hashable) -> bool: ...

    @property
    def memory_bytes(self) -> int:
        """Memory that the graphs keep beside the static buffers."""
        ...


@dataclass(frozen=True)
class GraphSizes:
    """Batch sizes and tree sizes that steps are captured for, ascending.

    Attributes:
        batch, nodes: the sizes.
        padding: smaller batches are padded to the next size; without it they run uncaptured.
    """

    batch: tuple[int, ...]
    nodes: tuple[int, ...]
    padding: bool = True

    def fit(self, rows: int, nodes: int) -> tuple[int, int] | None:
        """The smallest captured shape for such a step; None where there is none."""
        batch = next((size for size in self.batch if size >= rows), None)
        width = next((size for size in self.nodes if size >= nodes), None)
        if batch is None or width is None or (batch != rows and not self.padding):
            return None
        return batch, width


class CudaGraphRunner:
    """Captures on a side stream, all graphs in one memory pool.

    They share it because they run one after the other on one stream, and nothing in it outlives a
    replay: results are copied to static buffers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        # One for all: cuBLAS keeps a workspace for every stream that it has seen.
        self._stream: torch.cuda.Stream | None = None
        self._bytes = 0

    def record(self, key: Hashable, function: Callable[[], None]) -> None:
        free = torch.cuda.mem_get_info(self._device)[0]
        stream = self._stream = self._stream or torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_CALLS):
                function()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        ):
            function()
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph
        self._bytes += max(0, free - torch.cuda.mem_get_info(self._device)[0])

    def replay(self, key: Hashable) -> None:
        self._graphs[key].replay()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    @property
    def memory_bytes(self) -> int:
        return self._bytes


class RecordedCalls:
    """Calls what a graph would replay; for tests, and for devices without graphs."""

    def __init__(self) -> None:
        self._functions: dict[Hashable, Callable[[], None]] = {}

    def record(self, key: Hashable, function: Callable[[], None]) -> None:
        function()
        self._functions[key] = function

    def replay(self, key: Hashable) -> None:
        self._functions[key]()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._functions

    @property
    def memory_bytes(self) -> int:
        return 0


def make_runner(device: torch.device) -> GraphRunner:
    """Graphs on a GPU, calls elsewhere."""
    return CudaGraphRunner(device) if device.type == "cuda" else RecordedCalls()
