"""How the recurrent state moves to the accepted node: three policies behind one interface.

A policy verifies trees without writing the committed state, keeps what a commit will need (the
stash, one row a running sequence, all layers in one buffer), and commits once a step:

* `reconstruct`: stashes pseudo-values and log decays; a commit reads S_0 and writes S_a.
* `deferred`: the same stash; a commit appends the accepted path to a short history of the slot,
  which verification takes into account, and rewrites the state only when the history is full.
* `snapshot`: keeps the whole state of every node and copies one. A baseline and an oracle.

The operators are `torch.ops.treewy.*`; their shapes are in `trtllm_treewy/ops.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from trtllm_treewy import ops as ops  # registers torch.ops.treewy
from trtllm_treewy.batch import TreeBatch

DEFAULT_HISTORY_CAPACITY = 16


@dataclass(frozen=True)
class StateShape:
    """Sizes of the GDN state and of what a step may bring.

    Attributes:
        layers: GDN layers.
        slots: sequences held.
        key_heads, value_heads, key_dim, value_dim: HK, HV, and K and V of one head.
        max_batch, max_nodes: rows and nodes of the largest tree batch.
        state_dtype: type of the state pool.
        device: where everything lives.
    """

    layers: int
    slots: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    max_batch: int
    max_nodes: int
    state_dtype: torch.dtype
    device: torch.device

    @property
    def compute_dtype(self) -> torch.dtype:
        """Type of pseudo-values, decays and histories: float32, float64 for a float64 state."""
        return torch.promote_types(self.state_dtype, torch.float32)

    def per_slot(self, *sizes: int, dtype: torch.dtype) -> Tensor:
        """Zeros [layers, slots, *sizes]."""
        return self._zeros(self.layers, self.slots, *sizes, dtype=dtype)

    def per_node(self, *sizes: int, dtype: torch.dtype) -> Tensor:
        """Zeros [layers, max_batch, max_nodes, *sizes]."""
        return self._zeros(self.layers, self.max_batch, self.max_nodes, *sizes, dtype=dtype)

    def _zeros(self, *sizes: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(sizes, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class GdnInputs:
    """Inputs of one layer's delta rule: q, k, v after the conv, raw a and b, A_log, dt_bias."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor

    def as_args(self) -> tuple[Tensor, ...]:
        """In the order of the operators."""
        return self.q, self.k, self.v, self.a, self.b, self.A_log, self.dt_bias


class CommitPolicy(ABC):
    """One way to verify against a state pool and to commit to it.

    Args:
        shape: sizes of the pools.
        state: the state pool [layers, slots, HV, V, K], shared with prefill.
    """

    name: ClassVar[str]
    # Whether a commit needs the keys of the tree.
    needs_keys: ClassVar[bool] = True

    def __init__(self, shape: StateShape, state: Tensor) -> None:
        self.shape = shape
        self.state = state

    @abstractmethod
    def verify(self, layer: int, tree: TreeBatch, inputs: GdnInputs) -> Tensor:
        """Outputs [B, N, HV, V] of one layer; fills the stash, writes no committed state."""

    @abstractmethod
    def commit(self, tree: TreeBatch, accepted: Tensor, keys: Tensor | None) -> None:
        """Moves every row to its accepted node; -1 rows keep every bit.

        Args:
            tree: the tree verified last.
            accepted: int32 [B].
            keys: raw keys of the nodes [layers, B, N, HK, K], where `needs_keys`.
        """

    def check(self, tree: TreeBatch) -> None:
        """Raises ValueError for a tree this policy could not commit."""
        return  # any tree will do

    def clear(self, slot: int) -> None:
        """Forgets what the policy itself holds of `slot`."""
        return  # it holds nothing

    def materialize(self, slot: Tensor) -> None:
        """Brings the state pool of `slot` (int32 [B], -1 skipped) up to date."""
        return  # it is

    @property
    def stash_bytes(self) -> int:
        """Memory of the stash, all rows and layers."""
        return _bytes(self._stash())

    @property
    def pool_bytes(self) -> int:
        """Memory the policy holds for every slot, beside the state itself."""
        return 0

    @abstractmethod
    def _stash(self) -> list[Tensor]: ...


