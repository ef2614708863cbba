"""Who is told of requests and steps, and what there is to tell of one request."""

from __future__ import annotations

import time

from .request import Request


class EngineObserver:
    """Told of everything that happens, in the engine thread; this one does nothing with it.

    `metrics.Metrics` counts it.
    """

    def queued(self, request: Request) -> None:
        """A request is there."""

    def refused(self, reason: str) -> None:
        """A request was not taken; in the thread that asked."""

    def started(self, request: Request, queue_seconds: float) -> None:
        """Its prompt is being computed, after it has waited so long."""

    def first_token(self, request: Request, seconds: float) -> None:
        """Its first token is there, so long after it was submitted."""

    def advanced(self, request: Request, num_tokens: int) -> None:
        """It has so many more tokens."""

    def finished(
        self, request: Request, reason: str, seconds: float, per_token: float | None
    ) -> None:
        """It has ended; `per_token` seconds lay between tokens, None where that says nothing."""

    def stepped(self, seconds: float, failed: bool) -> None:
        """The engine has made a step."""


class RequestLife:
    """What an observer is told of one request, by a clock that starts when it is made.

    Args:
        request: that was submitted.
        observer: who is told.
    """

    def __init__(self, request: Request, observer: EngineObserver) -> None:
        self._request, self._observer = request, observer
        self._submitted_at = time.monotonic()
        self._started = False
        self._first_token_at: float | None = None
        self._num_tokens = 0

    def queue(self) -> None:
        """The engine thread has it."""
        self._observer.queued(self._request)

    def advance(self, began: float) -> None:
        """A step that began then is over."""
        request, now = self._request, time.monotonic()
        tokens = len(request.output_token_ids)
        if not self._started and (request.slot is not None or request.num_prefilled):
            self._started = True
            self._observer.started(request, max(0.0, began - self._submitted_at))
        if self._first_token_at is None and tokens:
            self._first_token_at = now
            self._observer.first_token(request, now - self._submitted_at)
        if tokens > self._num_tokens:
            self._observer.advanced(request, tokens - self._num_tokens)
            self._num_tokens = tokens

    def end(self, failed: bool) -> None:
        """It has ended, by itself or by a failure of the engine."""
        request, now = self._request, time.monotonic()
        per_token, tokens = None, len(request.output_token_ids)
        if self._first_token_at is not None and tokens > 1 and not failed:
            per_token = (now - self._first_token_at) / (tokens - 1)
        reason = "error" if failed else str(request.finish_reason)
        self._observer.finished(request, reason, now - self._submitted_at, per_token)
