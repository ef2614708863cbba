"""The operators that commit: they move the states of all layers to accepted nodes.

Conventions and shapes are those of `ops`, which exports them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import op_checks, reference
from .op_inputs import (
    STATE_LAYOUT,
    Commit,
    Folds,
    History,
    TreePlan,
    Writes,
    active_entries,
    compute_dtype,
    read_rows,
    write_entries,
)
from .op_stash import InputStash, Stash

_DEFERRED_POOLS = ("state", "history_u", "history_k", "history_g", "history_len")
_FOLDS = ("history_folded", "history_folding")


@torch.library.custom_op("treewy::commit", mutates_args=("state",))
def commit(
    state: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    accepted: Tensor,
    u: Tensor,
    k: Tensor,
    g: Tensor,
) -> None:
    """Moves the states to the accepted nodes, from what `tree_verify` returned.

    Args:
        state: [L, slots, HV, V, K], written in place.
        slot, parents, num_nodes, accepted: see the module.
        u, g: [L, B, N, HV, V] and [L, B, N, HV] of `tree_verify`; u in any of its types.
        k: [L, B, N, HK, K], as given to `tree_verify` (not normalised).
    """
    _check_commit(state, slot, parents, num_nodes, accepted, u, k, g)
    goal, stash = Commit(slot, parents, num_nodes, accepted), Stash(u, k, g)
    plan, dtype = goal.trees.plan(), compute_dtype(state, u)
    active = goal.active("commit", plan, state.shape[1])
    if goal.is_empty(state.shape[1]):
        return
    writes = Writes.of(active, slot)
    if not writes:
        return
    paths = goal.paths(plan, writes.rows)
    # Layer by layer, so that the temporaries are a layer's states and not the model's.
    for layer, pool in enumerate(state):
        path = stash.along(layer, writes.rows, paths, dtype)
        before = pool.index_select(0, writes.slots).to(dtype)
        writes.into(pool, reference.commit_path(before, *path, paths >= 0))


@commit.register_fake
def _check_commit(
    state: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    accepted: Tensor,
    u: Tensor,
    k: Tensor,
    g: Tensor,
) -> None:
    Commit(slot, parents, num_nodes, accepted).check("commit", state.device)
    Stash(u, k, g).check("commit", state, parents.shape)


@torch.library.custom_op("treewy::commit_inputs", mutates_args=("state",))
def commit_inputs(
    state: Tensor,
    conv_state: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    accepted: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
) -> None:
    """Moves the states to the accepted nodes, from what the projections wrote.

    Conv, norms, gates and pseudo-values of the accepted paths are computed again; the states are
    those of `commit` up to rounding. Call it before `conv_commit`: it needs the old windows.

    Args:
        state: [L, slots, HV, V, K], written in place.
        conv_state: [L, slots, W-1, C], only read.
        slot, parents, num_nodes, accepted: see the module.
        x: raw conv inputs [L, B, N, C], as given to `tree_conv`; channels [q, k, v], so that
            C = 2 HK K + HV V.
        a, b: raw gates [L, B, N, HV].
        conv_weight: [L, C, W].
        conv_bias: [L, C] or None.
        A_log, dt_bias: [L, HV].
    """
    layers = (conv_weight, conv_bias, A_log, dt_bias)
    _check_inputs(state, conv_state, slot, parents, num_nodes, accepted, x, a, b, *layers)
    goal, stash = (
        Commit(slot, parents, num_nodes, accepted),
        InputStash(conv_state, x, a, b, *layers),
    )
    plan, dtype = goal.trees.plan(), compute_dtype(state, x)
    active = goal.active("commit_inputs", plan, state.shape[1])
    if goal.is_empty(state.shape[1]):
        return
    writes = Writes.of(active, slot)
    if not writes:
        return
    paths = goal.paths(plan, writes.rows)
    for layer, pool in enumerate(state):
        before = pool.index_select(0, writes.slots).to(dtype)
        path = stash.along(layer, writes, paths, before, dtype)
        writes.into(pool, reference.commit_path(before, *path, paths >= 0))


@commit_inputs.register_fake
def _check_inputs(
    state: Tensor,
    conv_state: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    accepted: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
) -> None:
    op = "commit_inputs"
    Commit(slot, parents, num_nodes, accepted).check(op, state.device)
    stash = InputStash(conv_state, x, a, b, conv_weight, conv_bias, A_log, dt_bias)
    stash.check(op, state, parents.shape)


@torch.library.custom_op("treewy::commit_deferred", mutates_args=_DEFERRED_POOLS)
def commit_deferred(
    state: Tensor,
    history_u: Tensor,
    history_k: Tensor,
    history_g: Tensor,
    history_len: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    accepted: Tensor,
    u: Tensor,
    k: Tensor,
    g: Tensor,
) -> None:
    """Appends the accepted paths to the histories; a history without room is folded in first.

    Args:
        state: [L, slots, HV, V, K], written only where a history is folded in.
        history_u: [L, slots, H, HV, V].
        history_k: [L, slots, H, HK, K], filled with normalised keys; in a 16-bit type, which is
            then that of k, with raw ones.
        history_g: [L, slots, H, HV], each entry's own log decay.
        history_len: int32 [slots], shared by the layers.
        slot, parents, num_nodes, accepted, u, k, g: as for `commit`.

    Raises:
        ValueError: also if a path has more than H nodes.
    """
    history, goal = (history_u, history_k, history_g, history_len), (slot, parents, num_nodes)
    _defer("commit_deferred", state, *history, *goal, accepted, u, k, g)


@commit_deferred.register_fake
def _check_deferred(*tensors: Tensor) -> None:
    Deferred.of(*tensors).check("commit_deferred")


@torch.library.custom_op(
    "treewy::commit_deferred_folding", mutates_args=(*_DEFERRED_POOLS, *_FOLDS)
)
def commit_deferred_folding(
    state: Tensor,
    history_u: Tensor,
    history_k: Tensor,
    history_g: Tensor,
    history_len: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    accepted: Tensor,
    u: Tensor,
    k: Tensor,
    g: Tensor,
    history_folded: Tensor,
    history_folding: Tensor,
) -> None:
    """`commit_deferred` behind `tree_verify_folding`: what that has begun to fold is folded whole.

    Args:
        history_folded: uint8 [L, slots, HV, ceil(V / 64)], what verification has folded already;
            zeros behind it for the rows that move.
        history_folding: int32 [slots], likewise.

    The other arguments are those of `commit_deferred`, and so are the errors.
    """
    history, goal = (history_u, history_k, history_g, history_len), (slot, parents, num_nodes)
    given = (*history, *goal, accepted, u, k, g, history_folded, history_folding)
    _defer("commit_deferred_folding", state, *given)


@commit_deferred_folding.register_fake
def _check_deferred_folding(*tensors: Tensor) -> None:
    Deferred.of(*tensors).check("commit_deferred_folding")


class Deferred(NamedTuple):
    """The arguments of a deferred commit, with flags of folds or without."""

    state: Tensor
    history: History
    goal: Commit
    stash: Stash
    folds: Folds | None

    @classmethod
    def of(cls, state: Tensor, *rest: Tensor) -> Deferred:
        """From the operators' arguments."""
        history, goal, stash = History(*rest[:4]), Commit(*rest[4:8]), Stash(*rest[8:11])
        return cls(state, history, goal, stash, Folds(*rest[11:]) if rest[11:] else None)

    def check(self, op: str) -> None:
        """Raises ValueError unless they fit together."""
        self.goal.check(op, self.state.device)
        self.stash.check(op, self.state, self.goal.parents.shape)
        self.history.check(op, self.state, self.stash.k.shape[3])
        self.history.check_keys(op, self.stash.k)
        if self.folds is not None:
            self.folds.check(op, self.state)