class ReconstructPolicy(CommitPolicy):
    """S_a is computed from S_0 and the stashed pseudo-values; one state read and write a step."""

    name = "reconstruct"

    def __init__(self, shape: StateShape, state: Tensor) -> None:
        super().__init__(shape, state)
        dtype = shape.compute_dtype
        self._u = shape.per_node(shape.value_heads, shape.value_dim, dtype=dtype)
        self._g = shape.per_node(shape.value_heads, dtype=dtype)

    def verify(self, layer: int, tree: TreeBatch, inputs: GdnInputs) -> Tensor:
        return self._verify(layer, tree, inputs, ())

    def commit(self, tree: TreeBatch, accepted: Tensor, keys: Tensor | None) -> None:
        torch.ops.treewy.commit(
            self.state, tree.slot, tree.parents, tree.num_nodes, accepted, *self._path(tree, keys)
        )

    def _verify(
        self, layer: int, tree: TreeBatch, inputs: GdnInputs, history: tuple[Tensor, ...]
    ) -> Tensor:
        out, u, g = torch.ops.treewy.tree_verify(
            *inputs.as_args(),
            self.state[layer],
            tree.slot,
            tree.parents,
            tree.num_nodes,
            *history,
        )
        _rows(self._u, tree)[layer] = u
        _rows(self._g, tree)[layer] = g
        return out

    def _path(self, tree: TreeBatch, keys: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if keys is None:
            raise ValueError(f"policy {self.name} needs the keys of the tree to commit")
        return _rows(self._u, tree), keys, _rows(self._g, tree)

    def _stash(self) -> list[Tensor]:
        return [self._u, self._g]


class DeferredPolicy(ReconstructPolicy):
    """Accepted paths collect in a history of each slot; the state is rewritten when it is full.

    Args:
        shape, state: as for every policy.
        history_capacity: accepted tokens a slot's history holds, at least the longest path of a
            tree (its depth + 1).
    """

    name = "deferred"

    def __init__(
        self, shape: StateShape, state: Tensor, history_capacity: int = DEFAULT_HISTORY_CAPACITY
    ) -> None:
        super().__init__(shape, state)
        if history_capacity < 1:
            raise ValueError(f"history_capacity must be >= 1, got {history_capacity}")
        self.history_capacity = history_capacity
        dtype, size = shape.compute_dtype, history_capacity
        self._history_u = shape.per_slot(size, shape.value_heads, shape.value_dim, dtype=dtype)
        self._history_k = shape.per_slot(size, shape.key_heads, shape.key_dim, dtype=dtype)
        self._history_g = shape.per_slot(size, shape.value_heads, dtype=dtype)
        self._history_len = torch.zeros(shape.slots, dtype=torch.int32, device=shape.device)

    def check(self, tree: TreeBatch) -> None:
        if tree.parents.device.type != "cpu":
            return  # reading the depth would wait for the device; the engine sizes the history
        longest = int(tree.depth.max()) + 1
        if longest > self.history_capacity:
            raise ValueError(
                f"a tree path of {longest} tokens does not fit the history of "
                f"{self.history_capacity} that the deferred commit keeps; raise history_capacity "
                "(deferred_history) or draft less deep"
            )

    def verify(self, layer: int, tree: TreeBatch, inputs: GdnInputs) -> Tensor:
        history = tuple(pool[layer] for pool in self._pools())
        return self._verify(layer, tree, inputs, (*history, self._history_len))

    def commit(self, tree: TreeBatch, accepted: Tensor, keys: Tensor | None) -> None:
        torch.ops.treewy.commit_deferred(
            self.state,
            *self._pools(),
            self._history_len,
            tree.slot,
            tree.parents,
            tree.num_nodes,
            accepted,
            *self._path(tree, keys),
        )

    def clear(self, slot: int) -> None:
        for pool in self._pools():
            pool[:, slot] = 0
        self._history_len[slot] = 0

    def materialize(self, slot: Tensor) -> None:
        torch.ops.treewy.flush_history(self.state, *self._pools(), self._history_len, slot)

    @property
    def pool_bytes(self) -> int:
        return _bytes([*self._pools(), self._history_len])

    def _pools(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._history_u, self._history_k, self._history_g


class SnapshotPolicy(CommitPolicy):
    """The full state of every node is kept; a commit copies one. Baseline and oracle."""

    name = "snapshot"
    needs_keys = False

    def __init__(self, shape: StateShape, state: Tensor) -> None:
        super().__init__(shape, state)
        self._states = shape.per_node(
            shape.value_heads, shape.value_dim, shape.key_dim, dtype=shape.state_dtype
        )

    def verify(self, layer: int, tree: TreeBatch, inputs: GdnInputs) -> Tensor:
        out, states = torch.ops.treewy.tree_verify_snapshot(
            *inputs.as_args(), self.state[layer], tree.slot, tree.parents, tree.num_nodes
        )
        _rows(self._states, tree)[layer] = states
        return out

    def commit(self, tree: TreeBatch, accepted: Tensor, keys: Tensor | None) -> None:
        torch.ops.treewy.commit_snapshot(
            self.state,
            tree.slot,
            tree.parents,
            tree.num_nodes,
            accepted,
            _rows(self._states, tree),
        )

    def _stash(self) -> list[Tensor]:
        return [self._states]


POLICIES: dict[str, type[CommitPolicy]] = {
    policy.name: policy for policy in (ReconstructPolicy, DeferredPolicy, SnapshotPolicy)
}


def make_policy(
    name: str, shape: StateShape, state: Tensor, history_capacity: int | None = None
) -> CommitPolicy:
    """The policy called `name`.

    Raises:
        ValueError: for an unknown name, listing those that exist.
    """
    if name not in POLICIES:
        raise ValueError(f"commit policy must be one of {', '.join(POLICIES)}, got {name!r}")
    options: dict[str, Any] = {}
    if name == DeferredPolicy.name and history_capacity is not None:
        options["history_capacity"] = history_capacity
    return POLICIES[name](shape, state, **options)


def _rows(stash: Tensor, tree: TreeBatch) -> Tensor:
    """The part of a stash buffer [layers, max_batch, max_nodes, ..] that `tree` uses."""
    batch, nodes = tree.parents.shape
    return stash[:, :batch, :nodes]


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
