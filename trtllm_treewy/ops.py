"""The operators `torch.ops.treewy.*`: the reference mathematics by slot, on any device.

Importing this module registers them, those of `op_commits` and `op_acceptance` included. Each has a
kernel in torch for every device and a fake kernel for tracing; device kernels are added with
`register_kernel`.

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
from .op_acceptance import greedy_accept as greedy_accept
from .op_commits import commit as commit
from .op_commits import commit_deferred as commit_deferred
from .op_commits import commit_deferred_folding as commit_deferred_folding
from .op_commits import commit_inputs as commit_inputs
from .op_commits import commit_snapshot as commit_snapshot
from .op_commits import flush_history as flush_history
from .op_commits import flush_history_folding as flush_history_folding
from .op_commits import fold_layer
from .op_inputs import (
    Commit,
    Folds,
    History,
    Projections,
    Trees,
    Writes,
    active_entries,
    compute_dtype,
    read_rows,
    select_nodes,
    write_entries,
)
from .op_stash import stash_dtype

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
    u_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of all nodes of the trees, and what a commit needs. Reads the state, writes nothing.

    Args:
        q, k, v, a, b, A_log, dt_bias, state, slot, parents, num_nodes: see the module; the
            projections are [B, N, ...].
        history_u, history_k, history_g, history_len: accepted nodes that `commit_deferred` has not
            folded into the state yet, one layer of its pools. All or none. Entries that
            `tree_verify_folding` has folded already would count twice: where it is used, use no
            other.
        u_dtype: type of u, float32 where not given (float64 if q or the state is); bfloat16 only
            where the state is. Outputs do not depend on it.

    Returns:
        out [B, N, HV, V] in v's type; u [B, N, HV, V] and the nodes' own log decay g [B, N, HV],
        float32 (float64 if q or the state is).
    """
    inputs, trees = Projections(q, k, v, a, b, A_log, dt_bias), Trees(slot, parents, num_nodes)
    history = History.from_optional("tree_verify", history_u, history_k, history_g, history_len)
    _check_verify("tree_verify", inputs, state, trees, history)
    of_u = stash_dtype("tree_verify", u_dtype, q, state)
    real, out, u, g = _solve("tree_verify", inputs, state, trees, history)
    return select_nodes(real, out), select_nodes(real, u.to(of_u)), select_nodes(real, g)


def _solve(
    op: str,
    inputs: Projections,
    state: Tensor,
    trees: Trees,
    history: History | None,
    folds: Folds | None = None,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """The nodes whose results are wanted (None for all), and out, u and g of all nodes."""
    plan, dtype = trees.plan(), compute_dtype(inputs.q, state)
    real = trees.real_nodes(op, plan, state.shape[0])
    prepared = inputs.prepare(dtype)
    out, u = reference.tree_wy(
        *prepared,
        read_rows(state, trees.slot).to(dtype),
        plan.ancestors,
        history=history.read(trees.slot, dtype, folds) if history else None,
        blocks=plan.blocks,
    )
    return real, out.to(inputs.v.dtype), u, prepared[3]


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
    history_u=None, history_k=None, history_g=None, history_len=None, u_dtype=None,
):  # fmt: skip
    inputs, trees = Projections(q, k, v, a, b, A_log, dt_bias), Trees(slot, parents, num_nodes)
    history = History.from_optional("tree_verify", history_u, history_k, history_g, history_len)
    _check_verify("tree_verify", inputs, state, trees, history)
    u = v.new_empty(v.shape, dtype=stash_dtype("tree_verify", u_dtype, q, state))
    return v.new_empty(v.shape), u, v.new_empty(v.shape[:3], dtype=compute_dtype(q, state))


