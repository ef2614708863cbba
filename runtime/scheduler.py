"""Orders the work: which requests hold a slot, what is prefilled next. Touches no tensor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .request import Request


@dataclass(frozen=True)
class PrefillChunk:
    """`length` prompt tokens of `request` from token `start`."""

    request: Request
    start: int
    length: int


class Scheduler:
    """First come, first served, over a fixed number of slots.

    A request takes a slot, and cache blocks for its longest possible output, when it is admitted;
    so nothing that runs is ever evicted. Prompts longer than the token budget go in chunks.
    """

    def __init__(
        self,
        num_slots: int,
        max_num_tokens: int,
        try_allocate: Callable[[int, int], bool],
        free: Callable[[int], None],
    ) -> None:
        self._free_slots = list(range(num_slots))
        self._max_num_tokens = max_num_tokens
        self._try_allocate = try_allocate
        self._free = free
        self._waiting: deque[Request] = deque()
        self._admitted: list[Request] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._admitted)

    @property
    def decoding(self) -> list[Request]:
        """Requests whose prompt is done, in order of admission."""
        return [r for r in self._admitted if r.prompt_done and not r.finished]

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def schedule_prefill(self) -> list[PrefillChunk]:
        """Admits what fits, and returns this step's prompt chunks within the token budget."""
        self._admit()
        chunks, budget = [], self._max_num_tokens
        for request in self._admitted:
            remaining = len(request.prompt_token_ids) - request.num_prefilled
            length = min(remaining, budget)
            if length:
                chunks.append(PrefillChunk(request, request.num_prefilled, length))
                budget -= length
        return chunks

    def _admit(self) -> None:
        while self._waiting and self._free_slots:
            request = self._waiting[0]
            # It holds its slot before anything is allocated: whatever interrupts the allocation,
            # `cancel` finds the request and gives back what it got.
            request.slot = self._free_slots[-1]
            self._admitted.append(request)
            self._free_slots.pop()
            self._waiting.popleft()
            if not self._try_allocate(request.slot, request.max_total_tokens):
                self._admitted.pop()
                self._waiting.appendleft(request)
                self._return_slot(request)
                return

    def release_finished(self) -> None:
        """Gives back the slots of finished requests."""
        for request in self._admitted:
            if request.finished and request.slot is not None:
                self._free(request.slot)
                self._return_slot(request)
        self._admitted = [r for r in self._admitted if not r.finished]

    def _return_slot(self, request: Request) -> None:
        slot, request.slot = request.slot, None
        if slot is not None and slot not in self._free_slots:
            self._free_slots.append(slot)

    def cancel_all(self) -> None:
        """Ends every request."""
        self.cancel([*self._waiting, *self._admitted])

    def cancel(self, requests: Iterable[Request]) -> None:
        """Ends requests wherever they stand; unknown and finished ones are left alone."""
        for request in requests:
            if request.finished:
                continue
            request.finish_reason = "cancelled"
        self._waiting = deque(r for r in self._waiting if not r.finished)
        self.release_finished()
