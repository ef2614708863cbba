"""Trees, packed prompts and slots in standard ONNX operators.

The same quantities as `trtllm_treewy.topology`, for graphs: nothing depends on the host, so that
one graph serves every topology.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .onnx_nodes import Nodes

# A tree has at most 128 nodes, as in the plugins; the closure of 2^7 steps covers all of them.
MAX_NODES = 128
LEVELS = 7


@dataclass(frozen=True)
class Tree:
    """A batch of trees: `index` int32 [N], `valid` bool [B, N], `ancestors` bool [B, N, N]."""

    index: str
    valid: str
    ancestors: str


@dataclass(frozen=True)
class Segments:
    """Packed tokens: their row int32 [T], place in it int32 [T]; `start`, `length` int32 [B]."""

    row: str
    place: str
    start: str
    length: str


def tree(f: Nodes, parents: str, num_nodes: str) -> Tree:
    """`topology.valid_nodes` and `topology.ancestor_mask` of int32 [B, N] and [B]."""
    index = f.count(f.size(parents, 1))
    valid = f.op("Less", f.unsqueeze(index, 0), f.unsqueeze(num_nodes, 1))
    linked = f.op("And", f.unsqueeze(valid, 2), f.unsqueeze(valid, 1))
    is_parent = f.op("And", f.op("Equal", f.unsqueeze(parents, 2), index), linked)
    reach = f.cast(f.op("Or", is_parent, same(f, index)), torch.float32)
    for _ in range(LEVELS):
        reach = f.op("Min", f.op("MatMul", reach, reach), f.f32(1.0))
    return Tree(index, valid, f.op("Greater", reach, f.f32(0.5)))


def same(f: Nodes, index: str) -> str:
    """Bool [N, N]: the diagonal, for `index` 0, 1, .. N-1; in general, where entries are equal."""
    return f.op("Equal", f.unsqueeze(index, 1), f.unsqueeze(index, 0))


def segments(f: Nodes, cu_seqlens: str, tokens: str) -> Segments:
    """Which sequence each packed token belongs to.

    Args:
        f: the nodes.
        cu_seqlens: int32 [B + 1].
        tokens: a tensor [T, ..].
    """
    token = f.count(f.size(tokens, 0))
    start = f.slice(cu_seqlens, 0, -1, 0)
    stop = f.slice(cu_seqlens, 1, 2**31 - 1, 0)
    behind = f.op("LessOrEqual", f.unsqueeze(stop, 0), f.unsqueeze(token, 1))
    row = f.total(f.cast(behind, torch.int32), 1)
    # Tokens behind the last sequence, of which there should be none, would belong to no row.
    last = f.op("Sub", f.cast(f.size(start, 0), torch.int32), f.i32(1))
    row = f.op("Min", row, f.squeeze(last, 0))
    place = f.op("Sub", token, f.gather(start, row))
    return Segments(row, place, start, f.op("Sub", stop, start))


def slot_rows(f: Nodes, slot: str, pool: str) -> tuple[str, str]:
    """`slot` int32 [B] within the pool [slots, ..], and bool [B]: it names one of its slots."""
    slots = f.cast(f.size(pool, 0), torch.int32)
    real = f.op("And", f.op("GreaterOrEqual", slot, f.i32(0)), f.op("Less", slot, slots))
    return f.clamp(slot, f.op("Sub", slots, f.i32(1))), real


def write_slots(f: Nodes, pool: str, slot: str, rows: str, rank: int) -> str:
    """The pool [slots, ..] of `rank` dimensions with `rows` [B, ..] in its slots.

    Selected per slot and not scattered: what no row names keeps every bit, and -1 names nothing.
    """
    index = f.count(f.size(pool, 0))
    named = f.cast(f.op("Equal", f.unsqueeze(index, 1), f.unsqueeze(slot, 0)), torch.float32)
    row = f.op("ArgMax", named, axis=1, keepdims=0)
    taken = f.op("Greater", f.total(named, 1), f.f32(0.5))
    taken = f.unsqueeze(taken, *range(1, rank))
    return f.where(taken, f.gather(rows, row), pool)
