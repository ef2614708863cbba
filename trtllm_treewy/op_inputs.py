"""What the operators take, in groups: checked at the boundary and made ready for `reference`.

Nothing here waits for a GPU: what only the data can tell is read on the host for CPU tensors, and
handled by masks for others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import op_checks, reference, topology
from .cuda_library import FOLD_ROWS  # rows of V of a flag
from .op_checks import expect, expect_dims, expect_index

STATE_LAYOUT = "slots, HV, V, K"


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any of the tensors is, else float32."""
    wide = any(x.dtype == torch.float64 for x in tensors)
    return torch.float64 if wide else torch.float32


def read_rows(pool: Tensor, slot: Tensor) -> Tensor:
    """Rows of a pool [slots, ...] by slot; rows with slot -1 hold something to select away."""
    if pool.shape[0] == 0:
        return pool.new_zeros(slot.shape[0], *pool.shape[1:])
    if slot.is_cpu and slot.shape[0] == 1:
        return pool.narrow(0, max(int(slot), 0), 1)
    return pool.index_select(0, slot.clamp(min=0))


class Projections(NamedTuple):
    """The inputs of the gated delta rule as the layer computes them, [lead.., heads, dim]."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor

    def check(self, op: str, lead: str, state: Tensor) -> None:
        """Raises ValueError unless they fit each other and the pool [slots, HV, V, K]."""
        expect_dims(op, "q", self.q, f"{lead}, HK, K")
        expect_dims(op, "state", state, STATE_LAYOUT)
        heads, dim, key_dim = state.shape[1:]
        key_heads, front, device = self.q.shape[-2], self.q.shape[:-2], state.device
        op_checks.expect_groups(op, key_heads, heads)
        keys, per_head = (*front, key_heads, key_dim), (*front, heads)
        expect(op, "state", state, STATE_LAYOUT, state.shape)
        expect(op, "q", self.q, f"{lead}, HK, K", keys, device=device)
        expect(op, "k", self.k, f"{lead}, HK, K", keys, device=device)
        expect(op, "v", self.v, f"{lead}, HV, V", (*front, heads, dim), device=device)
        expect(op, "a", self.a, f"{lead}, HV", per_head, device=device)
        expect(op, "b", self.b, f"{lead}, HV", per_head, device=device)
        wide = op_checks.WIDE_TYPES
        expect(op, "A_log", self.A_log, "HV", (heads,), dtypes=wide, device=device)
        expect(op, "dt_bias", self.dt_bias, "HV", (heads,), dtypes=wide, device=device)

    def prepare(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, g and beta as `reference` wants them."""
        q, k = reference.normalize_qk(self.q.to(dtype), self.k.to(dtype))
        g, beta = reference.gates(
            self.a.to(dtype), self.b.to(dtype), self.A_log.to(dtype), self.dt_bias.to(dtype)
        )
        return q, k, self.v.to(dtype), g, beta


