"""Paged key/value cache of the attention layers, with provisional rows for draft trees.

A slot's sequence is a list of rows; row r lives in block `block_table[slot, r // block_size]`.
The pools are `[layers, kv_heads, (num_blocks + 1) * block_size, head_dim]`: heads before rows, so
that gathered rows go into the products without another copy. The extra last block is a sink:
writes that must not happen (padding) go there, and rows that do not exist are read from there
and masked, which keeps every step free of host synchronisation.

The host keeps the block tables; changed rows go to the device together, when it is next asked for
them, and in one copy that it does not wait for.

What a query may not attend never reaches it, not even as 0 * NaN: scores are selected away and
rows with non-finite values are cleared before the products. A query that does attend a row with a
non-finite value gets NaN, so that a fault stays visible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from trtllm_treewy import triton_ops
from trtllm_treewy.batch import PrefillBatch, TreeBatch, upload_all
from trtllm_treewy.model import PackedHeads, StoringStep
from trtllm_treewy.topology import valid_nodes

if TYPE_CHECKING:
    from trtllm_treewy.triton_ops.prefill_attention import Tiles


class KvCache:
    """Blocks and block tables of `num_slots` sequences. How long each is, its owner knows.

    Args:
        num_layers: attention layers.
        num_blocks: blocks shared by all sequences.
        block_size: rows (tokens) a block.
        num_kv_heads, head_dim: shape of a key or value row.
        dtype: type of the stored keys and values.
        device: where the pools live.
        num_slots: sequences that can be held.
        max_seq_len: most rows of one sequence, provisional ones included.

    Attributes:
        k, v: the pools, `[layers, kv_heads, rows, head_dim]`.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        num_slots: int,
        max_seq_len: int,
    ) -> None:
        sizes = {
            "num_layers": num_layers,
            "num_blocks": num_blocks,
            "block_size": block_size,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "num_slots": num_slots,
            "max_seq_len": max_seq_len,
        }
        for name, value in sizes.items():
            least = 0 if name == "num_layers" else 1  # a model may have no attention at all
            if value < least:
                raise ValueError(f"KV cache: {name} must be >= {least}, got {value}")
        self.num_layers, self.num_blocks, self.block_size = num_layers, num_blocks, block_size
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.num_slots, self.max_seq_len = num_slots, max_seq_len
        shape = (num_layers, num_kv_heads, (num_blocks + 1) * block_size, head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        width = -(-max_seq_len // block_size)
        self._table = torch.full((num_slots, width), num_blocks, dtype=torch.int64)
        self._table_device = self._table.to(device, copy=True)
        # Rows of the table that the device has not got yet, and blocks that it has not cleared.
        self._stale: set[int] = set()
        self._fresh: list[int] = []
        self._blocks: list[list[int]] = [[] for _ in range(num_slots)]
        self._free = list(range(num_blocks - 1, -1, -1))
        # Holders of each block: sequences, and the prefix cache.
        self._refs = [0] * num_blocks
        self._held: set[int] = set()

    @property
    def block_table(self) -> Tensor:
        """int64 `[num_slots, blocks a sequence]` on the device, the sink where unused."""
        self.flush()
        return self._table_device

    def flush(self) -> None:
        """Brings the device's block table up to date, and clears blocks that were just taken."""
        if not (self._stale or self._fresh):
            return
        rows = torch.tensor(sorted(self._stale), dtype=torch.int64)
        parts = [rows, self._table[rows], torch.tensor(self._fresh, dtype=torch.int64)]
        index, table, fresh = upload_all(parts, self.k.device)
        if self._stale:
            self._table_device[index] = table
            self._stale.clear()
        if self._fresh:
            self._fresh = []
            for pool in (self.k, self.v):
                self._by_block(pool).index_fill_(2, fresh, 0)

    @property
    def free_blocks(self) -> int:
        """Blocks that neither a sequence nor the prefix cache holds."""
        return len(self._free)

    def blocks(self, slot: int) -> tuple[int, ...]:
        """Blocks of `slot` in the order of its rows."""
        return tuple(self._blocks[self._check_slot(slot)])

    def refs(self, block: int) -> int:
        """Sequences that hold `block`, and one more where the prefix cache does."""
        return self._refs[block]

    @property
    def bytes(self) -> int:
        """Device memory of the pools."""
        return 2 * self.k.numel() * self.k.element_size()

    def reserved(self, slot: int) -> int:
        """Rows that `slot` has blocks for."""
        self._check_slot(slot)
        return min(len(self._blocks[slot]) * self.block_size, self.max_seq_len)

    def try_reserve(self, slot: int, num_tokens: int) -> bool:
        """Makes rows `0 .. num_tokens - 1` of `slot` exist; new blocks are zero.

        Returns:
            False, with nothing changed, when there are too few free blocks.

        Raises:
            ValueError: for a slot out of range or more rows than `max_seq_len`.
        """
        self._check_slot(slot)
        if num_tokens > self.max_seq_len:
            raise ValueError(
                f"KV cache: slot {slot} needs {num_tokens} rows, max_seq_len is "
                f"{self.max_seq_len}; shorten the prompt, lower max_tokens or the draft tree's "
                "nodes, or raise max_seq_len"
            )
        held = len(self._blocks[slot])
        more = -(-num_tokens // self.block_size) - held
        if more <= 0:
            return True
        if more > len(self._free):
            return False
        # Given to the slot first and then taken from the free ones: whatever interrupts this,
        # `recount` finds them, and none is lost or held twice.
        blocks = self._free[: -more - 1 : -1]
        self._blocks[slot] += blocks
        del self._free[-more:]
        for block in blocks:
            self._refs[block] = 1
        self._set_table(slot, held, blocks)
        self._fresh += blocks
        if self.k.device.type == "cpu":
            self.flush()  # nothing is gained by waiting
        return True

    def free(self, slot: int) -> None:
        """Takes every block from `slot`, if any; those that nobody else holds are free again."""
        self._check_slot(slot)
        blocks, self._blocks[slot] = self._blocks[slot], []
        self._set_table(slot, 0, [self.num_blocks] * self._table.shape[1])
        self._release(reversed(blocks))

    def try_share(self, slot: int, blocks: Sequence[int], num_tokens: int) -> bool:
        """Starts `slot` with the rows of `blocks`, and makes rows `0 .. num_tokens - 1` exist.

        All blocks but the last are shared and must not be written by `slot`. The last one is
        copied: its last row in the MTP module's layers depends on the token that follows, which
        is the new sequence's own.

        Returns:
            False, with nothing changed, when there are too few free blocks.

        Raises:
            ValueError: `slot` holds blocks already, or more rows than `max_seq_len` are asked for.
        """
        if self._blocks[self._check_slot(slot)]:
            raise ValueError(f"KV cache: slot {slot} holds blocks already; free it first")
        shared = list(blocks[:-1])
        self._blocks[slot] += shared
        for block in shared:
            self._refs[block] += 1
        self._set_table(slot, 0, shared)
        if not self.try_reserve(slot, max(num_tokens, len(blocks) * self.block_size)):
            self.free(slot)
            return False
        if blocks:
            self.flush()  # the copy's own block is cleared before it is written, not after
            source, target = blocks[-1], self._blocks[slot][len(shared)]
            for pool in (self.k, self.v):
                rows = self._by_block(pool)
                rows[:, :, target] = rows[:, :, source]
        return True

    def hold(self, block: int) -> None:
        """Keeps `block`, which some sequence holds, for the prefix cache.

        Raises:
            ValueError: the prefix cache holds it already, or nobody holds it.
        """
        if block in self._held or not self._refs[block]:
            raise ValueError(f"KV cache: block {block} is free or kept already; cannot keep it")
        self._held.add(block)
        self._refs[block] += 1

    def drop(self, block: int) -> None:
        """Ends `hold`; nothing happens where it is not kept."""
        if block in self._held:
            self._held.discard(block)
            self._release([block])

    def drop_all(self) -> None:
        """Ends `hold` of every block, those of an interrupted insertion among them."""
        for block in list(self._held):
            self.drop(block)

    def recount(self) -> None:
        """Derives who holds what from the sequences and the prefix cache alone.

        After an interrupt in the middle of a change, which may have left the counts behind.
        """
        refs = [0] * self.num_blocks
        for block in (*self._held, *(block for held in self._blocks for block in held)):
            refs[block] += 1
        self._refs = refs
        self._free = [block for block in range(self.num_blocks - 1, -1, -1) if not refs[block]]

    def _set_table(self, slot: int, start: int, blocks: Sequence[int]) -> None:
        if blocks:
            self._table[slot, start : start + len(blocks)] = torch.tensor(blocks)
            self._stale.add(slot)

    def _release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._refs[block] -= 1
            if not self._refs[block]:
                self._free.append(block)

    def verify(self, tree: TreeBatch, *, ahead: bool = False) -> StoringStep:
        """Attention of a draft tree over its context and its own ancestors.

        Node t is written to the provisional row `context_len + t`; it attends the committed rows
        and the rows of its ancestors and itself. Padded nodes write nothing; what they output is
        of no use. For `ahead` see `step_behind`.
        """
        own = tree.ancestors
        if not triton_ops.serves(self.k):
            own = own & valid_nodes(tree.parents, tree.num_nodes)[:, :, None]
        return self.step_behind(
            tree.slot, tree.context_lens, own, tree.max_context, count=tree.num_nodes, ahead=ahead
        )

    def step_behind(
        self,
        slot: Tensor,
        context_lens: Tensor,
        own: Tensor,
        max_context: int,
        *,
        base: Tensor | None = None,
        count: Tensor | None = None,
        first: int = 0,
        ahead: bool = False,
    ) -> StoringStep:
        """`tree_step` whose queries' keys and values go to rows one after the other.

        Args:
            slot, context_lens, own, max_context: as for `tree_step`. Where kernels run, queries at
                or beyond `count` may have any rows of their own: nobody reads their outputs.
            base: int32 [B], `context_lens` where not given; query t writes row `base + first + t`.
            count: int32 [B], queries that write; all where not given.
            first: see `base`.
            ahead: a sequence may have ended, and have no rows so far on: the sink takes what is
                written there, on a CPU as on a device, where nothing is checked.
        """
        base = context_lens if base is None else base
        nodes = own.shape[1]
        kernels = triton_ops.serves(self.k)
        if kernels and slot.device.type != "cpu":
            target = self._rows(slot, base, count, nodes, first)
            return PagedAttention(self, slot, context_lens, own, target=target)
        index = torch.arange(nodes, device=slot.device)
        offsets = base.long()[:, None] + first + index
        if count is not None:
            offsets = torch.where(index < count[:, None], offsets, -1)
        if kernels:  # played on the CPU
            if not ahead:
                self._check_writes(slot, offsets)
            target = self._rows(slot, base, count, nodes, first)
            return PagedAttention(self, slot, context_lens, own, target=target)
        return self.tree_step(slot, context_lens, own, offsets, max_context, ahead=ahead)

    def _rows(
        self, slot: Tensor, base: Tensor, count: Tensor | None, nodes: int, first: int
    ) -> Tensor:
        """Physical rows [B, nodes] of rows `base + first + t`; the sink beyond `count`."""
        from trtllm_treewy.triton_ops.trees import rows_behind

        return rows_behind(
            slot, base, count, nodes, self.block_table,
            page=self.block_size, num_blocks=self.num_blocks, first=first,
        )  # fmt: skip

    def tree_step(
        self,
        slot: Tensor,
        context_lens: Tensor,
        own: Tensor,
        write_offsets: Tensor,
        max_context: int,
        *,
        ahead: bool = False,
    ) -> StoringStep:
        """The step of a tree: all see the context, and behind it what `own` names.

        Args:
            slot, write_offsets: as for `step`.
            context_lens: int32 [B], rows that every query of a sequence attends.
            own: bool [B, Nq, E]: whether a query attends row `context_lens + e`. A query without
                any is padding.
            max_context: at least the largest of `context_lens`.
            ahead: as for `step_behind`.
        """
        if triton_ops.serves(self.k):
            if not ahead:
                self._check_writes(slot, write_offsets)
            return PagedAttention(self, slot, context_lens, own, write_offsets)
        _, queries, entries = own.shape
        rows = torch.arange(max_context + entries, device=own.device)
        behind = rows - context_lens.long()[:, None]  # [B, S], the entry at a row
        seen = own.gather(2, behind.clamp(0, entries - 1)[:, None].expand(-1, queries, -1))
        mask = (behind < 0)[:, None] | (seen & ((behind >= 0) & (behind < entries))[:, None])
        return self.step(slot, write_offsets, mask & own.any(-1, keepdim=True), ahead=ahead)

    def step(
        self, slot: Tensor, write_offsets: Tensor, mask: Tensor, *, ahead: bool = False
    ) -> StoringStep:
        """The general step: write some rows, then attend under any mask.

        Args:
            slot: int [B], -1 for a padded row: nothing read or written, output zero.
            write_offsets: int [B, Nq], the row of its sequence where each query's key and value
                go, -1 for nowhere.
            mask: bool [B, Nq, S], the rows `0 .. S-1` of the sequence that each query attends,
                those just written included. A query that attends nothing outputs zero.
            ahead: as for `step_behind`.

        Raises:
            ValueError: on the CPU, for a slot out of range or a row that is not reserved. On a
                device nothing is checked: such a write goes to the sink.
        """
        batch, queries = write_offsets.shape
        if mask.shape[:2] != (batch, queries) or slot.shape != (batch,):
            raise ValueError(
                f"KV cache step: slot [B], write_offsets [B, Nq] and mask [B, Nq, S] disagree: "
                f"{list(slot.shape)}, {list(write_offsets.shape)}, {list(mask.shape)}"
            )
        if not ahead:
            self._check_writes(slot, write_offsets)
        if triton_ops.serves(self.k):
            nothing = torch.zeros_like(slot, dtype=torch.int32)
            return PagedAttention(self, slot, nothing, mask, write_offsets)
        rows = torch.arange(mask.shape[2], device=slot.device)
        read = self._physical(slot, rows.expand(batch, -1))
        allowed = mask & (read < self._sink)[:, None]
        return TreeAttention(self, self._physical(slot, write_offsets), read, allowed)

    def prefill(self, batch: PrefillBatch) -> StoringStep:
        """Causal attention of prompt tokens, appended behind `context_lens` of each sequence.

        Raises:
            ValueError: for a slot out of range or rows that are not reserved.
        """
        self.check_prefill(batch)
        if triton_ops.serves(self.k):
            return PagedPrefill(self, partial(self._plan_prompts, batch))
        return PrefillAttention(self, batch)

    def check_prefill(self, batch: PrefillBatch) -> None:
        """Raises ValueError for a slot out of range or rows that are not reserved."""
        for slot, context, length in zip(
            batch.slots, batch.context_lens_host, batch.seq_lens_host, strict=True
        ):
            if slot != -1:
                self._check_row(slot, context + length - 1)

    def _plan_prompts(self, batch: PrefillBatch, groups: int) -> PromptPlan:
        """The plan of a batch, made on the host and sent without waiting."""
        from trtllm_treewy.triton_ops import prefill_attention

        slots, contexts, lengths = batch.slots, batch.context_lens_host, batch.seq_lens_host
        tiles = self.choose_tiles(lengths, groups)
        listed = prefill_attention.list_tiles(lengths, contexts, slots, tiles.tokens(groups))
        target = self.rows_of(slots, contexts, lengths)
        return PromptPlan(tiles, *upload_all([listed, target], self.k.device))

    def choose_tiles(self, lengths: Sequence[int], groups: int) -> Tiles:
        """Sizes of the attention of prompts of so many tokens, where kernels serve it."""
        from trtllm_treewy.triton_ops import prefill_attention, processors

        return prefill_attention.choose_tiles(
            lengths, self.num_kv_heads, groups, self.head_dim, *processors(self.k.device),
            self.k.element_size(),
        )  # fmt: skip

    def rows_of(
        self, slots: Sequence[int], contexts: Sequence[int], lengths: Sequence[int]
    ) -> Tensor:
        """Physical rows of new tokens of several sequences in turn, int64 [T] on the host."""
        spans = [span for span in zip(slots, contexts, lengths, strict=True) if span[2]]
        rows = [self.host_rows(*span) for span in spans]
        return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)

    def compact(self, slot: Tensor, path: Tensor, base: Tensor) -> None:
        """Moves the accepted nodes' rows together: row `base + path[p]` becomes row `base + p`.

        All layers, gathered before anything is written, so the accepted nodes may lie anywhere.

        Args:
            slot: int [B], -1 for a row to skip.
            path: int64 [B, P], accepted node indices from the root on, -1 beyond.
            base: int [B], committed rows before this step.
        """
        if triton_ops.serves(self.k):
            from trtllm_treewy.triton_ops.trees import compact_rows

            compact_rows(
                self.k, self.v, slot, path.contiguous(), base, self.block_table,
                page=self.block_size, num_blocks=self.num_blocks,
            )  # fmt: skip
            return
        start = base.long()[:, None]
        column = torch.arange(path.shape[1], device=path.device)
        source = self._physical(slot, torch.where(path >= 0, start + path, -1)).flatten()
        target = self._physical(slot, torch.where(path >= 0, start + column, -1)).flatten()
        for pool in (self.k, self.v):
            pool[:, :, target] = pool[:, :, source]

    @property
    def _sink(self) -> int:
        """First physical row of the sink block."""
        return self.num_blocks * self.block_size

    def _by_block(self, pool: Tensor) -> Tensor:
        return pool.unflatten(2, (self.num_blocks + 1, self.block_size))

    def _physical(self, slot: Tensor, rows: Tensor) -> Tensor:
        """Physical rows of `rows` [B, R] of each slot; the sink for slot -1, row -1 or no block."""
        block = rows // self.block_size
        exists = (slot >= 0)[:, None] & (rows >= 0) & (block < self.block_table.shape[1])
        table = self.block_table[slot.long().clamp(0, self.num_slots - 1)]
        ids = table.gather(1, torch.where(exists, block, 0))
        return torch.where(exists, ids, self.num_blocks) * self.block_size + rows % self.block_size

    def host_rows(self, slot: int, start: int, count: int) -> Tensor:
        """Physical rows `start .. start + count - 1` of `slot`, int64 on the host; sink for -1."""
        rows = torch.arange(start, start + count)
        if slot < 0:
            return self._sink + rows % self.block_size
        ids = self._table[slot, rows // self.block_size]
        return ids * self.block_size + rows % self.block_size

    def _check_slot(self, slot: int) -> int:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"KV cache: slot must be in [0, {self.num_slots}), got {slot}")
        return slot

    def _check_row(self, slot: int, row: int) -> None:
        if row >= self.reserved(slot):
            raise ValueError(
                f"KV cache: row {row} of slot {slot} is not reserved ({self.reserved(slot)} rows "
                "are); reserve it with try_reserve first"
            )

    def _check_writes(self, slot: Tensor, write_offsets: Tensor) -> None:
        """The checks that would make a GPU step wait for its device; made on the CPU only."""
        if slot.device.type != "cpu" or write_offsets.shape[1] == 0:
            return
        for one, row in zip(slot.tolist(), write_offsets.amax(1).tolist(), strict=True):
            if one != -1:
                self._check_row(one, row)


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
            target = cache._physical(slot, write_offsets)
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
                physical = cache._physical(torch.full_like(rows[:, 0], slot), rows)[0]
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
