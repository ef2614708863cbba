"""Decoding steps without the host: which requests take them, and the one that is under way."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from .batch_guard import BatchGuard
from .decision import NOT_FINITE, Sampler
from .device_decoder import DecodedRow, DeviceDecoder
from .progress import Progress
from .request import Request
from .scheduler import split_budget
from .sequence_memory import SequenceMemory
from .stats import EngineStats
from .timed_policy import TimedPolicy, VerifiedRow


class DeviceSteps:
    """Has steps run by a decoder, one of them while the host hears of the last.

    Args:
        decoder: runs the steps.
        sampler: knows which requests need the host.
        memory: whether sequences can grow.
        policy: limits the trees of the steps that are drafted ahead.
        progress: is told what came of it.
        guard: runs each batch.
        stats: counts.
        max_num_tokens: tokens of a step.
        max_nodes: most nodes of a tree that the host drafts.

    Attributes:
        decoder: see above.
        under_way: requests of the step that the device is at, of which the host has not heard.
    """

    def __init__(
        self,
        decoder: DeviceDecoder,
        sampler: Sampler,
        memory: SequenceMemory,
        policy: TimedPolicy,
        progress: Progress,
        guard: BatchGuard,
        stats: EngineStats,
        max_num_tokens: int,
        max_nodes: int,
    ) -> None:
        self.decoder = decoder
        self._max_num_tokens, self._max_nodes = max_num_tokens, max_nodes
        self._sampler, self._policy, self._memory = sampler, policy, memory
        self._progress, self._guard, self._stats = progress, guard, stats
        self.under_way: list[Request] = []

    def runs(self, decoding: Sequence[Request]) -> bool:
        """Whether a step of just these requests is under way."""
        return bool(self.under_way) and self.under_way == decoding

    def go_on(self) -> list[VerifiedRow] | None:
        """Starts the next step of the sequences under way, then hears of the last one.

        So the device never waits for the host. A sequence that turns out to have ended is in one
        step more, which nobody hears of.

        Returns:
            What the last step brought, nothing where the next one failed; None, with nothing
            started, where a sequence has no room or the next step is not captured.
        """
        requests, decoder = self.under_way, self.decoder
        if not all(self._reaches_on(request) for request in requests):
            return None
        # Its size was settled when it was drafted; the policy says that of the step behind it.
        following = self._following(requests)
        if not decoder.may_launch_again(following):
            return None
        if not self._guard.run(requests, partial(decoder.launch_again, following)):
            return []
        self._stats.graph_steps += 1
        return self.collect(requests)

    def _following(self, requests: Sequence[Request]) -> int | None:
        """The policy's limit for a step behind the one that is started, plain where it must be."""
        limit = self._policy.limit(len(requests))
        counts = [self.decoder.nodes(request, limit) for request in requests]
        fits = self.decoder.fits(len(counts), max(counts))
        return limit if fits and sum(counts) <= self._max_num_tokens else 1

    def _reaches_on(self, request: Request) -> bool:
        """Whether a request has room for a step behind one that accepts the deepest path."""
        path = self.decoder.depth + 1
        save = self._memory.next_save(request)
        if save is not None and save - request.num_computed <= 2 * path:
            return False
        return self._memory.try_grow(request, path)

    def launch(
        self, decoding: Sequence[Request], limit: int | None, prompt_tokens: int
    ) -> tuple[list[Request], list[Request]]:
        """Starts a step of those that need the host for nothing; returns them, and the others.

        Args:
            decoding: requests that have a tree next.
            limit: the policy's, of nodes a tree.
            prompt_tokens: that prompts beside them could run.
        """
        mine = [request for request in decoding if self._needs_no_host(request)]
        known = {request.request_id for request in mine}
        others = [request for request in decoding if request.request_id not in known]
        if mine and not self._has_room(mine, len(others), limit, prompt_tokens):
            self._stats.graph_misses += 1
            mine, others = [], [*decoding]
        for request in others:
            self.decoder.release(request)
        if not mine:
            return [], others
        following = self._following(mine)
        if not self._guard.run(mine, partial(self.decoder.launch, mine, limit, following)):
            return [], others
        self._stats.graph_steps += 1
        return mine, others

    def _needs_no_host(self, request: Request) -> bool:
        if request.isolated or not self._sampler.is_plain(request):
            return False
        # Where the state is to be saved soon, the tree must end there.
        save = self._memory.next_save(request)
        return save is None or save - request.num_computed > self.decoder.depth + 1

    def _has_room(
        self, mine: Sequence[Request], num_others: int, limit: int | None, prompt_tokens: int
    ) -> bool:
        """Whether the trees are captured, and fit into the step's tokens as they are."""
        counts = [self.decoder.nodes(request, limit) for request in mine]
        if not self.decoder.fits(len(mine), max(counts)):
            return False
        counts += [self._max_nodes] * num_others
        return split_budget(self._max_num_tokens, counts, prompt_tokens)[0] >= sum(counts)

    def num_nodes(self, requests: Sequence[Request], limit: int | None) -> int:
        """Nodes of a step of these requests under the policy's limit."""
        return sum(self.decoder.nodes(request, limit) for request in requests)

    def leave(self, launched: Sequence[Request]) -> None:
        """Lets a launched step run on until `go_on` or `hear`."""
        self.under_way = [*launched]

    def hear(self) -> list[VerifiedRow]:
        """Takes up the step that is under way; nothing where there is none."""
        requests, self.under_way = self.under_way, []
        return self.collect(requests)

    def collect(self, launched: Sequence[Request]) -> list[VerifiedRow]:
        """Takes up what a launched step brought."""
        rows = [VerifiedRow(request, None) for request in launched]
        decoded: list[DecodedRow] = []
        if not rows or not self._guard.run(
            launched, lambda: decoded.extend(self.decoder.results(launched))
        ):
            return rows
        for row, found in zip(rows, decoded, strict=True):
            row.tree = found.tree
            # Others have ended meanwhile, or before a step that was started all the same.
            if not row.request.finished:
                row.path = found.path
                self._take(row.request, found)
        return rows

    def _take(self, request: Request, found: DecodedRow) -> None:
        if found.faulty:
            self._progress.fail(request, NOT_FINITE)
            return
        depth = self.decoder.depth if found.tree is None else found.tree.depth
        depth *= found.num_nodes > 1
        self._progress.accept(request, found.path, found.token_ids, found.num_nodes, depth)

    def forget(self, slot: int) -> None:
        """The sequence in `slot` has ended."""
        self.decoder.forget(slot)

    def discard(self) -> None:
        """Forgets the step under way; its sequences must be forgotten as well."""
        self.under_way = []
        self.decoder.discard()
