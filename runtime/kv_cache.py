"""Paged key/value cache of the attention layers, with provisional rows for draft trees.

A slot's sequence is a list of rows; row r lives in block `block_table[slot, r // block_size]`.
The pools are `[layers, kv_heads, (num_blocks + 1) * block_size, head_dim]`: heads before rows, so
that gathered rows go into the products without another copy. The extra last block is a sink:
writes that must not happen (padding) go there, and rows that do not exist are read from there
and masked, which keeps every step free of host synchronisation.

The host keeps the block tables; changed rows go to the device together, when it is next asked for
them, and in one copy that it does not wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trtllm_treewy import triton_ops
from trtllm_treewy.batch import PrefillBatch, TreeBatch, upload_all
from trtllm_treewy.model import StoringStep
from trtllm_treewy.topology import valid_nodes

from .attention_steps import (
    PagedAttention,
    PagedPrefill,
    PrefillAttention,
    PromptPlan,
    TreeAttention,
)

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
        read = self.physical(slot, rows.expand(batch, -1))
        allowed = mask & (read < self._sink)[:, None]
        return TreeAttention(self, self.physical(slot, write_offsets), read, allowed)

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
        source = self.physical(slot, torch.where(path >= 0, start + path, -1)).flatten()
        target = self.physical(slot, torch.where(path >= 0, start + column, -1)).flatten()
        for pool in (self.k, self.v):
            pool[:, :, target] = pool[:, :, source]

    @property
    def _sink(self) -> int:
        """First physical row of the sink block."""
        return self.num_blocks * self.block_size

    def _by_block(self, pool: Tensor) -> Tensor:
        return pool.unflatten(2, (self.num_blocks + 1, self.block_size))

    def physical(self, slot: Tensor, rows: Tensor) -> Tensor:
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