@torch.library.custom_op("treewy::tree_verify_into", mutates_args=("u", "g"))
def tree_verify_into(
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
    u: Tensor,
    g: Tensor,
    history_u: Tensor | None = None,
    history_k: Tensor | None = None,
    history_g: Tensor | None = None,
    history_len: Tensor | None = None,
) -> Tensor:
    """`tree_verify` whose stash goes where the caller keeps it, without a copy.

    Args:
        u: [B, N, HV, V], written, [V] contiguous; its type is the `u_dtype` of `tree_verify`.
        g: [B, N, HV], written, [HV] contiguous, float32 (float64 if q or the state is).
        others: as for `tree_verify`.

    Returns:
        out [B, N, HV, V] in v's type, with the bits that `tree_verify` gives.
    """
    op = "tree_verify_into"
    inputs, trees = Projections(q, k, v, a, b, A_log, dt_bias), Trees(slot, parents, num_nodes)
    history = History.from_optional(op, history_u, history_k, history_g, history_len)
    _check_verify_into(op, inputs, state, trees, history, u, g)
    real, out, found, decays = _solve(op, inputs, state, trees, history)
    u.copy_(select_nodes(real, found.to(u.dtype)))
    g.copy_(select_nodes(real, decays))
    return select_nodes(real, out)


def _check_verify_into(
    op: str,
    inputs: Projections,
    state: Tensor,
    trees: Trees,
    history: History | None,
    u: Tensor,
    g: Tensor,
) -> None:
    """Raises ValueError for arguments that do not fit each other."""
    _check_verify(op, inputs, state, trees, history)
    stash_dtype(op, u.dtype, inputs.q, state)
    v, wide = inputs.v, (compute_dtype(inputs.q, state),)
    op_checks.expect(op, "u", u, "batch, N, HV, V", v.shape, device=state.device)
    op_checks.expect(op, "g", g, "batch, N, HV", v.shape[:3], dtypes=wide, device=state.device)
    for name, x in (("u", u), ("g", g)):
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(f"treewy::{op}: the last dimension of {name} must be contiguous")


@tree_verify_into.register_fake
def _(  # type: ignore[no-untyped-def]
    q, k, v, a, b, A_log, dt_bias, state, slot, parents, num_nodes, u, g,
    history_u=None, history_k=None, history_g=None, history_len=None,
):  # fmt: skip
    op = "tree_verify_into"
    inputs, trees = Projections(q, k, v, a, b, A_log, dt_bias), Trees(slot, parents, num_nodes)
    history = History.from_optional(op, history_u, history_k, history_g, history_len)
    _check_verify_into(op, inputs, state, trees, history, u, g)
    return v.new_empty(v.shape)


@torch.library.custom_op(
    "treewy::tree_verify_folding",
    mutates_args=("state", "u", "g", "history_folded", "history_folding"),
)
def tree_verify_folding(
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
    u: Tensor,
    g: Tensor,
    history_u: Tensor,
    history_k: Tensor,
    history_g: Tensor,
    history_len: Tensor,
    history_folded: Tensor,
    history_folding: Tensor,
    fold_above: int,
) -> Tensor:
    """`tree_verify_into` that folds long histories into the state, which it has read anyway.

    Behind the outputs S = exp(G) S_0 + sum over the entries h of exp(G - G_h) u_h k_h^T, with G the
    log decay of the whole history: what `commit_deferred` would do, whose time that saves. State
    and history stand for the same sequence before and behind it, so that it may be called again, or
    the tree be given up; from then on until the history is empty its entries count for the layers
    alone whose state does not hold them, which `history_folded` says. Every state has one writer at
    a time: this operator, or the commit behind it.

    Args:
        state: [slots, HV, V, K], written where a history is folded.
        history_u, history_k, history_g, history_len: one layer of the pools of `commit_deferred`.
        history_folded: uint8 [slots, HV, ceil(V / 64)], 1 where the state holds the history; zeros
            to begin with. One layer of that of `commit_deferred_folding`, which clears it.
        history_folding: int32 [slots], 1 where the state of any layer does.
        fold_above: histories with more entries are folded, where the device's kernel can (at most
            16 nodes and 32 entries, K = 128, activations and keys in one 16-bit type); others stay
            for the commit. Capacity less the longest path leaves the commit nothing to fold.
        others: as for `tree_verify_into`. A slot may be in one row only.

    Returns:
        out [B, N, HV, V] in v's type, with the bits that `tree_verify` gives.

    Raises:
        ValueError: also for a negative `fold_above`.
    """
    op = "tree_verify_folding"
    inputs, trees = Projections(q, k, v, a, b, A_log, dt_bias), Trees(slot, parents, num_nodes)
    history = History(history_u, history_k, history_g, history_len)
    folds = Folds(history_folded, history_folding)
    _check_verify_folding(op, inputs, state, trees, history, folds, u, g, fold_above)
    if slot.is_cpu:
        op_checks.slot_values(op, slot, state.shape[0], unique=True)
    real, out, found, decays = _solve(op, inputs, state, trees, history, folds)
    u.copy_(select_nodes(real, found.to(u.dtype)))
    g.copy_(select_nodes(real, decays))
    if state.shape[0] == 0 or parents.numel() == 0:
        return select_nodes(real, out)
    long = read_rows(history_len, slot).clamp(max=history_u.shape[1]) > fold_above
    writes = Writes.of((slot >= 0) & (num_nodes > 0) & long & ~folds.of(slot), slot)
    if writes:
        fold_layer(state, history, None, writes)
        writes.into(history_folded, torch.ones_like(history_folded[writes.slots]))
        writes.into(history_folding, torch.ones_like(writes.slots))
    return select_nodes(real, out)


