"""The loop: schedule, prefill, propose, verify, accept, commit, postprocess."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_treewy.batch import PrefillBatch
from trtllm_treewy.draft_tree import DraftTree, fit_to_budget, to_tree_batch

from .acceptance import Acceptance, greedy_accept
from .drafter import Drafter, DraftRoot
from .executor import Executor, StepOutput
from .request import Request
from .scheduler import PrefillChunk, Scheduler

NOT_FINITE = (
    "the model's logits are not finite; its weights, or its activations in this type, overflow"
)


@dataclass(frozen=True)
class _Choice:
    """`token_ids` int64 [batch, N] chosen after each node; `faulty` where there was no choosing."""

    token_ids: Tensor
    faulty: Tensor


class Engine:
    """Runs requests to their end. One step serves every request that holds a slot."""

    def __init__(self, executor: Executor, drafter: Drafter, max_num_tokens: int) -> None:
        limits = executor.limits
        if max_num_tokens < limits.max_batch_size:
            raise ValueError(
                f"max_num_tokens is {max_num_tokens}, expected at least max_batch_size "
                f"({limits.max_batch_size}): every sequence has one token a step"
            )
        self._executor = executor
        self._drafter = drafter
        self._max_num_tokens = max_num_tokens
        self._scheduler = Scheduler(
            limits.max_batch_size, max_num_tokens, executor.try_allocate, self._free
        )

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def add(self, request: Request) -> None:
        """Queues a request that `check` accepts."""
        self.check(request)
        self._scheduler.add(request)

    def check(self, request: Request) -> None:
        """Raises ValueError if the request could never run, saying which limit to raise."""
        limits = self._executor.limits
        if request.max_total_tokens > limits.max_seq_len:
            raise ValueError(
                f"prompt of {len(request.prompt_token_ids)} tokens plus max_tokens="
                f"{request.params.max_tokens} is {request.max_total_tokens}, expected at most "
                f"max_seq_len={limits.max_seq_len}"
            )
        rows = request.max_total_tokens + limits.scratch_rows
        capacity = limits.num_blocks * limits.tokens_per_block
        if -(-rows // limits.tokens_per_block) > limits.num_blocks:
            raise ValueError(
                f"a sequence of {request.max_total_tokens} tokens needs {rows} rows of the KV "
                f"cache, which has {capacity}; raise kv_cache_config.max_tokens or lower "
                "max_tokens"
            )

    def cancel(self, requests: Sequence[Request]) -> None:
        """Ends requests and frees what they hold."""
        self._scheduler.cancel(requests)

    def stop(self, request: Request, num_tokens: int, stop_reason: str) -> None:
        """Ends a request whose text met a stop string with its `num_tokens`-th output token."""
        del request.output_token_ids[num_tokens:]
        request.finish_reason, request.stop_reason = "stop", stop_reason
        self._scheduler.release_finished()

    def step(self) -> None:
        """One engine step: some prompt tokens, then one tree for every decoding sequence.

        If anything is raised on the way, an interrupt too, every request in the engine ends as
        cancelled: their states may stand between two tokens. The engine itself stays usable.
        """
        try:
            self._step()
        except BaseException:
            self._executor.discard()
            self._scheduler.cancel_all()
            raise

    def _step(self) -> None:
        chunks = self._scheduler.schedule_prefill()
        if chunks:
            self._prefill(chunks)
            self._scheduler.release_finished()
        decoding = self._scheduler.decoding
        if decoding:
            self._decode(decoding)
            self._scheduler.release_finished()

    def _free(self, slot: int) -> None:
        self._drafter.forget(slot)
        self._executor.free(slot)

    def _prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        spans = [
            chunk.request.prompt_token_ids[chunk.start : chunk.start + chunk.length]
            for chunk in chunks
        ]
        batch = PrefillBatch.pack(
            [token for span in spans for token in span],
            [chunk.length for chunk in chunks],
            [_slot(chunk.request) for chunk in chunks],
            [chunk.start for chunk in chunks],
            self._executor.device,
        )
        output = self._executor.prefill(batch)
        choice = self._choose(
            output.logits[:, None], [chunk.request for chunk in chunks], depth=None
        )
        states = output.hidden.split([chunk.length for chunk in chunks])
        faulty, target = choice.faulty[:, 0].tolist(), choice.token_ids[:, 0].tolist()
        for row, (chunk, hidden) in enumerate(zip(chunks, states, strict=True)):
            request, chosen = chunk.request, target[row]
            request.num_prefilled += chunk.length
            if faulty[row]:
                request.fail(NOT_FINITE)
                continue
            if request.prompt_done:
                request.append([chosen])
            following = chosen
            if not request.prompt_done:
                following = request.prompt_token_ids[request.num_prefilled]
            tokens = request.prompt_token_ids[chunk.start + 1 : request.num_prefilled]
            self._drafter.observe(_slot(request), [*tokens, following], hidden)

    def _decode(self, requests: Sequence[Request]) -> None:
        roots = [DraftRoot(_slot(r), r.output_token_ids[-1], r.context_len) for r in requests]
        trees = fit_to_budget(self._drafter.propose(roots), self._max_num_tokens)
        batch = to_tree_batch(
            trees,
            [root.slot for root in roots],
            [root.context_len for root in roots],
            self._executor.device,
        )
        output = self._executor.verify(batch)
        choice = self._choose(output.logits, requests, batch.depth)
        longest = 1 + max(tree.depth for tree in trees)
        acceptance = greedy_accept(batch, choice.token_ids, max_path=longest)
        self._executor.commit(batch, acceptance)
        self._postprocess(requests, trees, output, choice, acceptance)

    def _postprocess(
        self,
        requests: Sequence[Request],
        trees: Sequence[DraftTree],
        output: StepOutput,
        choice: _Choice,
        acceptance: Acceptance,
    ) -> None:
        """Appends each sequence's accepted tokens and bonus, and tells the drafter of them."""
        paths, bonus = acceptance.path.tolist(), acceptance.bonus_ids.tolist()
        faulty = choice.faulty.tolist()
        for row, request in enumerate(requests):
            path = [node for node in paths[row] if node >= 0]
            if any(faulty[row][node] for node in path):
                request.fail(NOT_FINITE)
                continue
            tokens = [trees[row].token_ids[node] for node in path[1:]] + [bonus[row]]
            taken = request.append(tokens)
            request.stats.record(trees[row].num_nodes - 1, taken - 1)
            if not request.finished:
                self._drafter.observe(_slot(request), tokens, output.hidden[row, path])

    @torch.inference_mode()
    def _choose(self, logits: Tensor, requests: Sequence[Request], depth: Tensor | None) -> _Choice:
        """The model's own choice after every node; greedy.

        End and stop tokens are out of the question where `min_tokens` is not reached yet.
        """
        for row, request in enumerate(requests):
            forbidden = request.forbidden_until_min_tokens
            minimum = request.params.min_tokens or 0
            count = len(request.output_token_ids)
            if not forbidden or count >= minimum:
                continue
            early = torch.ones_like(logits[row, :, 0], dtype=torch.bool)
            if depth is not None:
                early = count + depth[row] < minimum
            ids = torch.tensor(sorted(forbidden), device=logits.device)
            masked = logits[row][:, ids].masked_fill(early[:, None], -torch.inf)
            logits[row, :, ids] = masked
        best = logits.max(dim=-1)
        return _Choice(best.indices, ~best.values.isfinite())


def _slot(request: Request) -> int:
    if request.slot is None:
        raise RuntimeError(f"request {request.request_id} holds no slot")
    return request.slot
