"""What a step needs to know of its trees and its pages, one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _plan(
    parent_ptr, count_ptr, context_ptr, mask_ptr, depth_ptr, position_ptr, nodes,
    SIZE: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1)
    index = tl.arange(0, SIZE)
    count = tl.load(count_ptr + b)
    mask = index == t
    depth = 0
    at = t
    parent = tl.load(parent_ptr + b * nodes + t)
    # Parents come first; whatever does not, ends the path instead of going round.
    while (t < count) & (parent >= 0) & (parent < at):
        mask = mask | (index == parent)
        depth += 1
        at = parent
        parent = tl.load(parent_ptr + b * nodes + at)
    place = b * nodes + t
    tl.store(mask_ptr + place * nodes + index, mask.to(tl.uint8), index < nodes)
    tl.store(depth_ptr + place, depth)
    position = tl.load(context_ptr + b).to(tl.int64) + depth
    tl.store(position_ptr + place, position)


def plan_trees(
    parents: Tensor, num_nodes: Tensor, context_lens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As `topology.ancestor_mask` and `node_depth`, and positions, of well-formed trees.

    Args:
        parents: int32 [B, N], contiguous.
        num_nodes, context_lens: int32 [B].

    Returns:
        bool [B, N, N], ancestor or self; int32 [B, N], depths; int64 [B, N], context and depth.
    """
    batch, nodes = parents.shape
    device = parents.device
    mask = torch.empty(batch, nodes, nodes, dtype=torch.bool, device=device)
    depth = torch.empty(batch, nodes, dtype=torch.int32, device=device)
    positions = torch.empty(batch, nodes, dtype=torch.int64, device=device)
    if batch and nodes:
        _plan[(batch, nodes)](
            parents, num_nodes, context_lens, mask.view(torch.uint8), depth, positions, nodes,
            SIZE=triton.next_power_of_2(nodes), num_warps=1,
        )  # fmt: skip
    return mask, depth, positions


@triton.jit
def _physical(table, slot, row, num_blocks, width, PAGE: tl.constexpr):
    """The physical row of a sequence's row; one of the sink's where there is none, or row -1."""
    row = tl.where(slot >= 0, row, -1)
    block = tl.where(row >= 0, row // PAGE, width)
    at = table + tl.maximum(slot, 0).to(tl.int64) * width + block
    page = tl.load(at, mask=block < width, other=num_blocks)
    return page * PAGE + tl.where(row >= 0, row % PAGE, 0)


@triton.jit
def _rows(
    slot_ptr, base_ptr, count_ptr, table_ptr, target_ptr, first, nodes, num_blocks, width,
    COUNTED: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, SIZE)
    count = nodes
    if COUNTED:
        count = tl.load(count_ptr + b)
    row = tl.load(base_ptr + b).to(tl.int64) + first + t
    row = tl.where(t < count, row, -1)
    at = _physical(table_ptr, tl.load(slot_ptr + b), row, num_blocks, width, PAGE)
    tl.store(target_ptr + b * nodes + t, at, t < nodes)


def rows_behind(
    slot: Tensor,
    base: Tensor,
    count: Tensor | None,
    nodes: int,
    block_table: Tensor,
    *,
    page: int,
    num_blocks: int,
    first: int = 0,
) -> Tensor:
    """Physical rows [B, nodes] int64 of rows `base + first + t`, for t below `count`.

    Args:
        slot, base: int32 [B], -1 for a padded row of the batch.
        count: int32 [B], or None for all.
        nodes: of each.
        block_table: int64 [slots, W], contiguous.
        page, num_blocks: rows of a block, and blocks of the pool; the next one is the sink, which
            has all other rows.
        first: of the rows behind `base`.
    """
    target = torch.empty(slot.shape[0], nodes, dtype=torch.int64, device=slot.device)
    if target.numel():
        _rows[(slot.shape[0],)](
            slot, base, slot if count is None else count, block_table, target, first, nodes,
            num_blocks, block_table.shape[1], COUNTED=count is not None, PAGE=page,
            SIZE=triton.next_power_of_2(nodes), num_warps=1,
        )  # fmt: skip
    return target


@triton.jit
def _compact(
    k_ptr, v_ptr, slot_ptr, path_ptr, base_ptr, table_ptr, columns, pool_rows, dim, num_blocks,
    width, PAGE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    pool = tl.program_id(1).to(tl.int64) * pool_rows
    d = tl.arange(0, SIZE)
    slot = tl.load(slot_ptr + b)
    base = tl.load(base_ptr + b).to(tl.int64)
    for p in range(columns):
        node = tl.load(path_ptr + b * columns + p)
        # A path rises, so what is written here was read before; a thread has a column to itself.
        if (slot >= 0) & (node > p):
            source = _physical(table_ptr, slot, base + node, num_blocks, width, PAGE)
            target = _physical(table_ptr, slot, base + p, num_blocks, width, PAGE)
            source, target = (pool + source) * dim + d, (pool + target) * dim + d
            k = tl.load(k_ptr + source, d < dim)
            v = tl.load(v_ptr + source, d < dim)
            tl.store(k_ptr + target, k, d < dim)
            tl.store(v_ptr + target, v, d < dim)


def compact_rows(
    k: Tensor,
    v: Tensor,
    slot: Tensor,
    path: Tensor,
    base: Tensor,
    block_table: Tensor,
    *,
    page: int,
    num_blocks: int,
) -> None:
    """Row `base + path[p]` becomes row `base + p`, of all layers in one launch.

    Args:
        k, v: the pools [layers, kv_heads, rows, D], contiguous, written in place.
        slot: int32 [B], -1 for a row to skip.
        path: int64 [B, P], contiguous, nodes in rising order from the root on, -1 beyond.
        base: int32 [B].
        block_table: int64 [slots, W], contiguous.
        page, num_blocks: rows of a block, and blocks of the pool.
    """
    layers, heads, rows, dim = k.shape
    batch, columns = path.shape
    if batch and columns and layers:
        _compact[(batch, layers * heads)](
            k, v, slot, path, base, block_table, columns, rows, dim, num_blocks,
            block_table.shape[1], PAGE=page, SIZE=triton.next_power_of_2(dim), num_warps=1,
        )  # fmt: skip