def _check_verify_folding(
    op: str,
    inputs: Projections,
    state: Tensor,
    trees: Trees,
    history: History,
    folds: Folds,
    u: Tensor,
    g: Tensor,
    fold_above: int,
) -> None:
    """Raises ValueError for arguments that do not fit each other."""
    _check_verify_into(op, inputs, state, trees, history, u, g)
    folds.check(op, state)
    if fold_above < 0:
        raise ValueError(f"treewy::{op}: fold_above must be >= 0, got {fold_above}")


@tree_verify_folding.register_fake
def _(  # type: ignore[no-untyped-def]
    q, k, v, a, b, A_log, dt_bias, state, slot, parents, num_nodes, u, g,
    history_u, history_k, history_g, history_len, history_folded, history_folding, fold_above,
):  # fmt: skip
    op = "tree_verify_folding"
    inputs, trees = Projections(q, k, v, a, b, A_log, dt_bias), Trees(slot, parents, num_nodes)
    history = History(history_u, history_k, history_g, history_len)
    folds = Folds(history_folded, history_folding)
    _check_verify_folding(op, inputs, state, trees, history, folds, u, g, fold_above)
    return v.new_empty(v.shape)


@torch.library.custom_op("treewy::tree_outputs", mutates_args=())
def tree_outputs(
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
) -> Tensor:
    """`tree_verify` without a stash: for `commit_inputs`, which computes what it needs itself.

    Returns:
        out [B, N, HV, V] in v's type, with the bits that `tree_verify` gives.
    """
    inputs, trees = Projections(q, k, v, a, b, A_log, dt_bias), Trees(slot, parents, num_nodes)
    _check_verify("tree_outputs", inputs, state, trees)
    real, out, _, _ = _solve("tree_outputs", inputs, state, trees, None)
    return select_nodes(real, out)


@tree_outputs.register_fake
def _(q, k, v, a, b, A_log, dt_bias, state, slot, parents, num_nodes):  # type: ignore[no-untyped-def]
    inputs, trees = Projections(q, k, v, a, b, A_log, dt_bias), Trees(slot, parents, num_nodes)
    _check_verify("tree_outputs", inputs, state, trees)
    return v.new_empty(v.shape)


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


