"""What a fixed draft tree is, from the widths or the parents that settings give it by."""

from __future__ import annotations

from collections import Counter

MAX_TREE_NODES = 128
"""Most nodes of a draft tree, the root among them."""
MAX_TREE_WIDTH = 64
"""Most children of one node."""


def count_nodes(widths: tuple[int, ...]) -> int:
    """Nodes of the tree, the root among them; ValueError above the limit."""
    nodes = level = 1
    for width in widths:
        level *= width
        nodes += level
    if nodes > MAX_TREE_NODES:
        raise ValueError(
            f"MTPDecodingConfig: draft_tree_widths={widths} makes {nodes} nodes with the root, "
            f"the limit is {MAX_TREE_NODES}"
        )
    return nodes


def parent_depths(parents: tuple[int, ...]) -> list[int]:
    """Depth of each node, the root at 0; ValueError unless the list is a tree in order."""
    if not parents or parents[0] != -1:
        raise ValueError(
            "MTPDecodingConfig: draft_tree_parents must start with -1, the root, "
            f"got {list(parents[:4])}"
        )
    if len(parents) > MAX_TREE_NODES:
        raise ValueError(
            f"MTPDecodingConfig: draft_tree_parents has {len(parents)} nodes with the root, the "
            f"limit is {MAX_TREE_NODES}"
        )
    depths = [0]
    for node, parent in enumerate(parents[1:], start=1):
        if not 0 <= parent < node:
            raise ValueError(
                f"MTPDecodingConfig: draft_tree_parents[{node}] is {parent}; a parent comes "
                f"before its child, so it must be in [0, {node})"
            )
        depths.append(depths[parent] + 1)
    if widest(parents) > MAX_TREE_WIDTH:
        raise ValueError(
            f"MTPDecodingConfig: draft_tree_parents gives a node {widest(parents)} children, the "
            f"limit is {MAX_TREE_WIDTH}"
        )
    return depths


def widest(parents: tuple[int, ...]) -> int:
    """Most children of one node."""
    return max(Counter(parents[1:]).values(), default=0)
