"""Why a request did not run to its end, as types that a caller can tell apart.

A prompt or a setting that can never run is a plain ValueError, raised where the request is made.
"""

from __future__ import annotations


def describe(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def step_failed(error: BaseException) -> str:
    """What a request is told that ended with an error of its step."""
    return f"the engine step failed: {describe(error)}"


class TooLongError(ValueError):
    """Prompt and output together are more than the engine, or its cache, can ever hold."""


class RequestError(Exception):
    """A request was not taken, or did not finish; the message says why."""


class QueueFullError(RequestError):
    """As many requests wait as may wait; try again later."""


class ShuttingDownError(RequestError):
    """The engine finishes what it has, and takes nothing more."""


class StepFailedError(RequestError):
    """The engine step that this request was part of raised an error. The engine goes on."""


class EngineDeadError(RequestError):
    """The engine has failed for good; nothing can run until it is made anew."""
