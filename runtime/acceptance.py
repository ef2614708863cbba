"""Acceptance of a verified draft tree: which path of it the target model would have produced.

On the device, without loops over the batch and without synchronising, so that the host never
walks a tree between two steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_treewy.batch import TreeBatch
from trtllm_treewy.topology import valid_nodes


@dataclass(frozen=True)
class Acceptance:
    """The accepted path of each row.

    Attributes:
        accepted: int32 [batch], tree index of the last accepted node; -1 where the row must not
            move (slot -1, or no nodes).
        num_accepted: int32 [batch], nodes on the accepted path, the root included; 0 where
            `accepted` is -1.
        path: int64 [batch, P], the accepted nodes from the root on, -1 beyond.
        bonus_ids: int64 [batch], the target's token after the last accepted node, -1 where
            `accepted` is -1.
    """

    accepted: Tensor
    num_accepted: Tensor
    path: Tensor
    bonus_ids: Tensor


def greedy_accept(
    tree: TreeBatch, target_ids: Tensor, *, max_path: int | None = None
) -> Acceptance:
    """Accepts the longest path whose every token is the target's choice after its parent.

    A node matches where `token_ids[t] == target_ids[parent(t)]`; the root always does. The
    deepest node all of whose ancestors match is accepted, the lowest index where several are as
    deep (equal tokens among siblings).

    Args:
        tree: the verified batch.
        target_ids: int64 [batch, N], the target's token after each node.
        max_path: columns of `path`, N where not given (tree depth + 1 is enough); also the
            longest path accepted.
    """
    batch, n = tree.parents.shape
    if target_ids.shape != (batch, n):
        raise ValueError(
            f"target_ids must be [batch, nodes] = [{batch}, {n}], got {list(target_ids.shape)}"
        )
    columns = n if max_path is None else max_path
    if columns < 1:
        raise ValueError(f"max_path must be >= 1 (the root is accepted), got {max_path}")
    index = torch.arange(n, device=tree.parents.device)
    choice = target_ids.gather(1, tree.parents.long().clamp(min=0))
    match = (tree.token_ids == choice) | (index == 0)
    usable = valid_nodes(tree.parents, tree.num_nodes) & (tree.slot >= 0)[:, None]
    ok = (match[:, None] | ~tree.ancestors).all(-1) & usable & (tree.depth < columns)

    # Deepest first, then the lowest index; the ranks of a row are distinct.
    rank = torch.where(ok, tree.depth.long() * n + (n - 1 - index), -1)
    best = rank.argmax(1, keepdim=True)
    moves = ok.any(1)
    accepted = torch.where(moves, best[:, 0], -1)
    on_path = tree.ancestors.gather(1, best[:, :, None].expand(-1, 1, n))[:, 0] & moves[:, None]
    return Acceptance(
        accepted=accepted.to(torch.int32),
        num_accepted=on_path.sum(1).to(torch.int32),
        path=_by_depth(on_path, tree.depth, columns),
        bonus_ids=torch.where(moves, target_ids.gather(1, best)[:, 0], -1),
    )


def _by_depth(on_path: Tensor, depth: Tensor, columns: int) -> Tensor:
    """Nodes of one path a row, placed by depth: int64 [batch, columns], -1 beyond the path."""
    batch, n = on_path.shape
    column = torch.where(on_path, depth.long(), columns)
    path = torch.full((batch, columns + 1), -1, dtype=torch.int64, device=on_path.device)
    index = torch.arange(n, device=on_path.device).expand(batch, n)
    return path.scatter_(1, column, index)[:, :columns]
