"""Who moves an engine forward: callers that wait, each for all, or a thread for event loops."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from .request_handle import RequestHandle
from .runtime.async_engine import DEFAULT_MAX_QUEUE, AsyncEngine
from .runtime.engine import Engine
from .runtime.errors import describe
from .runtime.observer import EngineObserver
from .runtime.request_stream import RequestStream


class EngineDriver:
    """An engine that several callers share, in threads and event loops.

    Args:
        engine: what does the work.
        device: it runs on.

    Attributes:
        lock: held while the engine is touched; whoever waits for a request holds it for a step.
    """

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self._engine, self._device = engine, device
        self.lock = threading.RLock()
        # Requests that callers wait for; those of an engine thread are its own.
        self._handles: dict[int, RequestHandle] = {}
        self._async_engine: AsyncEngine | None = None
        # Not the engine's lock, for which an event loop would wait a step.
        self._starting = threading.Lock()
        self._closed = False

    def submit(self, handles: Sequence[RequestHandle]) -> None:
        """Queues all requests, or none.

        Raises:
            ValueError: a request could never run.
            RuntimeError: the engine was closed.
        """
        with self.lock:
            if self._closed:
                raise RuntimeError("this LLM was shut down")
            for handle in handles:
                self._engine.check(handle.request)
            for handle in handles:
                self._engine.add(handle.request)
                self._handles[handle.request.request_id] = handle

    def step(self) -> None:
        """One engine step, for every request there is, whoever waits for it; with the lock held."""
        try:
            self._engine.step()
        finally:
            self._update()
            if self._async_engine is not None:
                self._async_engine.poll()

    def _update(self) -> None:
        """Turns new tokens into text; what goes wrong with that ends its request alone."""
        for handle in list(self._handles.values()):
            try:
                handle.update(self._engine.stop)
            except Exception as error:  # such as a tokenizer's
                self._engine.fail(handle.request, describe(error))
            if handle.finished:
                self._handles.pop(handle.request.request_id, None)

    def release(self, handles: Sequence[RequestHandle]) -> None:
        """Ends requests where they stand; those that have ended are left alone."""
        with self.lock:
            self._engine.cancel([handle.request for handle in handles])
            for handle in handles:
                self._handles.pop(handle.request.request_id, None)

    def make_front(
        self,
        *,
        num_slots: int = 0,
        max_queue: int = DEFAULT_MAX_QUEUE,
        observer: EngineObserver | None = None,
    ) -> AsyncEngine:
        """A thread that steps the engine for event loops, beside callers; see `AsyncEngine`."""
        return AsyncEngine(
            self._engine,
            num_slots=num_slots,
            max_queue=max_queue,
            observer=observer,
            lock=self.lock,
            after_step=self._update,
            device=self._device,
        )

    def adopt(self, handle: RequestHandle, streaming: bool) -> RequestStream:
        """Hands a request over to the engine thread, which is started if need be.

        Raises:
            ShuttingDownError, EngineDeadError: it takes nothing any more.
        """
        with self._starting:
            if self._async_engine is None:
                self._async_engine = self.make_front()
        self._handles.pop(handle.request.request_id, None)
        return self._async_engine.adopt(handle, streaming=streaming)

    def close(self) -> None:
        """Cancels what still runs, and ends the engine. Safe to call twice."""
        if self._async_engine is not None:
            self._async_engine.close()  # not under the lock, which its last step may need
        with self.lock:
            self._engine.cancel([handle.request for handle in self._handles.values()])
            self._handles.clear()
            self._closed = True
            self._engine.close()
