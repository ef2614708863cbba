"""Prompt steps: chunks into state and cache, and the first token of those that end."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from trtllm_treewy.batch import PrefillBatch, upload
from trtllm_treewy.draft_tree import DraftTree, to_tree_batch

from .batch_guard import BatchGuard, batches
from .decision import NOT_FINITE, Decision, Sampler
from .executor import Executor
from .progress import Progress
from .request import Request
from .scheduler import PrefillChunk
from .stats import EngineStats


class PromptSteps:
    """Runs the prompt chunks of a step.

    Args:
        executor: the device work.
        sampler: chooses first tokens.
        progress: is told what came of it.
        guard: runs each batch.
        stats: counts.
    """

    def __init__(
        self,
        executor: Executor,
        sampler: Sampler,
        progress: Progress,
        guard: BatchGuard,
        stats: EngineStats,
    ) -> None:
        self._executor, self._sampler = executor, sampler
        self._progress, self._guard, self._stats = progress, guard, stats

    def run(self, chunks: Sequence[PrefillChunk]) -> None:
        """Computes all chunks; where a batch of them fails, see `BatchGuard`."""
        for group in batches(chunks, lambda chunk: chunk.request):
            self._guard.run([chunk.request for chunk in group], partial(self._prefill, group))

    def _prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        lengths = [chunk.length for chunk in chunks]
        spans = [
            chunk.request.token_ids[chunk.start : chunk.start + chunk.length] for chunk in chunks
        ]
        batch = PrefillBatch.pack(
            [token for span in spans for token in span],
            lengths,
            [chunk.request.held_slot for chunk in chunks],
            [chunk.start for chunk in chunks],
            self._executor.device,
        )
        output = self._executor.prefill(batch)
        for chunk in chunks:
            chunk.request.num_computed += chunk.length
        self._stats.prefilled_tokens += sum(lengths)
        self._choose_first(chunks, spans, output.logits)
        going: list[tuple[Request, Tensor]] = []
        for chunk, hidden in zip(chunks, output.hidden.split(lengths), strict=True):
            request, start = chunk.request, chunk.start + 1
            if request.error is None:
                following = request.token_ids[start : start + chunk.length]
                self._progress.observe(request, following, hidden)
                going.append((request, hidden[-1]))
        # All prompts enter the drafter's cache in one pass, at which the device is while the next
        # step is planned.
        self._progress.settle([request for request, _ in going])
        for request, last in going:
            self._progress.save(request, last)

    def _choose_first(
        self, chunks: Sequence[PrefillChunk], spans: Sequence[Sequence[int]], logits: Tensor
    ) -> None:
        """The first token of every request whose prompt is computed now; faults of all.

        What it brings comes to the host together, when the device has done the step.
        """
        rows = [row for row, chunk in enumerate(chunks) if _ends_prompt(chunk.request)]
        # Before the sampler writes over them.
        told = [(~logits.amax(-1).isfinite()).long()]
        decision = self._decide(chunks, spans, logits, rows) if rows else None
        if decision is not None:
            told += [decision.faulty[:, 0].long(), decision.acceptance.bonus_ids.long()]
        numbers = torch.cat(told).tolist()
        for chunk, fault in zip(chunks, numbers, strict=False):
            if fault:
                self._progress.fail(chunk.request, NOT_FINITE)
        if decision is None:
            return
        faulty, bonus = (numbers[len(chunks) :][i : i + len(rows)] for i in (0, len(rows)))
        for row, at in enumerate(rows):
            request = chunks[at].request
            if request.error is not None:
                continue
            if faulty[row]:
                self._progress.fail(request, decision.reason(row))
            else:
                self._progress.append(request, [bonus[row]])

    def _decide(
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


def _ends_prompt(request: Request) -> bool:
    """Whether the first token is to be chosen; one that is computed again has it already."""
    return (
        not request.finished
        and not request.output_token_ids
        and request.num_computed == request.num_to_prefill
    )
