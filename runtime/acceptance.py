"""Acceptance of a verified draft tree: which path of it the target model would have produced.

`torch.ops.treewy.greedy_accept` does it, by one launch where there is a kernel: no step waits for
the host between verification and commit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_treewy import ops as ops  # registers torch.ops.treewy
from trtllm_treewy.batch import TreeBatch


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
    if target_ids.shape != tree.parents.shape:
        raise ValueError(
            f"target_ids must be [batch, nodes] = {list(tree.parents.shape)}, got "
            f"{list(target_ids.shape)}"
        )
    if max_path is not None and max_path < 1:
        raise ValueError(f"max_path must be >= 1 (the root is accepted), got {max_path}")
    return Acceptance(
        *torch.ops.treewy.greedy_accept(
            tree.token_ids, target_ids, tree.slot, tree.parents, tree.num_nodes, max_path
        )
    )
