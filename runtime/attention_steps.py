"""Attention of a step over the rows of a `KvCache`: trees and prompts, by kernels and by torch.

What a query may not attend never reaches it, not even as 0 * NaN: scores are selected away and
rows with non-finite values are cleared before the products. A query that does attend a row with a
non-finite value gets NaN, so that a fault stays visible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from trtllm_treewy.batch import PrefillBatch
from trtllm_treewy.model import PackedHeads

if TYPE_CHECKING:
    from trtllm_treewy.triton_ops.prefill_attention import Tiles

    from .kv_cache import KvCache


class TreeAttention:
    """Attention step of `KvCache.step`: metadata made once, used by every layer."""

    def __init__(self, cache: KvCache, write: Tensor, read: Tensor, allowed: Tensor) -> None:
        self._cache = cache
        rows = cache.k.shape[2]
        head = torch.arange(cache.num_kv_heads, device=read.device)[:, None] * rows
        # Row indices into a layer's pool seen as [kv_heads * rows, head_dim].
        self._write = (head + write.reshape(1, -1)).flatten()
        self._read = (head + read.reshape(1, -1)).flatten()
        self._allowed = allowed
        self._attends = allowed.any(-1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Writes this layer's rows and attends.

        Args:
            layer: attention layer, counted from 0.
            q: [B, Nq, heads, D].
            k, v: [B, Nq, kv_heads, D].
            scale: factor of the scores.

        Returns:
            [B, Nq, heads, D] in `q.dtype`: softmax(scale * q k^T) v over the allowed rows, with
            the softmax and both products in float32 (float64 for float64 inputs).
        """
        batch, queries, heads, dim = q.shape
        cache = self._cache
        groups = heads // cache.num_kv_heads
        dtype = torch.promote_types(q.dtype, torch.float32)
        keys = self._exchange(cache.k[layer], k, batch).to(dtype)
        values, bad = _clear_non_finite(self._exchange(cache.v[layer], v, batch).to(dtype))

        # [kv_heads, B, groups * Nq, D]: the query heads of one key head share its rows.
        grouped = q.to(dtype).unflatten(2, (-1, groups)).permute(2, 0, 3, 1, 4)
        grouped = grouped.reshape(-1, batch, groups * queries, dim) * scale
        scores = (grouped @ keys.transpose(-1, -2)).unflatten(2, (groups, queries))
        scores.masked_fill_(~self._allowed[None, :, None], float("-inf"))
        out = (scores.softmax(-1).flatten(2, 3) @ values).unflatten(2, (groups, queries))

        faulty = (self._allowed & bad[:, :, None]).any(-1)  # [kv_heads, B, Nq]
        out = out.masked_fill(faulty[:, :, None, :, None], float("nan"))
        out = out.masked_fill(~self._attends[None, :, None, :, None], 0.0)
        return out.permute(1, 3, 0, 2, 4).reshape(batch, queries, heads, dim).to(q.dtype)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Writes this layer's rows, and attends nothing."""
        self._put(self._cache.k[layer], k)
        self._put(self._cache.v[layer], v)

    def _exchange(self, pool: Tensor, new: Tensor, batch: int) -> Tensor:
        """Writes new rows into one layer's pool, then gathers those to read [kv_heads, B, S, D]."""
        heads, _, dim = pool.shape
        self._put(pool, new)
        return pool.view(-1, dim).index_select(0, self._read).view(heads, batch, -1, dim)

    def _put(self, pool: Tensor, new: Tensor) -> None:
        dim = pool.shape[2]
        rows = new.permute(2, 0, 1, 3).reshape(-1, dim)
        pool.view(-1, dim)[self._write] = rows.to(pool.dtype)


