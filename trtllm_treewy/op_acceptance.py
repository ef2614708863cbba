"""Greedy acceptance as an operator. Conventions are those of `ops`, which exports it."""

from __future__ import annotations

import torch
from torch import Tensor

from . import op_checks, reference
from .op_inputs import Trees


@torch.library.custom_op("treewy::greedy_accept", mutates_args=())
def greedy_accept(
    token_ids: Tensor,
    target_ids: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    max_path: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The longest path of each tree whose every token is the target's choice after its parent.

    The root always is. Waits for no device: commits can follow at once.

    Args:
        token_ids, target_ids: int64 [B, N], the drafted tokens and the target's after each node.
        slot, parents, num_nodes: see the module; rows with slot -1 or without nodes accept nothing.
        max_path: columns of `path` and the longest path accepted; N where not given.

    Returns:
        accepted int32 [B], the last accepted node or -1; its path's nodes int32 [B]; the path int64
        [B, P], root first and -1 beyond; the target's token after it int64 [B], or -1.
    """
    columns = _check_greedy(token_ids, target_ids, slot, parents, num_nodes, max_path)
    if parents.numel() == 0:
        return _empty_acceptance(parents, columns)
    plan = Trees(slot, parents, num_nodes).plan()
    usable = plan.valid & (slot >= 0)[:, None]
    return reference.greedy_walk(
        token_ids, target_ids, plan.parents, usable, plan.ancestors, columns
    )


def _check_greedy(
    token_ids: Tensor,
    target_ids: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    max_path: int | None,
) -> int:
    """P; raises ValueError for tensors that do not fit each other."""
    op, integers = "greedy_accept", (torch.int64,)
    op_checks.expect_dims(op, "parents", parents, "batch, N")
    shape, device = (parents.shape[0], parents.shape[1]), parents.device
    Trees(slot, parents, num_nodes).check(op, shape, device)
    for name, ids in (("token_ids", token_ids), ("target_ids", target_ids)):
        op_checks.expect(op, name, ids, "batch, N", shape, dtypes=integers, device=device)
    columns = shape[1] if max_path is None else max_path
    if columns < 1 and max_path is not None:
        raise ValueError(f"treewy::{op}: max_path must be at least 1 (the root), got {max_path}")
    return columns


def _empty_acceptance(parents: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Nothing accepted, in every row."""
    batch = parents.shape[0]
    none = parents.new_full((batch,), -1)
    path = none.new_full((batch, columns), -1, dtype=torch.int64)
    return none, torch.zeros_like(none), path, none.long()


@greedy_accept.register_fake
def _(
    token_ids: Tensor,
    target_ids: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    max_path: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    columns = _check_greedy(token_ids, target_ids, slot, parents, num_nodes, max_path)
    batch = parents.shape[0]
    index = parents.new_empty(batch)
    ids = token_ids.new_empty
    return index, torch.empty_like(index), ids((batch, columns)), ids(batch)
