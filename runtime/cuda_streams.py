"""A stream for engines and the CUDA graphs captured on it, by torch.

torch has streams, graphs and memory that TensorRT takes as they are (handles and addresses), and
the tensors around a network are torch's: another binding of CUDA would only be another owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class Streams(Protocol):
    """Where the networks of an engine run, one after the other."""

    @property
    def handle(self) -> int:
        """The stream, for `execute_async_v3`."""
        ...

    def scope(self) -> AbstractContextManager[None]:
        """A `with` block whose work runs on the stream, behind and before the caller's own."""
        ...

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """Records what `enqueue` puts on the stream, without running it; returns what replays it.

        Raises:
            RuntimeError: it cannot be captured.
        """
        ...

    def synchronize(self) -> None:
        """Waits for all that was put on the stream."""
        ...


class CudaStreams:
    """`Streams` on a GPU.

    TensorRT waits for the device at every call on the default stream, so this one is another.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @property
    def handle(self) -> int:
        return int(self._stream.cuda_stream)

    @contextmanager
    def scope(self) -> Iterator[None]:
        with torch.cuda.device(self._device):
            outer = torch.cuda.current_stream()
            self._stream.wait_stream(outer)
            with torch.cuda.stream(self._stream):
                yield
            outer.wait_stream(self._stream)

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on with CUDA meanwhile.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            enqueue()
        return graph.replay

    def synchronize(self) -> None:
        self._stream.synchronize()
