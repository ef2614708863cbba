"""The operators `torch.ops.treewy.*`: the reference mathematics by slot, on any device.

Importing this module registers them. Each has a kernel in torch for every device and a fake
kernel for tracing; device kernels are added with `register_kernel`.

Conventions that all operators share (L layers, B rows, N nodes, W the conv kernel's width):

* Verify, prefill and conv operators take one layer's pools [slots, ...]; commits take the pools
  of all layers [L, slots, ...].
* `slot` int32 [B]: -1 marks a padded row, which is neither read nor written and whose outputs are
  zero. Slot 0 is an ordinary slot. `parents` int32 [B, N], parents first, root -1; `num_nodes`
  int32 [B], nodes beyond it are padding, with outputs zero.
* `accepted` int32 [B]: index of the last accepted node; -1 leaves the row's state bit-identical.
* q, k [.., HK, K], v [.., HV, V], a, b [.., HV] are the raw projections, views included: gates and
  normalisation happen inside, in float32 (float64 if q or the state is). A_log, dt_bias [HV].
* State is [slots, HV, V, K]. What verification keeps per node is `u` and the node's own log decay
  `g` (not the path's sum: see `reference.py`).

A wrong shape, type or device raises ValueError, and so do wrong values in CPU tensors, before
anything is written. On other devices values are not read back: rows whose `accepted` is out of
range, or whose path does not fit the history, are left alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from . import op_checks, reference
from .op_inputs import (
    STATE_LAYOUT,
    Commit,
    History,
    Projections,
    Stash,
    TreePlan,
    Trees,
    Writes,
    active_entries,
    compute_dtype,
    read_rows,
    select_nodes,
    write_entries,
)

# ------------------------------------------------------------------ verification


@torch.library.custom_op("treewy::tree_verify", mutates_args=())
def tree_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    history_u: Tensor | None = None,
    history_k: Tensor | None = None,
    history_g: Tensor | None = None,
    history_len: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of all nodes of the trees, and what a commit needs. Reads the state, writes nothing.

    Args:
        q, k, v, a, b, A_log, dt_bias, state, slot, parents, num_nodes: see the module; the
            projections are [B, N, ...].
        history_u, history_k, history_g, history_len: accepted nodes that `commit_deferred` has not
            folded into the state yet, one layer of its pools. All or none.

    Returns:
        out [B, N, HV, V] in v's type; u [B, N, HV, V] and the nodes' own log decay g [B, N, HV],
        both float32 (float64 if q or the state is).
    """
    inputs, trees = Projections(q, k, v, a, b, A_log, dt_bias), Trees(slot, parents, num_nodes)
    history = History.from_optional("tree_verify", history_u, history_k, history_g, history_len)
    _check_verify("tree_verify", inputs, state, trees, history)
    plan, dtype = trees.plan(), compute_dtype(q, state)
    real = trees.real_nodes("tree_verify", plan, state.shape[0])
    prepared = inputs.prepare(dtype)
    out, u = reference.tree_wy(
        *prepared,
        read_rows(state, slot).to(dtype),
        plan.ancestors,
        history=history.read(slot, dtype) if history else None,
        blocks=plan.blocks,
    )
    g = prepared[3]
    return select_nodes(real, out.to(v.dtype)), select_nodes(real, u), select_nodes(real, g)


def _check_verify(
    op: str, inputs: Projections, state: Tensor, trees: Trees, history: History | None = None
) -> None:
    inputs.check(op, "batch, N", state)
    batch, nodes, key_heads = inputs.q.shape[:3]
    trees.check(op, (batch, nodes), state.device)
    if history:
        history.check(op, state, key_heads)


