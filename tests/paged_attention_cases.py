"""Random cases of tree attention over the paged cache, and what it is in float64.

Used by the interpreter's tests and by the GPU's. Whatever no query may read is NaN: free blocks,
the sink, rows behind a tree, and, inside `unwritten_is_nan`, memory that a kernel did not write.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_treewy.runtime.attention_steps import PagedAttention
from trtllm_treewy.runtime.kv_cache import KvCache
from trtllm_treewy.topology import ancestor_mask

PAGE = 32


@contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """torch.empty gives NaN, and the largest integer, instead of whatever lies there."""
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


@dataclass(frozen=True)
class PagedCase:
    """Trees behind contexts of several lengths; slot b has the b-th.

    Attributes:
        cache: one layer, blocks of several sequences mixed.
        slot, context, counts: int32 [B]; counts are the real nodes of each tree.
        own: bool [B, Nq, Nq], ancestors and the node itself.
        q: [B, Nq, heads, D]; k, v: [B, Nq, kv_heads, D].
    """

    cache: KvCache
    slot: Tensor
    context: Tensor
    counts: Tensor
    own: Tensor
    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def real(self) -> Tensor:
        """bool [B, Nq], the nodes that are no padding."""
        return torch.arange(self.own.shape[1], device=self.own.device) < self.counts[:, None]

    def run(self, scale: float) -> Tensor:
        """The kernels' output [B, Nq, heads, D]."""
        index = torch.arange(self.own.shape[1], device=self.own.device)
        offsets = torch.where(self.real, self.context[:, None] + index, -1)
        step = PagedAttention(self.cache, self.slot, self.context, self.own, offsets)
        with unwritten_is_nan():
            return step.attend(0, self.q, self.k, self.v, scale)

    def expected(self, scale: float) -> Tensor:
        """The same in float64 by plain torch, before `run`; rows without a block are not seen."""
        kv_heads, groups = self.k.shape[2], self.q.shape[2] // self.k.shape[2]
        rows = torch.arange(int((self.context + self.counts).max()), device=self.q.device)
        at = self.cache.physical(self.slot, rows.expand(len(self.slot), -1))
        mask = self._mask(rows) & (at < self.cache._sink)[:, None]
        b, t = self.real.nonzero(as_tuple=True)
        pools = []
        for pool, new in ((self.cache.k, self.k), (self.cache.v, self.v)):
            old = pool[0][:, at].double()  # [kv_heads, B, S, D]
            old[:, b, self.context[b].long() + t] = new[b, t].double().transpose(0, 1)
            pools.append(old.masked_fill(~mask.any(1)[None, :, :, None], 0.0))
        keys, values = (pool[:, :, None] for pool in pools)
        grouped = self.q.double().unflatten(2, (kv_heads, groups)).permute(2, 0, 3, 1, 4)
        scores = grouped @ keys.transpose(-1, -2) * scale
        weights = scores.masked_fill(~mask[None, :, None], float("-inf")).softmax(-1)
        weights = weights.masked_fill(~mask.any(-1)[None, :, None, :, None], 0.0)
        return (weights @ values).permute(1, 3, 0, 2, 4).flatten(2, 3)

    def _mask(self, rows: Tensor) -> Tensor:
        """bool [B, Nq, S], the rows that a query attends if they exist."""
        nodes = self.own.shape[1]
        behind = rows - self.context[:, None].long()
        seen = self.own.gather(2, behind.clamp(0, nodes - 1)[:, None].expand(-1, nodes, -1))
        return (behind < 0)[:, None] | (seen & ((behind >= 0) & (behind < nodes))[:, None])


def make_case(
    batch: int,
    nodes: int,
    kv_heads: int,
    groups: int,
    dim: int,
    dtype: torch.dtype,
    device: str,
    longest: int,
    short: bool = False,
) -> PagedCase:
    """A case with contexts below `longest`.

    With `short`, the last sequence and every second one before it have blocks for half their rows
    at most.
    """
    context = torch.randint(0, longest, (batch,), dtype=torch.int32)
    counts = torch.randint(1, nodes + 1, (batch,), dtype=torch.int32)
    need = (context + counts).tolist()
    kept = [n // 2 // PAGE * PAGE if short and (batch - b) % 2 else n for b, n in enumerate(need)]
    blocks = sum(-(-n // PAGE) for n in kept) + 3
    cache = KvCache(1, blocks, PAGE, kv_heads, dim, dtype, device, batch + 1, 3000)
    for part in (8, 2, 1):  # blocks of a sequence do not lie together
        for slot, rows in enumerate(kept):
            assert cache.try_reserve(slot, rows // part), "the case's pool is too small for it"
    slot = torch.arange(batch, dtype=torch.int32, device=device)
    _fill(cache, slot, torch.tensor(kept, device=device))
    parents = [
        [-1] + [int(torch.randint(max(0, t - 5), t, ())) for t in range(1, nodes)]
        for _ in range(batch)
    ]
    counts = counts.to(device)
    own = ancestor_mask(torch.tensor(parents, dtype=torch.int32, device=device), counts)
    own &= (torch.arange(nodes, device=device) < counts[:, None])[:, :, None]
    q = torch.randn(batch, nodes, kv_heads * groups, dim, device=device).to(dtype)
    k, v = (torch.randn(batch, nodes, kv_heads, dim, device=device).to(dtype) for _ in range(2))
    return PagedCase(cache, slot, context.to(device), counts, own, q, k, v)


def _fill(cache: KvCache, slot: Tensor, kept: Tensor) -> None:
    """Random values in the first `kept` rows of each slot, NaN everywhere else."""
    rows = torch.arange(int(kept.max()), device=slot.device)
    at = cache.physical(slot, rows.expand(len(slot), -1))[rows < kept[:, None]]
    for pool in (cache.k, cache.v):
        pool.fill_(float("nan"))
        shape = (*pool.shape[:2], len(at), pool.shape[3])
        pool[:, :, at] = torch.randn(shape, device=pool.device).to(pool.dtype)