@torch.library.custom_op("treewy::tree_conv_into", mutates_args=("stash",))
def tree_conv_into(
    x: Tensor,
    conv_state: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stash: Tensor,
) -> Tensor:
    """`tree_conv` that keeps the raw inputs for the commit as they pass by.

    Args:
        stash: [B, N, C], gets x; what it holds of padded nodes and rows is undefined.
        others: as for `tree_conv`.

    Returns:
        A new tensor [B, N, C] in x's type, with the bits that `tree_conv` gives.
    """
    _check_tree_conv_into(x, conv_state, Trees(slot, parents, num_nodes), weight, bias, stash)
    y: Tensor = tree_conv._init_fn(x, conv_state, slot, parents, num_nodes, weight, bias)
    stash.copy_(x)
    return y


@tree_conv_into.register_fake
def _(x, conv_state, slot, parents, num_nodes, weight, bias, stash):  # type: ignore[no-untyped-def]
    _check_tree_conv_into(x, conv_state, Trees(slot, parents, num_nodes), weight, bias, stash)
    return x.new_empty(x.shape)


def _check_tree_conv_into(
    x: Tensor,
    conv_state: Tensor,
    trees: Trees,
    weight: Tensor,
    bias: Tensor | None,
    stash: Tensor,
) -> None:
    _check_tree_conv(x, conv_state, trees, weight, bias)
    op_checks.expect("tree_conv_into", "stash", stash, "batch, N, C", x.shape, device=x.device)


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


@torch.library.custom_op("treewy::path_conv", mutates_args=("y",))
def path_conv(
    y: Tensor,
    conv_state: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    accepted: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> None:
    """`tree_conv` again at the nodes of the accepted paths, all layers, with the same bits.

    For outputs of the conv that a commit needs and nobody kept, as the keys. Call it before
    `conv_commit`: it needs the old windows.

    Args:
        y: [L, B, N, C], written at the nodes from the root to the accepted one; every other
            element stays.
        conv_state: [L, slots, W-1, C], only read.
        slot, parents, num_nodes, accepted: see the module.
        x: raw inputs [L, B, N, C], as given to `tree_conv`.
        weight: [L, C, W].
        bias: [L, C] or None.
    """
    _check_path_conv(y, conv_state, slot, parents, num_nodes, accepted, x, weight, bias)
    goal = Commit(slot, parents, num_nodes, accepted)
    plan = goal.trees.plan()
    active = goal.active("path_conv", plan, conv_state.shape[1])
    if goal.is_empty(conv_state.shape[1]):
        return
    writes = Writes.of(active, slot)
    if not writes:
        return
    paths = goal.paths(plan, writes.rows)
    wanted = paths >= 0 if writes.keep is None else (paths >= 0) & ~writes.keep[:, None]
    entries, keep = active_entries(wanted.flatten())
    nodes = paths.clamp(min=0)
    index = (writes.rows.repeat_interleave(paths.shape[1])[entries], nodes.flatten()[entries])
    for layer, into in enumerate(y):
        window = conv_state[layer].index_select(0, writes.slots)
        of_layer = None if bias is None else bias[layer]
        along = x[layer][writes.rows[:, None], nodes]
        found = reference.path_conv(along, window, weight[layer], of_layer)
        write_entries(into, index, found.flatten(0, 1)[entries], keep)


@path_conv.register_fake
def _check_path_conv(
    y: Tensor,
    conv_state: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    accepted: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> None:
    op, device = "path_conv", conv_state.device
    op_checks.expect_dims(op, "conv_state", conv_state, "layers, slots, W-1, C")
    Commit(slot, parents, num_nodes, accepted).check(op, device)
    layers, _, rows, channels = conv_state.shape
    shape = (layers, *parents.shape, channels)
    op_checks.expect(op, "x", x, "layers, batch, N, C", shape, device=device)
    op_checks.expect(op, "y", y, "layers, batch, N, C", shape, device=device)
    of_conv = (layers, channels, rows + 1)
    op_checks.expect(op, "weight", weight, "layers, C, W", of_conv, device=device)
    if bias is not None:
        op_checks.expect(op, "bias", bias, "layers, C", (layers, channels), device=device)


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

    Reads slots and lengths on the host, on a GPU too: this reference cannot be captured in a graph.
    The kernels of `cuda_ops` can.
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