class Folds(NamedTuple):
    """Which histories verification has folded into the state, of one layer or of all.

    Attributes:
        folded: uint8 [(layers,) slots, HV, P], 1 where the state holds all entries already; P parts
            of `FOLD_ROWS` rows of V, all of a slot and layer alike.
        folding: int32 [slots], 1 where the state of any layer does.
    """

    folded: Tensor
    folding: Tensor

    @classmethod
    def new(cls, layers: int, slots: int, heads: int, dim: int, device: torch.device) -> Folds:
        """Of pools in which nothing is folded."""
        shape = (layers, slots, heads, -(-dim // FOLD_ROWS))
        folded = torch.zeros(shape, dtype=torch.uint8, device=device)
        return cls(folded, torch.zeros(slots, dtype=torch.int32, device=device))

    def check(self, op: str, state: Tensor) -> None:
        """Raises ValueError unless they fit the state pool [(layers,) slots, HV, V, K]."""
        lead, (slots, heads, dim) = state.shape[:-4], state.shape[-4:-1]
        layout = "layers, slots, HV, P" if lead else "slots, HV, P"
        shape = (*lead, slots, heads, -(-dim // FOLD_ROWS))
        types, device = (torch.uint8,), state.device
        expect(op, "history_folded", self.folded, layout, shape, dtypes=types, device=device)
        expect_index(op, "history_folding", self.folding, "slots", (slots,), device)
        inner = self.folded.stride()[-2:]
        if self.folded.numel() and inner != (shape[-1], 1):
            raise ValueError(
                f"treewy::{op}: history_folded must be contiguous within a slot, got strides "
                f"{list(self.folded.stride())}"
            )
        if not self.folding.is_contiguous():
            raise ValueError(
                f"treewy::{op}: history_folding must be contiguous, got strides "
                f"{list(self.folding.stride())}"
            )

    def of(self, slot: Tensor) -> Tensor:
        """Bool [B], rows whose history the state of a layer's pools holds."""
        if self.folded.shape[0] == 0:
            return slot < 0
        return self.folded.flatten(1).bool().any(1)[slot.clamp(min=0).long()] & (slot >= 0)


class History(NamedTuple):
    """The pools of the deferred commit, of one layer or of all.

    Keys in a 16-bit type are raw, to the bit what verification took, and normalised where they are
    used; in a wider type they are L2-normalised.
    """

    u: Tensor
    k: Tensor
    g: Tensor
    length: Tensor

    @property
    def keeps_raw_keys(self) -> bool:
        return self.k.dtype.itemsize == 2

    @classmethod
    def from_optional(cls, op: str, *tensors: Tensor | None) -> History | None:
        """None if all four are None; ValueError if some are."""
        given = [x for x in tensors if x is not None]
        if not given:
            return None
        if len(given) != len(tensors):
            raise ValueError(
                f"treewy::{op}: history_u, history_k, history_g and history_len go together, "
                f"got {len(given)} of the four"
            )
        return cls(*given)

    def check(self, op: str, state: Tensor, key_heads: int) -> None:
        """Raises ValueError unless they fit the state pool [(layers,) slots, HV, V, K]."""
        lead, (slots, heads, dim, key_dim) = state.shape[:-4], state.shape[-4:]
        prefix = "layers, slots, H" if lead else "slots, H"
        expect_dims(op, "history_u", self.u, f"{prefix}, HV, V")
        front, device = (*lead, slots, self.u.shape[-3]), state.device
        keys = (*front, key_heads, key_dim)
        expect(op, "history_u", self.u, f"{prefix}, HV, V", (*front, heads, dim), device=device)
        expect(op, "history_k", self.k, f"{prefix}, HK, K", keys, device=device)
        expect(op, "history_g", self.g, f"{prefix}, HV", (*front, heads), device=device)
        expect_index(op, "history_len", self.length, "slots", (slots,), device)

    def read(
        self, slot: Tensor, dtype: torch.dtype, folds: Folds | None = None
    ) -> reference.History | None:
        """The rows' histories from a layer's pools; on the CPU None if all are empty.

        Those that the state holds already are empty.
        """
        length = torch.where(slot >= 0, read_rows(self.length, slot), 0)
        if folds is not None:
            length = torch.where(folds.of(slot), 0, length)
        longest = self.u.shape[1]
        if length.is_cpu:
            longest = max(length.tolist(), default=0)
            if longest == 0:
                return None
        u, k, g = (read_rows(x[:, :longest], slot).to(dtype) for x in (self.u, self.k, self.g))
        return self.entries(u, k, g, length)

    def entries(self, u: Tensor, k: Tensor, g: Tensor, length: Tensor) -> reference.History:
        """What was read from these pools, keys normalised."""
        return reference.History(u, reference.l2norm(k) if self.keeps_raw_keys else k, g, length)

    def check_keys(self, op: str, k: Tensor) -> None:
        """Raises ValueError unless the pool can hold the keys `k`, which are raw."""
        if self.keeps_raw_keys and self.k.dtype != k.dtype:
            raise ValueError(
                f"treewy::{op}: history_k in {self.k.dtype} holds raw keys of that type, got k in "
                f"{k.dtype}"
            )


@dataclass(frozen=True)
class TreePlan:
    """Metadata of a batch of trees, the same for all layers.

    Attributes:
        valid: bool [B, N], real nodes.
        ancestors: bool [B, N, N], ancestor or self.
        parents: int32 [B, N], -1 at padded nodes.
        blocks: runs of nodes that are solved together, or None where only the device knows.
        counts: num_nodes on the host, or None likewise.
    """

    valid: Tensor
    ancestors: Tensor
    parents: Tensor
    blocks: tuple[tuple[int, int], ...] | None = None
    counts: tuple[int, ...] | None = None


def _make_plan(parents: Tensor, num_nodes: Tensor) -> TreePlan:
    valid = topology.valid_nodes(parents, num_nodes)
    ancestors = topology.ancestor_mask(parents, num_nodes)
    return TreePlan(valid, ancestors, torch.where(valid, parents, -1))


@lru_cache(maxsize=8)
def _host_plan(parents: bytes, num_nodes: bytes, shape: tuple[int, int]) -> TreePlan:
    """A checked plan, found by content: changed metadata can never meet a stale plan."""
    with torch.inference_mode(False):
        tree = torch.tensor(np.frombuffer(parents, np.int32)).view(shape)
        nodes = torch.tensor(np.frombuffer(num_nodes, np.int32))
        counts = tuple(op_checks.tree_values(tree, nodes))
        plan = _make_plan(tree, nodes)
        blocks = topology.independent_blocks(tree, nodes)
        return TreePlan(plan.valid, plan.ancestors, plan.parents, blocks, counts)


class Trees(NamedTuple):
    """A batch of trees and the slots of their sequences."""

    slot: Tensor
    parents: Tensor
    num_nodes: Tensor

    def check(self, op: str, shape: tuple[int, int], device: torch.device) -> None:
        """Raises ValueError unless the shapes are those of `shape` = (B, N)."""
        expect_index(op, "slot", self.slot, "batch", shape[:1], device)
        expect_index(op, "parents", self.parents, "batch, N", shape, device)
        expect_index(op, "num_nodes", self.num_nodes, "batch", shape[:1], device)

    def plan(self) -> TreePlan:
        """The trees' plan; on the CPU checked, and kept for the next layers of the step."""
        if not self.parents.is_cpu:
            return _make_plan(self.parents, self.num_nodes)
        shape = (self.parents.shape[0], self.parents.shape[1])
        return _host_plan(self.parents.numpy().tobytes(), self.num_nodes.numpy().tobytes(), shape)

    def real_nodes(self, op: str, plan: TreePlan, num_slots: int) -> Tensor | None:
        """Bool [B, N]: nodes whose outputs are wanted, None for all; checks slots on the CPU."""
        if self.slot.is_cpu:
            slots = op_checks.slot_values(op, self.slot, num_slots, unique=False)
            full = all(count == plan.valid.shape[1] for count in plan.counts or (-1,))
            if full and min(slots, default=0) >= 0:
                return None
        return plan.valid & (self.slot >= 0)[:, None]


def select_nodes(real: Tensor | None, x: Tensor) -> Tensor:
    """x [B, N, ...] where real [B, N], zeros elsewhere; None says that all are."""
    if real is None:
        return x
    return torch.where(real.view(*real.shape, *[1] * (x.dim() - 2)), x, 0)


@dataclass(frozen=True)
class Writes:
    """The rows of a batch that an operator writes to pools.

    On the CPU these are the active rows. Elsewhere the host does not know how many are active, so
    every inactive row repeats the first active one, which writes the same values twice; if none
    is active, `keep` makes all of them write what is there.

    Attributes:
        rows: int64 [R], rows of the batch.
        slots: int64 [R].
        keep: bool [R], rows that keep what they hold; None if there are none.
    """

    rows: Tensor
    slots: Tensor
    keep: Tensor | None

    @classmethod
    def of(cls, active: Tensor, slot: Tensor) -> Writes:
        """The writes of the active rows, bool [B]."""
        rows, keep = active_entries(active)
        return cls(rows, slot[rows].clamp(min=0).long(), keep)

    def __bool__(self) -> bool:
        return len(self.rows) > 0

    def into(self, pool: Tensor, new: Tensor) -> None:
        """`pool[slots] = new` for a pool [slots, ...]."""
        write_entries(pool, (self.slots,), new, self.keep)


def active_entries(active: Tensor) -> tuple[Tensor, Tensor | None]:
    """Indices of the active entries of a mask, as `Writes` describes them, and `keep`."""
    if active.is_cpu:
        return active.nonzero()[:, 0], None
    index = torch.arange(active.shape[0], device=active.device)
    entries = torch.where(active, index, active.int().argmax())
    return entries, ~active[entries]


def write_entries(
    pool: Tensor, index: tuple[Tensor, ...], new: Tensor, keep: Tensor | None
) -> None:
    """`pool[index] = new`, but for the entries to keep."""
    new = new.to(pool.dtype)
    if keep is not None:
        new = torch.where(keep.view(-1, *[1] * (new.dim() - 1)), pool[index], new)
    pool[index] = new


class Commit(NamedTuple):
    """Where each sequence of a batch goes: to a node of its tree."""

    slot: Tensor
    parents: Tensor
    num_nodes: Tensor
    accepted: Tensor

    @property
    def trees(self) -> Trees:
        """The trees alone."""
        return Trees(self.slot, self.parents, self.num_nodes)

    def check(self, op: str, device: torch.device) -> None:
        """Raises ValueError unless the shapes fit each other."""
        expect_dims(op, "parents", self.parents, "batch, N")
        batch, nodes = self.parents.shape
        self.trees.check(op, (batch, nodes), device)
        expect_index(op, "accepted", self.accepted, "batch", (batch,), device)

    def active(self, op: str, plan: TreePlan, num_slots: int) -> Tensor:
        """Bool [B], rows that move. Checks slots and accepted nodes on the CPU."""
        if self.slot.is_cpu:
            slots = op_checks.slot_values(op, self.slot, num_slots, unique=True)
            op_checks.accepted_values(op, self.accepted, slots, plan.counts or ())
        return (self.slot >= 0) & (self.accepted >= 0) & (self.accepted < self.num_nodes)

    def is_empty(self, num_slots: int) -> bool:
        """Whether the shapes alone say that no row can move."""
        return self.parents.numel() == 0 or num_slots == 0

    def last(self, rows: Tensor) -> Tensor:
        """The accepted node of the rows, int64, in range whatever it held."""
        nodes = self.parents.shape[1]
        return self.accepted[rows].clamp(min=0).clamp(max=nodes - 1).long()

    def paths(self, plan: TreePlan, rows: Tensor) -> Tensor:
        """Nodes from the root to the accepted one, int64 [R, P], -1 beyond the path."""
        last, longest = self.last(rows), self.parents.shape[1]
        if last.is_cpu:
            longest = int(plan.ancestors[rows, last].sum(-1).max()) if len(rows) else 0
        nodes, _ = topology.path_to(plan.parents[rows], last, longest)
        return nodes
