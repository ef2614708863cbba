"""Commits of recurrent states: from pseudo-values, from inputs, to a history, and its flush."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..op_commits import Deferred, Flush
from ..op_inputs import Commit, Folds, History
from ..op_stash import InputStash, Stash
from .call import Call, call_reference, find_copies, prepare
from .fields import set_folds, set_history, set_stash, set_state, set_tree, set_weights
from .rules import DTYPES, history_reason, reason_for_reference


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
    """`ops.commit` by one launch for all layers."""
    tensors = (state, slot, parents, num_nodes, accepted, u, k, g)
    call, ready = prepare("commit", tensors, _setup_commit)
    if call.reason is not None:
        call_reference("commit", call, tensors)
    else:
        call.launch(ready)


def _setup_commit(call: Call, *tensors: Any) -> None:
    state, slot, parents, num_nodes, accepted, u, k, g = tensors
    Commit(slot, parents, num_nodes, accepted).check("commit", state.device)
    Stash(u, k, g).check("commit", state, parents.shape)
    call.reason = reason_for_reference(
        state=state, inputs=(k,), u=u, float32=(g,), nodes=parents.shape[1]
    )
    if call.reason is not None:
        return
    call.copies = find_copies(tensors, whole=(1, 2, 3, 4), rows=(5, 6, 7))
    _fill_commit(call, call.params, state, parents, u, k, g)


def _fill_commit(
    call: Call, view: Any, state: Tensor, parents: Tensor, u: Tensor, k: Tensor, g: Tensor
) -> None:
    """The part that both commits share; addresses of the pool, the goal and the stash."""
    set_tree(view.tree, parents, state.shape[1])
    set_state(view.state, state, k.shape[3])
    set_stash(view.stash, u, k, g)
    call.count_errors(view)
    call.address(view.state, "data")
    call.address(view.tree, "slot", "parents", "num_nodes")
    call.address(view, "accepted")
    call.address(view.stash, "u", "k", "g")


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
    """`ops.commit_inputs` by one launch for all layers, two where a path may have over 16 nodes."""
    tensors: tuple[Tensor | None, ...]
    tensors = (state, conv_state, slot, parents, num_nodes, accepted, x, a, b)
    tensors += (conv_weight, conv_bias, A_log, dt_bias)
    call, ready = prepare("commit_inputs", tensors, _setup_inputs)
    if call.reason is not None:
        call_reference("commit_inputs", call, tensors)
    else:
        call.launch(ready)


def _setup_inputs(call: Call, *tensors: Any) -> None:
    op = "commit_inputs"
    state, conv_state, slot, parents, num_nodes, accepted, *rest = tensors
    x, a, b, weight, bias, A_log, dt_bias = rest
    Commit(slot, parents, num_nodes, accepted).check(op, state.device)
    stash = InputStash(conv_state, *rest)
    stash.check(op, state, parents.shape)
    call.reason = reason_for_reference(
        state=state,
        inputs=(weight,) if bias is None else (weight, bias),
        gates=(a, b),
        float32=(A_log, dt_bias),
        conv=(x, conv_state),
        width=weight.shape[-1],
        nodes=parents.shape[1],
    )
    if call.reason is not None:
        return
    call.copies = find_copies(tensors, whole=(2, 3, 4, 5, 9, 10, 11, 12), rows=(6, 7, 8))
    params = call.params
    set_tree(params.tree, parents, state.shape[1])
    set_state(params.state, state, stash.key_heads(op, state))
    set_weights(params.weights, weight)
    params.weight_stride = weight.stride(0)
    params.bias_stride = 0 if bias is None else bias.stride(0)
    params.A_log_stride, params.dt_bias_stride = A_log.stride(0), dt_bias.stride(0)
    for name, tensor in (("x", x), ("conv_state", conv_state), ("a", a), ("b", b)):
        getattr(params, f"{name}_stride")[:] = tensor.stride()[:3]
    params.dtype, params.gate_dtype = DTYPES[x.dtype], DTYPES[a.dtype]
    call.count_errors(params)
    call.address(params.state, "data")
    call.address(params, "conv_state")
    call.address(params.tree, "slot", "parents", "num_nodes")
    call.address(params, "accepted", "x", "a", "b")
    call.address(params.weights, "weight", "bias")
    call.address(params, "A_log", "dt_bias")


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
    """`ops.commit_deferred` by three launches for all layers; a path too long is not moved."""
    history, goal = (history_u, history_k, history_g, history_len), (slot, parents, num_nodes)
    _defer("commit_deferred", (state, *history, *goal, accepted, u, k, g))


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
    """`ops.commit_deferred_folding` by the launches of `commit_deferred`."""
    history, goal = (history_u, history_k, history_g, history_len), (slot, parents, num_nodes)
    given = (state, *history, *goal, accepted, u, k, g, history_folded, history_folding)
    _defer("commit_deferred_folding", given)


def _defer(op: str, tensors: tuple[Tensor, ...]) -> None:
    call, ready = prepare(op, tensors, _setup_deferred, op)
    if call.reason is not None:
        call_reference(op, call, tensors)
    else:
        call.launch((ready[0], *ready[5:12], *ready[1:5], *(ready[12:] or (None, None))))


def _setup_deferred(call: Call, *tensors_and_op: Any) -> None:
    *tensors, op = tensors_and_op
    given = Deferred.of(*tensors)
    given.check(op)
    state, history, goal, (u, k, g), folds = given
    call.reason = reason_for_reference(
        state=state, inputs=(k,), u=u, float32=(g, history.g), nodes=goal.parents.shape[1]
    ) or _pools_reason(history, state)
    if call.reason is not None:
        return
    call.copies = find_copies(tensors, whole=(5, 6, 7, 8), rows=(9, 10, 11))
    _fill_commit(call, call.params.commit, state, goal.parents, u, k, g)
    _set_pools(call, history, folds)


def _pools_reason(history: History, state: Tensor) -> str | None:
    """`history_reason` of pools whose lengths are written, so that a copy would not do."""
    if not history.length.is_contiguous():
        return "history lengths that are not contiguous"
    return history_reason(history[:3], state)


def _set_pools(call: Call, history: History, folds: Folds | None) -> None:
    """Histories of all layers; addresses of u, k, g, length, folded and folding."""
    view = call.params.history
    set_history(view, *history[:3])
    if folds is not None:
        set_folds(view, folds.folded)
    call.address(view, "u", "k", "g", "length", "folded", "folding")


def flush_history(
    state: Tensor,
    history_u: Tensor,
    history_k: Tensor,
    history_g: Tensor,
    history_len: Tensor,
    slot: Tensor,
) -> None:
    """`ops.flush_history` by two launches for all layers."""
    _flush("flush_history", (state, history_u, history_k, history_g, history_len, slot))


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
    """`ops.flush_history_folding` by the launches of `flush_history`."""
    given = (state, history_u, history_k, history_g, history_len, slot)
    _flush("flush_history_folding", (*given, history_folded, history_folding))


def _flush(op: str, tensors: tuple[Tensor, ...]) -> None:
    call, ready = prepare(op, tensors, _setup_flush, op)
    if call.reason is not None:
        call_reference(op, call, tensors)
    else:
        call.launch((*ready[:5], *(ready[6:] or (None, None)), ready[5]))


def _setup_flush(call: Call, *tensors_and_op: Any) -> None:
    *tensors, op = tensors_and_op
    given = Flush.of(*tensors)
    given.check(op)
    state, history, slot, folds = given
    call.reason = reason_for_reference(state=state, float32=(history.g,)) or _pools_reason(
        history, state
    )
    if call.reason is not None:
        return
    call.copies = find_copies(tensors, whole=(5,), rows=())
    params = call.params
    params.batch, params.num_slots = slot.shape[0], state.shape[1]
    set_state(params.state, state, history.k.shape[3])
    call.count_errors(params)
    call.address(params.state, "data")
    _set_pools(call, history, folds)
    call.address(params, "slot")
