"""What an error in a batch costs: its requests start again alone, and a lone one ends with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from .errors import EngineDeadError, step_failed
from .request import Request
from .scheduler import Scheduler
from .stats import EngineStats

_Item = TypeVar("_Item")


class BatchGuard:
    """Runs the batches of a step.

    Args:
        scheduler: takes back the requests of a batch that failed.
        stats: where faults are counted.
        discard: forgets what is under way on the device.
    """

    def __init__(
        self, scheduler: Scheduler, stats: EngineStats, discard: Callable[[], None]
    ) -> None:
        self._scheduler, self._stats, self._discard = scheduler, stats, discard

    def run(self, requests: Sequence[Request], run: Callable[[], None]) -> bool:
        """Runs a batch of `requests`; False where it raised.

        Raises:
            EngineDeadError: no batch would run.
        """
        try:
            run()
        except EngineDeadError:
            raise
        except Exception as error:
            self._discard()
            self._stats.executor_faults += 1
            going = [request for request in requests if not request.finished]
            if len(requests) == 1:
                for request in going:
                    request.fail(step_failed(error))
            else:
                for request in going:
                    request.isolated = True
                self._scheduler.requeue(going)
            return False
        return True


def batches(
    items: Sequence[_Item], request_of: Callable[[_Item], Request]
) -> list[Sequence[_Item]]:
    """The items in one batch, but those of isolated requests, which have one each."""
    together = [item for item in items if not request_of(item).isolated]
    alone = [[item] for item in items if request_of(item).isolated]
    return [together, *alone] if together else [*alone]
