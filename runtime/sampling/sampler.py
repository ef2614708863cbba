"""The next token of each row: greedy, or drawn with the row's own random numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .counter_rng import Purpose, gumbel
from .logprobs import TokenLogprobs, token_logprobs
from .processors import Fault, Scores, score
from .rows import SamplingRows


@dataclass(frozen=True)
class NextTokens:
    """One token a row.

    Attributes:
        token_ids: int64 [rows], -1 where there is a fault.
        fault: int8 [rows], a `Fault`.
        logprobs: of the tokens; None where no row asks for any.
    """

    token_ids: Tensor
    fault: Tensor
    logprobs: TokenLogprobs | None


@torch.inference_mode()
def sample(logits: Tensor, rows: SamplingRows) -> NextTokens:
    """Samples after `logits` [rows, vocab], any float type.

    Random rows take `argmax(log p + G)` with Gumbel noise G of (seed, position): a draw from p that
    small errors in p change with small probability only, however large the vocabulary is.

    Raises:
        ValueError: shapes or devices that do not fit.
    """
    check_logits(logits, (len(rows), rows.vocab_size), rows)
    scores = score(logits, rows)
    token_ids = torch.where(scores.fault == Fault.NONE, draw(scores.random, scores, rows), -1)
    return NextTokens(token_ids, scores.fault, token_logprobs(logits, scores, rows, token_ids))


def draw(random: Tensor, scores: Scores, rows: SamplingRows) -> Tensor:
    """Greedy choices, and draws from exp(`random`) [rows, vocab], int64 [rows]."""
    if not rows.any_random:
        return scores.greedy.max(-1).indices
    tokens = torch.arange(rows.vocab_size, device=random.device)
    noisy = random + gumbel(rows.word(Purpose.TARGET), tokens)
    return torch.where(rows.greedy[:, None], scores.greedy, noisy).max(-1).indices


def check_logits(logits: Tensor, shape: tuple[int, ...], rows: SamplingRows) -> None:
    """Raises ValueError unless `logits` has this shape, a float type, and lies with `rows`."""
    if tuple(logits.shape) != shape or not logits.is_floating_point():
        raise ValueError(
            f"sampling: logits must be a float tensor {list(shape)}, got {logits.dtype} "
            f"{list(logits.shape)}"
        )
    if logits.device != rows.position.device:
        raise ValueError(
            f"sampling: logits are on {logits.device}, the sampling rows on {rows.position.device}"
        )