def _defer(op: str, *tensors: Tensor) -> None:
    given = Deferred.of(*tensors)
    given.check(op)
    state, history, goal, stash, folds = given
    plan, capacity = goal.trees.plan(), history.u.shape[2]
    active = goal.active(op, plan, state.shape[1])
    if goal.is_empty(state.shape[1]):
        return
    added = _path_lengths(goal, plan)
    fits = added <= capacity
    if active.is_cpu and bool((active & ~fits).any()):
        row = int((active & ~fits).nonzero()[0])
        raise ValueError(
            f"treewy::{op}: the accepted path of row {row} has {int(added[row])} nodes, "
            f"more than the history holds ({capacity})"
        )
    active = active & fits
    full = read_rows(history.length, goal.slot) + added > capacity
    if folds is not None:
        full |= read_rows(folds.folding, goal.slot) != 0
    _fold(state, history, folds, goal.slot, active & full)
    _append(history, goal, plan, Writes.of(active, goal.slot), stash)


def _path_lengths(goal: Commit, plan: TreePlan) -> Tensor:
    """Nodes on the path to each row's accepted node, [B]."""
    rows = torch.arange(goal.slot.shape[0], device=goal.slot.device)
    return plan.ancestors[rows, goal.last(rows)].sum(-1)


def _append(history: History, goal: Commit, plan: TreePlan, writes: Writes, stash: Stash) -> None:
    """Writes the accepted paths behind the histories' last entries."""
    if not writes:
        return
    paths = goal.paths(plan, writes.rows)
    valid = paths >= 0
    wanted = valid if writes.keep is None else valid & ~writes.keep[:, None]
    entries, keep = active_entries(wanted.flatten())
    length = history.length[writes.slots].clamp(min=0)  # below zero is none, as in the kernels
    at = length[:, None] + torch.arange(paths.shape[1], device=paths.device)
    index = (writes.slots.repeat_interleave(paths.shape[1])[entries], at.flatten()[entries])
    dtype = compute_dtype(history.u)
    for layer in range(stash.u.shape[0]):
        news = stash.along(layer, writes.rows, paths, dtype, not history.keeps_raw_keys)
        for pool, new in zip(history[:3], news, strict=True):
            write_entries(pool[layer], index, new.flatten(0, 1)[entries], keep)
    writes.into(history.length, length + valid.sum(-1))


