"""Decoding steps with the host: trees are proposed, fitted, verified, and accepted nodes kept."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from trtllm_treewy.batch import TreeBatch
from trtllm_treewy.draft_tree import DraftTree, fit_to_budget, to_tree_batch

from .batch_guard import BatchGuard, batches
from .buckets import Buckets
from .decision import Decision, Sampler
from .drafter import Drafter, DraftRoot
from .executor import Executor, StepOutput
from .progress import Progress
from .request import Request
from .sequence_memory import SequenceMemory
from .stats import EngineStats
from .timed_policy import VerifiedRow
from .tree_policy import cut_to_depth


class TreeSteps:
    """Decodes requests by a tree each.

    Args:
        executor: the device work.
        drafter: proposes trees.
        sampler: has trees proposed by the drafter, and accepts tokens.
        memory: knows at which tokens a tree must end.
        progress: is told what came of it.
        guard: runs each batch.
        stats: counts.
        buckets: shapes that batches are padded to, None for no padding.
    """

    def __init__(
        self,
        executor: Executor,
        drafter: Drafter,
        sampler: Sampler,
        memory: SequenceMemory,
        progress: Progress,
        guard: BatchGuard,
        stats: EngineStats,
        buckets: Buckets | None,
    ) -> None:
        self._executor, self._drafter, self._sampler = executor, drafter, sampler
        self._memory, self._progress, self._guard = memory, progress, guard
        self._stats, self._buckets = stats, buckets

    def propose(
        self, decoding: Sequence[Request], limit: int | None
    ) -> tuple[list[Request], list[DraftTree]]:
        """A tree for every request; those whose drafter failed are left out.

        Args:
            decoding: requests that have a tree next.
            limit: nodes of a tree; 1 drafts nothing, None is no limit.
        """
        trees = {
            request.request_id: DraftTree.root_only(request.output_token_ids[-1])
            for request in decoding
            if not request.speculation or limit == 1
        }
        for group in batches([r for r in decoding if r.request_id not in trees], lambda r: r):
            self._guard.run(group, partial(self._draft, group, limit, trees))
        drafted = [request for request in decoding if request.request_id in trees]
        return drafted, [trees[request.request_id] for request in drafted]

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

    def decode(
        self, requests: Sequence[Request], trees: Sequence[DraftTree], num_nodes: int
    ) -> list[VerifiedRow]:
        """Verifies and commits the trees, pruned to the best `num_nodes` nodes of all."""
        fitted = self._fit(trees, num_nodes)
        rows = [VerifiedRow(r, tree) for r, tree in zip(requests, fitted, strict=True)]
        for group in batches(list(zip(rows, fitted, strict=True)), lambda pair: pair[0].request):
            members = [row for row, _ in group]
            batch = [row.request for row in members]
            drafts = [tree for _, tree in group]
            if self._guard.run(batch, partial(self._verify, members, drafts)):
                # Only a verified step clears a request: its prompt may run and its trees fail.
                for request in batch:
                    request.isolated = False
        return rows

    def _fit(self, trees: Sequence[DraftTree], num_nodes: int) -> list[DraftTree]:
        fitted = fit_to_budget(trees, num_nodes) if trees else []
        for before, after in zip(trees, fitted, strict=True):
            cut = before.num_nodes - after.num_nodes
            self._stats.pruned_trees += cut > 0
            self._stats.pruned_tokens += cut
        return fitted

    def _verify(self, rows: Sequence[VerifiedRow], trees: Sequence[DraftTree]) -> None:
        requests = [row.request for row in rows]
        batch = self._tree_batch(requests, trees)
        output = self._executor.verify(batch)
        longest = 1 + max(tree.depth for tree in trees)
        decision = self._sampler.decide(output.logits, batch, trees, requests, longest)
        self._executor.commit(batch, decision.acceptance)
        self._take(rows, trees, output, decision)

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

    def _take(
        self,
        rows: Sequence[VerifiedRow],
        trees: Sequence[DraftTree],
        output: StepOutput,
        decision: Decision,
    ) -> None:
        """Appends accepted tokens and bonus, and tells the drafter of them; notes the paths."""
        table, bonus = decision.acceptance.path.tolist(), decision.acceptance.bonus_ids.tolist()
        faulty = decision.faulty.tolist()
        for index, (row, tree) in enumerate(zip(rows, trees, strict=True)):
            request = row.request
            path = row.path = [node for node in table[index] if node >= 0]
            if any(faulty[index][node] for node in path):
                self._progress.fail(request, decision.reason(index))
                continue
            tokens = [tree.token_ids[node] for node in path[1:]] + [bonus[index]]
            self._progress.accept(request, path, tokens, tree.num_nodes, tree.depth)
            if not request.finished:
                hidden = output.hidden[index, path]
                self._progress.observe(request, tokens, hidden)
                self._progress.save(request, hidden[-1])
