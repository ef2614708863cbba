"""Tensor functions of a batch of draft trees: depths, ancestors, path tables.

A tree is `parents [batch, N]` int32: topological order (a parent's index is smaller than its
child's), root first with parent -1. Nodes at or beyond `num_nodes` are padding. The functions run
on any device and never wait for it, but for `independent_blocks`, which reads its tensors on the
host. Loops run over sizes that the host knows: `path_to` over the columns of its result,
`ancestor_mask` over ceil(log2(N)) products.
"""

from __future__ import annotations

import torch
from torch import Tensor


def valid_nodes(parents: Tensor, num_nodes: Tensor) -> Tensor:
    """Mask of real nodes, bool [batch, N]."""
    index = torch.arange(parents.shape[1], device=parents.device)
    return index[None] < num_nodes[:, None]


def ancestor_mask(parents: Tensor, num_nodes: Tensor) -> Tensor:
    """`mask[b, t, i]` is True where i is t or a proper ancestor of t; bool [batch, N, N].

    A padded node has itself alone, and no real node has a padded ancestor. The closure of the
    parent relation is taken by squaring, in ceil(log2(N)) products: fewer would do for a shallow
    tree, but only the device knows the depth.
    """
    batch, n = parents.shape
    valid = valid_nodes(parents, num_nodes)
    index = torch.arange(n, device=parents.device)
    is_parent = (parents.long()[:, :, None] == index) & valid[:, :, None] & valid[:, None, :]
    # 0/1 products below N are exact in float32, on every device.
    reach = (is_parent | (index[:, None] == index)).float()
    for _ in range(max(1, (n - 1).bit_length())):
        reach = (reach @ reach).clamp_(max=1.0)
    return reach > 0.5


def node_depth(ancestors: Tensor) -> Tensor:
    """Depth of each node, the root at 0, int32 [batch, N], from `ancestor_mask`."""
    return (ancestors.sum(-1) - 1).to(torch.int32)


def path_to(parents: Tensor, node: Tensor, max_length: int) -> tuple[Tensor, Tensor]:
    """Nodes from the root to `node`, found by walking the parents.

    Args:
        parents: int32 [batch, N].
        node: int32 [batch], the last node of each path; -1 gives an empty path.
        max_length: columns of the result, at least the longest path.

    Returns:
        `path` int64 [batch, max_length], root first, -1 beyond the path, and its `length`
        int32 [batch].
    """
    batch = parents.shape[0]
    reverse = torch.full((batch, max_length), -1, dtype=torch.int64, device=parents.device)
    current = node.to(torch.int64)
    for step in range(max_length):
        reverse[:, step] = current
        parent = parents.gather(1, current.clamp(min=0)[:, None])[:, 0].to(torch.int64)
        current = torch.where(current >= 0, parent, current)
    length = (reverse >= 0).sum(1)
    offset = length[:, None] - 1 - torch.arange(max_length, device=parents.device)
    path = reverse.gather(1, offset.clamp(min=0))
    return torch.where(offset >= 0, path, -1), length.to(torch.int32)


def independent_blocks(parents: Tensor, num_nodes: Tensor) -> tuple[tuple[int, int], ...]:
    """Runs `[start, stop)` of consecutive nodes none of which descends from another of its run.

    The nodes of a run can be solved together: all of their ancestors lie before it, in every tree
    of the batch. A tree in level order has a run per level, a chain a run per node. Reads the
    tensors on the host.
    """
    batch, nodes = parents.shape
    if batch == 0 or nodes == 0:
        return ((0, nodes),) if nodes else ()
    before = torch.where(valid_nodes(parents, num_nodes), parents, -1).amax(0).tolist()
    starts = [0]
    for node, parent in enumerate(before):
        if parent >= starts[-1]:
            starts.append(node)
    return tuple(zip(starts, [*starts[1:], nodes], strict=True))