@tree_verify.register_fake
def _(  # type: ignore[no-untyped-def]
    q, k, v, a, b, A_log, dt_bias, state, slot, parents, num_nodes,
    history_u=None, history_k=None, history_g=None, history_len=None,
):  # fmt: skip
    inputs, trees = Projections(q, k, v, a, b, A_log, dt_bias), Trees(slot, parents, num_nodes)
    history = History.from_optional("tree_verify", history_u, history_k, history_g, history_len)
    _check_verify("tree_verify", inputs, state, trees, history)
    dtype = compute_dtype(q, state)
    u = v.new_empty(v.shape, dtype=dtype)
    return v.new_empty(v.shape), u, v.new_empty(v.shape[:3], dtype=dtype)


@torch.library.custom_op("treewy::tree_verify_snapshot", mutates_args=())
def tree_verify_snapshot(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
) -> tuple[Tensor, Tensor]:
    """Outputs of all nodes by the step-by-step recurrence, and the state after every node.

    The baseline that TreeWY does without, and an oracle. Arguments as for `tree_verify`.

    Returns:
        out [B, N, HV, V] in v's type and states [B, N, HV, V, K] in the state's type. A node
        continues from its parent's state as computed, not as rounded for storage.
    """
    op = "tree_verify_snapshot"
    inputs, trees = Projections(q, k, v, a, b, A_log, dt_bias), Trees(slot, parents, num_nodes)
    _check_verify(op, inputs, state, trees)
    plan, dtype = trees.plan(), compute_dtype(q, state)
    real = trees.real_nodes(op, plan, state.shape[0])
    out, states = reference.tree_recurrence(
        *inputs.prepare(dtype), read_rows(state, slot).to(dtype), plan.parents
    )
    states = states.to(state.dtype).contiguous()
    return select_nodes(real, out.to(v.dtype)), select_nodes(real, states)


@tree_verify_snapshot.register_fake
def _(q, k, v, a, b, A_log, dt_bias, state, slot, parents, num_nodes):  # type: ignore[no-untyped-def]
    inputs, trees = Projections(q, k, v, a, b, A_log, dt_bias), Trees(slot, parents, num_nodes)
    _check_verify("tree_verify_snapshot", inputs, state, trees)
    return v.new_empty(v.shape), state.new_empty((*v.shape[:2], *state.shape[1:]))


# ------------------------------------------------------------------ commits


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
        u, g: [L, B, N, HV, V] and [L, B, N, HV] of `tree_verify`.
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


