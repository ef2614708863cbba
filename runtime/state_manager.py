"""Owner of the recurrent and conv state of every sequence, by slot.

A verify pass only reads committed state; `prefill` and `commit` alone write it, but that a deferred
commit's verification may fold a history into the state it belongs to, as `save` does: that changes
where the sequence's state is kept and not what it is. One tree is pending between `verify` and
`commit`; `discard` drops it, which leaves every sequence as it was.

The conv state needs no snapshots: the window after the accepted node is made of the raw conv
inputs along its path, which are stashed anyway. The keys a commit needs are computed again from
the same inputs with the window that is still uncommitted, so they need no stash of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_treewy.batch import PrefillBatch, TreeBatch, upload
from trtllm_treewy.config import ModelConfig

from .commit_policy import (
    PSEUDO_VALUES,
    CommitPolicy,
    GdnInputs,
    LayerStack,
    StateShape,
    make_policy,
)


class StateManager:
    """State pools of all GDN layers, and the stash of the tree that is being verified.

    Args:
        config: the model.
        num_slots: sequences held.
        max_batch_size, max_nodes: rows and nodes of the largest tree batch; the stash is
            allocated once, for these.
        state_dtype: type of the recurrent state.
        activation_dtype: type of the conv inputs and of the conv state.
        device: where the pools live.
        commit: `reconstruct`, `deferred` or `snapshot` (see `commit_policy`).
        history_capacity: tokens a slot's history holds (deferred only; 16 where not given).
        max_path: tokens of the longest path of a tree, where it is known (deferred only).
        stash, stash_dtype: what commits work from (see `commit_policy.make_policy`).
        num_checkpoints: copies of a sequence's state that can be kept (for the prefix cache).

    Attributes:
        state: [layers, slots, HV, V, K].
        conv_state: [layers, slots, kernel - 1, conv_dim], raw conv inputs, oldest first.
        policy: the commit policy.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_slots: int,
        max_batch_size: int,
        max_nodes: int,
        state_dtype: torch.dtype = torch.float32,
        activation_dtype: torch.dtype,
        device: torch.device | str,
        commit: str = "reconstruct",
        history_capacity: int | None = None,
        max_path: int | None = None,
        stash: str = PSEUDO_VALUES,
        stash_dtype: torch.dtype | None = None,
        num_checkpoints: int = 0,
    ) -> None:
        sizes = {"num_slots": num_slots, "max_batch_size": max_batch_size, "max_nodes": max_nodes}
        for name, value in {**sizes, "num_checkpoints": num_checkpoints + 1}.items():
            if value < 1:
                raise ValueError(f"state manager: {name} must be >= 1, got {value}")
        self.config = config
        shape = StateShape(
            layers=len(config.linear_layers),
            slots=num_slots,
            key_heads=config.linear_num_key_heads,
            value_heads=config.linear_num_value_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            max_batch=max_batch_size,
            max_nodes=max_nodes,
            state_dtype=state_dtype,
            activation_dtype=activation_dtype,
            device=torch.device(device),
        )
        self.shape = shape
        self.state = shape.per_slot(
            shape.value_heads, shape.value_dim, shape.key_dim, dtype=state_dtype
        )
        self.conv_state = shape.per_slot(
            config.linear_conv_kernel_dim - 1, config.conv_dim, dtype=activation_dtype
        )
        self.policy: CommitPolicy = make_policy(
            commit,
            shape,
            self.state,
            history_capacity=history_capacity,
            max_path=max_path,
            stash=stash,
            stash_dtype=stash_dtype,
        )
        self._conv_weights = LayerStack()
        self._conv_inputs = shape.per_node(config.conv_dim, dtype=activation_dtype)
        # Recurrent and conv states of checkpoints [layers, checkpoints, ...].
        self._checkpoints = tuple(
            pool.new_zeros(pool.shape[0], num_checkpoints, *pool.shape[2:])
            for pool in (self.state, self.conv_state)
        )
        self._used: set[int] = set()
        self._pending: TreeGdnStep | None = None

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints there is room for."""
        return self._checkpoints[0].shape[1]

    @property
    def checkpoint_bytes(self) -> int:
        """Memory of all checkpoints."""
        return sum(pool.numel() * pool.element_size() for pool in self._checkpoints)

    @property
    def pool_bytes(self) -> int:
        """Memory of all slots: recurrent state, conv state, and histories where deferred."""
        pools = (self.state, self.conv_state)
        return self.policy.pool_bytes + sum(p.numel() * p.element_size() for p in pools)

    @property
    def stash_bytes(self) -> int:
        """Memory of what verification leaves for the commit, for the largest batch."""
        inputs = self._conv_inputs
        return self.policy.stash_bytes + inputs.numel() * inputs.element_size()

    @property
    def snapshot_bytes(self) -> int:
        """Memory that a full state for every node of the largest batch takes, or would take."""
        shape = self.shape
        per_state = shape.value_heads * shape.value_dim * shape.key_dim * self.state.element_size()
        return shape.layers * shape.max_batch * shape.max_nodes * per_state

    def allocate(self, slot: int) -> None:
        """Takes `slot` for a new sequence; its state, conv state and history become zero."""
        self._check_range(slot)
        if slot in self._used:
            raise ValueError(f"slot {slot} is in use already; free it first")
        self._used.add(slot)
        self.state[:, slot] = 0
        self.conv_state[:, slot] = 0
        self.policy.clear(slot)

    def free(self, slot: int) -> None:
        """Gives `slot` back; nothing happens if it is free."""
        self._check_range(slot)
        self._check_not_pending([slot], "free")
        self._used.discard(slot)

    def prefill(self, batch: PrefillBatch) -> PrefillGdnStep:
        """Step that runs prompt tokens into the state.

        Raises:
            ValueError: for a slot that is not allocated or whose tree is pending.
        """
        self.check_prefill(batch.slots)
        return self.prefill_unchecked(batch)

    def check_prefill(self, slots: list[int]) -> None:
        """Raises ValueError for a slot that is not allocated or whose tree is pending."""
        self.check_allocated(slots)
        self._check_not_pending(slots, "prefill")

    def prefill_unchecked(self, batch: PrefillBatch) -> PrefillGdnStep:
        """The same of slots that are not known on the host: a captured step's."""
        self.policy.materialize(batch.slot)
        return PrefillGdnStep(self, batch)

    def verify(self, tree: TreeBatch) -> TreeGdnStep:
        """Step that scores a tree; it becomes the pending one.

        Raises:
            ValueError: when a tree is pending already, for a tree larger than the stash, and, on
                the CPU, for a slot that is not allocated (on a GPU that would wait for it).
        """
        if self._pending is not None:
            raise ValueError("a verified tree is pending; commit or discard it before the next")
        self._check_fits(tree)
        if tree.slot.device.type == "cpu":
            self.check_allocated(tree.slot.tolist())
        self.policy.check(tree)
        self._pending = TreeGdnStep(self, tree)
        return self._pending

    def commit(self, accepted: Tensor) -> None:
        """Moves every row of the pending tree to its accepted node, once.

        Args:
            accepted: int32 [B], tree index of the last accepted node; rows with -1 keep every
                bit of their state and conv state, but that a deferred commit may fold the history
                into the state.

        Raises:
            ValueError: when no tree is pending or not all layers have verified it; for accepted
                nodes out of range (from the operator, before anything is written).
        """
        step = self._pending
        if step is None:
            raise ValueError("no verified tree is pending; every verify has exactly one commit")
        tree = step.tree
        if accepted.shape != tree.slot.shape:
            raise ValueError(
                f"accepted must have one node for each of {tree.slot.shape[0]} rows, got "
                f"{list(accepted.shape)}"
            )
        step.check_complete()
        accepted = accepted.to(torch.int32)
        if self.shape.layers:  # a model may have attention alone
            self.policy.commit(tree, accepted, step)
        torch.ops.treewy.conv_commit(
            self.conv_state,
            tree.slot,
            tree.parents,
            tree.num_nodes,
            accepted,
            step.conv_inputs,
        )
        self._pending = None

    @property
    def pending(self) -> bool:
        """Whether a verified tree waits for its commit."""
        return self._pending is not None

    def resume(self, step: TreeGdnStep) -> None:
        """Makes a step of `verify` the pending one again, which `discard` dropped.

        A captured commit belongs to the captured verification of its shape, whichever ran last.
        """
        self._pending = step

    def discard(self) -> None:
        """Drops the pending tree, if there is one; every state stays as it is."""
        self._pending = None

    def save(self, slot: int, checkpoint: int) -> None:
        """Copies the committed state and conv state of `slot` to `checkpoint`.

        Raises:
            ValueError: a slot that is not allocated or whose tree is pending, or no such
                checkpoint.
        """
        self._check_checkpoint(checkpoint)
        self._check_not_pending([slot], "save")
        self.materialize(slot)
        for pool, kept in zip((self.state, self.conv_state), self._checkpoints, strict=True):
            kept[:, checkpoint] = pool[:, slot]

    def restore(self, slot: int, checkpoint: int) -> None:
        """Gives `slot`, just allocated, the states of `checkpoint`.

        Raises:
            ValueError: as for `save`.
        """
        self._check_checkpoint(checkpoint)
        self.check_allocated([slot])
        self._check_not_pending([slot], "restore")
        self.policy.clear(slot)
        for pool, kept in zip((self.state, self.conv_state), self._checkpoints, strict=True):
            pool[:, slot] = kept[:, checkpoint]

    def materialize(self, slot: int) -> None:
        """Brings `state[:, slot]` up to date (deferred commit: fold the history in)."""
        self.check_allocated([slot])
        self.policy.materialize(upload(torch.tensor([slot], dtype=torch.int32), self.shape.device))

    def _check_range(self, slot: int) -> None:
        if not 0 <= slot < self.shape.slots:
            raise ValueError(f"slot must be in [0, {self.shape.slots}), got {slot}")

    def _check_checkpoint(self, checkpoint: int) -> None:
        if not 0 <= checkpoint < self.num_checkpoints:
            raise ValueError(f"checkpoint must be in [0, {self.num_checkpoints}), got {checkpoint}")

    def check_allocated(self, slots: list[int]) -> None:
        """Every slot but -1 must be allocated, and occur once.

        Raises:
            ValueError: one is not, or occurs twice.
        """
        real = [slot for slot in slots if slot != -1]
        for slot in real:
            self._check_range(slot)
            if slot not in self._used:
                raise ValueError(f"slot {slot} is not allocated; allocate it first")
        if len(set(real)) != len(real):
            raise ValueError(f"a slot may occur once in a batch, got {slots}")

    def _check_not_pending(self, slots: list[int], what: str) -> None:
        if self._pending is None:
            return
        held = set(self._pending.tree.slot.tolist()) - {-1}
        for slot in slots:
            if slot in held:
                raise ValueError(
                    f"cannot {what} slot {slot}: its verified tree is pending; commit or discard it"
                )

    def _check_fits(self, tree: TreeBatch) -> None:
        batch, nodes = tree.parents.shape
        shape = self.shape
        for name, value, limit in (
            ("max_batch_size", batch, shape.max_batch),
            ("max_nodes", nodes, shape.max_nodes),
        ):
            if value > limit:
                raise ValueError(
                    f"a tree batch of {batch} rows and {nodes} nodes exceeds {name} {limit} of the "
                    f"state manager; prune or split it, or raise {name}"
                )


