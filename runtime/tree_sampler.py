"""The engine's `Sampler`: every request by its own settings, greedy or random, on any tree."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from trtllm_treewy.batch import TreeBatch
from trtllm_treewy.draft_tree import DraftTree

from .decision import Decision
from .drafter import Drafter, DraftRoot
from .request import Request
from .sampling import (
    FAULT_REASONS,
    AcceptanceRule,
    DraftRecord,
    Fault,
    NodeDrafts,
    SampledTree,
    SamplingDynamicDrafter,
    SamplingRows,
    SamplingStaticDrafter,
    SequenceSampling,
    check_vocabulary,
    sample_tree,
)


class TreeSampler:
    """Draws drafts and accepts tokens without changing the distribution of any request.

    Args:
        vocab_size: tokens of the model.
        device: of its logits.
        rule: how drafts are accepted under random sampling.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        rule: AcceptanceRule = AcceptanceRule.MATCH,
    ) -> None:
        self._vocab_size, self._device, self._rule = vocab_size, device, rule
        self._sequences: WeakKeyDictionary[Request, SequenceSampling] = WeakKeyDictionary()
        # Where each request's last tree came from, until it is verified.
        self._drawn: WeakKeyDictionary[Request, tuple[DraftRecord, int]] = WeakKeyDictionary()

    def check(self, request: Request) -> None:
        """Raises ValueError for settings that name tokens which the model does not have."""
        check_vocabulary(request.params, self._vocab_size)

    def is_plain(self, request: Request) -> bool:
        sequence, params = self._sequence(request), request.params
        position = len(request.output_token_ids)
        biased = any(position < until for _, _, until in sequence.biases)
        changed = biased or sequence.penalised or params.embedding_bias is not None
        return params.greedy and not changed and params.num_logprobs is None

    def propose(
        self,
        drafter: Drafter,
        requests: Sequence[Request],
        roots: Sequence[DraftRoot],
        max_nodes: int | None,
    ) -> list[DraftTree]:
        for request in requests:
            self._drawn.pop(request, None)
        if not isinstance(drafter, (SamplingStaticDrafter, SamplingDynamicDrafter)):
            return drafter.propose(roots, max_nodes)
        proposal = drafter.propose_sampled(roots, self._rows(requests), max_nodes)
        if proposal.record is not None:
            for row, request in enumerate(requests):
                self._drawn[request] = proposal.record, row
        return proposal.trees

    def decide(
        self,
        logits: Tensor,
        batch: TreeBatch,
        trees: Sequence[DraftTree],
        requests: Sequence[Request],
        max_path: int,
    ) -> Decision:
        size, nodes = batch.parents.shape
        rows = self._rows(requests, pad_to=size)
        drafts = self._drafts(trees, requests, size, nodes) if rows.any_rejection else None
        result = sample_tree(batch, logits, rows, drafts=drafts, max_path=max_path)
        if result.logprobs is not None:
            self._note_logprobs(result, requests)
        faults = result.fault.tolist()
        reasons = [FAULT_REASONS[Fault(fault)] if fault else "" for fault in faults]
        faulty = (result.fault != 0)[:, None].expand(-1, nodes)
        return Decision(result.acceptance, faulty, reasons)

    def _drafts(
        self, trees: Sequence[DraftTree], requests: Sequence[Request], size: int, nodes: int
    ) -> NodeDrafts | None:
        """What the nodes were drawn from; all requests of a batch come from one proposal."""
        drawn = [self._drawn.get(request) for request in requests]
        records = [entry[0] for entry in drawn if entry is not None]
        if not records:
            return None
        # A request that was not in the last proposal has a root alone, so there is nothing to find.
        last = records[-1]
        sources = [entry[1] if entry is not None and entry[0] is last else -1 for entry in drawn]
        return last.align(trees, nodes, record_rows=sources, pad_batch_to=size)

    def _rows(self, requests: Sequence[Request], pad_to: int | None = None) -> SamplingRows:
        return SamplingRows.build(
            [self._sequence(request) for request in requests],
            [request.output_token_ids for request in requests],
            self._device,
            pad_to=pad_to,
        )

    def _sequence(self, request: Request) -> SequenceSampling:
        known = self._sequences.get(request)
        if known is None:
            known = self._sequences[request] = SequenceSampling(
                request.params,
                request.prompt_token_ids,
                self._vocab_size,
                end_ids=request.end_ids,
                sequence=request.sequence,
                acceptance=self._rule,
            )
        return known

    def _note_logprobs(self, result: SampledTree, requests: Sequence[Request]) -> None:
        """Adds those of the tokens to come; of tokens that were taken back there are none."""
        if result.logprobs is None:
            return
        counts = result.num_tokens.tolist()
        tokens = [row[:n] for row, n in zip(result.token_ids.tolist(), counts, strict=True)]
        tokens = tokens[: len(requests)]
        entries = result.logprobs.to_host(tokens, [request.params for request in requests])
        for request, more in zip(requests, entries, strict=True):
            del request.logprobs[len(request.output_token_ids) :]
            request.logprobs += more
