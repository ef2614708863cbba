"""Random cases of packed prompts over the paged cache, and what their attention is in float64.

Used by the interpreter's tests and by the GPU's. Free blocks, the sink and rows behind a prompt
are NaN: nobody may read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from paged_attention_cases import _fill, unwritten_is_nan
from torch import Tensor

from trtllm_treewy.batch import PrefillBatch
from trtllm_treewy.runtime.attention_steps import PagedPrefill
from trtllm_treewy.runtime.kv_cache import KvCache


@dataclass(frozen=True)
class PromptCase:
    """Chunks of several prompts, packed; slot -1 is a row that is skipped.

    Attributes:
        cache: one layer, blocks of several sequences mixed.
        batch: the chunks, each behind its context.
        q: [T, heads, D]; k, v: [T, kv_heads, D].
    """

    cache: KvCache
    batch: PrefillBatch
    q: Tensor
    k: Tensor
    v: Tensor

    def run(self, scale: float) -> Tensor:
        """The kernels' output [T, heads, D]."""
        step = self.cache.prefill(self.batch)
        assert isinstance(step, PagedPrefill)
        with unwritten_is_nan():
            return step.attend(0, self.q, self.k, self.v, scale)

    def rows(self, row: int) -> Tensor:
        """Physical rows that the last token of a sequence attends."""
        batch = self.batch
        count = batch.context_lens_host[row] + batch.seq_lens_host[row]
        index = torch.arange(count, device=self.q.device)[None]
        return self.cache.physical(torch.full_like(index[:, 0], batch.slots[row]), index)[0]

    def expected(self, scale: float) -> Tensor:
        """The same in float64 by plain torch, from what the cache holds after `run`.

        A query that attends a row with a value that is not finite is NaN.
        """
        groups = self.q.shape[1] // self.k.shape[1]
        out = torch.zeros(self.q.shape, dtype=torch.float64, device=self.q.device)
        stops = torch.tensor(self.batch.seq_lens_host).cumsum(0).tolist()
        for row, stop in enumerate(stops):
            length, context = self.batch.seq_lens_host[row], self.batch.context_lens_host[row]
            if self.batch.slots[row] < 0 or not length:
                continue
            span = slice(stop - length, stop)
            at = self.rows(row)
            keys, values = (pool[0][:, at].double() for pool in (self.cache.k, self.cache.v))
            bad = ~(keys.isfinite().all(-1) & values.isfinite().all(-1))  # [kv_heads, S]
            keys, values = (x.masked_fill(bad[..., None], 0.0) for x in (keys, values))
            index = torch.arange(context + length, device=at.device)
            mask = index <= index[context:, None]
            q = self.q[span].double().transpose(0, 1)  # [heads, n, D]
            scores = q @ keys.repeat_interleave(groups, 0).transpose(1, 2) * scale
            weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            mixed = weights @ values.repeat_interleave(groups, 0)
            faulty = (mask & bad[:, None]).any(-1).repeat_interleave(groups, 0)
            out[span] = mixed.masked_fill(faulty[..., None], float("nan")).transpose(0, 1)
        return out


def make_prompts(
    lengths: Sequence[int],
    contexts: Sequence[int],
    kv_heads: int,
    groups: int,
    dim: int,
    dtype: torch.dtype,
    device: str,
    page: int = 32,
    skipped: int | None = None,
) -> PromptCase:
    """Prompts of `lengths` tokens behind `contexts` rows; number `skipped` has slot -1."""
    need = [c + n for c, n in zip(contexts, lengths, strict=True)]
    blocks = sum(-(-n // page) for n in need) + 3
    slots = torch.randperm(len(need)).tolist()
    cache = KvCache(
        1, blocks, page, kv_heads, dim, dtype, device, len(need), max(need) + page
    )  # fmt: skip
    for part in (8, 2, 1):  # blocks of a sequence do not lie together
        for slot, rows in zip(slots, need, strict=True):
            assert cache.try_reserve(slot, rows // part), "the case's pool is too small for it"
    _fill(
        cache,
        torch.tensor(slots, dtype=torch.int32, device=device),
        torch.tensor(contexts, device=device),
    )
    if skipped is not None:
        slots[skipped] = -1
    total = sum(lengths)
    batch = PrefillBatch.pack([0] * total, lengths, slots, contexts, torch.device(device))
    # As the model's projections leave them: rows of something wider.
    q = torch.randn(total, kv_heads * groups, 2 * dim, device=device).to(dtype)[..., :dim]
    k, v = (torch.randn(total, kv_heads, dim, device=device).to(dtype) for _ in range(2))
    return PromptCase(cache, batch, q, k, v)
