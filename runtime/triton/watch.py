"""What must be asked for again and again: cancellation, health, metrics."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from trtllm_treewy.runtime.errors import describe

if TYPE_CHECKING:
    from .front import Front
    from .metrics import MetricsMirror

# Triton's Python backend tells of a cancellation only when it is asked.
POLL_SECONDS = 0.1
METRICS_SECONDS = 1.0


class Watch:
    """A thread beside the requests, which Triton's answers do not hold up.

    An error in one of its tasks is told, once for each, and the next turn tries again: whatever it
    was, cancellation and health go on.

    Args:
        front: whose requests and engine.
        mirror: brought up to date every second.
        on_failure: called with the reason when the engine is dead, once unless it raises.
        on_error: called with the text of an error in the watch itself.
    """

    def __init__(
        self,
        front: Front,
        mirror: MetricsMirror,
        on_failure: Callable[[str], None],
        on_error: Callable[[str], None],
    ) -> None:
        self._front, self._mirror = front, mirror
        self._on_failure, self._on_error = on_failure, on_error
        self._end = threading.Event()
        self._told = False
        self._due = 0.0
        self._errors: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="treewy-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(POLL_SECONDS):
            self._try("cancelled requests", self._front.end_cancelled)
            self._try("metrics", self._update_metrics)
            self._try("health", self._tell_failure)

    def _try(self, what: str, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception as error:
            if what not in self._errors:
                self._errors.add(what)
                with suppress(Exception):  # a log that fails is no reason to end either
                    self._on_error(f"the watch over {what} goes on after {describe(error)}")

    def _update_metrics(self) -> None:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + METRICS_SECONDS
            self._mirror.update()

    def _tell_failure(self) -> None:
        failure = self._front.failure
        if failure is not None and not self._told:
            self._due = 0.0
            self._try("metrics", self._update_metrics)
            self._on_failure(failure)
            self._told = True
