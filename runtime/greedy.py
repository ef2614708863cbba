"""Greedy decoding as a step's decision: from logits, trees and requests to accepted paths.

`Sampler` is what the engine asks for trees and for decisions; `GreedySampler` is the one without
random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trtllm_treewy.batch import TreeBatch
from trtllm_treewy.draft_tree import DraftTree

from .acceptance import Acceptance, greedy_accept
from .drafter import Drafter, DraftRoot
from .request import Request

NOT_FINITE = (
    "the model's logits are not finite; its weights, or its activations in this type, overflow"
)


@dataclass(frozen=True)
class Decision:
    """What a step chose.

    Attributes:
        acceptance: the accepted paths, and the token after each.
        faulty: bool [batch, N], nodes whose logits allowed no choice; one on its path ends a
            request with an error.
        reasons: the text of that error, by row; that the logits are not finite unless given.
    """

    acceptance: Acceptance
    faulty: Tensor
    reasons: Sequence[str] | None = None

    def reason(self, row: int) -> str:
        """Why `row` could not choose."""
        return NOT_FINITE if self.reasons is None else self.reasons[row]


class Sampler(Protocol):
    """Draws drafts and decides what is accepted; both see the requests of each row."""

    def check(self, request: Request) -> None:
        """Raises ValueError for settings that cannot be carried out."""
        ...

    def is_plain(self, request: Request) -> bool:
        """Whether the model's most likely token is all that this request wants, from now on."""
        ...

    def propose(
        self,
        drafter: Drafter,
        requests: Sequence[Request],
        roots: Sequence[DraftRoot],
        max_nodes: int | None,
    ) -> list[DraftTree]:
        """A tree for each request. It may be pruned before it is verified."""
        ...

    def decide(
        self,
        logits: Tensor,
        batch: TreeBatch,
        trees: Sequence[DraftTree],
        requests: Sequence[Request],
        max_path: int,
    ) -> Decision:
        """Accepts a path of each tree.

        A prompt's first token is decided by the same call: its tree is a root, the prompt's last
        token, and the request has no output yet. Of any other tree the root is the request's last
        output token.

        Args:
            logits: [batch, N, vocab]; may be overwritten.
            batch: the verified batch; rows beyond `requests` are padding.
            trees: the trees of the requests.
            requests: the first rows of the batch.
            max_path: the longest path in nodes.
        """
        ...


class GreedySampler:
    """The drafter's own trees, and the model's own choice."""

    def check(self, request: Request) -> None:
        if not request.params.greedy:
            raise ValueError("this engine decodes greedily, but the request asks for sampling")

    def is_plain(self, request: Request) -> bool:
        minimum = request.params.min_tokens or 0
        return not request.forbidden_until_min_tokens or len(request.output_token_ids) >= minimum

    def propose(
        self,
        drafter: Drafter,
        requests: Sequence[Request],
        roots: Sequence[DraftRoot],
        max_nodes: int | None,
    ) -> list[DraftTree]:
        return drafter.propose(roots, max_nodes)

    def decide(
        self,
        logits: Tensor,
        batch: TreeBatch,
        trees: Sequence[DraftTree],
        requests: Sequence[Request],
        max_path: int,
    ) -> Decision:
        return decide_greedily(logits, batch, requests, max_path)


@torch.inference_mode()
def decide_greedily(
    logits: Tensor,
    batch: TreeBatch,
    requests: Sequence[Request],
    max_path: int,
) -> Decision:
    """Accepts what the model itself would have chosen; see `Sampler.decide`."""
    forbid_early_ends(logits, batch, requests)
    best = logits.max(dim=-1)
    acceptance = greedy_accept(batch, best.indices, max_path=max_path)
    return Decision(acceptance, ~best.values.isfinite())


def forbid_early_ends(logits: Tensor, batch: TreeBatch, requests: Sequence[Request]) -> None:
    """Takes end and stop tokens out of the question where `min_tokens` is not reached yet.

    Args:
        logits: [batch, N, vocab], written in place.
        batch: the trees, whose depths say how many tokens come before each choice.
        requests: the first rows of the batch.
    """
    for row, request in enumerate(requests):
        forbidden = request.forbidden_until_min_tokens
        minimum = request.params.min_tokens or 0
        count = len(request.output_token_ids)
        if not forbidden or count >= minimum:
            continue
        early = count + batch.depth[row] < minimum
        ids = torch.tensor(sorted(forbidden), device=logits.device)
        masked = logits[row][:, ids].masked_fill(early[:, None], -torch.inf)
        logits[row, :, ids] = masked
