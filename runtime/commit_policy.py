"""How the recurrent state moves to the accepted node: three policies behind one interface.

A policy verifies trees without moving the committed state, keeps what a commit will need (the
stash, one row a running sequence, all layers in one buffer), and commits once a step:

* `reconstruct`: a commit reads S_0 and writes S_a, from either of two stashes: pseudo-values and
  log decays, or the gates alone beside the raw conv inputs, which are kept in any case.
* `deferred`: stashes pseudo-values; a commit appends the accepted path to a short history of the
  slot, which verification takes into account. The state is rewritten only when that is nearly full:
  by the verification that reads it anyway, or by the commit where that could not. On a GPU steps of
  one or two rows commit as `reconstruct` does.
* `snapshot`: keeps the whole state of every node and copies one. A baseline and an oracle.

The operators are `torch.ops.treewy.*`; their shapes are in `trtllm_treewy/ops.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from trtllm_treewy import ops as ops  # registers torch.ops.treewy
from trtllm_treewy import triton_ops
from trtllm_treewy.batch import TreeBatch
from trtllm_treewy.op_inputs import Folds

DEFAULT_HISTORY_CAPACITY = 16
# Rows of a GPU's step up to which a history costs a verification as much as it saves the commit.
FEW_ROWS = 2
PSEUDO_VALUES, INPUTS = "pseudo_values", "inputs"


def choose_stash(wanted: str) -> str:
    """What a commit works from: "pseudo_values" or "inputs"; `wanted` may be "auto".

    "auto" takes the faster one, and so far that is pseudo-values everywhere. A layer of
    Qwen3.5-35B-A3B on an H200, batch 64, 16 nodes, 4 accepted, microseconds:

                        pseudo-values     inputs
        bf16 state      32.2 + 38.4       28.3 + 61.9     verify + commit
        fp32 state      63.6 + 73.4       63.7 + 111

    Inputs save what verification writes, and cost more where the path is computed again. They are
    an option for their memory: no value of a node is kept but what the projections write.
    """
    return PSEUDO_VALUES if wanted == "auto" else wanted


@dataclass(frozen=True)
class StateShape:
    """Sizes of the GDN state and of what a step may bring.

    Attributes:
        layers: GDN layers.
        slots: sequences held.
        key_heads, value_heads, key_dim, value_dim: HK, HV, and K and V of one head.
        max_batch, max_nodes: rows and nodes of the largest tree batch.
        state_dtype: type of the state pool.
        activation_dtype: type of the conv inputs and raw gates.
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
    activation_dtype: torch.dtype
    device: torch.device

    @property
    def compute_dtype(self) -> torch.dtype:
        """Type of pseudo-values and decays: float32, float64 for a float64 state."""
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


class TreeInputs(Protocol):
    """What verification keeps of a tree whatever the policy: its raw conv inputs."""

    @property
    def conv_inputs(self) -> Tensor:
        """[layers, B, N, conv_dim]."""
        ...

    @property
    def conv_state(self) -> Tensor:
        """The windows before the tree [layers, slots, kernel - 1, conv_dim]."""
        ...

    def conv_weights(self) -> Tensor:
        """[layers, conv_dim, kernel]."""
        ...

    def path_keys(self, accepted: Tensor) -> Tensor:
        """Raw keys [layers, B, N, HK, K] of the nodes on the accepted paths, by a conv."""
        ...


class LayerStack:
    """Parameters that layers give one by one, as one tensor [layers, ...].

    It is made again when a layer gives another tensor, or one that was written to meanwhile.
    """

    def __init__(self) -> None:
        # The tensors are held, so that no other can have come to lie at their addresses.
        self._given: list[tuple[Tensor, int]] = []
        self._stacked: Tensor | None = None

    def of(self, tensors: list[Tensor]) -> Tensor:
        """The stack of the layers' tensors."""
        given = [(x, 0 if x.is_inference() else x._version) for x in tensors]
        known = len(given) == len(self._given) and all(
            x.data_ptr() == y.data_ptr() and v == w and not x.is_inference()
            for (x, v), (y, w) in zip(given, self._given, strict=True)
        )
        if self._stacked is None or not known:
            self._given, self._stacked = given, torch.stack(tensors)
        return self._stacked


