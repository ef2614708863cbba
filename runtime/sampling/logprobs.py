"""Log probabilities of emitted tokens, and of the most likely ones in their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_treewy.sampling_params import SamplingParams

from .processors import Scores
from .rows import SamplingRows


@dataclass(frozen=True)
class Logprob:
    """Natural log of a token's probability, and its rank among all tokens, the best at 1."""

    logprob: float
    rank: int


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities of one token a row, or of P tokens a row.

    Attributes:
        chosen: float32 [rows] or [rows, P].
        rank: int64, the same shape: 1 + tokens that are more likely.
        top_ids, top: int64, float32 [..., n], the n most likely tokens in order.
    """

    chosen: Tensor
    rank: Tensor
    top_ids: Tensor
    top: Tensor

    @classmethod
    def stack(cls, levels: Sequence[TokenLogprobs]) -> TokenLogprobs:
        """Tokens of successive positions, [rows, P]."""
        return cls(
            torch.stack([level.chosen for level in levels], 1),
            torch.stack([level.rank for level in levels], 1),
            torch.stack([level.top_ids for level in levels], 1),
            torch.stack([level.top for level in levels], 1),
        )

    def to_host(
        self, token_ids: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[list[dict[int, Logprob]]]:
        """The values as each row asked for them; waits for the device, once for each tensor.

        Args:
            token_ids: emitted tokens of each row; as many positions are returned.
            params: settings of each row; rows without `logprobs` get empty lists.

        Returns:
            For each row and token, the chosen token first and then the most likely ones.
        """
        chosen, rank = self.chosen.tolist(), self.rank.tolist()
        top_ids, top = self.top_ids.tolist(), self.top.tolist()
        result: list[list[dict[int, Logprob]]] = []
        for row, (tokens, settings) in enumerate(zip(token_ids, params, strict=True)):
            asked = settings.num_logprobs
            entries: list[dict[int, Logprob]] = []
            for place, token in enumerate(tokens if asked is not None else ()):
                entry = {token: Logprob(chosen[row][place], rank[row][place])}
                best = zip(top_ids[row][place][:asked], top[row][place], strict=False)
                for number, (other, value) in enumerate(best, start=1):
                    entry.setdefault(other, Logprob(value, number))
                entries.append(entry)
            result.append(entries)
        return result


def token_logprobs(
    logits: Tensor, scores: Scores, rows: SamplingRows, token_ids: Tensor
) -> TokenLogprobs | None:
    """Log probabilities of `token_ids` int64 [rows]; None where no row asks for any.

    "processed" of a greedy row is the distribution that has the greedy choice alone.
    """
    if rows.num_logprobs is None:
        return None
    values = logits.float().log_softmax(-1)
    if rows.any_processed:
        chosen = torch.zeros_like(scores.greedy).fill_(-torch.inf)
        chosen = chosen.scatter(1, token_ids.clamp(min=0)[:, None], 0.0)
        processed = torch.where(rows.greedy[:, None], chosen, scores.random.log_softmax(-1))
        values = torch.where(rows.processed_logprobs[:, None], processed, values)
    own = values.gather(1, token_ids.clamp(min=0)[:, None])
    top = values.topk(rows.num_logprobs, dim=-1)
    return TokenLogprobs(own[:, 0], (values > own).sum(-1) + 1, top.indices, top.values)