def _fold(
    state: Tensor, history: History, folds: Folds | None, slot: Tensor, active: Tensor
) -> None:
    """Folds the histories of the active rows into their states and empties them."""
    writes = Writes.of(active & (read_rows(history.length, slot) > 0), slot)
    if not writes:
        return
    for layer in range(state.shape[0]):
        of_layer = History(history.u[layer], history.k[layer], history.g[layer], history.length)
        # The rows that verification has folded are there; the others are known here.
        known = None if folds is None else Folds(folds.folded[layer], folds.folding)
        fold_layer(state[layer], of_layer, known, writes)
    writes.into(history.length, torch.zeros_like(writes.slots))
    if folds is not None:
        for flags in folds.folded:
            writes.into(flags, torch.zeros_like(flags[writes.slots]))
        writes.into(folds.folding, torch.zeros_like(writes.slots))


def fold_layer(pool: Tensor, history: History, folds: Folds | None, writes: Writes) -> None:
    """Folds a layer's histories of the rows into their states, but those that are there already."""
    dtype = compute_dtype(pool)
    u, k, g = (x.index_select(0, writes.slots).to(dtype) for x in history[:3])
    before = pool.index_select(0, writes.slots)
    entries = history.entries(u, k, g, history.length[writes.slots])
    after = reference.fold_history(before.to(dtype), entries).to(pool.dtype)
    if folds is not None:
        after = torch.where(folds.of(writes.slots)[:, None, None, None], before, after)
    writes.into(pool, after)


@torch.library.custom_op("treewy::flush_history", mutates_args=_DEFERRED_POOLS)
def flush_history(
    state: Tensor,
    history_u: Tensor,
    history_k: Tensor,
    history_g: Tensor,
    history_len: Tensor,
    slot: Tensor,
) -> None:
    """Folds the histories of the slots into their states now, and empties them.

    Args:
        state, history_u, history_k, history_g, history_len: as for `commit_deferred`.
        slot: int32 [B], -1 rows are skipped.
    """
    _flush("flush_history", state, history_u, history_k, history_g, history_len, slot)