@torch.library.custom_op(
    "treewy::commit_deferred",
    mutates_args=("state", "history_u", "history_k", "history_g", "history_len"),
)
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
        history_k: [L, slots, H, HK, K], filled with normalised keys.
        history_g: [L, slots, H, HV], each entry's own log decay.
        history_len: int32 [slots], shared by the layers.
        slot, parents, num_nodes, accepted, u, k, g: as for `commit`.

    Raises:
        ValueError: also if a path has more than H nodes.
    """
    op = "commit_deferred"
    history, stash = History(history_u, history_k, history_g, history_len), Stash(u, k, g)
    goal = Commit(slot, parents, num_nodes, accepted)
    _check_deferred(state, *history, *goal, *stash)
    plan = goal.trees.plan()
    active = goal.active(op, plan, state.shape[1])
    if goal.is_empty(state.shape[1]):
        return
    added = _path_lengths(goal, plan)
    fits = added <= history_u.shape[2]
    if active.is_cpu and bool((active & ~fits).any()):
        row = int((active & ~fits).nonzero()[0])
        raise ValueError(
            f"treewy::{op}: the accepted path of row {row} has {int(added[row])} nodes, "
            f"more than the history holds ({history_u.shape[2]})"
        )
    active = active & fits
    full = active & (read_rows(history_len, slot) + added > history_u.shape[2])
    _fold(state, history, slot, full)
    _append(history, goal, plan, Writes.of(active, slot), stash)


@commit_deferred.register_fake
def _check_deferred(
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
    op = "commit_deferred"
    Commit(slot, parents, num_nodes, accepted).check(op, state.device)
    Stash(u, k, g).check(op, state, parents.shape)
    History(history_u, history_k, history_g, history_len).check(op, state, k.shape[3])


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
    length = history.length[writes.slots]
    at = length[:, None] + torch.arange(paths.shape[1], device=paths.device)
    index = (writes.slots.repeat_interleave(paths.shape[1])[entries], at.flatten()[entries])
    dtype = compute_dtype(history.u)
    for layer in range(stash.u.shape[0]):
        news = stash.along(layer, writes.rows, paths, dtype)
        for pool, new in zip(history[:3], news, strict=True):
            write_entries(pool[layer], index, new.flatten(0, 1)[entries], keep)
    writes.into(history.length, length + valid.sum(-1))


def _fold(state: Tensor, history: History, slot: Tensor, active: Tensor) -> None:
    """Folds the histories of the active rows into their states and empties them."""
    writes = Writes.of(active & (read_rows(history.length, slot) > 0), slot)
    if not writes:
        return
    dtype = compute_dtype(state)
    for layer, pool in enumerate(state):
        u, k, g = (x[layer].index_select(0, writes.slots).to(dtype) for x in history[:3])
        before = pool.index_select(0, writes.slots).to(dtype)
        entries = reference.History(u, k, g, history.length[writes.slots])
        writes.into(pool, reference.fold_history(before, entries))
    writes.into(history.length, torch.zeros_like(writes.slots))


@torch.library.custom_op(
    "treewy::flush_history",
    mutates_args=("state", "history_u", "history_k", "history_g", "history_len"),
)
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
    _check_flush(state, history_u, history_k, history_g, history_len, slot)
    if slot.is_cpu:
        op_checks.slot_values("flush_history", slot, state.shape[1], unique=True)
    if slot.shape[0] == 0 or state.shape[1] == 0:
        return
    _fold(state, History(history_u, history_k, history_g, history_len), slot, slot >= 0)


@flush_history.register_fake
def _check_flush(
    state: Tensor,
    history_u: Tensor,
    history_k: Tensor,
    history_g: Tensor,
    history_len: Tensor,
    slot: Tensor,
) -> None:
    op = "flush_history"
    op_checks.expect_dims(op, "state", state, f"layers, {STATE_LAYOUT}")
    op_checks.expect_dims(op, "history_k", history_k, "layers, slots, H, HK, K")
    op_checks.expect_groups(op, history_k.shape[3], state.shape[2])
    History(history_u, history_k, history_g, history_len).check(op, state, history_k.shape[3])
    op_checks.expect_dims(op, "slot", slot, "batch")
    op_checks.expect_index(op, "slot", slot, "batch", slot.shape, state.device)


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


# ------------------------------------------------------------------ convolution


@torch.library.custom_op("treewy::tree_conv", mutates_args=())
def tree_conv(
    x: Tensor,
    conv_state: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Causal conv with SiLU along the path from the root to each node.

    Args:
        x: raw inputs [B, N, C].
        conv_state: [slots, W-1, C], the raw inputs before the root, oldest first.
        slot, parents, num_nodes: see the module.
        weight: [C, W]; weight[:, W-1] is for the node itself.
        bias: [C] or None.

    Returns:
        A new tensor [B, N, C] in x's type, computed in float32 (float64 if x is).
    """
    _check_tree_conv(x, conv_state, Trees(slot, parents, num_nodes), weight, bias)
    trees = Trees(slot, parents, num_nodes)
    plan = trees.plan()
    real = trees.real_nodes("tree_conv", plan, conv_state.shape[0])
    taps = reference.tap_rows(plan.parents, plan.valid, weight.shape[1])
    return select_nodes(
        real, reference.tree_conv(x, read_rows(conv_state, slot), taps, weight, bias)
    )


@tree_conv.register_fake
def _(x, conv_state, slot, parents, num_nodes, weight, bias=None):  # type: ignore[no-untyped-def]
    _check_tree_conv(x, conv_state, Trees(slot, parents, num_nodes), weight, bias)
    return x.new_empty(x.shape)


