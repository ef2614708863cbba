"""The outputs of a `generate_async` request: all texts of a prompt, for loops of either kind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any

from .engine_driver import EngineDriver
from .outputs import RequestOutput
from .runtime.request_stream import RequestStream as OneStream
from .text_group import MergedStream, TextGroup


class RequestStream:
    """The outputs of one `generate_async` request, as they come.

    Whoever iterates with `for` moves the engine forward, for all requests in it; so several streams
    may be read in turn, from one thread or from several. `async for` waits for the engine thread;
    it raises `runtime.errors.RequestError` where the request could not be brought to its end. A
    stream is read in one of these ways. Leave early with `abort`, or by closing the stream, which
    gives the request's slot back.
    """

    def __init__(self, driver: EngineDriver, group: TextGroup, streaming: bool) -> None:
        self._driver, self._group, self._streaming = driver, group, streaming
        self._done = False
        self._adopted: list[OneStream] = []
        self._merged: AsyncIterator[RequestOutput] | None = None

    def __iter__(self) -> Iterator[RequestOutput]:
        return self

    def __next__(self) -> RequestOutput:
        if self._done:
            raise StopIteration
        if self._adopted:
            raise RuntimeError("this stream is read with `async for`; go on with it")
        driver, group = self._driver, self._group
        with driver.lock:
            while not (group.finished or (self._streaming and group.has_news)):
                driver.step()
            self._done = group.finished
            return group.output()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._done:
            raise StopAsyncIteration
        if self._merged is None:
            self._merged = self._adopt()
        output = await anext(self._merged)
        self._done = output.finished
        return output

    def _adopt(self) -> AsyncIterator[RequestOutput]:
        """Hands all texts over to the engine thread; they are ended where it takes no more."""
        texts, streaming = self._group.texts, self._streaming
        try:
            adopted = [self._driver.adopt(handle, streaming) for handle in texts]
        except BaseException:
            self._done = True
            self._driver.release(texts)
            raise
        self._adopted = adopted
        return adopted[0] if len(adopted) == 1 else MergedStream(adopted, streaming)

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self.aresult().__await__()

    async def aresult(self) -> RequestOutput:
        """Waits for the end and returns the whole output, without blocking the event loop.

        Cancelling the wait ends the request.
        """
        output = None
        try:
            async for output in self:
                pass
        finally:
            if not self._done:
                self.abort()
        return output if output is not None else self._group.output()

    def result(self) -> RequestOutput:
        """Waits for the end and returns the whole output."""
        output = None
        for output in self:
            pass
        return output if output is not None else self._group.output()

    def abort(self) -> None:
        """Ends the request where it stands; the next output says "cancelled"."""
        for stream in self._adopted:
            stream.abort()
        if not self._adopted:
            self._driver.release(self._group.texts)

    close = abort
