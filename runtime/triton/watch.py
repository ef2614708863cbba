"""What must be asked for again and again: cancellation, health, metrics."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .front import Front
    from .metrics import MetricsMirror

# Triton's Python backend tells of a cancellation only when it is asked.
POLL_SECONDS = 0.1
METRICS_SECONDS = 1.0


class Watch:
    """A thread beside the requests, which Triton's answers do not hold up.

    Args:
        front: whose requests and engine.
        mirror: brought up to date every second.
        on_failure: called once, with the reason, when the engine is dead.
    """

    def __init__(
        self, front: Front, mirror: MetricsMirror, on_failure: Callable[[str], None]
    ) -> None:
        self._front, self._mirror, self._on_failure = front, mirror, on_failure
        self._end = threading.Event()
        self._told = False
        self._thread = threading.Thread(target=self._run, name="treewy-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        due = 0.0
        while not self._end.wait(POLL_SECONDS):
            self._front.end_cancelled()
            if time.monotonic() >= due:
                self._mirror.update()
                due = time.monotonic() + METRICS_SECONDS
            failure = self._front.failure
            if failure is not None and not self._told:
                self._told = True
                self._mirror.update()
                self._on_failure(failure)
