"""Checks at the boundary of the operators: one error that names the tensor and both shapes.

Shape and type checks read no data, so they run on any device, while tracing too. Value checks
read the data and run for CPU tensors only: on a GPU they would stop the stream.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WIDE_TYPES = (torch.float32, torch.float64)


def expect(
    op: str,
    name: str,
    x: Tensor,
    layout: str,
    shape: Sequence[int],
    *,
    dtypes: Sequence[torch.dtype] = FLOAT_TYPES,
    device: torch.device | None = None,
) -> None:
    """Raises ValueError unless x has the shape, one of the types and the device expected."""
    if x.dim() != len(shape) or any(
        have != want for have, want in zip(x.shape, shape, strict=True)
    ):
        raise ValueError(
            f"treewy::{op}: {name} must be [{layout}] = {list(shape)}, got {list(x.shape)}"
        )
    if x.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        got = str(x.dtype).removeprefix("torch.")
        raise ValueError(f"treewy::{op}: {name} must be {wanted}, got {got}")
    if device is not None and x.device != device:
        raise ValueError(f"treewy::{op}: {name} must be on {device}, got {x.device}")


def expect_dims(op: str, name: str, x: Tensor, layout: str) -> None:
    """Raises ValueError unless x has as many dimensions as the layout names."""
    dims = layout.count(",") + 1
    if x.dim() != dims:
        raise ValueError(f"treewy::{op}: {name} must be [{layout}], got {list(x.shape)}")


def expect_index(
    op: str, name: str, x: Tensor, layout: str, shape: Sequence[int], device: torch.device
) -> None:
    """`expect` for int32 metadata."""
    expect(op, name, x, layout, shape, dtypes=(torch.int32,), device=device)


def expect_groups(op: str, key_heads: int, value_heads: int) -> None:
    """Raises ValueError unless the value heads divide evenly among the key heads."""
    if key_heads < 1 or value_heads % key_heads:
        raise ValueError(
            f"treewy::{op}: value heads must be a multiple of key heads, "
            f"got {value_heads} value heads and {key_heads} key heads"
        )


def slot_values(op: str, slot: Tensor, num_slots: int, *, unique: bool) -> list[int]:
    """The slots on the host: all in [-1, num_slots), and none twice if `unique`."""
    values: list[int] = slot.tolist()
    for row, value in enumerate(values):
        if not -1 <= value < num_slots:
            raise ValueError(f"treewy::{op}: slot[{row}] must be in [-1, {num_slots}), got {value}")
    if unique:
        seen: dict[int, int] = {}
        for row, value in enumerate(values):
            if value >= 0 and seen.setdefault(value, row) != row:
                raise ValueError(
                    f"treewy::{op}: slot {value} is in rows {seen[value]} and {row}; "
                    "a slot can be written by one row only"
                )
    return values


def accepted_values(
    op: str, accepted: Tensor, slots: Sequence[int], num_nodes: Sequence[int]
) -> list[int]:
    """The accepted nodes on the host, checked: in [-1, num_nodes) for rows with a slot."""
    values: list[int] = accepted.tolist()
    for row, (value, slot, bound) in enumerate(zip(values, slots, num_nodes, strict=True)):
        if slot >= 0 and not -1 <= value < bound:
            raise ValueError(
                f"treewy::{op}: accepted[{row}] must be in [-1, {bound}), the nodes of its tree, "
                f"got {value}"
            )
    return values


def tree_values(parents: Tensor, num_nodes: Tensor) -> list[int]:
    """Raises ValueError unless the trees are well formed; returns num_nodes on the host."""
    batch, nodes = parents.shape
    counts: list[int] = num_nodes.tolist()
    for row, count in enumerate(counts):
        if not 0 <= count <= nodes:
            raise ValueError(f"treewy: num_nodes[{row}] must be in [0, {nodes}], got {count}")
    index = torch.arange(nodes)
    root = index == 0
    good = torch.where(root, parents == -1, (parents >= 0) & (parents < index))
    bad = ~good & (index < num_nodes[:, None])
    if bool(bad.any()):
        row, node = bad.nonzero()[0].tolist()
        wanted = "-1, the root's" if node == 0 else f"a node before it, in [0, {node})"
        raise ValueError(
            f"treewy: parents[{row}, {node}] must be {wanted}, got {int(parents[row, node])}"
        )
    return counts


def sequence_bounds(op: str, cu_seqlens: Tensor, tokens: int) -> list[tuple[int, int]]:
    """Start and stop of each sequence; raises ValueError unless they tile the tokens."""
    ends: list[int] = cu_seqlens.tolist()
    bounds = list(itertools.pairwise(ends))
    if ends[0] != 0 or ends[-1] != tokens or any(start > stop for start, stop in bounds):
        raise ValueError(
            f"treewy::{op}: cu_seqlens must rise from 0 to the {tokens} tokens given, got {ends}"
        )
    return bounds