class PrefillGdnStep:
    """GDN step over prompt tokens: updates state and conv state in place, layer by layer."""

    def __init__(self, manager: StateManager, batch: PrefillBatch) -> None:
        self._manager = manager
        self._batch = batch

    def conv(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """`x` [T, conv_dim], `weight` [conv_dim, kernel]; returns [T, conv_dim]."""
        return torch.ops.treewy.prefill_conv(
            x,
            self._manager.conv_state[layer],
            self._batch.slot,
            self._batch.cu_seqlens,
            weight,
            None,
        )

    def delta_rule(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
    ) -> Tensor:
        """`q`, `k` [T, HK, K], `v` [T, HV, V], `a`, `b` [T, HV]; returns [T, HV, V]."""
        return torch.ops.treewy.prefill(
            q,
            k,
            v,
            a,
            b,
            A_log,
            dt_bias,
            self._manager.state[layer],
            self._batch.slot,
            self._batch.cu_seqlens,
        )


class TreeGdnStep:
    """GDN step over a draft tree: reads committed state, fills the stash."""

    def __init__(self, manager: StateManager, tree: TreeBatch) -> None:
        self.tree = tree
        self._manager = manager
        self._weights: list[Tensor | None] = [None] * manager.shape.layers
        self._verified: set[int] = set()

    @property
    def conv_inputs(self) -> Tensor:
        """The stashed raw conv inputs of this tree [layers, B, N, conv_dim]."""
        batch, nodes = self.tree.parents.shape
        return self._manager._conv_inputs[:, :batch, :nodes]

    @property
    def conv_state(self) -> Tensor:
        """The windows before this tree, as long as it is pending."""
        return self._manager.conv_state

    def conv_weights(self) -> Tensor:
        """Weights of all layers, which have been through `conv` [layers, conv_dim, kernel]."""
        return self._manager._conv_weights.of([w for w in self._weights if w is not None])

    def conv(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """`x` [B, N, conv_dim], `weight` [conv_dim, kernel]; returns [B, N, conv_dim]."""
        self._check_pending()
        self._weights[layer] = weight
        tree = self.tree
        return torch.ops.treewy.tree_conv_into(
            x,
            self.conv_state[layer],
            tree.slot,
            tree.parents,
            tree.num_nodes,
            weight,
            None,
            self.conv_inputs[layer],
        )

    def delta_rule(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
    ) -> Tensor:
        """`q`, `k` [B, N, HK, K], `v` [B, N, HV, V], `a`, `b` [B, N, HV]; returns v's shape."""
        self._check_pending()
        self._verified.add(layer)
        inputs = GdnInputs(q, k, v, a, b, A_log, dt_bias)
        return self._manager.policy.verify(layer, self.tree, inputs)

    def path_keys(self, accepted: Tensor) -> Tensor:
        """Keys [layers, B, N, HK, K] of the nodes on the paths to `accepted` [B].

        A commit reads no others, and what the others hold here is undefined. They come from the
        stashed conv inputs, all layers at once. The conv works channel by channel, so they are bit
        for bit the keys that verification saw, as long as the conv state is not committed yet.
        """
        config, tree = self._manager.config, self.tree
        channels = slice(config.key_dim, 2 * config.key_dim)
        inputs = self.conv_inputs[..., channels]
        keys = torch.empty_like(inputs, memory_format=torch.contiguous_format)
        torch.ops.treewy.path_conv(
            keys,
            self.conv_state[..., channels],
            tree.slot,
            tree.parents,
            tree.num_nodes,
            accepted,
            inputs,
            self.conv_weights()[:, channels],
            None,
        )
        return keys.unflatten(-1, (config.linear_num_key_heads, config.linear_key_head_dim))

    def check_complete(self) -> None:
        """Raises ValueError unless every layer has been through `conv` and `delta_rule`."""
        layers = len(self._weights)
        done = sum(
            layer in self._verified and weight is not None
            for layer, weight in enumerate(self._weights)
        )
        if done != layers:
            raise ValueError(f"the pending tree was verified in {done} of {layers} layers")

    def _check_pending(self) -> None:
        if self._manager._pending is not self:
            raise ValueError("this verify step was committed or discarded; start a new one")
