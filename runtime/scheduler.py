"""Orders the work: who holds a slot, who gives it up, what is prefilled next. Touches no tensor."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .prefix_cache import CachedPrefix
from .request import Request
from .sequence_memory import SequenceMemory

# Of requests that ask for none.
NORMAL_PRIORITY = 0


@dataclass(frozen=True)
class PrefillChunk:
    """`length` tokens of `request` from token `start`."""

    request: Request
    start: int
    length: int


@dataclass(frozen=True)
class Admission:
    """A request that got a slot, and the cached prefix it starts from."""

    request: Request
    prefix: CachedPrefix | None


@dataclass(frozen=True)
class BatchWait:
    """How long requests that could start wait for others to start with them.

    A prompt step reads every weight, as a decoding step does, so that few prompts cost nearly what
    many do. Requests wait while sequences decode, for at most `steps` engine steps, and no longer
    than until prompts of `tokens` tokens have come together, or a request of a higher priority than
    `NORMAL_PRIORITY`.
    """

    steps: int = 0
    tokens: int = 0


def split_budget(budget: int, trees: Sequence[int], prompt_tokens: int) -> tuple[int, int]:
    """Divides a step's tokens between tree nodes and prompt tokens.

    Every tree has its root. What is left goes to whoever asks for less than half of it, in full,
    and the rest to the other; where both ask for more, each gets half. So prompts always advance,
    and drafts are never switched off by a prompt beside them.

    Args:
        budget: tokens of the step, at least one for each tree and one more for a prompt.
        trees: nodes of each tree.
        prompt_tokens: tokens that prompts could run.

    Returns:
        Nodes for all trees together, roots included, and prompt tokens.
    """
    left = budget - len(trees)
    drafts = sum(trees) - len(trees)
    for_prompts = min(prompt_tokens, max(left - drafts, -(-left // 2)))
    return len(trees) + min(drafts, left - for_prompts), for_prompts


class Scheduler:
    """By priority and then first come, first served, over a fixed number of slots.

    A request is admitted when its next tokens fit, and never before one that waits in front of it.
    A sequence takes more blocks as it grows; when there are none, the newest one of the lowest
    priority gives up its slot, waits in its old place, and is computed again.

    Args:
        num_slots: sequences that run at once.
        memory: gives and grows what they hold.
        free: takes back all that a slot holds.
        wait: for others, before a request is admitted.

    Attributes:
        dropped_tokens: computed tokens that `requeue` dropped, to be computed again.
    """

    def __init__(
        self,
        num_slots: int,
        memory: SequenceMemory,
        free: Callable[[int], None],
        wait: BatchWait | None = None,
    ) -> None:
        self._free_slots = list(range(num_slots))
        self._memory = memory
        self._free = free
        self._wait = wait or BatchWait()
        # Steps that those who could start have waited, this one among them once it was looked at.
        self._waited = 0
        self._counted = False
        self._waiting: list[Request] = []
        self._admitted: list[Request] = []
        self._arrivals = 0
        self.dropped_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._admitted)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def admitted(self) -> list[Request]:
        """Requests with a slot, finished ones too."""
        return list(self._admitted)

    @property
    def running(self) -> list[Request]:
        """Requests with a slot, by priority and arrival."""
        return sorted((r for r in self._admitted if not r.finished), key=_order)

    @property
    def decoding(self) -> list[Request]:
        """Those of `running` that have a tree next."""
        return [r for r in self.running if r.prompt_done]

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    def add(self, request: Request) -> None:
        request.arrival = self._arrivals
        self._arrivals += 1
        bisect.insort(self._waiting, request, key=_order)

    def begin_step(self) -> None:
        """Tells that an engine step begins, in which `admit` may be asked more than once."""
        self._counted = False

    def make_room(self) -> list[Request]:
        """Lets every decoding sequence grow, by preempting others or itself; returns those."""
        preempted: list[Request] = []
        for request in self.decoding:
            while request.slot is not None and not self._memory.try_grow(request):
                newest = self.running[-1]
                preempted.append(newest)
                self.requeue([newest])
        return preempted

    def requeue(self, requests: Iterable[Request]) -> None:
        """Takes the slots of `requests`, which wait again in their old places."""
        for request in requests:
            if request.finished or request.slot is None:
                continue
            self._free(request.slot)
            self._return_slot(request)
            self.dropped_tokens += request.num_computed
            request.num_computed = request.num_cached = 0
            bisect.insort(self._waiting, request, key=_order)
            self._admitted.remove(request)

    def admit(self) -> list[Admission]:
        """Gives slots to those who wait, in order, as long as the first of them fits."""
        admissions: list[Admission] = []
        if not self._waiting:
            self._waited = 0
        if not (self._waiting and self._free_slots) or self._waits_for_others():
            return admissions
        # Who holds all that it can ever need takes no block from the one that is admitted.
        others = sum(self._memory.may_grow(other) for other in self._admitted)
        while self._waiting and self._free_slots:
            request = self._waiting[0]
            # It holds its slot before anything is allocated: whatever interrupts the allocation,
            # `cancel` finds the request and gives back what it got.
            request.slot = self._free_slots[-1]
            self._admitted.append(request)
            self._free_slots.pop()
            self._waiting.pop(0)
            prefix = self._memory.try_admit(request, others)
            if isinstance(prefix, bool):
                self._admitted.pop()
                self._waiting.insert(0, request)
                self._return_slot(request)
                break
            # Not before: who has waited and finds no memory starts as soon as there is some.
            self._waited = 0
            admissions.append(Admission(request, prefix))
            others += self._memory.may_grow(request)
        return admissions

    def _waits_for_others(self) -> bool:
        """Whether those that could start now are kept back this time; counts the steps."""
        if not self._wait.steps:
            return False
        if not self._counted:
            self._waited += 1
            self._counted = True
        if self._waiting[0].priority > NORMAL_PRIORITY:
            return False
        running = [r for r in self._admitted if not r.finished]
        could = self._waiting[: len(self._free_slots)]
        tokens = sum(request.num_to_prefill for request in could)
        # A prompt under way has its step in any case, which more of them may join.
        alone = not running or not all(request.prompt_done for request in running)
        return not (alone or self._waited > self._wait.steps or tokens >= self._wait.tokens)

    def prompt_tokens(self) -> int:
        """Prompt tokens that this step could run."""
        return sum(chunk.length for chunk in self._chunks(None))

    def schedule_prefill(self, budget: int) -> list[PrefillChunk]:
        """This step's prompt chunks, of at most `budget` tokens together."""
        return self._chunks(budget)

    def _chunks(self, budget: int | None) -> list[PrefillChunk]:
        chunks: list[PrefillChunk] = []
        for request in self.running:
            stop = request.num_to_prefill
            save = None if request.prompt_done else self._memory.next_save(request)
            if save is not None:
                stop = min(stop, save)
            length = stop - request.num_computed
            if budget is not None:
                length = min(length, budget)
                budget -= max(0, length)
            if length > 0 and not request.prompt_done:
                chunks.append(PrefillChunk(request, request.num_computed, length))
        return chunks

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

    def cancel_all(self) -> list[Request]:
        """Ends every request; returns those that it ended."""
        return self.cancel([*self._waiting, *self._admitted])

    def cancel(self, requests: Iterable[Request]) -> list[Request]:
        """Ends requests wherever they stand; finished ones are left alone.

        Returns:
            Those that it ended.
        """
        ended = []
        for request in requests:
            if not request.finished:
                request.finish_reason = "cancelled"
                ended.append(request)
        self._waiting = [r for r in self._waiting if not r.finished]
        self.release_finished()
        return ended


def _order(request: Request) -> tuple[int, int]:
    return -request.priority, request.arrival