class CommitPolicy(ABC):
    """One way to verify against a state pool and to commit to it.

    Args:
        shape: sizes of the pools.
        state: the state pool [layers, slots, HV, V, K], shared with prefill.
    """

    name: ClassVar[str]

    def __init__(self, shape: StateShape, state: Tensor) -> None:
        self.shape = shape
        self.state = state

    @abstractmethod
    def verify(self, layer: int, tree: TreeBatch, inputs: GdnInputs) -> Tensor:
        """Outputs [B, N, HV, V] of one layer; fills the stash. What is committed stays the same."""

    @abstractmethod
    def commit(self, tree: TreeBatch, accepted: Tensor, inputs: TreeInputs) -> None:
        """Moves every row to its accepted node; -1 rows stay where they are.

        They keep every bit, but that `deferred` may fold their history into their state.

        Args:
            tree: the tree verified last.
            accepted: int32 [B].
            inputs: of that tree; its windows are not committed yet.
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
    """S_a is computed from S_0 and the stashed pseudo-values; one state read and write a step.

    Args:
        shape, state: as for every policy.
        stash_dtype: type of the pseudo-values, that of the computation unless given; bfloat16 only
            beside a bfloat16 state. It halves their memory; over many commits it adds a tenth to
            two fifths to the error that rounding the state has anyway.
    """

    name = "reconstruct"

    def __init__(
        self, shape: StateShape, state: Tensor, stash_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(shape, state)
        dtype = shape.compute_dtype
        of_u = stash_dtype or dtype
        if of_u != dtype and {of_u, shape.state_dtype} != {torch.bfloat16}:
            raise ValueError(
                f"stash_dtype must be {dtype}, or bfloat16 beside a bfloat16 state, got "
                f"{stash_dtype} beside {shape.state_dtype}"
            )
        self._u = shape.per_node(shape.value_heads, shape.value_dim, dtype=of_u)
        self._g = shape.per_node(shape.value_heads, dtype=dtype)

    def verify(self, layer: int, tree: TreeBatch, inputs: GdnInputs) -> Tensor:
        out: Tensor = torch.ops.treewy.tree_verify_into(
            *inputs.as_args(),
            self.state[layer],
            tree.slot,
            tree.parents,
            tree.num_nodes,
            _rows(self._u, tree)[layer],
            _rows(self._g, tree)[layer],
        )
        return out

    def commit(self, tree: TreeBatch, accepted: Tensor, inputs: TreeInputs) -> None:
        torch.ops.treewy.commit(
            self.state,
            tree.slot,
            tree.parents,
            tree.num_nodes,
            accepted,
            *self._path(tree, accepted, inputs),
        )

    def _path(
        self, tree: TreeBatch, accepted: Tensor, inputs: TreeInputs
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _rows(self._u, tree), inputs.path_keys(accepted), _rows(self._g, tree)

    def _stash(self) -> list[Tensor]:
        return [self._u, self._g]


class ReconstructInputsPolicy(CommitPolicy):
    """S_a is computed from S_0 and what the projections wrote; verification stashes gates alone."""

    name = "reconstruct"

    def __init__(self, shape: StateShape, state: Tensor) -> None:
        super().__init__(shape, state)
        self._a = shape.per_node(shape.value_heads, dtype=shape.activation_dtype)
        self._b = shape.per_node(shape.value_heads, dtype=shape.activation_dtype)
        self._parameters: list[tuple[Tensor, Tensor]] = [(state, state)] * shape.layers
        self._A_log, self._dt_bias = LayerStack(), LayerStack()

    def verify(self, layer: int, tree: TreeBatch, inputs: GdnInputs) -> Tensor:
        for name, gate in (("a", inputs.a), ("b", inputs.b)):
            if gate.dtype != self._a.dtype:
                raise ValueError(
                    f"the stash of inputs holds {name} in {self._a.dtype}, the type of the "
                    f"activations, got {gate.dtype}"
                )
        out: Tensor = torch.ops.treewy.tree_outputs(
            *inputs.as_args(), self.state[layer], tree.slot, tree.parents, tree.num_nodes
        )
        _rows(self._a, tree)[layer] = inputs.a
        _rows(self._b, tree)[layer] = inputs.b
        self._parameters[layer] = inputs.A_log, inputs.dt_bias
        return out

    def commit(self, tree: TreeBatch, accepted: Tensor, inputs: TreeInputs) -> None:
        torch.ops.treewy.commit_inputs(
            self.state,
            inputs.conv_state,
            tree.slot,
            tree.parents,
            tree.num_nodes,
            accepted,
            inputs.conv_inputs,
            _rows(self._a, tree),
            _rows(self._b, tree),
            inputs.conv_weights(),
            None,
            self._A_log.of([A_log for A_log, _ in self._parameters]),
            self._dt_bias.of([dt_bias for _, dt_bias in self._parameters]),
        )

    def _stash(self) -> list[Tensor]:
        return [self._a, self._b]


class DeferredPolicy(ReconstructPolicy):
    """Accepted paths collect in a history of each slot; the state is rewritten when it is full.

    Args:
        shape, state, stash_dtype: as for `ReconstructPolicy`.
        history_capacity: accepted tokens a slot's history holds, at least the longest path of a
            tree (its depth + 1).
        max_path: tokens of the longest path of any tree, as far as it is known.
        few_rows: steps of at most so many rows, padding counted, commit as `reconstruct` does, and
            fold what histories others left: their states are few bytes, and what is left of a
            history's gain is its latency. None: `FEW_ROWS` on a GPU, else 0.

    A history is made of what verification left, to the bit: pseudo-values in the stash's type, and
    raw keys where the activations have 16 bits.

    A history that the longest path may not fit behind is folded by the next verification of each
    layer, where the kernel can; the state and what is left of the history are the same sequence
    before and after it, so that a tree may be verified again or given up. What verification could
    not fold, and what became full sooner, the commit folds.
    """

    name = "deferred"

    def __init__(
        self,
        shape: StateShape,
        state: Tensor,
        stash_dtype: torch.dtype | None = None,
        history_capacity: int = DEFAULT_HISTORY_CAPACITY,
        max_path: int | None = None,
        few_rows: int | None = None,
    ) -> None:
        super().__init__(shape, state, stash_dtype)
        if few_rows is None:
            few_rows = FEW_ROWS if shape.device.type == "cuda" else 0
        self.few_rows = few_rows
        if max_path is not None and max_path < 1:
            raise ValueError(f"max_path must be >= 1, got {max_path}")
        self.max_path = max_path
        if history_capacity < 1:
            raise ValueError(f"history_capacity must be >= 1, got {history_capacity}")
        self.history_capacity = history_capacity
        dtype, size = shape.compute_dtype, history_capacity
        of_k = shape.activation_dtype if shape.activation_dtype.itemsize == 2 else dtype
        of_u = self._u.dtype
        self._history_u = shape.per_slot(size, shape.value_heads, shape.value_dim, dtype=of_u)
        self._history_k = shape.per_slot(size, shape.key_heads, shape.key_dim, dtype=of_k)
        self._history_g = shape.per_slot(size, shape.value_heads, dtype=dtype)
        self._history_len = torch.zeros(shape.slots, dtype=torch.int32, device=shape.device)
        sizes = shape.layers, shape.slots, shape.value_heads, shape.value_dim
        self._folds = Folds.new(*sizes, shape.device)

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
        out: Tensor = torch.ops.treewy.tree_verify_folding(
            *inputs.as_args(),
            self.state[layer],
            tree.slot,
            tree.parents,
            tree.num_nodes,
            _rows(self._u, tree)[layer],
            _rows(self._g, tree)[layer],
            *(pool[layer] for pool in self._pools()),
            self._history_len,
            self._folds.folded[layer],
            self._folds.folding,
            self.fold_above(tree),
        )
        return out

    def fold_above(self, tree: TreeBatch) -> int:
        """Histories with more entries are folded by the tree's verification; from shapes alone."""
        capacity, nodes = self.history_capacity, tree.parents.shape[1]
        longest = self.max_path
        if longest is None:
            if tree.parents.device.type != "cpu":
                return capacity  # its depth is on the device: the commits fold
            longest = int(tree.depth.max()) + 1
        # Less than half full, it would be folded so often that the commits' folds cost no more.
        return max(capacity - min(longest, nodes), capacity // 2)

    def commit(self, tree: TreeBatch, accepted: Tensor, inputs: TreeInputs) -> None:
        if tree.slot.shape[0] <= self.few_rows:
            self.materialize(tree.slot)  # what steps of more rows have left
            super().commit(tree, accepted, inputs)
            return
        torch.ops.treewy.commit_deferred_folding(
            self.state,
            *self._pools(),
            self._history_len,
            tree.slot,
            tree.parents,
            tree.num_nodes,
            accepted,
            *self._path(tree, accepted, inputs),
            *self._folds,
        )

    def clear(self, slot: int) -> None:
        for pool in (*self._pools(), self._folds.folded):
            pool[:, slot] = 0
        self._history_len[slot] = 0
        self._folds.folding[slot] = 0

    def materialize(self, slot: Tensor) -> None:
        pools = (*self._pools(), self._history_len)
        torch.ops.treewy.flush_history_folding(self.state, *pools, slot, *self._folds)

    @property
    def pool_bytes(self) -> int:
        return _bytes([*self._pools(), self._history_len, *self._folds])

    def _pools(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._history_u, self._history_k, self._history_g


class SnapshotPolicy(CommitPolicy):
    """The full state of every node is kept; a commit copies one. Baseline and oracle.

    On a GPU its steps are kernels of their own (`triton_ops/snapshots.py`), which write the states
    where they are kept; elsewhere, and in float64, the torch operators.
    """

    name = "snapshot"

    def __init__(self, shape: StateShape, state: Tensor) -> None:
        super().__init__(shape, state)
        self._states = shape.per_node(
            shape.value_heads, shape.value_dim, shape.key_dim, dtype=shape.state_dtype
        )

    def verify(self, layer: int, tree: TreeBatch, inputs: GdnInputs) -> Tensor:
        kept, state = _rows(self._states, tree)[layer], self.state[layer]
        given = (*inputs.as_args(), state, tree.slot, tree.parents, tree.num_nodes)
        if all(triton_ops.serves(x) for x in (*inputs.as_args(), state)):
            from trtllm_treewy.triton_ops.snapshots import verify_snapshots

            return verify_snapshots(*given, states=kept)
        out, states = torch.ops.treewy.tree_verify_snapshot(*given)
        kept.copy_(states)
        return out

    def commit(self, tree: TreeBatch, accepted: Tensor, inputs: TreeInputs) -> None:
        kept = _rows(self._states, tree)
        if triton_ops.serves(self.state):
            from trtllm_treewy.triton_ops.snapshots import commit_snapshots

            commit_snapshots(self.state, tree.slot, tree.num_nodes, accepted, kept)
            return
        torch.ops.treewy.commit_snapshot(
            self.state, tree.slot, tree.parents, tree.num_nodes, accepted, kept
        )

    def _stash(self) -> list[Tensor]:
        return [self._states]


POLICIES: dict[str, type[CommitPolicy]] = {
    policy.name: policy for policy in (ReconstructPolicy, DeferredPolicy, SnapshotPolicy)
}


def make_policy(
    name: str,
    shape: StateShape,
    state: Tensor,
    *,
    history_capacity: int | None = None,
    max_path: int | None = None,
    stash: str = PSEUDO_VALUES,
    stash_dtype: torch.dtype | None = None,
) -> CommitPolicy:
    """The policy called `name`.

    Args:
        name: `reconstruct`, `deferred` or `snapshot`.
        shape, state: sizes and the state pool.
        history_capacity, max_path: of `deferred`.
        stash: what commits work from, "pseudo_values" or "inputs" (`choose_stash`).
        stash_dtype: type of the pseudo-values, where there are any.

    Raises:
        ValueError: for an unknown name or stash, listing those that exist, and for a policy that
            has no such stash.
    """
    if name not in POLICIES:
        raise ValueError(f"commit policy must be one of {', '.join(POLICIES)}, got {name!r}")
    if stash not in (PSEUDO_VALUES, INPUTS):
        raise ValueError(f"stash must be {PSEUDO_VALUES} or {INPUTS}, got {stash!r}")
    if stash == INPUTS:
        if name != ReconstructPolicy.name:
            raise ValueError(f"commit policy {name} cannot work from a stash of inputs")
        return ReconstructInputsPolicy(shape, state)
    options: dict[str, Any] = {}
    if name == DeferredPolicy.name:
        options["max_path"] = max_path
        if history_capacity is not None:
            options["history_capacity"] = history_capacity
    if name != SnapshotPolicy.name:
        options["stash_dtype"] = stash_dtype
    return POLICIES[name](shape, state, **options)


def _rows(stash: Tensor, tree: TreeBatch) -> Tensor:
    """The part of a stash buffer [layers, max_batch, max_nodes, ..] that `tree` uses."""
    batch, nodes = tree.parents.shape
    return stash[:, :batch, :nodes]


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
