"""What the ranks of a tensor parallel model exchange: sums of partial results, parts of logits.

A rank's model has whole heads, a slice of every feed-forward block and a range of the vocabulary.
Each mixer and each feed-forward block yields a partial sum, which is summed over ranks once; the
embedding is summed, and the logits are gathered. Everything else is the same on all ranks. The
model calls this protocol, and does not know what carries it out.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn


class Collectives(Protocol):
    """One rank's end of a group. Every rank calls the same methods in the same order.

    Nothing here waits for the device on the host, so a step can be captured in a CUDA graph.

    Attributes:
        rank: this one.
        ranks: how many there are.
    """

    rank: int
    ranks: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, bit for bit the same on each; `x` may be overwritten."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' `x` [..., n], one after the other along the last axis: [..., ranks * n]."""
        ...


class SingleRank:
    """The group of a model that is not divided: nothing is exchanged."""

    rank, ranks = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x


SINGLE_RANK = SingleRank()


def embed(embedding: nn.Embedding, token_ids: Tensor, collectives: Collectives) -> Tensor:
    """Embeddings [..., hidden] of `token_ids` [...], whichever rank has their rows.

    A rank has the rows `[rank * n, (rank + 1) * n)` of the whole table in its own of n rows. The
    sum over ranks is exact: all terms but one are zero.
    """
    if collectives.ranks == 1:
        return embedding(token_ids)
    size = embedding.num_embeddings
    local = token_ids - collectives.rank * size
    own = (local >= 0) & (local < size)
    rows = embedding(local.clamp(0, size - 1))
    return collectives.all_reduce(torch.where(own[..., None], rows, 0.0))
