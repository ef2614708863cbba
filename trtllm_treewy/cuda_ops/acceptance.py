"""Greedy acceptance."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import op_checks
from ..op_inputs import Trees
from .call import Call, find_copies, prepare
from .fields import set_tree


def greedy_accept(
    token_ids: Tensor,
    target_ids: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    max_path: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `runtime.acceptance.greedy_accept` computes, by one launch.

    Args:
        token_ids, target_ids: int64 [B, N].
        slot, parents, num_nodes: int32, see `ops`; slot -1 rows accept nothing.
        max_path: columns of `path` and the longest path accepted; N where not given.

    Returns:
        accepted int32 [B], num_accepted int32 [B], path int64 [B, P] and bonus_ids int64 [B].

    Raises:
        ValueError: for wrong shapes or types, or trees of more nodes than the kernels take.
    """
    tensors = (token_ids, target_ids, slot, parents, num_nodes)
    call, ready = prepare("greedy_accept", tensors, _setup_greedy, max_path)
    batch, device = parents.shape[0], parents.device
    columns = max(call.params.max_path, 0)
    accepted = torch.empty(batch, dtype=torch.int32, device=device)
    num_accepted = torch.empty(batch, dtype=torch.int32, device=device)
    path = torch.empty((batch, columns), dtype=torch.int64, device=device)
    bonus_ids = torch.empty(batch, dtype=torch.int64, device=device)
    call.launch((*ready, accepted, num_accepted, path, bonus_ids))
    return accepted, num_accepted, path, bonus_ids


def _setup_greedy(
    call: Call,
    token_ids: Tensor,
    target_ids: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    max_path: int | None,
) -> None:
    op = "greedy_accept"
    op_checks.expect_dims(op, "parents", parents, "batch, N")
    shape, device = (parents.shape[0], parents.shape[1]), parents.device
    Trees(slot, parents, num_nodes).check(op, shape, device)
    for name, ids in (("token_ids", token_ids), ("target_ids", target_ids)):
        op_checks.expect(op, name, ids, "batch, N", shape, dtypes=(torch.int64,), device=device)
    tensors = (token_ids, target_ids, slot, parents, num_nodes)
    call.copies = find_copies(tensors, whole=(2, 3, 4), rows=(0, 1))
    params = call.params
    set_tree(params.tree, parents, 2**31)  # any slot but -1 is one
    params.target_stride, params.token_stride = target_ids.stride(0), token_ids.stride(0)
    params.max_path = shape[1] if max_path is None else max_path
    call.address(params, "token_ids", "target_ids")
    call.address(params.tree, "slot", "parents", "num_nodes")
    call.address(params, "accepted", "num_accepted", "path", "bonus_ids")
