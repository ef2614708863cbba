"""One thread that steps the engine, and an asyncio front to it.

Only the engine thread touches the engine. Callers hand requests and aborts over a mailbox; outputs
come back through a `RequestStream`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from .errors import (
    EngineDeadError,
    QueueFullError,
    RequestError,
    ShuttingDownError,
    StepFailedError,
    describe,
    step_failed,
)
from .observer import EngineObserver, RequestLife
from .request import Request
from .request_stream import Handle, RequestStream

DEFAULT_MAX_QUEUE = 256
# Steps that fail in a row until the engine counts as dead.
MAX_FAILED_STEPS = 3
# Between looks at whether an engine without work is still there.
IDLE_SECONDS = 0.5


class EngineLike(Protocol):
    """The part of `Engine` that is used here."""

    @property
    def has_work(self) -> bool: ...
    @property
    def lost(self) -> str | None: ...
    def add(self, request: Request) -> None: ...
    def check(self, request: Request) -> None: ...
    def cancel(self, requests: Sequence[Request]) -> None: ...
    def stop(self, request: Request, num_tokens: int, stop_reason: str) -> None: ...
    def fail(self, request: Request, error: str) -> None: ...
    def step(self) -> None: ...


class AsyncEngine:
    """Runs an engine in a thread of its own for any number of concurrent requests.

    Args:
        engine: what does the work; nobody else may touch it, or only while holding `lock`.
        num_slots: sequences that the engine runs at once.
        max_queue: most requests that may be there beyond `num_slots`; more are refused.
        observer: told of everything that happens to requests.
        lock: held while the engine is touched, for those who share it with other callers.
        after_step: called after each step, with the lock held; those who step the engine
            themselves call `poll` instead.
        device: made current in the thread, if it is a CUDA device.

    A step that raises ends the requests in it with `StepFailedError`. After `MAX_FAILED_STEPS`
    such steps in a row, or one error that CUDA does not recover from, the engine is dead:
    `failure` says why and every request, waiting or new, gets `EngineDeadError`. So it is when the
    engine says that it is `lost`, which is asked for while there is no work.
    """

    def __init__(
        self,
        engine: EngineLike,
        *,
        num_slots: int = 0,
        max_queue: int = DEFAULT_MAX_QUEUE,
        observer: EngineObserver | None = None,
        lock: AbstractContextManager[Any] | None = None,
        after_step: Callable[[], None] | None = None,
        device: torch.device | None = None,
    ) -> None:
        if isinstance(max_queue, bool) or not isinstance(max_queue, int) or max_queue < 1:
            raise ValueError(f"max_queue must be an integer >= 1, got {max_queue!r}")
        self.engine = engine
        self._max_queue, self._max_open = max_queue, max_queue + num_slots
        self._observer = observer or EngineObserver()
        self._engine_lock: AbstractContextManager[Any] = lock or threading.Lock()
        self._after_step = after_step
        self._device = device
        self._mail = threading.Condition()
        self._submitted: deque[RequestStream] = deque()
        self._aborted: deque[RequestStream] = deque()
        self._stale: deque[RequestStream] = deque()
        self._live: dict[int, RequestStream] = {}
        self._num_open = 0
        self._num_waiting = 0
        self._num_running = 0
        self._draining = self._closing = False
        self._failed_steps = 0
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="treewy-engine", daemon=True)
        self._thread.start()

    # --- any thread ---

    @property
    def alive(self) -> bool:
        """Whether requests can run."""
        return self.failure is None and self._thread.is_alive()

    @property
    def draining(self) -> bool:
        """Whether new requests are refused because the end is near."""
        return self._draining

    @property
    def num_waiting(self) -> int:
        """Requests without a slot, those that the engine thread has not seen yet among them."""
        with self._mail:
            return self._num_waiting + len(self._submitted)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return self._num_running

    @property
    def num_open(self) -> int:
        """Requests that were submitted and have not ended."""
        with self._mail:
            return self._num_open

    def generate_async(self, handle: Handle, *, streaming: bool = True) -> RequestStream:
        """Starts one request; iterate over what comes back. See `submit`."""
        return self.submit([handle], streaming=streaming)[0]

    def submit(self, handles: Sequence[Handle], *, streaming: bool) -> list[RequestStream]:
        """Queues all of `handles`, or none; to be called in an event loop.

        Raises:
            ValueError: a request could never run.
            QueueFullError: not all of them may wait.
            ShuttingDownError, EngineDeadError: nothing is taken any more.
        """
        for handle in handles:
            self.engine.check(handle.request)  # reads limits alone, so any thread may
        streams = [self._stream(handle, streaming) for handle in handles]
        with self._mail:
            self._admit(len(streams))
            self._submitted.extend(streams)
            self._num_open += len(streams)
            self._mail.notify()
        return streams

    def adopt(self, handle: Handle, *, streaming: bool) -> RequestStream:
        """The stream of a request that is in the engine already; to be called in an event loop.

        Raises:
            ShuttingDownError, EngineDeadError: the engine thread takes nothing any more.
        """
        stream = self._stream(handle, streaming, added=True)
        with self._mail:
            self._admit(0)
            self._submitted.append(stream)
            self._num_open += 1
            self._mail.notify()
        return stream

    def _stream(self, handle: Handle, streaming: bool, added: bool = False) -> RequestStream:
        life = RequestLife(handle.request, self._observer)
        return RequestStream(handle, streaming, life, self._abort, self._refresh, added=added)

    def poll(self) -> None:
        """Tells readers what is new; for whoever has stepped the engine, and holds the lock."""
        self._wake(self._exchange(step=False))

    def _admit(self, count: int) -> None:
        error: RequestError | None = None
        if self.failure is not None:
            error, reason = EngineDeadError(self.failure), "dead"
        elif self._draining:
            error, reason = ShuttingDownError("the server is shutting down"), "draining"
        elif count and self._num_open + count > self._max_open:
            reason = "queue_full"
            error = QueueFullError(
                f"{self._num_open} requests run or wait and {count} more were asked for, at most "
                f"{self._max_open} may ({self._max_queue} of them waiting); try again later"
            )
        if error is not None:
            self._observer.refused(reason)
            raise error

    def drain(self) -> None:
        """From now on new requests are refused; those that are there go on."""
        with self._mail:
            self._draining = True

    async def drained(self, timeout: float) -> bool:
        """Waits until no request is open, `timeout` seconds at most; whether that came about."""
        deadline = time.monotonic() + timeout
        while self.num_open and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self.num_open

    def close(self) -> None:
        """Ends what still runs with `ShuttingDownError`, and the thread. Safe to call twice."""
        with self._mail:
            self._draining = self._closing = True
            self._mail.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _abort(self, stream: RequestStream) -> None:
        with self._mail:
            self._aborted.append(stream)
            self._mail.notify()

    def _refresh(self, stream: RequestStream) -> None:
        """The reader has caught up: what it missed may be published without another step."""
        with self._mail:
            self._stale.append(stream)
            self._mail.notify()

    # --- engine thread ---

    def _run(self) -> None:
        try:
            if self._device is not None and self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            while self._turn():
                pass
            with self._engine_lock:
                self._end_all(ShuttingDownError("the engine was closed before the end"))
        except BaseException as error:  # the thread must not end without telling anyone
            with self._engine_lock:
                self._die(error)

    def _turn(self) -> bool:
        """Takes the mail, makes a step if there is work; False once closed."""
        with self._mail:
            while not (
                self._submitted or self._aborted or self._stale or self._live or self._closing
            ):
                self._mail.wait(IDLE_SECONDS)
                if self.failure is None and (lost := self.engine.lost) is not None:
                    raise EngineDeadError(lost)
            if self._closing:
                return False
        with self._engine_lock:
            woken = self._exchange(step=True)
        self._wake(woken)
        return True

    def _exchange(self, *, step: bool) -> list[RequestStream]:
        """Takes the mail, makes a step, publishes; with the lock held. Whose readers to wake."""
        with self._mail:
            submitted, self._submitted = self._submitted, deque()
            aborted, self._aborted = self._aborted, deque()
            stale, self._stale = self._stale, deque()
            self._num_waiting += len(submitted)
        self._take(submitted, aborted)
        woken = [stream for stream in stale if not stream.closed and self._publish(stream)]
        began = time.monotonic()
        if step and self._live and self.failure is None:
            self._step(began)
        return woken + self._collect(began)

    def _take(self, submitted: Iterable[RequestStream], aborted: Iterable[RequestStream]) -> None:
        for stream in submitted:
            if self.failure is not None:
                self._finish(stream, EngineDeadError(self.failure))
                self._wake([stream])
                continue
            self._live[id(stream)] = stream
            stream.life.queue()
            try:
                if not stream.added:
                    self.engine.add(stream.handle.request)
            except Exception as error:  # what `check` could not know
                self._drop(stream, error)
        for stream in aborted:
            if id(stream) in self._live:
                self.engine.cancel([stream.handle.request])

    def _drop(self, stream: RequestStream, error: Exception) -> None:
        """Ends one request for what went wrong with it alone."""
        reason = describe(error)
        self.engine.fail(stream.handle.request, reason)
        self._finish(stream, RequestError(reason))
        self._wake([stream])

    def _publish(self, stream: RequestStream) -> bool:
        """As the stream's own; what goes wrong with its output ends that request alone."""
        try:
            return stream.publish()
        except Exception as error:
            self._drop(stream, error)
            return False

    def _step(self, began: float) -> None:
        failed: Exception | None = None
        try:
            if self.engine.has_work:
                self.engine.step()
        except Exception as error:
            failed = error
        finally:
            if self._after_step is not None:
                self._after_step()
        self._observer.stepped(time.monotonic() - began, failed is not None)
        if failed is None:
            self._failed_steps = 0
            return
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS or _is_final(failed):
            self._die(failed)
            return
        # What the engine ended because of the failure is told why; what it kept goes on.
        for stream in list(self._live.values()):
            reason = stream.handle.request.finish_reason
            if reason in ("cancelled", "error") and not stream.aborted:
                self._finish(stream, StepFailedError(step_failed(failed)))
                self._wake([stream])

    def _collect(self, began: float) -> list[RequestStream]:
        """Brings every stream up to date; those whose readers are to be woken."""
        woken, running = [], 0
        for stream in list(self._live.values()):
            try:
                stream.handle.update(self.engine.stop)
            except Exception as error:
                self._drop(stream, error)
                continue
            stream.life.advance(began)
            if self._publish(stream):
                woken.append(stream)
            if stream.handle.request.finished:
                self._finish(stream, None)
            elif stream.handle.request.slot is not None:
                running += 1
        with self._mail:
            self._num_running, self._num_waiting = running, len(self._live) - running
        return woken

    def _finish(self, stream: RequestStream, error: RequestError | None) -> None:
        if stream.closed:
            return
        if error is not None:
            stream.fail(error)
        stream.closed = True
        self._live.pop(id(stream), None)
        with self._mail:
            self._num_open -= 1
        stream.life.end(failed=error is not None)

    def _die(self, error: BaseException) -> None:
        """Nothing will run any more; everyone who waits is told."""
        with self._mail:
            self.failure = f"the engine has failed: {describe(error)}"
        self._end_all(EngineDeadError(self.failure))

    def _end_all(self, error: RequestError) -> None:
        with self._mail:
            streams = [*self._live.values(), *self._submitted]
            self._submitted.clear()
        with contextlib.suppress(Exception):  # what has failed may fail again
            self.engine.cancel([stream.handle.request for stream in self._live.values()])
        for stream in streams:
            self._finish(stream, error)
        with self._mail:
            self._num_running = self._num_waiting = 0
        self._wake(streams)

    def _wake(self, streams: Iterable[RequestStream]) -> None:
        """Wakes readers, with one call into each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[RequestStream]] = defaultdict(list)
        for stream in streams:
            by_loop[stream.loop].append(stream)
        for loop, readers in by_loop.items():
            try:
                loop.call_soon_threadsafe(_wake_all, readers)
            except RuntimeError:  # the loop is closed: nobody will read these any more
                for stream in readers:
                    stream.abort()


def _wake_all(streams: Sequence[RequestStream]) -> None:
    for stream in streams:
        stream.wake()


def _is_final(error: BaseException) -> bool:
    """Whether all is lost: the device, after whose errors every CUDA call fails, or the ranks."""
    kind = getattr(torch, "AcceleratorError", None)
    lost = (EngineDeadError,) if kind is None else (EngineDeadError, kind)
    return isinstance(error, lost) or "CUDA error" in str(error)
