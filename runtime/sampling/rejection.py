"""Recursive rejection: accepts drawn children of a node so that the target's law is kept.

Let q be the target's distribution after a node, p the drafter's, and c_1, c_2, ... its children,
drawn from p without replacement. Child i is accepted with probability min(1, q_i(c_i) / p_i(c_i));
where it is not, q_{i+1} = max(0, q_i - p_i) renormalised, and p_{i+1} is p_i without c_i,
renormalised. After the last child the token is drawn from what is left of q. Each step is the
acceptance rule of Leviathan et al. (ICML 2023), so the token has law q. Drafts with replacement:
Miao et al., "SpecInfer" (ASPLOS 2024); without: Jeon et al., "Recursive Speculative Decoding"
(2024), Chen et al., "Sequoia" (2024).

It holds only if no child's presence in the tree depends on which token it turned out to be:
see `draft.draft_children`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Drafted:
    """The drafts below one node of each row.

    Attributes:
        support_ids: int64 [rows, K], tokens that the drafter may draw, distinct in a row.
        support_probs: float32 [rows, K], their probabilities; all zero where nothing was drawn.
        token_ids: int64 [rows, C], the children in the order they were drawn.
        present: bool [rows, C], False beyond the children there are.
    """

    support_ids: Tensor
    support_probs: Tensor
    token_ids: Tensor
    present: Tensor


@dataclass(frozen=True)
class Verdict:
    """What became of the children.

    Attributes:
        token_ids: int64 [rows], the accepted child's token, -1 where none is.
        residual: float32 [rows, vocab], log of the distribution left, up to a constant.
    """

    token_ids: Tensor
    residual: Tensor


class _Residual:
    """q_i and p_i on the drafter's support in float64, and what q has outside of it."""

    def __init__(self, log_target: Tensor, drafted: Drafted) -> None:
        target = log_target.softmax(-1)
        self.q = target.gather(1, drafted.support_ids).double()
        outside = target.scatter(1, drafted.support_ids, 0.0)
        self.outside = outside.double().sum(-1)
        self.scale = torch.ones_like(self.outside)
        self.p = drafted.support_probs.double()
        self._normalise_p()

    def _normalise_p(self) -> None:
        total = self.p.sum(-1, keepdim=True)
        self.p = torch.where(total > 0, self.p / total, 0.0)

    def reject(self, where: Tensor, is_child: Tensor) -> None:
        """q becomes its residual and p loses the child, in the rows of `where`."""
        left = (self.q - self.p).clamp(min=0)
        mass = (left.sum(-1) + self.outside)[:, None]
        # Without a residual a rejection is rounding alone; the child just leaves.
        left = torch.where(mass > 0, left / mass, torch.where(is_child, 0.0, self.q))
        shrink = torch.where(where & (mass[:, 0] > 0), mass[:, 0], 1.0)
        self.q = torch.where(where[:, None], left, self.q)
        self.outside, self.scale = self.outside / shrink, self.scale / shrink
        self.p = torch.where(where[:, None] & is_child, 0.0, self.p)
        self._normalise_p()


def recursive_rejection(log_target: Tensor, drafted: Drafted, uniforms: Tensor) -> Verdict:
    """Accepts at most one child of each row.

    Args:
        log_target: float32 [rows, vocab], log q up to a constant.
        drafted: the children and their distribution.
        uniforms: float64 [rows, C] in [0, 1), one for each child.

    Children of probability zero under p_i (not drawn, but filled in) are passed over: the draw
    from the residual may still choose them.
    """
    state = _Residual(log_target, drafted)
    accepted = torch.full_like(drafted.token_ids[:, 0], -1)
    rejected = torch.zeros_like(drafted.present[:, 0])
    for child in range(drafted.token_ids.shape[1]):
        token = drafted.token_ids[:, child]
        is_child = (drafted.support_ids == token[:, None]) & (state.p > 0)
        tested = is_child.any(-1) & drafted.present[:, child] & (accepted < 0)
        p = torch.where(is_child, state.p, 0.0).sum(-1)
        q = torch.where(is_child, state.q, 0.0).sum(-1)
        passes = uniforms[:, child] * p < q
        accepted = torch.where(tested & passes, token, accepted)
        state.reject(tested & ~passes, is_child)
        rejected |= tested & ~passes
    left = log_target.log_softmax(-1) + state.scale.log().float()[:, None]
    left = left.scatter(1, drafted.support_ids, state.q.log().float())
    # Rows that rejected nothing keep the very numbers that plain sampling draws from.
    return Verdict(accepted, torch.where(rejected[:, None], left, log_target))
