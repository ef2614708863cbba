"""How one sequence is sampled: its settings, its seed, and what its penalties count."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from enum import Enum
from math import inf

import torch
from torch import Tensor

from trtllm_treewy.sampling_params import SamplingParams

FOREVER = 2**62


class AcceptanceRule(str, Enum):
    """How drafts are checked under random sampling; both give the target's distribution.

    MATCH draws the target's token as plain sampling does and accepts the child that has it. The
    tokens are those of plain sampling with the same seed, whatever the drafts, and so whatever
    else is in the batch.
    REJECTION accepts drawn drafts by recursive rejection, which accepts more. The tokens depend on
    the drafts, and on the batch where the batch decides how large a tree may be.
    """

    MATCH = "match"
    REJECTION = "rejection"


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError for settings that name tokens which the model does not have."""
    for name in ("logit_bias", "bad_token_ids"):
        worst = max(getattr(params, name) or (), default=0)
        if worst >= vocab_size:
            raise ValueError(
                f"SamplingParams: {name} has token id {worst}, expected ids below the vocabulary's "
                f"{vocab_size}"
            )
    bias = params.embedding_bias
    if bias is None:
        return
    if not isinstance(bias, Tensor) or bias.shape != (vocab_size,):
        raise ValueError(
            f"SamplingParams: embedding_bias must be a tensor [{vocab_size}], got "
            f"{list(getattr(bias, 'shape', ())) or type(bias).__name__}"
        )
    if not bool((bias.float() < inf).all()):
        raise ValueError("SamplingParams: embedding_bias must hold no NaN and no +inf")


class SequenceSampling:
    """Sampling settings of one sequence, made when its request is added.

    Attributes:
        params: the request's settings.
        seed: `params.seed`, or a fresh one where it has none.
        sequence: number of the sequence among those of its request (n > 1); each has random
            numbers of its own.
        acceptance: how drafts are checked; without effect where decoding is greedy.
        biases: (token id, bias, position) triples: the bias holds before that output position.

    Raises:
        ValueError: see `check_vocabulary`.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
        *,
        end_ids: Sequence[int] | frozenset[int] = (),
        sequence: int = 0,
        acceptance: AcceptanceRule = AcceptanceRule.MATCH,
    ) -> None:
        check_vocabulary(params, vocab_size)
        self.params = params
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self.sequence = sequence
        self.acceptance = acceptance
        self.vocab_size = vocab_size
        self.biases = _biases(params, end_ids, vocab_size)
        self._prompt = prompt_token_ids
        self._counts: Tensor | None = None
        self._num_counted = 0

    @property
    def penalised(self) -> bool:
        """Whether tokens of the text so far change the next one's distribution."""
        params = self.params
        return (params.repetition_penalty or 1.0) != 1.0 or bool(
            params.presence_penalty or params.frequency_penalty
        )

    def counts(self, output_token_ids: Sequence[int], device: torch.device) -> Tensor:
        """How often each token is in the text: int32 [2, vocab].

        Row 0 counts prompt and output (repetition penalty); row 1 leaves the ignored part of the
        prompt out (presence, frequency). Kept between steps, so that only new tokens are counted.
        """
        if self._counts is None or self._num_counted > len(output_token_ids):
            skipped = self.params.prompt_ignore_length or 0
            rows = [self._prompt, self._prompt[skipped:]]
            self._counts = torch.stack([self._count(row) for row in rows]).to(device)
            self._num_counted = 0
        if self._num_counted < len(output_token_ids):
            self._counts += self._count(output_token_ids[self._num_counted :]).to(device)
            self._num_counted = len(output_token_ids)
        return self._counts

    def _count(self, token_ids: Sequence[int]) -> Tensor:
        ids = torch.tensor(list(token_ids), dtype=torch.int64)
        return torch.bincount(ids, minlength=self.vocab_size).to(torch.int32)


def _biases(
    params: SamplingParams, end_ids: Sequence[int] | frozenset[int], vocab_size: int
) -> list[tuple[int, float, int]]:
    biases = [(token, bias, FOREVER) for token, bias in (params.logit_bias or {}).items()]
    biases += [(token, -inf, FOREVER) for token in params.bad_token_ids or ()]
    if params.min_tokens:
        ending = sorted({*end_ids, *params.stop_ids})
        biases += [(token, -inf, params.min_tokens) for token in ending if token < vocab_size]
    return biases
