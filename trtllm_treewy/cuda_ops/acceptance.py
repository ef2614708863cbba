"""Greedy acceptance."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import cuda_library as lib
from ..op_acceptance import _check_greedy
from .call import Call, call_reference, find_copies, prepare
from .fields import set_tree


def greedy_accept(
    token_ids: Tensor,
    target_ids: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    max_path: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`ops.greedy_accept` by one launch."""
    tensors = (token_ids, target_ids, slot, parents, num_nodes)
    call, ready = prepare("greedy_accept", tensors, _setup_greedy, max_path)
    if call.reason is not None:
        result: tuple[Tensor, Tensor, Tensor, Tensor]
        result = call_reference("greedy_accept", call, (*tensors, max_path))
        return result
    batch, device = parents.shape[0], parents.device
    columns = call.params.max_path
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
    tensors = (token_ids, target_ids, slot, parents, num_nodes)
    columns = _check_greedy(*tensors, max_path)
    if parents.numel() == 0:
        call.reason = "no nodes"
    elif parents.shape[1] > lib.MAX_NODES:
        call.reason = f"more than {lib.MAX_NODES} nodes"
    if call.reason is not None:
        return
    call.copies = find_copies(tensors, whole=(2, 3, 4), rows=(0, 1))
    params = call.params
    set_tree(params.tree, parents, 2**31)  # any slot but -1 is one
    params.target_stride, params.token_stride = target_ids.stride(0), token_ids.stride(0)
    params.max_path = columns
    call.address(params, "token_ids", "target_ids")
    call.address(params.tree, "slot", "parents", "num_nodes")
    call.address(params, "accepted", "num_accepted", "path", "bonus_ids")