class PagedAttention:
    """Attention step that reads the pages in place, each sequence's own rows alone."""

    def __init__(
        self,
        cache: KvCache,
        slot: Tensor,
        context_lens: Tensor,
        own: Tensor,
        write_offsets: Tensor | None = None,
        target: Tensor | None = None,
    ) -> None:
        """The rows to write are in `write_offsets`, as for `KvCache.step`, or physical ones."""
        self._cache, self._table = cache, cache.block_table
        self._slot, self._context = slot.int(), context_lens.int()
        # Trees of one topology share a mask, which is not repeated for them.
        self._own = own if own.stride()[1:] == (own.shape[2], 1) else own.contiguous()
        if target is None:
            assert write_offsets is not None
            target = cache.physical(slot, write_offsets)
        self._target = target

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """As `TreeAttention.attend`, but products of 16-bit rows are 16-bit ones, summed wide."""
        from trtllm_treewy.triton_ops import attention

        cache = self._cache
        self.store(layer, k, v)
        return attention.tree_attention(
            q,
            cache.k[layer],
            cache.v[layer],
            self._table,
            self._slot,
            self._context,
            self._own,
            scale,
            page=cache.block_size,
            num_blocks=cache.num_blocks,
            max_rows=cache.max_seq_len,
        )

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Writes this layer's rows, and attends nothing."""
        from trtllm_treewy.triton_ops import attention

        attention.append_rows(k, v, self._cache.k[layer], self._cache.v[layer], self._target)

    def store_packed(self, layer: int, heads: PackedHeads) -> None:
        """As `PackedAttentionStep.store_packed`."""
        _place(self._cache, layer, heads, self._target)

    def attend_packed(self, layer: int, heads: PackedHeads, scale: float) -> Tensor:
        """As `PackedAttentionStep.attend_packed`; `heads.packed` is [B, Nq, ...]."""
        from trtllm_treewy.triton_ops import attention

        cache, packed = self._cache, heads.packed
        k_pool, v_pool = cache.k[layer], cache.v[layer]
        q = _place(cache, layer, heads, self._target)
        gates = packed[..., : 2 * heads.heads * cache.head_dim]
        return attention.tree_attention(
            q.view(*packed.shape[:2], heads.heads, cache.head_dim),
            k_pool,
            v_pool,
            self._table,
            self._slot,
            self._context,
            self._own,
            scale,
            page=cache.block_size,
            num_blocks=cache.num_blocks,
            max_rows=cache.max_seq_len,
            gate=gates.unflatten(-1, (heads.heads, 2, -1))[..., 1, :],
        )


@dataclass(frozen=True)
class PromptPlan:
    """How the attention of packed prompts is launched; all layers share it.

    Attributes:
        tiles: sizes of the launch.
        listed: int32 [tiles, 4], see `prefill_attention.list_tiles`.
        target: int64 [T], physical rows of the new tokens.
    """

    tiles: Tiles
    listed: Tensor
    target: Tensor


class PagedPrefill:
    """Attention step of `KvCache.prefill` that reads the pages in place, for all sequences at once.

    `plan` gives the plan for so many query heads a key head; it is made once.
    """

    def __init__(self, cache: KvCache, plan: Callable[[int], PromptPlan]) -> None:
        self._cache, self._table = cache, cache.block_table
        self._make_plan = plan
        self._planned: tuple[int, PromptPlan] | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """As `PrefillAttention.attend`; products of 16-bit rows are 16-bit ones, summed wide."""
        from trtllm_treewy.triton_ops import attention, prefill_attention

        cache = self._cache
        keys, values = cache.k[layer], cache.v[layer]
        plan = self._plan_of(q.shape[1])
        attention.append_rows(k[None], v[None], keys, values, plan.target)
        return prefill_attention.prefill_attention(
            q, keys, values, self._table, plan.listed, scale,
            page=cache.block_size, tiles=plan.tiles,
        )  # fmt: skip

    def attend_packed(self, layer: int, heads: PackedHeads, scale: float) -> Tensor:
        """As `PackedAttentionStep.attend_packed`; `heads.packed` is [T, ...]."""
        from trtllm_treewy.triton_ops import prefill_attention

        cache, packed = self._cache, heads.packed
        keys, values = cache.k[layer], cache.v[layer]
        plan = self._plan_of(heads.heads)
        q = _place(cache, layer, heads, plan.target)
        out = prefill_attention.prefill_attention(
            q, keys, values, self._table, plan.listed, scale,
            page=cache.block_size, tiles=plan.tiles,
        )  # fmt: skip
        gates = packed[:, : 2 * heads.heads * cache.head_dim].unflatten(-1, (heads.heads, 2, -1))
        return out.mul_(torch.sigmoid(gates[:, :, 1]))

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Writes this layer's rows, and attends nothing."""
        from trtllm_treewy.triton_ops import attention

        cache = self._cache
        target = self._plan_of(cache.num_kv_heads).target
        attention.append_rows(k[None], v[None], cache.k[layer], cache.v[layer], target)

    def store_packed(self, layer: int, heads: PackedHeads) -> None:
        """As `PackedAttentionStep.store_packed`; `heads.packed` is [T, ...]."""
        _place(self._cache, layer, heads, self._plan_of(heads.heads).target)

    def _plan_of(self, heads: int) -> PromptPlan:
        groups = heads // self._cache.num_kv_heads
        if self._planned is None or self._planned[0] != groups:
            self._planned = groups, self._make_plan(groups)
        return self._planned[1]


