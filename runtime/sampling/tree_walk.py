"""Sampling along a verified tree: from the root, token by token, as far as the tree goes along.

At each node a token is chosen from the target's distribution there; where a child has it, the walk
goes on at the child, else the token is the step's last. Only the nodes on the path are processed:
a step costs as much as (path length) plain steps, however wide the tree is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_treewy.batch import TreeBatch
from trtllm_treewy.runtime.acceptance import Acceptance, greedy_accept
from trtllm_treewy.topology import valid_nodes

from .counter_rng import Purpose, uniform
from .draft import NodeDrafts
from .logprobs import TokenLogprobs, token_logprobs
from .processors import Fault, Scores, score
from .rejection import Drafted, recursive_rejection
from .rows import SamplingRows
from .sampler import NextTokens, check_logits, draw


@dataclass(frozen=True)
class SampledTree:
    """What a step yields.

    Attributes:
        acceptance: the accepted paths; a valid node even in rows with a fault.
        token_ids: int64 [batch, P], emitted tokens in order: those of the path but the root, then
            the bonus; -1 beyond, and everywhere in rows with a fault.
        num_tokens: int32 [batch], how many those are.
        fault: int8 [batch], a `Fault`: the logits of a node on the path were no use.
        logprobs: [batch, P] of the emitted tokens; None where no row asks for any.
    """

    acceptance: Acceptance
    token_ids: Tensor
    num_tokens: Tensor
    fault: Tensor
    logprobs: TokenLogprobs | None


@torch.inference_mode()
def sample_tree(
    tree: TreeBatch,
    logits: Tensor,
    rows: SamplingRows,
    *,
    drafts: NodeDrafts | None = None,
    max_path: int | None = None,
) -> SampledTree:
    """Accepts a path of each tree and the token after it; waits for no device.

    Args:
        tree: the verified batch; rows with slot -1 or without nodes yield nothing.
        logits: [batch, N, vocab], the target's after each node.
        rows: settings of each row, the root counted among its outputs.
        drafts: what the children were drawn from, for rows that accept by rejection. Nodes without
            drafts, and all nodes where this is not given, accept by match.
        max_path: longest path accepted, the root included; N where not given.

    Raises:
        ValueError: shapes or devices that do not fit, or a `max_path` below 1.
    """
    batch, nodes = tree.parents.shape
    check_logits(logits, (batch, nodes, rows.vocab_size), rows)
    if len(rows) != batch:
        raise ValueError(f"sampling: the tree has {batch} rows, the sampling rows {len(rows)}")
    columns = nodes if max_path is None else max_path
    if columns < 1:
        raise ValueError(f"max_path must be >= 1 (the root is accepted), got {max_path}")
    if drafts is not None:
        drafts.check(tree.parents)
    if rows.plain_greedy:
        return _greedy(tree, logits, columns)
    return _Walk(tree, logits, rows, drafts if rows.any_rejection else None).run(columns)


def _greedy(tree: TreeBatch, logits: Tensor, columns: int) -> SampledTree:
    """All rows greedy and unchanged: one operator finds the path."""
    best = logits.max(-1)
    acceptance = greedy_accept(tree, best.indices, max_path=columns)
    on_path = acceptance.path.clamp(min=0)
    broken = (~best.values.isfinite()).gather(1, on_path) & (acceptance.path >= 0)
    fault = broken.any(1).to(torch.int8) * int(Fault.NOT_FINITE)
    # The token after each node of the path is its successor on it, or the bonus.
    token_ids = best.indices.gather(1, on_path)
    token_ids = torch.where((acceptance.path >= 0) & (fault == 0)[:, None], token_ids, -1)
    counts = (token_ids >= 0).sum(1, dtype=torch.int32)
    return SampledTree(acceptance, token_ids, counts, fault, None)


class _Walk:
    """One walk: where each row stands, and which rows still move."""

    def __init__(
        self, tree: TreeBatch, logits: Tensor, rows: SamplingRows, drafts: NodeDrafts | None
    ) -> None:
        self._logits, self._rows, self._drafts = logits, rows, drafts
        self._tokens = tree.token_ids
        self._valid = valid_nodes(tree.parents, tree.num_nodes)
        self._parents = tree.parents.long()
        self._row = torch.arange(len(rows), device=logits.device)
        self._active = self._valid[:, 0] & (tree.slot >= 0)

    def run(self, columns: int) -> SampledTree:
        node = torch.where(self._active, 0, -1)
        fault = torch.zeros(len(self._rows), dtype=torch.int8, device=node.device)
        path, tokens, logprobs = [], [], []
        accepted, bonus = node, torch.full_like(node, -1)
        for level in range(columns):
            chosen = self._choose(node)
            fault = torch.where(self._active, chosen.fault, fault)
            token = torch.where(self._active, chosen.token_ids, -1)
            path.append(torch.where(self._active, node, -1))
            tokens.append(token)
            if chosen.logprobs is not None:
                logprobs.append(chosen.logprobs)
            accepted = torch.where(self._active, node, accepted)
            bonus = torch.where(self._active, token, bonus)
            if level + 1 == columns or not self._descend(node, token):
                break
            node = self._next
            self._rows = self._rows.after(torch.where(self._active, token, -1))
        return _result(columns, path, tokens, accepted, bonus, fault, logprobs)

    def _descend(self, node: Tensor, token: Tensor) -> bool:
        """Moves rows to the first child that has their token; False if no row is known to move."""
        same = (self._tokens == token[:, None]) & self._children(node)
        self._active = self._active & same.any(1)
        self._next = same.to(torch.int8).argmax(1)
        # Only a CPU can be asked without waiting.
        return self._active.device.type != "cpu" or bool(self._active.any())

    def _children(self, node: Tensor) -> Tensor:
        return (self._parents == node[:, None]) & self._valid & (node >= 0)[:, None]

    def _choose(self, node: Tensor) -> NextTokens:
        logits = self._logits[self._row, node.clamp(min=0)]
        scores = score(logits, self._rows)
        token_ids = self._draw(node, scores)
        token_ids = torch.where(scores.fault == Fault.NONE, token_ids, -1)
        logprobs = token_logprobs(logits, scores, self._rows, token_ids)
        return NextTokens(token_ids, scores.fault, logprobs)

    def _draw(self, node: Tensor, scores: Scores) -> Tensor:
        if self._drafts is None or not self._drafts.max_children:
            return draw(scores.random, scores, self._rows)
        drafted = self._drafted(self._drafts, node)
        ranks = range(drafted.token_ids.shape[1])
        words = torch.stack([self._rows.word(Purpose.ACCEPT, rank) for rank in ranks], 1)
        verdict = recursive_rejection(scores.random, drafted, uniform(words))
        drawn = draw(verdict.residual, scores, self._rows)
        return torch.where(verdict.token_ids >= 0, verdict.token_ids, drawn)

    def _drafted(self, drafts: NodeDrafts, node: Tensor) -> Drafted:
        """The children of each row's node, in the order of their indices, and their law."""
        at = node.clamp(min=0)
        nodes = self._tokens.shape[1]
        index = torch.arange(nodes, device=node.device)
        order = torch.where(self._children(node), index, nodes)
        first = order.topk(min(drafts.max_children, nodes), largest=False, sorted=True).values
        probs = drafts.probs[self._row, at]
        return Drafted(
            support_ids=drafts.ids[self._row, at],
            support_probs=torch.where(self._rows.rejection[:, None], probs, 0.0),
            token_ids=self._tokens.gather(1, first.clamp(max=nodes - 1)),
            present=first < nodes,
        )


def _result(
    columns: int,
    path: list[Tensor],
    tokens: list[Tensor],
    accepted: Tensor,
    bonus: Tensor,
    fault: Tensor,
    logprobs: list[TokenLogprobs],
) -> SampledTree:
    """Puts the levels together; columns that no row reached are -1."""
    batch = accepted.shape[0]
    missing = path[0].new_full((batch, columns - len(path)), -1)
    paths = torch.cat([torch.stack(path, 1), missing], 1)
    emitted = torch.cat([torch.stack(tokens, 1), missing], 1)
    emitted = torch.where((fault == 0)[:, None], emitted, -1)
    acceptance = Acceptance(
        accepted.to(torch.int32), (paths >= 0).sum(1, dtype=torch.int32), paths, bonus
    )
    return SampledTree(
        acceptance,
        emitted,
        (emitted >= 0).sum(1, dtype=torch.int32),
        fault,
        TokenLogprobs.stack(logprobs) if logprobs else None,
    )
