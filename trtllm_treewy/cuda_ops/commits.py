"""Commits of recurrent states: at once, deferred to a history, and its flush."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..op_inputs import Commit, History, Stash
from .call import Call, call_reference, find_copies, prepare
from .fields import set_history, set_stash, set_state, set_tree
from .rules import history_reason, reason_for_reference


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
        state=state, inputs=(k,), float32=(u, g), nodes=parents.shape[1]
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
    pools, goal = (history_u, history_k, history_g, history_len), (slot, parents, num_nodes)
    tensors = (state, *pools, *goal, accepted, u, k, g)
    call, ready = prepare("commit_deferred", tensors, _setup_deferred)
    if call.reason is not None:
        call_reference("commit_deferred", call, tensors)
    else:
        call.launch((ready[0], *ready[5:], *ready[1:5]))


def _setup_deferred(call: Call, *tensors: Any) -> None:
    op = "commit_deferred"
    state, *pools = tensors[:5]
    slot, parents, num_nodes, accepted, u, k, g = tensors[5:]
    Commit(slot, parents, num_nodes, accepted).check(op, state.device)
    Stash(u, k, g).check(op, state, parents.shape)
    History(*pools).check(op, state, k.shape[3])
    history = pools[0], pools[1], pools[2]
    call.reason = reason_for_reference(
        state=state, inputs=(k,), float32=(u, g, *history), nodes=parents.shape[1]
    ) or history_reason(history)
    if call.reason is not None:
        return
    call.copies = find_copies(tensors, whole=(5, 6, 7, 8), rows=(9, 10, 11))
    _fill_commit(call, call.params.commit, state, parents, u, k, g)
    set_history(call.params.history, *history)
    call.address(call.params.history, "u", "k", "g", "length")


def flush_history(
    state: Tensor,
    history_u: Tensor,
    history_k: Tensor,
    history_g: Tensor,
    history_len: Tensor,
    slot: Tensor,
) -> None:
    """`ops.flush_history` by two launches for all layers."""
    tensors = (state, history_u, history_k, history_g, history_len, slot)
    call, ready = prepare("flush_history", tensors, _setup_flush)
    if call.reason is not None:
        call_reference("flush_history", call, tensors)
    else:
        call.launch(ready)


def _setup_flush(call: Call, *tensors: Any) -> None:
    from .. import ops

    ops._check_flush(*tensors)
    state, history_u, history_k, history_g, history_len, slot = tensors
    history = history_u, history_k, history_g
    call.reason = reason_for_reference(state=state, float32=history) or history_reason(history)
    if call.reason is not None:
        return
    call.copies = find_copies(tensors, whole=(5,), rows=())
    params = call.params
    params.batch, params.num_slots = slot.shape[0], state.shape[1]
    set_state(params.state, state, history_k.shape[3])
    set_history(params.history, *history)
    call.count_errors(params)
    call.address(params.state, "data")
    call.address(params.history, "u", "k", "g", "length")
    call.address(params, "slot")
