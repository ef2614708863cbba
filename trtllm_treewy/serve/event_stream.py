"""Server-sent events, and answers that are given up when the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_T = TypeVar("_T")


class ClientGoneError(Exception):
    """The client has closed the connection before it got its answer."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, which is cancelled if the client goes first.

    Raises:
        ClientGoneError: the client has gone.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        await _cancel(working, watching)


class EventStream(Response):
    """Sends what `events` yields; closes it as soon as the client has gone, or it is cancelled.

    Args:
        events: what is sent.
        ended: called at the end, whichever; a generator that was not begun is told of none.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], ended: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._ended = events, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        working = asyncio.ensure_future(self._send(send))
        watching = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            self._ended()
            await _cancel(working, watching)
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async with aclosing(self._events) as events:
            await send(start)
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: Awaitable[Any]) -> None:
    for task in tasks:
        assert isinstance(task, asyncio.Future)
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError, Exception):
            await task
