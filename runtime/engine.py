"""The loop: admit, propose, prefill, verify, accept, commit, postprocess."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .batch_guard import BatchGuard
from .buckets import Buckets
from .decision import Sampler
from .device_decoder import DeviceDecoder
from .device_steps import DeviceSteps
from .drafter import Drafter
from .errors import TooLongError, step_failed
from .executor import Executor
from .prefix_cache import PrefixCache
from .progress import Progress
from .prompt_steps import PromptSteps
from .request import Request
from .scheduler import Admission, BatchWait, Scheduler, split_budget
from .sequence_memory import SequenceMemory
from .stats import EngineStats
from .timed_policy import TimedPolicy
from .tree_policy import FullTrees, TreePolicy
from .tree_steps import TreeSteps


class Engine:
    """Runs requests to their end. One step serves every request that holds a slot.

    Args:
        executor: the device work.
        drafter: proposes trees.
        sampler: has trees proposed by the drafter, and accepts tokens.
        max_num_tokens: tokens of a step: tree nodes and prompt tokens together.
        prefixes: the prefix cache, None without one.
        policy: limits the trees of each step.
        buckets: shapes that steps are padded to, None for no padding.
        batch_wait: how long requests wait for others to start with them.
        decoder: runs the steps of requests that need the host for nothing, None for none.
        clock: seconds, for statistics and for the policy.

    Attributes:
        stats: counters, up to date after every step.
    """

    def __init__(
        self,
        executor: Executor,
        drafter: Drafter,
        sampler: Sampler,
        max_num_tokens: int,
        *,
        prefixes: PrefixCache | None = None,
        policy: TreePolicy | None = None,
        buckets: Buckets | None = None,
        batch_wait: BatchWait | None = None,
        decoder: DeviceDecoder | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        limits = executor.limits
        if max_num_tokens < limits.max_batch_size:
            raise ValueError(
                f"max_num_tokens is {max_num_tokens}, expected at least max_batch_size "
                f"({limits.max_batch_size}): every sequence has one token a step"
            )
        self.stats = stats = EngineStats(
            slots_total=limits.max_batch_size,
            kv_blocks_total=limits.num_blocks,
            checkpoints_total=prefixes.num_checkpoints if prefixes is not None else 0,
        )
        self._executor, self._drafter, self._sampler = executor, drafter, sampler
        self._max_num_tokens, self._prefixes, self._clock = max_num_tokens, prefixes, clock
        self._policy = TimedPolicy(policy or FullTrees(), clock)
        self._memory = memory = SequenceMemory(executor, prefixes, stats)
        self._scheduler = Scheduler(limits.max_batch_size, memory, self._free, batch_wait)
        guard = BatchGuard(self._scheduler, stats, self._discard)
        progress = Progress(executor, drafter, memory, prefixes, stats, clock)
        self._prompts = PromptSteps(executor, sampler, progress, guard, stats)
        self._trees = TreeSteps(executor, drafter, sampler, memory, progress, guard, stats, buckets)
        self._device: DeviceSteps | None = None
        if decoder is not None:
            self._device = DeviceSteps(
                decoder, sampler, memory, self._policy, progress, guard, stats,
                max_num_tokens, limits.max_nodes,
            )  # fmt: skip

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def add(self, request: Request) -> None:
        """Queues a request that `check` accepts."""
        self.check(request)
        request.added_at = self._clock()
        self._scheduler.add(request)
        self.stats.requests_added += 1
        self.stats.waiting = self._scheduler.num_waiting

    def check(self, request: Request) -> None:
        """Raises ValueError if the request could never run, saying which limit to raise.

        It is a `TooLongError` where the tokens are too many.
        """
        self._sampler.check(request)
        limits = self._executor.limits
        if request.max_total_tokens > limits.max_seq_len:
            raise TooLongError(
                f"prompt of {len(request.prompt_token_ids)} tokens plus max_tokens="
                f"{request.params.max_tokens} is {request.max_total_tokens}, expected at most "
                f"max_seq_len={limits.max_seq_len}"
            )
        rows = request.max_total_tokens + limits.scratch_rows
        capacity = limits.num_blocks * limits.tokens_per_block
        if self._memory.blocks_needed(request.max_total_tokens) > limits.num_blocks:
            raise TooLongError(
                f"a sequence of {request.max_total_tokens} tokens needs {rows} rows of the KV "
                f"cache, which has {capacity}; raise kv_cache_config.max_tokens or lower "
                "max_tokens"
            )

    def cancel(self, requests: Sequence[Request]) -> None:
        """Ends requests and frees what they hold."""
        self._count_ends(self._scheduler.cancel(requests))

    def stop(self, request: Request, num_tokens: int, stop_reason: str) -> None:
        """Ends a request whose text met a stop string with its `num_tokens`-th output token."""
        running = not request.finished
        del request.output_token_ids[num_tokens:]
        del request.logprobs[num_tokens:]
        request.finish_reason, request.stop_reason = "stop", stop_reason
        self._scheduler.release_finished()
        if running:
            self._count_ends([request])

    def fail(self, request: Request, error: str) -> None:
        """Ends a request for what went wrong outside of the engine with it alone."""
        running = not request.finished
        request.fail(error)
        self._scheduler.cancel([request])  # wherever it stands
        if running:
            self._count_ends([request])

    def drop_prefixes(self) -> None:
        """Empties the prefix cache."""
        if self._prefixes is not None:
            self._prefixes.clear()

    def close(self) -> None:
        """Ends what the executor has running beside it; no step may come after."""
        self._executor.close()

    @property
    def lost(self) -> str | None:
        """Why no step can run any more; an executor over several processes knows it at once."""
        reason: str | None = getattr(self._executor, "lost", None)
        return reason

    def step(self) -> None:
        """One engine step: some prompt tokens, and one tree for every decoding sequence.

        An error of the executor or the drafter costs the requests of its batch what they had
        computed, and each is then tried in a batch of its own: one that fails alone ends with
        that error, and the others go on.

        Any other error ends every request in the engine with it, an interrupt as cancelled, and
        empties the prefix cache: their states may stand between two tokens. The engine itself stays
        usable.
        """
        started = self._clock()
        try:
            self._step()
        except BaseException as error:
            self._discard()
            self._executor.pages.recount()
            ended = self._scheduler.cancel_all()
            if isinstance(error, Exception):
                # Whoever waits for them may be another than who made this step.
                for request in ended:
                    request.fail(step_failed(error))
            self._count_ends(ended)
            self.drop_prefixes()
            self._executor.pages.recount()
            raise
        self.stats.steps += 1
        self.stats.step_seconds += self._clock() - started
        self._refresh_stats()

    def _step(self) -> None:
        """Goes on where nothing has changed, or else hears of the last step and plans a new one."""
        self._scheduler.begin_step()
        if self._go_on():
            self._finish()
            return
        self._hear()
        self._finish()
        for request in self._scheduler.make_room():
            request.num_preemptions += 1
            self.stats.preemptions += 1
        self._admit()
        chunks = self._scheduler.schedule_prefill(self._decode(self._scheduler.decoding))
        if chunks:
            self._policy.interrupt()
            self._prompts.run(chunks)
        self._finish()

    def _go_on(self) -> bool:
        """Goes on with the sequences under way; False where anything else is to be done first."""
        device, scheduler = self._device, self._scheduler
        if device is None or not device.runs(scheduler.decoding) or scheduler.prompt_tokens():
            return False
        if self._admit():
            return False
        heard = device.go_on()
        if heard is not None:
            self._policy.observe(heard)
        return heard is not None

    def _hear(self) -> None:
        """Takes up the step that is under way, if there is one."""
        if self._device is not None:
            self._policy.observe(self._device.hear())

    def _decode(self, decoding: Sequence[Request]) -> int:
        """A tree for every request; returns the prompt tokens that the step has left."""
        device, prompt_tokens = self._device, self._scheduler.prompt_tokens()
        self._policy.start()
        limit = self._policy.limit(len(decoding)) if decoding else None
        launched: list[Request] = []
        if device is not None:
            launched, decoding = device.launch(decoding, limit, prompt_tokens)
            if launched and not decoding and not prompt_tokens:
                device.leave(launched)
                return 0
        if decoding or not launched:
            self._policy.interrupt()
        verified, own = [], 0
        if device is not None:
            # The device drafts the next trees while the host takes these up.
            verified, own = device.collect(launched), device.num_nodes(launched, limit)
        hosted, trees = self._trees.propose(decoding, limit)
        nodes, prompt_tokens = split_budget(
            self._max_num_tokens - own, [tree.num_nodes for tree in trees], prompt_tokens
        )
        verified += self._trees.decode(hosted, trees, nodes)
        self._policy.observe(verified)
        if hosted:
            self._policy.interrupt()
        return prompt_tokens

    def _admit(self) -> bool:
        """Gives slots to those who wait, as far as they fit; whether there were any."""
        admissions = self._scheduler.admit()
        for admission in admissions:
            self._start(admission)
            self._policy.interrupt()
        return bool(admissions)

    def _start(self, admission: Admission) -> None:
        request, prefix = admission.request, admission.prefix
        if request.admitted_at is None:
            request.admitted_at = self._clock()
            self.stats.admissions += 1
            if request.added_at is not None:
                self.stats.queue_seconds += request.admitted_at - request.added_at
        if prefix is not None and request.speculation:
            following = request.token_ids[prefix.num_tokens]
            hidden = self._executor.checkpoint_hidden(prefix.checkpoint).clone()
            self._drafter.resume(request.held_slot, prefix.num_tokens - 1)
            self._drafter.observe(request.held_slot, [following], hidden[None])

    def _finish(self) -> None:
        ended = [r for r in self._scheduler.admitted if r.finished]
        self._scheduler.release_finished()
        self._count_ends(ended)

    def _discard(self) -> None:
        self._policy.interrupt()
        if self._device is not None:
            self._device.discard()
        self._executor.discard()

    def _free(self, slot: int) -> None:
        self._drafter.forget(slot)
        if self._device is not None:
            self._device.forget(slot)
        self._executor.free(slot)
        self._memory.release(slot)

    def _count_ends(self, requests: Sequence[Request]) -> None:
        stats = self.stats
        for request in requests:
            request.finished_at = self._clock()
            stats.requests_finished += request.finish_reason in ("stop", "length")
            stats.requests_cancelled += request.finish_reason == "cancelled"
            stats.requests_failed += request.finish_reason == "error"
        self._refresh_stats()

    def _refresh_stats(self) -> None:
        stats, scheduler = self.stats, self._scheduler
        stats.running, stats.waiting = len(scheduler.running), scheduler.num_waiting
        stats.slots_used = stats.slots_total - scheduler.free_slots
        stats.recomputed_tokens = scheduler.dropped_tokens
        stats.kv_blocks_used = stats.kv_blocks_total - self._executor.pages.free_blocks
        if self._prefixes is not None:
            stats.kv_blocks_cached = self._prefixes.blocks_held
            stats.checkpoints_used = self._prefixes.checkpoints_used
            stats.checkpoint_evictions = self._prefixes.evictions
