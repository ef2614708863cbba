"""The sampling settings of a batch's rows, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from trtllm_treewy.batch import upload_all

from .counter_rng import Purpose, random_word, seed_words
from .sequence import AcceptanceRule, SequenceSampling

# A temperature below this is this; float32 has nothing smaller that is not rounded to zero.
MIN_TEMPERATURE = 2.0**-126


@dataclass(frozen=True)
class SamplingRows:
    """One row of settings for each sequence of a batch; built once a step, read on the device.

    Attributes:
        vocab_size: tokens of the vocabulary.
        sorted_prefix: how many of the best tokens top-k and top-p need in order; 0 for none.
        any_random, any_rejection: whether a row draws at all, or accepts drafts by rejection.
        plain_greedy: every row takes the model's most likely token and reports nothing.
        num_logprobs: top log probabilities to compute, the most that a row asks for; None where no
            row asks.
        any_processed: whether a row wants log probabilities of the processed distribution.
        greedy, rejection: bool [rows].
        position: int64 [rows], output tokens so far: the place of the next one.
        seed: int64 [rows, 3], see `random_word`.
        top_k: int64 [rows]; the vocabulary where all are kept.
        temperature, top_p, min_p, repetition, presence, frequency: float32 [rows].
        processed_logprobs: bool [rows].
        counts: int32 [rows, 2, vocab], see `SequenceSampling.counts`; None without penalties.
        bias_ids, bias, bias_until: int64, float32, int64 [rows, M]: tokens' biases, and the
            position at which each ends; None where no row has any.
        dense_bias: float32 [rows, vocab], None where no row has any.
    """

    vocab_size: int
    sorted_prefix: int
    any_random: bool
    any_rejection: bool
    plain_greedy: bool
    num_logprobs: int | None
    any_processed: bool
    greedy: Tensor
    rejection: Tensor
    position: Tensor
    seed: Tensor
    top_k: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    processed_logprobs: Tensor
    counts: Tensor | None
    bias_ids: Tensor | None
    bias: Tensor | None
    bias_until: Tensor | None
    dense_bias: Tensor | None

    @classmethod
    def build(
        cls,
        sequences: Sequence[SequenceSampling],
        outputs: Sequence[Sequence[int]],
        device: torch.device | str,
        *,
        pad_to: int | None = None,
    ) -> SamplingRows:
        """The rows of a batch.

        Args:
            sequences: one for each row, at least one, of one vocabulary.
            outputs: output tokens of each so far, the root of its tree included.
            device: where the tensors go; that of the logits.
            pad_to: rows of the batch; those beyond `sequences` decode greedily.

        Raises:
            ValueError: for unequal lengths, no rows, or a `pad_to` below the rows there are.
        """
        rows = len(sequences) if pad_to is None else pad_to
        if len(sequences) != len(outputs) or not sequences or rows < len(sequences):
            raise ValueError(
                "sampling rows: expected an output for each sequence, at least one, and pad_to not "
                f"below; got {len(sequences)} sequences, {len(outputs)} outputs, pad_to {pad_to}"
            )
        device, vocab_size = torch.device(device), sequences[0].vocab_size
        asked = [n for s in sequences if (n := s.params.num_logprobs) is not None]
        sparse = _sparse_biases(sequences, rows, device)
        counts = _counts(sequences, outputs, rows, device)
        dense = _dense_biases(sequences, rows, device)
        random = [s for s in sequences if not s.params.greedy]
        changed = any(tensor is not None for tensor in (sparse[0], counts, dense))
        return cls(
            vocab_size=vocab_size,
            sorted_prefix=max((_sorted_prefix(s) for s in random), default=0),
            any_random=bool(random),
            any_rejection=any(s.acceptance is AcceptanceRule.REJECTION for s in random),
            plain_greedy=not random and not asked and not changed,
            num_logprobs=min(max(asked), vocab_size) if asked else None,
            any_processed=any(s.params.logprobs_mode == "processed" for s in sequences),
            **_columns(sequences, outputs, rows, device),
            counts=counts,
            bias_ids=sparse[0],
            bias=sparse[1],
            bias_until=sparse[2],
            dense_bias=dense,
        )

    def __len__(self) -> int:
        return self.position.shape[0]

    def repeat(self, times: int) -> SamplingRows:
        """Every row `times` times in succession, for nodes that share their sequence's settings."""
        tensors: dict[str, Any] = {
            f.name: value.repeat_interleave(times, 0)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **tensors)

    def after(self, token_ids: Tensor) -> SamplingRows:
        """The rows one position later, `token_ids` int64 [rows] taken; -1 leaves counts alone."""
        counts = self.counts
        if counts is not None:
            taken = (token_ids >= 0).to(counts.dtype)[:, None, None].expand(-1, 2, 1)
            where = token_ids.clamp(min=0)[:, None, None].expand(-1, 2, 1)
            counts = counts.scatter_add(2, where, taken)
        return replace(self, position=self.position + 1, counts=counts)

    def word(self, purpose: Purpose, index: Tensor | int = 0) -> Tensor:
        """Random bits of each row at its position, int64 [rows]."""
        return random_word(self.seed, self.position, purpose, index)