def _check_tree_conv(
    x: Tensor, conv_state: Tensor, trees: Trees, weight: Tensor, bias: Tensor | None
) -> None:
    op_checks.expect_dims("tree_conv", "x", x, "batch, N, C")
    _check_conv("tree_conv", x, conv_state, weight, bias)
    trees.check("tree_conv", (x.shape[0], x.shape[1]), x.device)


def _check_conv(
    op: str, x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None
) -> None:
    """x [.., C] and conv_state [slots, W-1, C] against weight [C, W] and bias [C]."""
    channels, device = x.shape[-1], x.device
    op_checks.expect_dims(op, "weight", weight, "C, W")
    op_checks.expect_dims(op, "conv_state", conv_state, "slots, W-1, C")
    width = conv_state.shape[1] + 1
    op_checks.expect(op, "x", x, "..., C", x.shape)
    op_checks.expect(op, "weight", weight, "C, W", (channels, width), device=device)
    shape = (conv_state.shape[0], width - 1, channels)
    op_checks.expect(op, "conv_state", conv_state, "slots, W-1, C", shape, device=device)
    if bias is not None:
        op_checks.expect(op, "bias", bias, "C", (channels,), device=device)


@torch.library.custom_op("treewy::conv_commit", mutates_args=("conv_state",))
def conv_commit(
    conv_state: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    accepted: Tensor,
    x: Tensor,
) -> None:
    """Moves the conv windows to the accepted nodes: the last W-1 raw inputs along each path.

    Args:
        conv_state: [L, slots, W-1, C], written in place.
        slot, parents, num_nodes, accepted: see the module.
        x: raw inputs [L, B, N, C], as given to `tree_conv`.
    """
    _check_conv_commit(conv_state, slot, parents, num_nodes, accepted, x)
    goal = Commit(slot, parents, num_nodes, accepted)
    plan = goal.trees.plan()
    active = goal.active("conv_commit", plan, conv_state.shape[1])
    if goal.is_empty(conv_state.shape[1]):
        return
    writes = Writes.of(active, slot)
    if not writes:
        return
    taps = reference.tap_rows(plan.parents, plan.valid, conv_state.shape[2] + 1)
    taps = taps[writes.rows, goal.last(writes.rows)]
    for pool, inputs in zip(conv_state, x, strict=True):
        window = pool.index_select(0, writes.slots)
        writes.into(pool, reference.conv_window(window, inputs, taps, writes.rows))


@conv_commit.register_fake
def _check_conv_commit(
    conv_state: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    accepted: Tensor,
    x: Tensor,
) -> None:
    op = "conv_commit"
    op_checks.expect_dims(op, "conv_state", conv_state, "layers, slots, W-1, C")
    Commit(slot, parents, num_nodes, accepted).check(op, conv_state.device)
    shape = (conv_state.shape[0], *parents.shape, conv_state.shape[3])
    op_checks.expect(op, "x", x, "layers, batch, N, C", shape, device=conv_state.device)


# ------------------------------------------------------------------ prefill


@torch.library.custom_op("treewy::prefill", mutates_args=("state",))
def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slot: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    """The gated delta rule over the tokens of several packed sequences.

    Each sequence starts from the state in its slot and leaves its final state there, so that a
    prompt may come in several calls.

    Args:
        q, k, v, a, b, A_log, dt_bias: see the module; the projections are [T, ...].
        state: [slots, HV, V, K], written in place.
        slot: int32 [B]; the tokens of a -1 row are skipped.
        cu_seqlens: int32 [B + 1], where each sequence starts, then T.

    Returns:
        out [T, HV, V] in v's type.
    """
    inputs = Projections(q, k, v, a, b, A_log, dt_bias)
    inputs.check("prefill", "tokens", state)
    _check_packed("prefill", slot, cu_seqlens, state.device)
    spans = _sequences("prefill", slot, cu_seqlens, q.shape[0], state.shape[0])
    out = v.new_zeros(v.shape)
    if not spans:
        return out
    dtype = compute_dtype(q, state)
    slots = torch.tensor([row for row, _, _ in spans], device=state.device)
    q_, k_, v_, g, beta = (_side_by_side(x, spans) for x in inputs.prepare(dtype))
    before = state.index_select(0, slots).to(dtype)
    lengths = [stop - start for _, start, stop in spans]
    padded, after = reference.chunk_prefill(q_, k_, v_, g, beta, before, lengths=lengths)
    for row, (_, start, stop) in enumerate(spans):
        out[start:stop] = padded[row, : stop - start]
    state[slots] = after.to(state.dtype)
    return out


