"""A step's decision: from logits, trees and requests to accepted paths.

`Sampler` is what the engine asks for trees and for decisions; see `tree_sampler`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from trtllm_treewy.batch import TreeBatch
from trtllm_treewy.draft_tree import DraftTree

from .acceptance import Acceptance
from .drafter import Drafter, DraftRoot
from .request import Request
from .sampling import FAULT_REASONS, Fault

NOT_FINITE = FAULT_REASONS[Fault.NOT_FINITE]


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