_GREEDY_INTEGERS = [1, 0, 0, 0, 0, 0, 0, 0]
_NEUTRAL_NUMBERS = [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]


def _columns(
    sequences: Sequence[SequenceSampling],
    outputs: Sequence[Sequence[int]],
    rows: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """The settings that every row has, by name; in two tensors, for one upload."""
    padding = rows - len(sequences)
    integers = [_integers(s, len(output)) for s, output in zip(sequences, outputs, strict=True)]
    numbers = [_numbers(s) for s in sequences]
    i, f = upload_all(
        [
            torch.tensor(integers + [_GREEDY_INTEGERS] * padding),
            torch.tensor(numbers + [_NEUTRAL_NUMBERS] * padding),
        ],
        device,
    )
    return {
        "greedy": i[:, 0] != 0,
        "rejection": i[:, 1] != 0,
        "processed_logprobs": i[:, 2] != 0,
        "position": i[:, 3],
        "top_k": torch.where(i[:, 4] > 0, i[:, 4], sequences[0].vocab_size),
        "seed": i[:, 5:8],
        "temperature": f[:, 0],
        "top_p": f[:, 1],
        "min_p": f[:, 2],
        "repetition": f[:, 3],
        "presence": f[:, 4],
        "frequency": f[:, 5],
    }


def _integers(sequence: SequenceSampling, position: int) -> list[int]:
    params = sequence.params
    rejection = sequence.acceptance is AcceptanceRule.REJECTION and not params.greedy
    return [
        int(params.greedy),
        int(rejection),
        int(params.logprobs_mode == "processed"),
        position,
        # Here, as what a client asks for may be beyond int64.
        min(params.top_k or 0, sequence.vocab_size),
        *seed_words(sequence.seed, sequence.sequence),
    ]


def _numbers(sequence: SequenceSampling) -> list[float]:
    params = sequence.params
    temperature = 1.0 if params.temperature is None else params.temperature
    penalties = [params.presence_penalty or 0.0, params.frequency_penalty or 0.0]
    repetition = params.repetition_penalty or 1.0
    if params.greedy:
        return [1.0, 1.0, 0.0, repetition, *penalties]
    top_p = 1.0 if params.top_p is None else params.top_p
    return [
        max(temperature, MIN_TEMPERATURE),
        # A top_p too small for float32 still keeps the most likely token.
        max(top_p, MIN_TEMPERATURE),
        params.min_p or 0.0,
        repetition,
        *penalties,
    ]


def _sorted_prefix(sequence: SequenceSampling) -> int:
    params = sequence.params
    if params.top_k:
        return min(params.top_k, sequence.vocab_size)
    return sequence.vocab_size if (1.0 if params.top_p is None else params.top_p) < 1 else 0


def _counts(
    sequences: Sequence[SequenceSampling],
    outputs: Sequence[Sequence[int]],
    rows: int,
    device: torch.device,
) -> Tensor | None:
    if not any(s.penalised for s in sequences):
        return None
    shape = (rows, 2, sequences[0].vocab_size)
    counts = torch.zeros(shape, dtype=torch.int32, device=device)
    for row, (sequence, output) in enumerate(zip(sequences, outputs, strict=True)):
        if sequence.penalised:
            counts[row] = sequence.counts(output, device)
    return counts


def _sparse_biases(
    sequences: Sequence[SequenceSampling], rows: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor] | tuple[None, None, None]:
    width = max(len(s.biases) for s in sequences)
    if not width:
        return None, None, None
    # Padding adds zero to token 0, which is nothing.
    padded = [[*s.biases, *[(0, 0.0, 0)] * (width - len(s.biases))] for s in sequences]
    padded += [[(0, 0.0, 0)] * width] * (rows - len(sequences))
    columns = [[[entry[part] for entry in row] for row in padded] for part in range(3)]
    ids, bias, until = (torch.tensor(column) for column in columns)
    ids, bias, until = upload_all([ids, bias.float(), until], device)
    return ids, bias, until


def _dense_biases(
    sequences: Sequence[SequenceSampling], rows: int, device: torch.device
) -> Tensor | None:
    given = {r: s.params.embedding_bias for r, s in enumerate(sequences)}
    given = {row: bias for row, bias in given.items() if bias is not None}
    if not given:
        return None
    dense = torch.zeros(rows, sequences[0].vocab_size, device=device)
    for row, bias in given.items():
        dense[row] = bias
    return dense
