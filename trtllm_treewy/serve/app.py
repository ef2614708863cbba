"""The routes: models, completions, chat completions, health, metrics."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..outputs import RequestOutput
from ..runtime.metrics import CONTENT_TYPE
from ..runtime.request_stream import RequestStream
from .errors import ApiError
from .event_stream import ClientGoneError, EventStream, unless_gone
from .fields import parse_object
from .protocol import GenerationRequest, chat_request, completion_request
from .responses import DONE, Answer, encode, event
from .service import Service, gather, merge

Endpoint = Callable[[Request], Awaitable[Response]]
# What nginx logs for a client that has gone; nobody is there to read it.
CLIENT_GONE = 499


class Json(JSONResponse):
    """JSON as `encode` writes it."""

    def render(self, content: Any) -> bytes:
        return encode(content)


def make_app(service: Service) -> Starlette:
    """The ASGI application over `service`, which it closes at its end."""
    api = _Api(service)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    return Starlette(
        routes=[
            Route("/health", api.health, methods=["GET"]),
            Route("/metrics", api.metrics, methods=["GET"]),
            Route("/v1/models", api.guarded(api.models), methods=["GET"]),
            Route("/v1/models/{name:path}", api.guarded(api.model), methods=["GET"]),
            Route("/v1/completions", api.guarded(api.completions), methods=["POST"]),
            Route("/v1/chat/completions", api.guarded(api.chat), methods=["POST"]),
        ],
        exception_handlers={
            ApiError: _api_error,
            ClientGoneError: _client_gone,
            ClientDisconnect: _client_gone,
            HTTPException: _http_error,
            Exception: _server_error,
        },
        lifespan=lifespan,
    )


class _Api:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._settings = service.settings
        self._created = int(time.time())

    def guarded(self, endpoint: Endpoint) -> Endpoint:
        """`endpoint` for those who show the key."""

        async def checked(request: Request) -> Response:
            self._check_key(request)
            return await endpoint(request)

        return checked

    def _check_key(self, request: Request) -> None:
        key = self._settings.api_key
        if key is None:
            return
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        # Starlette reads headers as Latin-1, whatever they are.
        same = hmac.compare_digest(shown.strip().encode("latin-1"), key.encode("utf-8"))
        if scheme.lower() != "bearer" or not same:
            raise ApiError(
                401,
                "expected the server's API key in the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def health(self, _: Request) -> Response:
        engine = self._service.engine
        numbers = {"running": engine.num_running, "waiting": engine.num_waiting}
        if not engine.alive:
            reason = engine.failure or "the engine thread has ended"
            return Json({"status": "failed", "reason": reason} | numbers, 503)
        if engine.draining:
            return Json({"status": "shutting_down"} | numbers, 503)
        return Json({"status": "ok"} | numbers)

    async def metrics(self, _: Request) -> Response:
        return Response(self._service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def models(self, _: Request) -> Response:
        return Json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._settings.model_name:
            raise ApiError(404, f"the model {name!r} is not here", code="model_not_found")
        return Json(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._settings.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "trtllm-treewy",
            "max_model_len": self._service.max_seq_len,
        }

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, completion_request)

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, chat_request)

    async def _generate(
        self, http: Request, parse: Callable[[dict[str, Any]], GenerationRequest]
    ) -> Response:
        request = parse(parse_object(await self._body(http)))
        # Before there are streams, which whoever has them must end.
        answer = Answer(request, self._settings.model_name, self._service.llm.tokenizer)
        streams = await self._service.start(request)

        def end() -> None:
            for stream in streams:
                stream.abort()

        if request.stream:
            return EventStream(_events(streams, answer), end)
        try:
            return Json(answer.whole(await unless_gone(http, gather(streams))))
        finally:
            end()

    async def _body(self, http: Request) -> bytes:
        """The body, refused as soon as it is known to be too long or too slow.

        A web page can make a browser send a form to this machine, but no JSON without being asked
        first (CORS); so the content type must be that of JSON.
        """
        kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"Content-Type must be application/json, got {kind or 'none'!r}")
        length = http.headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._settings.max_body_bytes:
            raise self._too_long(f"{length} bytes")
        try:
            return await asyncio.wait_for(self._read(http), self._settings.body_seconds)
        except asyncio.TimeoutError:
            raise ApiError(
                408, f"the body did not come within {self._settings.body_seconds:g} s"
            ) from None

    async def _read(self, http: Request) -> bytes:
        body = bytearray()
        async for part in http.stream():
            body += part
            if len(body) > self._settings.max_body_bytes:
                raise self._too_long("more bytes")
        return bytes(body)

    def _too_long(self, came: str) -> ApiError:
        limit = self._settings.max_body_bytes
        return ApiError(
            413,
            f"the body has {came}, expected at most {limit}",
            code="body_too_large",
            headers={"Connection": "close"},
        )


async def _events(streams: list[RequestStream], answer: Answer) -> AsyncGenerator[bytes, None]:
    """The events of a streamed answer; an error is the last of them."""
    last: dict[int, RequestOutput] = {}
    try:
        for data in answer.opening():
            yield event(data)
        async with aclosing(merge(streams)) as outputs:
            async for index, output in outputs:
                last[index] = output
                news = answer.news(index, output)
                if news is not None:
                    yield event(news)
        closing = answer.closing([last[index] for index in range(len(streams))])
        if closing is not None:
            yield event(closing)
    except ApiError as error:
        yield event(error.body())
    except Exception as error:
        yield event(_internal(error).body())
        raise  # to be logged; the connection ends with it
    yield DONE


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Json(error.body(), error.status, headers=error.headers)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = ApiError(error.status_code, str(error.detail)).body()
    return Json(body, error.status_code, headers=dict(error.headers or {}))


async def _client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _server_error(_: Request, error: Exception) -> Response:
    return Json(_internal(error).body(), 500)


def _internal(error: Exception) -> ApiError:
    return ApiError(500, f"internal error: {type(error).__name__}", code="internal")