@prefill.register_fake
def _(q, k, v, a, b, A_log, dt_bias, state, slot, cu_seqlens):  # type: ignore[no-untyped-def]
    Projections(q, k, v, a, b, A_log, dt_bias).check("prefill", "tokens", state)
    _check_packed("prefill", slot, cu_seqlens, state.device)
    return v.new_empty(v.shape)


def _check_packed(op: str, slot: Tensor, cu_seqlens: Tensor, device: torch.device) -> None:
    op_checks.expect_dims(op, "slot", slot, "batch")
    op_checks.expect_index(op, "slot", slot, "batch", slot.shape, device)
    bounds = (slot.shape[0] + 1,)
    op_checks.expect_index(op, "cu_seqlens", cu_seqlens, "batch + 1", bounds, device)


def _sequences(
    op: str, slot: Tensor, cu_seqlens: Tensor, tokens: int, num_slots: int
) -> list[tuple[int, int, int]]:
    """(slot, start, stop) of the sequences to run, longest first; skips -1 rows and empty ones.

    Reads slots and lengths on the host, on a GPU too: prefill is not captured in a graph.
    """
    slots = op_checks.slot_values(op, slot, num_slots, unique=True)
    bounds = op_checks.sequence_bounds(op, cu_seqlens, tokens)
    spans = [
        (row, start, stop)
        for row, (start, stop) in zip(slots, bounds, strict=True)
        if row >= 0 and stop > start
    ]
    return sorted(spans, key=lambda span: span[1] - span[2])


def _side_by_side(x: Tensor, spans: list[tuple[int, int, int]]) -> Tensor:
    """The sequences of x [T, ...] as [B, longest, ...], zeros behind the shorter ones."""
    return pad_sequence([x[start:stop] for _, start, stop in spans], batch_first=True)


@torch.library.custom_op("treewy::prefill_conv", mutates_args=("conv_state",))
def prefill_conv(
    x: Tensor,
    conv_state: Tensor,
    slot: Tensor,
    cu_seqlens: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Causal conv with SiLU over packed sequences, each starting from the window in its slot.

    Args:
        x: raw inputs [T, C].
        conv_state: [slots, W-1, C], written in place: the last W-1 raw inputs of each sequence.
        slot, cu_seqlens: as for `prefill`.
        weight, bias: as for `tree_conv`.

    Returns:
        A new tensor [T, C] in x's type.
    """
    op_checks.expect_dims("prefill_conv", "x", x, "tokens, C")
    _check_conv("prefill_conv", x, conv_state, weight, bias)
    _check_packed("prefill_conv", slot, cu_seqlens, x.device)
    y = x.new_zeros(x.shape)
    spans = _sequences("prefill_conv", slot, cu_seqlens, x.shape[0], conv_state.shape[0])
    for row, start, stop in spans:
        y[start:stop], conv_state[row] = reference.causal_conv(
            x[start:stop], conv_state[row], weight, bias
        )
    return y


@prefill_conv.register_fake
def _(x, conv_state, slot, cu_seqlens, weight, bias=None):  # type: ignore[no-untyped-def]
    op_checks.expect_dims("prefill_conv", "x", x, "tokens, C")
    _check_conv("prefill_conv", x, conv_state, weight, bias)
    _check_packed("prefill_conv", slot, cu_seqlens, x.device)
    return x.new_empty(x.shape)


# ------------------------------------------------------------------ CUDA

from . import cuda_ops  # noqa: E402  (its kernels go to the operators above)

cuda_ops.register()
