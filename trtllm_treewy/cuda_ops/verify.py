"""Tree verification."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..op_inputs import Folds, History, Projections, Trees
from ..op_stash import stash_dtype
from .call import Call, call_reference, find_copies, prepare
from .fields import set_folds, set_history, set_state, set_tree
from .rules import DTYPES, history_reason, reason_for_reference, verify_reason


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
    """`ops.tree_verify` by one launch."""
    projections = (q, k, v, a, b, A_log, dt_bias)
    rest = (slot, parents, num_nodes, history_u, history_k, history_g, history_len)
    tensors: tuple[Tensor | None, ...] = (*projections, state, *rest)
    call, tensors = prepare("tree_verify", tensors, _setup_verify, u_dtype)
    if call.reason is not None:
        result: tuple[Tensor, Tensor, Tensor]
        result = call_reference("tree_verify", call, (*tensors, u_dtype))
        return result
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    u = torch.empty(v.shape, dtype=u_dtype or torch.float32, device=v.device)
    g = torch.empty(v.shape[:3], dtype=torch.float32, device=v.device)
    call.launch((*tensors, out, u, g))
    return out, u, g


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
    """`ops.tree_verify_into` by the launch of `tree_verify`."""
    projections = (q, k, v, a, b, A_log, dt_bias)
    rest = (slot, parents, num_nodes, history_u, history_k, history_g, history_len)
    tensors: tuple[Tensor | None, ...] = (*projections, state, *rest, u, g)
    call, tensors = prepare("tree_verify_into", tensors, _setup_into)
    if call.reason is not None:
        ordered = (*tensors[:11], u, g, *tensors[11:15])
        result: Tensor = call_reference("tree_verify_into", call, ordered)
        return result
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    call.launch((*tensors[:15], out, u, g))
    return out


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
    """`ops.tree_verify_folding` by the launch of `tree_verify`."""
    projections = (q, k, v, a, b, A_log, dt_bias)
    rest = (slot, parents, num_nodes, history_u, history_k, history_g, history_len)
    tensors: tuple[Tensor | None, ...]
    tensors = (*projections, state, *rest, u, g, history_folded, history_folding)
    call, tensors = prepare("tree_verify_folding", tensors, _setup_folding, fold_above)
    if call.reason is not None:
        ordered = (*tensors[:11], u, g, *tensors[11:15], *tensors[17:], fold_above)
        result: Tensor = call_reference("tree_verify_folding", call, ordered)
        return result
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    call.launch((*tensors[:15], out, u, g, *tensors[17:]))
    return out


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
    """`ops.tree_outputs` by one launch, that of `tree_verify` without its stash."""
    tensors: tuple[Tensor | None, ...]
    tensors = (q, k, v, a, b, A_log, dt_bias, state, slot, parents, num_nodes)
    call, tensors = prepare("tree_outputs", tensors, _setup_outputs)
    if call.reason is not None:
        result: Tensor = call_reference("tree_outputs", call, tensors)
        return result
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    no_history = (None, None, None, None)
    call.launch((*tensors, *no_history, out, None, None))
    return out


def _setup_outputs(call: Call, *tensors: Any) -> None:
    _setup("tree_outputs", call, (*tensors, None, None, None, None), None)


def _setup_into(call: Call, *tensors: Any) -> None:
    from .. import ops

    *given, u, g = tensors
    inputs, trees = Projections(*given[:7]), Trees(*given[8:11])
    op, state = "tree_verify_into", given[7]
    history = History.from_optional(op, *given[11:])
    ops._check_verify_into(op, inputs, state, trees, history, u, g)
    _setup(op, call, tuple(given), u.dtype)
    if call.reason is None:
        call.params.u_stride[:] = u.stride()[:3]
        call.params.g_stride[:] = g.stride()[:2]


def _setup_folding(call: Call, *tensors_and_limit: Any) -> None:
    from .. import ops

    *given, u, g, folded, folding, fold_above = tensors_and_limit
    inputs, trees = Projections(*given[:7]), Trees(*given[8:11])
    op, state, history = "tree_verify_folding", given[7], History(*given[11:])
    folds = Folds(folded, folding)
    ops._check_verify_folding(op, inputs, state, trees, history, folds, u, g, fold_above)
    _setup(op, call, tuple(given), u.dtype)
    if call.reason is None:
        call.params.u_stride[:] = u.stride()[:3]
        call.params.g_stride[:] = g.stride()[:2]
        set_folds(call.params.history, folded)
        call.params.fold_above = min(fold_above, history.u.shape[1])
        call.address(call.params.history, "folded", "folding")


def _setup_verify(call: Call, *tensors_and_type: Any) -> None:
    *tensors, u_dtype = tensors_and_type
    _setup("tree_verify", call, tuple(tensors), u_dtype)


def _setup(op: str, call: Call, tensors: tuple[Any, ...], u_dtype: torch.dtype | None) -> None:
    q, k, v, a, b, A_log, dt_bias, state, slot, parents, num_nodes, *histories = tensors
    inputs, trees = Projections(*tensors[:7]), Trees(slot, parents, num_nodes)
    history = History.from_optional(op, *histories)
    inputs.check(op, "batch, N", state)
    trees.check(op, (q.shape[0], q.shape[1]), state.device)
    if history is not None:
        history.check(op, state, q.shape[2])
    of_u = stash_dtype(op, u_dtype, q, state)
    call.reason = (
        reason_for_reference(
            state=state,
            inputs=(q, k, v),
            gates=(a, b),
            float32=(A_log, dt_bias, histories[2]),
            nodes=parents.shape[1],
        )
        or (None if history is None else history_reason((history.u, history.k, history.g), state))
        or verify_reason(q, state, parents.shape[1], history)
    )
    if call.reason is not None:
        return
    call.copies = find_copies(tensors, whole=(5, 6, 8, 9, 10, 14), rows=(0, 1, 2, 3, 4))
    params = call.params
    set_tree(params.tree, parents, state.shape[0])
    set_state(params.state, state, q.shape[2])
    if history is not None:
        set_history(params.history, history.u, history.k, history.g)
    for name, x in (("q", q), ("k", k), ("v", v), ("out", None), ("u", None)):
        strides = v.new_empty(v.shape, device="meta").stride() if x is None else x.stride()
        getattr(params, f"{name}_stride")[:] = strides[:3]
    params.a_stride[:] = a.stride()[:2]
    params.b_stride[:] = b.stride()[:2]
    params.g_stride[:] = v.shape[1] * v.shape[2], v.shape[2]
    params.dtype, params.gate_dtype = DTYPES[q.dtype], DTYPES[a.dtype]
    params.u_dtype = DTYPES[of_u]
    call.address(params, "q", "k", "v", "a", "b", "A_log", "dt_bias")
    call.address(params.state, "data")
    call.address(params.tree, "slot", "parents", "num_nodes")
    call.address(params.history, "u", "k", "g", "length")
    call.address(params, "out", "u", "g")