class PrefillAttention:
    """Attention step of `KvCache.prefill`: one causal call for each sequence."""

    def __init__(self, cache: KvCache, batch: PrefillBatch) -> None:
        self._cache = cache
        self._spans: list[tuple[int, int, int, Tensor]] = []  # start, length, context, rows
        start = 0
        for slot, context, length in zip(
            batch.slots, batch.context_lens_host, batch.seq_lens_host, strict=True
        ):
            if slot != -1 and length > 0:
                rows = torch.arange(context + length, device=cache.k.device)[None]
                physical = cache.physical(torch.full_like(rows[:, 0], slot), rows)[0]
                self._spans.append((start, length, context, physical))
            start += length

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Appends this layer's rows and attends causally.

        Args:
            layer: attention layer, counted from 0.
            q: [T, heads, D].
            k, v: [T, kv_heads, D].
            scale: factor of the scores.

        Returns:
            [T, heads, D] in `q.dtype`; zero for the tokens of a row with slot -1.
        """
        out = torch.zeros_like(q)
        for start, length, context, rows in self._spans:
            span = slice(start, start + length)
            keys, bad_k = self._append(self._cache.k[layer], k[span], rows)
            values, bad_v = self._append(self._cache.v[layer], v[span], rows)
            mixed = _causal(q[span], keys.to(q.dtype), values.to(q.dtype), context, scale)
            # A query sees every earlier row: after the first faulty row all are faulty.
            faulty = (bad_k | bad_v).int().cummax(1).values[:, context:].bool()
            faulty = faulty.T.repeat_interleave(q.shape[1] // k.shape[1], 1)
            out[span] = mixed.masked_fill(faulty[:, :, None], float("nan"))
        return out

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Appends this layer's rows, and attends nothing."""
        for start, length, _, rows in self._spans:
            for pool, new in ((self._cache.k[layer], k), (self._cache.v[layer], v)):
                _put(pool, new[start : start + length], rows)

    def _append(self, pool: Tensor, new: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Writes one sequence's new rows; its finite rows [kv_heads, S, D] and the others' mask."""
        _put(pool, new, rows)
        return _clear_non_finite(pool[:, rows])


def _put(pool: Tensor, new: Tensor, rows: Tensor) -> None:
    """New keys or values [n, kv_heads, D] into the last of a sequence's `rows`."""
    pool[:, rows[-new.shape[0] :]] = new.transpose(0, 1).to(pool.dtype)


def _place(cache: KvCache, layer: int, heads: PackedHeads, target: Tensor) -> Tensor:
    """Keys and values to their physical rows `target`; queries [T, heads, D]."""
    from trtllm_treewy.triton_ops.heads import place_heads

    return place_heads(
        heads.packed.flatten(0, -2),
        heads.q_norm,
        heads.k_norm,
        heads.frequencies,
        heads.positions.flatten(),
        target.flatten(),
        cache.k[layer],
        cache.v[layer],
        heads.heads,
    )


def _causal(q: Tensor, keys: Tensor, values: Tensor, context: int, scale: float) -> Tensor:
    """Attention of the last `q.shape[0]` positions [n, heads, D] over rows [kv_heads, S, D]."""
    length, heads, dim = q.shape
    kv_heads, rows, _ = keys.shape
    groups = heads // kv_heads
    mask = None
    if context:
        index = torch.arange(rows, device=q.device)
        mask = index <= index[context:, None]
    out = F.scaled_dot_product_attention(
        q.view(length, kv_heads, groups, dim).permute(1, 2, 0, 3),
        keys[:, None].expand(-1, groups, -1, -1),
        values[:, None].expand(-1, groups, -1, -1),
        attn_mask=mask,
        is_causal=context == 0,
        scale=scale,
    )
    return out.permute(2, 0, 1, 3).reshape(length, heads, dim)


def _clear_non_finite(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Zero, in place, the rows of [.., D] that hold a NaN or an Inf; also gives their mask [..]."""
    # Both extremes carry a NaN; two reductions read less than isfinite over every element.
    bad = ~(rows.amax(-1).isfinite() & rows.amin(-1).isfinite())
    return rows.masked_fill_(bad[..., None], 0.0), bad