@flush_history.register_fake
def _check_flush(*tensors: Tensor) -> None:
    Flush.of(*tensors).check("flush_history")


@torch.library.custom_op("treewy::flush_history_folding", mutates_args=(*_DEFERRED_POOLS, *_FOLDS))
def flush_history_folding(
    state: Tensor,
    history_u: Tensor,
    history_k: Tensor,
    history_g: Tensor,
    history_len: Tensor,
    slot: Tensor,
    history_folded: Tensor,
    history_folding: Tensor,
) -> None:
    """`flush_history` of histories that `tree_verify_folding` may have begun to fold.

    Args:
        history_folded, history_folding: as for `commit_deferred_folding`.

    The other arguments are those of `flush_history`.
    """
    history = (history_u, history_k, history_g, history_len)
    _flush("flush_history_folding", state, *history, slot, history_folded, history_folding)


@flush_history_folding.register_fake
def _check_flush_folding(*tensors: Tensor) -> None:
    Flush.of(*tensors).check("flush_history_folding")


class Flush(NamedTuple):
    """The arguments of a flush, with flags of folds or without."""

    state: Tensor
    history: History
    slot: Tensor
    folds: Folds | None

    @classmethod
    def of(cls, state: Tensor, *rest: Tensor) -> Flush:
        """From the operators' arguments."""
        return cls(state, History(*rest[:4]), rest[4], Folds(*rest[5:]) if rest[5:] else None)

    def check(self, op: str) -> None:
        """Raises ValueError unless they fit together."""
        op_checks.expect_dims(op, "state", self.state, f"layers, {STATE_LAYOUT}")
        op_checks.expect_dims(op, "history_k", self.history.k, "layers, slots, H, HK, K")
        op_checks.expect_groups(op, self.history.k.shape[3], self.state.shape[2])
        self.history.check(op, self.state, self.history.k.shape[3])
        op_checks.expect_dims(op, "slot", self.slot, "batch")
        op_checks.expect_index(op, "slot", self.slot, "batch", self.slot.shape, self.state.device)
        if self.folds is not None:
            self.folds.check(op, self.state)


def _flush(op: str, *tensors: Tensor) -> None:
    given = Flush.of(*tensors)
    given.check(op)
    state, history, slot, folds = given
    if slot.is_cpu:
        op_checks.slot_values(op, slot, state.shape[1], unique=True)
    if slot.shape[0] == 0 or state.shape[1] == 0:
        return
    _fold(state, history, folds, slot, slot >= 0)


@torch.library.custom_op("treewy::commit_snapshot", mutates_args=("state",))
def commit_snapshot(
    state: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    accepted: Tensor,
    states: Tensor,
) -> None:
    """Copies the stored states of the accepted nodes into the pool.

    Args:
        state: [L, slots, HV, V, K], written in place.
        slot, parents, num_nodes, accepted: see the module.
        states: [L, B, N, HV, V, K] of `tree_verify_snapshot`.
    """
    _check_snapshot(state, slot, parents, num_nodes, accepted, states)
    goal = Commit(slot, parents, num_nodes, accepted)
    active = goal.active("commit_snapshot", goal.trees.plan(), state.shape[1])
    if goal.is_empty(state.shape[1]):
        return
    writes = Writes.of(active, slot)
    last = goal.last(writes.rows)
    for pool, stored in zip(state, states, strict=True):
        writes.into(pool, stored[writes.rows, last])


@commit_snapshot.register_fake
def _check_snapshot(
    state: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    accepted: Tensor,
    states: Tensor,
) -> None:
    op, layout = "commit_snapshot", "layers, batch, N, HV, V, K"
    op_checks.expect_dims(op, "state", state, f"layers, {STATE_LAYOUT}")
    Commit(slot, parents, num_nodes, accepted).check(op, state.device)
    shape = (state.shape[0], *parents.shape, *state.shape[2:])
    op_checks.expect(op, "states", states, layout, shape, device=state.device)
