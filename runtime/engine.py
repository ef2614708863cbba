"""The loop: admit, propose, prefill, verify, accept, commit, postprocess."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from trtllm_treewy.batch import PrefillBatch, TreeBatch, upload
from trtllm_treewy.draft_tree import DraftTree, fit_to_budget, to_tree_batch

from .buckets import Buckets
from .decision import NOT_FINITE, Decision, Sampler
from .device_decoder import DecodedRow, DeviceDecoder
from .drafter import Drafter, DraftRoot
from .errors import EngineDeadError, TooLongError, describe
from .executor import Executor, StepOutput
from .prefix_cache import PrefixCache
from .request import Request
from .scheduler import Admission, BatchWait, PrefillChunk, Scheduler, split_budget
from .sequence_memory import SequenceMemory
from .stats import EngineStats
from .tree_policy import FullTrees, StepReport, TreePolicy, cut_to_depth

_Item = TypeVar("_Item")


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
        self.stats = EngineStats(
            slots_total=limits.max_batch_size,
            kv_blocks_total=limits.num_blocks,
            checkpoints_total=prefixes.num_checkpoints if prefixes is not None else 0,
        )
        self._executor = executor
        self._drafter = drafter
        self._max_num_tokens = max_num_tokens
        self._prefixes = prefixes
        self._policy = policy or FullTrees()
        self._sampler = sampler
        self._buckets = buckets
        self._decoder = decoder
        # Requests of a step that the device is at, and of which the host has not heard.
        self._under_way: list[Request] = []
        self._clock = clock
        # When the host last heard of a step, as long as the device has done nothing else since;
        # and when the one under way was started, where that is not so.
        self._heard_at: float | None = None
        self._started_at = 0.0
        self._memory = SequenceMemory(executor, prefixes, self.stats)
        self._scheduler = Scheduler(limits.max_batch_size, self._memory, self._free, batch_wait)

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
                    request.fail(_step_failed(error))
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
        for admission in self._scheduler.admit():
            self._start(admission)
            self._heard_at = None
        prompt_tokens = self._decode_all(self._scheduler.decoding)
        chunks = self._scheduler.schedule_prefill(prompt_tokens)
        for group in _batches(chunks, lambda chunk: chunk.request):
            self._heard_at = None
            self._guard([chunk.request for chunk in group], partial(self._prefill, group))
        self._finish()

    def _decode_all(self, decoding: Sequence[Request]) -> int:
        """A tree for every request; returns the prompt tokens that the step has left."""
        self._started_at = self._clock()
        limit = self._policy.limit(len(decoding)) if decoding else None
        launched, hosted = self._launch(decoding, limit)
        if launched and not hosted and not self._scheduler.prompt_tokens():
            self._under_way = launched
            return 0
        if hosted or not decoding:
            self._heard_at = None
        paths: dict[int, list[int]] = {}
        # The device drafts the next trees while the host takes these up.
        verified = self._collect(launched, paths)
        trees = self._propose(hosted, limit)
        hosted = [r for r in hosted if r.request_id in trees]
        own = sum(self._decoder.nodes(r, limit) for r in launched) if self._decoder else 0
        nodes, prompt_tokens = split_budget(
            self._max_num_tokens - own,
            [trees[r.request_id].num_nodes for r in hosted],
            self._scheduler.prompt_tokens(),
        )
        fitted = self._fit([trees[r.request_id] for r in hosted], nodes)
        self._decode(hosted, fitted, paths)
        verified += zip(hosted, fitted, strict=True)
        self._report(verified, paths)
        if hosted:
            self._heard_at = None
        return prompt_tokens

    def _finish(self) -> None:
        ended = [r for r in self._scheduler.admitted if r.finished]
        self._scheduler.release_finished()
        self._count_ends(ended)

    def _start(self, admission: Admission) -> None:
        request = admission.request
        if request.admitted_at is None:
            request.admitted_at = self._clock()
            self.stats.admissions += 1
            if request.added_at is not None:
                self.stats.queue_seconds += request.admitted_at - request.added_at
        if admission.prefix is not None and request.speculation:
            prefix = admission.prefix
            following = request.token_ids[prefix.num_tokens]
            hidden = self._executor.checkpoint_hidden(prefix.checkpoint).clone()
            self._drafter.resume(request.held_slot, prefix.num_tokens - 1)
            self._drafter.observe(request.held_slot, [following], hidden[None])

    def _guard(self, requests: Sequence[Request], run: Callable[[], None]) -> bool:
        """Runs a batch; where that raises, its requests start again alone, or a lone one fails."""
        try:
            run()
        except EngineDeadError:
            raise  # no batch would run
        except Exception as error:
            self._discard()
            self.stats.executor_faults += 1
            going = [r for r in requests if not r.finished]
            if len(requests) == 1:
                for request in going:
                    request.fail(_step_failed(error))
            else:
                for request in going:
                    request.isolated = True
                self._scheduler.requeue(going)
            return False
        return True

    def _discard(self) -> None:
        self._under_way, self._heard_at = [], None
        self._executor.discard()
        if self._decoder is not None:
            self._decoder.discard()

    def _free(self, slot: int) -> None:
        self._drafter.forget(slot)
        if self._decoder is not None:
            self._decoder.forget(slot)
        self._executor.free(slot)
        self._memory.release(slot)

    # ------------------------------------------------------------------------------- prompts

    def _prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        spans = [
            chunk.request.token_ids[chunk.start : chunk.start + chunk.length] for chunk in chunks
        ]
        batch = PrefillBatch.pack(
            [token for span in spans for token in span],
            [chunk.length for chunk in chunks],
            [chunk.request.held_slot for chunk in chunks],
            [chunk.start for chunk in chunks],
            self._executor.device,
        )
        output = self._executor.prefill(batch)
        for chunk in chunks:
            chunk.request.num_computed += chunk.length
        self.stats.prefilled_tokens += sum(chunk.length for chunk in chunks)
        self._choose_first(chunks, spans, output.logits)
        going: list[tuple[Request, Tensor]] = []
        hidden = output.hidden.split([chunk.length for chunk in chunks])
        for chunk, states in zip(chunks, hidden, strict=True):
            if chunk.request.error is None:
                self._observe_prompt(chunk, states)
                going.append((chunk.request, states[-1]))
        # All prompts enter the drafter's cache in one pass, at which the device is while the next
        # step is planned.
        self._drafter.settle(*[r.held_slot for r, _ in going if r.speculation and not r.finished])
        for request, last in going:
            self._save(request, last)

    def _observe_prompt(self, chunk: PrefillChunk, states: Tensor) -> None:
        request, stop = chunk.request, chunk.start + chunk.length + 1
        if request.speculation:
            following = request.token_ids[chunk.start + 1 : stop]
            self._drafter.observe(request.held_slot, following, states)

    def _choose_first(
        self, chunks: Sequence[PrefillChunk], spans: Sequence[Sequence[int]], logits: Tensor
    ) -> None:
        """The first token of every request whose prompt is computed now; faults of all.

        What it brings comes to the host together, when the device has done the step.
        """
        rows = [
            row
            for row, chunk in enumerate(chunks)
            if not chunk.request.finished
            and not chunk.request.output_token_ids
            and chunk.request.num_computed == chunk.request.num_to_prefill
        ]
        # Before the sampler writes over them.
        told = [(~logits.amax(-1).isfinite()).long()]
        decision = self._decide_first(chunks, spans, logits, rows) if rows else None
        if decision is not None:
            told += [decision.faulty[:, 0].long(), decision.acceptance.bonus_ids.long()]
        numbers = torch.cat(told).tolist()
        for chunk, fault in zip(chunks, numbers, strict=False):
            if fault:
                self._fail(chunk.request, NOT_FINITE)
        if decision is None:
            return
        faulty, bonus = (numbers[len(chunks) :][i : i + len(rows)] for i in (0, len(rows)))
        for row, at in enumerate(rows):
            request = chunks[at].request
            if request.error is not None:
                continue
            if faulty[row]:
                self._fail(request, decision.reason(row))
            else:
                self._append(request, [bonus[row]])

    def _decide_first(
        self,
        chunks: Sequence[PrefillChunk],
        spans: Sequence[Sequence[int]],
        logits: Tensor,
        rows: Sequence[int],
    ) -> Decision:
        """The sampler's decision on the rows whose prompt ends."""
        requests = [chunks[row].request for row in rows]
        trees = [DraftTree.root_only(spans[row][-1]) for row in rows]
        batch = to_tree_batch(
            trees,
            [r.held_slot for r in requests],
            [r.num_computed - 1 for r in requests],
            self._executor.device,
        )
        if len(rows) < len(chunks):
            logits = logits.index_select(0, upload(torch.tensor(rows), logits.device))
        return self._sampler.decide(logits[:, None], batch, trees, requests, 1)

    # ------------------------------------------------------------------------- on the device

    def _go_on(self) -> bool:
        """Starts the next step of the sequences under way, then hears of the last one.

        So the device never waits for the host. A sequence that turns out to have ended is in one
        step more, which nobody hears of.

        Returns:
            False, with nothing started, where anything else is to be done first.
        """
        requests, decoder = self._under_way, self._decoder
        if not requests or decoder is None or self._scheduler.decoding != requests:
            return False
        if self._scheduler.prompt_tokens():
            return False
        admissions = self._scheduler.admit()
        for admission in admissions:
            self._start(admission)
        if admissions:
            self._heard_at = None
            return False
        if not all(self._reaches_on(r, decoder.depth + 1) for r in requests):
            return False
        # Its size was settled when it was drafted; the policy says that of the step behind it.
        following = self._following(requests, decoder)
        if not decoder.may_launch_again(following):
            return False
        if self._guard(requests, partial(decoder.launch_again, following)):
            self.stats.graph_steps += 1
            self._under_way = requests
            self._take_up(requests)
        return True

    def _following(self, requests: Sequence[Request], decoder: DeviceDecoder) -> int | None:
        """The policy's limit for a step behind the one that is started, plain where it must be."""
        limit = self._policy.limit(len(requests))
        counts = [decoder.nodes(request, limit) for request in requests]
        fits = sum(counts) <= self._max_num_tokens and decoder.fits(len(counts), max(counts))
        return limit if fits else 1

    def _reaches_on(self, request: Request, path: int) -> bool:
        """Whether a request has room for a step behind one that accepts `path` nodes."""
        save = self._memory.next_save(request)
        if save is not None and save - request.num_computed <= 2 * path:
            return False
        return self._memory.try_grow(request, path)

    def _hear(self) -> None:
        """Takes up the step that is under way, if there is one."""
        requests, self._under_way = self._under_way, []
        if requests:
            self._take_up(requests)

    def _take_up(self, requests: Sequence[Request]) -> None:
        """Hears of a step that had the device for itself, and tells the policy."""
        paths: dict[int, list[int]] = {}
        self._report(self._collect(requests, paths), paths)

    def _launch(
        self, decoding: Sequence[Request], limit: int | None
    ) -> tuple[list[Request], list[Request]]:
        """Starts a step of those that need the host for nothing; returns them, and the others."""
        decoder = self._decoder
        if decoder is None:
            return [], [*decoding]
        mine = [r for r in decoding if self._needs_no_host(r, decoder, limit)]
        known = {r.request_id for r in mine}
        others = [r for r in decoding if r.request_id not in known]
        if mine and not self._has_room(mine, others, decoder, limit):
            self.stats.graph_misses += 1
            mine, others = [], [*decoding]
        for request in others:
            decoder.release(request)
        if not mine:
            return [], others
        following = self._following(mine, decoder)
        if not self._guard(mine, partial(decoder.launch, mine, limit, following)):
            return [], others
        self.stats.graph_steps += 1
        return mine, others

    def _needs_no_host(self, request: Request, decoder: DeviceDecoder, limit: int | None) -> bool:
        if request.isolated or not self._sampler.is_plain(request):
            return False
        # Where the state is to be saved soon, the tree must end there.
        save = self._memory.next_save(request)
        return save is None or save - request.num_computed > decoder.depth + 1

    def _has_room(
        self,
        mine: Sequence[Request],
        others: Sequence[Request],
        decoder: DeviceDecoder,
        limit: int | None,
    ) -> bool:
        """Whether the trees are captured, and fit into the step's tokens as they are."""
        counts = [decoder.nodes(request, limit) for request in mine]
        if not decoder.fits(len(mine), max(counts)):
            return False
        counts += [self._executor.limits.max_nodes] * len(others)
        prompts = self._scheduler.prompt_tokens()
        return split_budget(self._max_num_tokens, counts, prompts)[0] >= sum(counts)

    def _collect(
        self, requests: Sequence[Request], paths: dict[int, list[int]]
    ) -> list[tuple[Request, DraftTree | None]]:
        """Takes up what a launched step brought."""
        decoder = self._decoder
        if decoder is None or not requests:
            return []
        rows: list[DecodedRow] = []
        if not self._guard(requests, lambda: rows.extend(decoder.results(requests))):
            return [(request, None) for request in requests]
        for request, row in zip(requests, rows, strict=True):
            if request.finished:
                continue  # meanwhile, or before a step that was started all the same
            paths[request.request_id] = row.path
            if row.faulty:
                self._fail(request, NOT_FINITE)
                continue
            request.num_computed += len(row.path)
            taken = self._append(request, row.token_ids)
            request.stats.record(row.num_nodes - 1, taken - 1)
            depth = decoder.depth if row.tree is None else row.tree.depth
            self.stats.record_tree(row.num_nodes - 1, depth * (row.num_nodes > 1), taken - 1)
        return [(request, row.tree) for request, row in zip(requests, rows, strict=True)]

    # --------------------------------------------------------------------------------- trees

    def _propose(self, decoding: Sequence[Request], limit: int | None) -> dict[int, DraftTree]:
        """A tree for every request, by its id; those whose drafter failed have none."""
        trees: dict[int, DraftTree] = {}
        for request in decoding:
            if not request.speculation or limit == 1:
                trees[request.request_id] = DraftTree.root_only(request.output_token_ids[-1])
        for group in _batches([r for r in decoding if r.request_id not in trees], lambda r: r):
            self._guard(group, partial(self._draft, group, limit, trees))
        return trees

    def _draft(
        self, requests: Sequence[Request], limit: int | None, trees: dict[int, DraftTree]
    ) -> None:
        roots = [DraftRoot(r.held_slot, r.output_token_ids[-1], r.context_len) for r in requests]
        proposed = self._sampler.propose(self._drafter, requests, roots, limit)
        for request, tree in zip(requests, proposed, strict=True):
            trees[request.request_id] = self._cut(request, tree, limit)

    def _cut(self, request: Request, tree: DraftTree, limit: int | None) -> DraftTree:
        """The tree within the policy's limit, and no deeper than the next state to be saved."""
        if limit is not None:
            tree = tree.prune(limit)
        save = self._memory.next_save(request)
        return tree if save is None else cut_to_depth(tree, save - request.num_computed - 1)

    def _fit(self, trees: Sequence[DraftTree], nodes: int) -> list[DraftTree]:
        """The trees within the step's budget, pruned to the best nodes of all."""
        fitted = fit_to_budget(trees, nodes) if trees else []
        for before, after in zip(trees, fitted, strict=True):
            cut = before.num_nodes - after.num_nodes
            self.stats.pruned_trees += cut > 0
            self.stats.pruned_tokens += cut
        return fitted

    def _decode(
        self,
        requests: Sequence[Request],
        trees: Sequence[DraftTree],
        paths: dict[int, list[int]],
    ) -> None:
        for group in _batches(list(zip(requests, trees, strict=True)), lambda row: row[0]):
            members = [request for request, _ in group]
            drafts = [tree for _, tree in group]
            if self._guard(members, partial(self._verify, members, drafts, paths)):
                # Only a verified step clears a request: its prompt may run and its trees fail.
                for request in members:
                    request.isolated = False

    def _report(
        self,
        rows: Sequence[tuple[Request, DraftTree | None]],
        paths: dict[int, list[int]],
    ) -> None:
        """Tells the policy of a step that went well; of rows that had ended there is nothing."""
        heard, now = self._heard_at, self._clock()
        self._heard_at = now
        known = [(r, tree) for r, tree in rows if r.request_id in paths]
        drafting = [(r, tree) for r, tree in known if r.speculation and tree is not None]
        failed = any(r.error is not None for r, _ in rows)
        if failed or not drafting or not all(r.finished or r.request_id in paths for r, _ in rows):
            return
        self._policy.observe(
            StepReport(
                rows=len(rows),
                seconds=now - (self._started_at if heard is None else heard),
                trees=[tree for _, tree in drafting],
                paths=[paths[r.request_id] for r, _ in drafting],
                whole=heard is not None,
            )
        )

    def _verify(
        self,
        requests: Sequence[Request],
        trees: Sequence[DraftTree],
        paths: dict[int, list[int]],
    ) -> None:
        batch = self._tree_batch(requests, trees)
        output = self._executor.verify(batch)
        longest = 1 + max(tree.depth for tree in trees)
        decision = self._sampler.decide(output.logits, batch, trees, requests, longest)
        self._executor.commit(batch, decision.acceptance)
        self._postprocess(requests, trees, output, decision, paths)

    def _tree_batch(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> TreeBatch:
        rows, nodes = None, None
        if self._buckets is not None:
            rows, nodes = self._buckets.pad(len(trees), max(tree.num_nodes for tree in trees))
        return to_tree_batch(
            trees,
            [request.held_slot for request in requests],
            [request.context_len for request in requests],
            self._executor.device,
            pad_nodes_to=nodes,
            pad_batch_to=rows,
        )

    def _postprocess(
        self,
        requests: Sequence[Request],
        trees: Sequence[DraftTree],
        output: StepOutput,
        decision: Decision,
        paths: dict[int, list[int]],
    ) -> None:
        """Appends accepted tokens and bonus, and tells the drafter of them; notes the paths."""
        table, bonus = decision.acceptance.path.tolist(), decision.acceptance.bonus_ids.tolist()
        faulty = decision.faulty.tolist()
        for row, (request, tree) in enumerate(zip(requests, trees, strict=True)):
            path = paths[request.request_id] = [node for node in table[row] if node >= 0]
            if any(faulty[row][node] for node in path):
                self._fail(request, decision.reason(row))
                continue
            tokens = [tree.token_ids[node] for node in path[1:]] + [bonus[row]]
            request.num_computed += len(path)
            taken = self._append(request, tokens)
            request.stats.record(tree.num_nodes - 1, taken - 1)
            self.stats.record_tree(tree.num_nodes - 1, tree.depth, taken - 1)
            if not request.finished:
                hidden = output.hidden[row, path]
                if request.speculation:
                    self._drafter.observe(request.held_slot, tokens, hidden)
                self._save(request, hidden[-1])

    # ------------------------------------------------------------------------------- the rest

    def _append(self, request: Request, tokens: Sequence[int]) -> int:
        taken = request.append(tokens)
        self.stats.generated_tokens += taken
        if request.first_token_at is None:
            request.first_token_at = self._clock()
        return taken

    def _fail(self, request: Request, reason: str) -> None:
        request.fail(reason)
        self.stats.non_finite_logits += reason == NOT_FINITE

    def _save(self, request: Request, hidden: Tensor) -> None:
        """Gives the state to the prefix cache, where it is to be saved."""
        if self._prefixes is None or not self._memory.is_save_point(request):
            return
        slot, count = request.held_slot, request.num_computed
        if request.speculation:
            self._drafter.settle(slot)  # its rows are part of what is kept
        self._prefixes.insert(
            request.token_ids[:count],
            self._executor.pages.blocks(slot),
            request.speculation,
            lambda checkpoint: self._executor.save_checkpoint(slot, checkpoint, hidden),
        )

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


def _step_failed(error: Exception) -> str:
    return f"the engine step failed: {describe(error)}"


def _batches(
    items: Sequence[_Item], request_of: Callable[[_Item], Request]
) -> list[Sequence[_Item]]:
    """The items in one batch, but those of isolated requests, which have one each."""
    together = [item for item in items if not request_of(item).isolated]
    alone = [[item] for item in items if request_of(item).isolated]
    return [together, *alone] if together else [*alone]
