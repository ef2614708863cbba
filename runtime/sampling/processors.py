"""From the model's logits to the distribution that is sampled: penalties, biases, filters.

Every function works on rows [R, vocab] in float32; nothing of one row reaches another.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from .rows import SamplingRows


class Fault(IntEnum):
    """Why a row has no token."""

    NONE = 0
    NOT_FINITE = 1
    NOTHING_ALLOWED = 2
    SETTINGS = 3


FAULT_REASONS = {
    Fault.NOT_FINITE: (
        "the model's logits are not finite; its weights, or its activations in this type, overflow"
    ),
    Fault.NOTHING_ALLOWED: (
        "no token is left to choose: logit_bias, embedding_bias, bad_token_ids and min_tokens "
        "forbid all that the model allows"
    ),
    Fault.SETTINGS: (
        "the request's penalties or biases take the logits beyond what float32 holds; use less "
        "extreme ones"
    ),
}


@dataclass(frozen=True)
class Scores:
    """What a row is sampled from.

    Attributes:
        greedy: float32 [rows, vocab], logits with penalties and biases; its argmax is the greedy
            choice.
        random: float32 [rows, vocab], the log of the distribution up to a constant, -inf where
            filtered; `greedy` itself where no row is random.
        fault: int8 [rows], a `Fault`.
    """

    greedy: Tensor
    random: Tensor
    fault: Tensor


def score(logits: Tensor, rows: SamplingRows) -> Scores:
    """Processes `logits` [rows, vocab], any float type; they stay as they are."""
    adjusted = adjust(logits, rows)
    fault = faults(logits, adjusted)
    random = filtered(tempered(adjusted, rows), rows) if rows.any_random else adjusted
    return Scores(adjusted, random, fault)


def adjust(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Logits with penalties, biases and forbidden tokens, float32 [rows, vocab]."""
    x = logits.float()
    if rows.counts is not None:
        in_text, counted = rows.counts[:, 0] > 0, rows.counts[:, 1]
        repetition = rows.repetition[:, None]
        x = torch.where(in_text, torch.where(x > 0, x / repetition, x * repetition), x)
        x = x - rows.presence[:, None] * (counted > 0) - rows.frequency[:, None] * counted
    if rows.dense_bias is not None:
        x = x + rows.dense_bias
    if rows.bias_ids is not None and rows.bias is not None and rows.bias_until is not None:
        holds = rows.position[:, None] < rows.bias_until
        x = x.scatter_add(1, rows.bias_ids, torch.where(holds, rows.bias, 0.0))
    return x


def faults(logits: Tensor, adjusted: Tensor) -> Tensor:
    """int8 [rows]: rows with NaN or +inf, or nothing but -inf, and why."""
    # NaN wins a maximum, so one reduction sees all three.
    best, left = logits.amax(-1), adjusted.amax(-1)
    fault = torch.where(left == -torch.inf, int(Fault.NOTHING_ALLOWED), int(Fault.NONE))
    # The model's own logits are sound in these: it is the settings that overflow.
    fault = torch.where(left.isnan() | (left == torch.inf), int(Fault.SETTINGS), fault)
    return torch.where(best.isfinite(), fault, int(Fault.NOT_FINITE)).to(torch.int8)


def tempered(adjusted: Tensor, rows: SamplingRows) -> Tensor:
    """`(logits - max) / temperature`: the best token at 0, so that no temperature overflows."""
    best = adjusted.amax(-1, keepdim=True)
    return (adjusted - best) / rows.temperature[:, None]


def filtered(x: Tensor, rows: SamplingRows) -> Tensor:
    """`x` [rows, vocab] with -inf where top-k, top-p or min-p exclude a token.

    Filters act through a threshold on the value, so equal tokens stay or go together, and what is
    kept does not depend on how a sort orders them. The best token is always kept.
    """
    if rows.sorted_prefix:
        best = _largest(x, rows.sorted_prefix)
        lowest = best.gather(1, (rows.top_k.clamp(max=rows.sorted_prefix) - 1)[:, None])
        unlimited = (rows.top_k >= rows.vocab_size)[:, None]
        x = torch.where((x >= lowest) | unlimited, x, -torch.inf)
        x = torch.where(x >= _nucleus(x, best, rows), x, -torch.inf)
    # log(0) is -inf: no threshold.
    return torch.where(x >= rows.min_p.log()[:, None], x, -torch.inf)


def _largest(x: Tensor, count: int) -> Tensor:
    """The largest values of each row, in descending order."""
    if count < x.shape[1]:
        return x.topk(count, dim=-1).values
    return x.sort(dim=-1, descending=True).values


def _nucleus(x: Tensor, best: Tensor, rows: SamplingRows) -> Tensor:
    """The smallest value that top-p keeps, [rows, 1]; `best` [rows, n] holds x in order."""
    mass = (best.double() - x.double().logsumexp(-1, keepdim=True)).exp()
    before = mass.cumsum(-1) - mass
    last = (before < rows.top_p[:, None]).sum(-1, keepdim=True) - 1
    lowest = best.gather(1, last.clamp(min=0))
    # A row whose top_k reaches past `best` has no top_p (see `sorted_prefix`), nor has top_p 1.
    return torch.where((rows.top_p < 1)[:, None], lowest, -torch.inf)
