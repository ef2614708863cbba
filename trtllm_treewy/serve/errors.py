"""Errors as OpenAI's API writes them."""

from __future__ import annotations

from typing import Any

from ..runtime.errors import (
    EngineDeadError,
    QueueFullError,
    RequestError,
    ShuttingDownError,
)


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status.
        message: what was expected and what came.
        code: short name for programs, such as "context_length_exceeded".
        param: the field of the request that is at fault, if one is.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = headers

    @property
    def kind(self) -> str:
        """OpenAI's error type for the status."""
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> dict[str, Any]:
        """The JSON object that a client gets."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """400: the request itself is at fault."""
    return ApiError(400, message, param=param, code=code)


def from_request_error(error: RequestError) -> ApiError:
    """What the engine says of a request, as an answer."""
    message = str(error)
    if isinstance(error, QueueFullError):
        return ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, ShuttingDownError):
        return ApiError(503, message, code="shutting_down")
    if isinstance(error, EngineDeadError):
        return ApiError(500, message, code="engine_failed")
    return ApiError(500, message, code="request_failed")
