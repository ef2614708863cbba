"""Acceptance drawn by depth, in one launch: what `runtime/acceptance_law.py` does in torch.

A program has a row. It draws a number for each depth (Philox, by a counter of its own that every
call moves on, so that a replayed launch draws anew), and walks as deep as all of them allow.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _draw(
    slot_ptr, count_ptr, depth_ptr, own_ptr, target_ptr, law_ptr, counter_ptr,
    accepted_ptr, num_ptr, path_ptr, bonus_ptr, seed, nodes, columns,
    SIZE: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    drawn = tl.load(counter_ptr + b)
    tl.store(counter_ptr + b, drawn + 1)
    c = tl.arange(0, SIZE)
    place = (drawn * tl.num_programs(0) + b) * SIZE + c
    law = tl.load(law_ptr + c, c < columns - 1, other=0.0)
    refused = tl.rand(seed, place.to(tl.int32)) >= law
    wanted = tl.min(tl.where(refused, c, columns - 1), 0)

    n = tl.arange(0, NODES)
    count = tl.where(tl.load(slot_ptr + b) >= 0, tl.load(count_ptr + b), 0)
    real = n < tl.minimum(count, nodes)
    depth = tl.load(depth_ptr + b * nodes + n, real, other=-1)
    reached = tl.minimum(wanted, tl.max(depth, 0))
    last = tl.min(tl.where(real & (depth == reached), n, nodes), 0)
    at = b * nodes + tl.minimum(last, nodes - 1)
    own = real & (n < tl.where(last < nodes, nodes, 0))
    own = own & (tl.load(own_ptr + at * nodes + n, own, other=0) != 0)
    rank = tl.cumsum(own.to(tl.int32), 0) - 1
    tl.store(path_ptr + b * columns + rank, n.to(tl.int64), own & (rank < columns))
    length = tl.sum(own.to(tl.int32), 0)
    tl.store(path_ptr + b * columns + c, c.to(tl.int64) * 0 - 1, (c >= length) & (c < columns))
    tl.store(num_ptr + b, length)
    tl.store(accepted_ptr + b, tl.where(length > 0, last, -1))
    target = tl.load(target_ptr + at)
    tl.store(bonus_ptr + b, tl.where(length > 0, target, -1))


def draw(
    slot: Tensor,
    num_nodes: Tensor,
    depth: Tensor,
    ancestors: Tensor,
    target_ids: Tensor,
    law: Tensor,
    counter: Tensor,
    seed: int,
    columns: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A path of each tree, to the first node of the depth that is drawn.

    Args:
        slot, num_nodes: int32 [B]; rows of slot -1 accept nothing.
        depth: int32 [B, N].
        ancestors: bool [B, N, N], ancestor or self.
        target_ids: int64 [B, N].
        law: float32 [columns], of a draft at depth d + 1 given its parent; the last is not used.
        counter: int64 [B], moved on by one.
        seed: of all draws.
        columns: nodes of the longest path.

    Returns:
        As `runtime.acceptance.Acceptance`.
    """
    batch, nodes = depth.shape
    accepted, count = torch.empty(2, batch, dtype=torch.int32, device=slot.device)
    path = torch.empty(batch, columns, dtype=torch.int64, device=slot.device)
    bonus = torch.empty(batch, dtype=torch.int64, device=slot.device)
    _draw[(batch,)](
        slot, num_nodes, depth, ancestors.view(torch.uint8), target_ids.contiguous(), law, counter,
        accepted, count, path, bonus, seed, nodes, columns,
        SIZE=triton.next_power_of_2(columns), NODES=triton.next_power_of_2(nodes), num_warps=1,
    )  # fmt: skip
    return accepted, count, path, bonus
