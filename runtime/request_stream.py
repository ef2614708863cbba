"""The outputs of one request on their way from the engine thread to an event loop.

One at a time: what a slow reader has not fetched yet is not piled up, the next output simply says
more.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Protocol

from trtllm_treewy.outputs import RequestOutput

from .errors import RequestError
from .observer import RequestLife
from .request import Request


class Handle(Protocol):
    """A request with its text: what `LLM` makes of a prompt."""

    @property
    def request(self) -> Request: ...
    @property
    def has_news(self) -> bool: ...
    def update(self, stop: Callable[[Request, int, str], None]) -> None: ...
    def output(self) -> RequestOutput: ...


class RequestStream:
    """The outputs of one request, for `async for`; in the event loop that submitted it.

    With `streaming` an output comes after every step that brought something new, with the news
    since the output before in `text_diff` and `token_ids_diff`; otherwise the whole comes at the
    end. Leaving early: `abort`, or `async with` around it, which frees what the request holds.

    Args:
        handle: the request with its text.
        streaming: see above.
        life: what an observer is told of it.
        abort: asks the engine to end the request.
        refresh: asks it to publish what came while an output was unread.
        added: the request is in the engine already.

    Raises (from the iteration):
        StepFailedError: the step that the request was in failed.
        EngineDeadError: the engine failed for good.
        ShuttingDownError: the engine was closed before the request was done.
    """

    def __init__(
        self,
        handle: Handle,
        streaming: bool,
        life: RequestLife,
        abort: Callable[[RequestStream], None],
        refresh: Callable[[RequestStream], None],
        *,
        added: bool = False,
    ) -> None:
        self.handle, self._streaming, self.life = handle, streaming, life
        self._abort, self._refresh = abort, refresh
        self.added = added
        self.aborted = False
        self.closed = False  # the engine thread is done with it
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._mutex = threading.Lock()
        self._output: RequestOutput | None = None
        self._error: RequestError | None = None
        self._behind = False
        self._exhausted = False

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._exhausted:
            self._woken.clear()
            with self._mutex:
                output, self._output = self._output, None
                error = None if output is not None else self._error
                behind, self._behind = self._behind, False
            if behind and output is not None and not output.finished:
                self._refresh(self)
            if output is not None:
                self._exhausted = output.finished
                return output
            if error is not None:
                self._exhausted = True
                raise error
            await self._woken.wait()
        raise StopAsyncIteration

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abort()

    async def aclose(self) -> None:
        """Ends the request where it stands."""
        self.abort()

    async def result(self) -> RequestOutput:
        """Waits for the end and returns the whole output; cancelling the wait aborts."""
        output = None
        try:
            async for output in self:
                pass
        finally:
            self.abort()
        assert output is not None, "a stream without an error yields at least its last output"
        return output

    def abort(self) -> None:
        """Ends the request where it stands; does nothing once it has finished."""
        if not (self.aborted or self.closed):
            self.aborted = True
            self._abort(self)

    # --- engine thread ---

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def wake(self) -> None:
        """To be called in the stream's event loop."""
        self._woken.set()

    def publish(self) -> bool:
        """Offers the newest output, unless the last one is still unread; whether to wake."""
        request = self.handle.request
        if not (request.finished or (self._streaming and self.handle.has_news)):
            return False
        with self._mutex:
            if self._output is not None:
                self._behind = True
                if not request.finished:
                    return False
                # Nothing comes after the last output: the unread one is folded into it.
                self._output = _joined(self._output, self.handle.output())
            else:
                self._output = self.handle.output()
        return True

    def fail(self, error: RequestError) -> None:
        with self._mutex:
            self._error = error


def _joined(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """`second` with the differences of both."""
    for before, after in zip(first.outputs, second.outputs, strict=True):
        after.text_diff = before.text_diff + after.text_diff
        after.token_ids_diff = [*before.token_ids_diff, *after.token_ids_diff]
    return second
