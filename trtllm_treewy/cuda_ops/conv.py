"""The causal conv: of trees, of accepted paths, of prompts, and the commit of its windows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import op_checks
from ..op_inputs import Trees
from .call import Call, call_reference, find_copies, prepare
from .fields import set_packed, set_tree, set_weights
from .rules import DTYPES, reason_for_reference


def tree_conv(
    x: Tensor,
    conv_state: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """`ops.tree_conv` by one launch."""
    tensors = (x, conv_state, slot, parents, num_nodes, weight, bias)
    return _run_tree_conv("tree_conv", x, tensors)


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
    """`ops.tree_conv_into` by one launch."""
    tensors = (x, conv_state, slot, parents, num_nodes, weight, bias, stash)
    return _run_tree_conv("tree_conv_into", x, tensors)


def _run_tree_conv(name: str, x: Tensor, tensors: tuple[Tensor | None, ...]) -> Tensor:
    """Either operator of trees: y, of the shape of `x`."""
    call, tensors = prepare(name, tensors, _setup_tree_conv)
    if call.reason is not None:
        result: Tensor = call_reference(name, call, tensors)
        return result
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    call.launch((*tensors, y))
    return y


def _setup_tree_conv(call: Call, *tensors: Any) -> None:
    from .. import ops

    x, conv_state, slot, parents, num_nodes, weight, bias, *into = tensors
    trees = Trees(slot, parents, num_nodes)
    if into:
        ops._check_tree_conv_into(x, conv_state, trees, weight, bias, into[0])
    else:
        ops._check_tree_conv(x, conv_state, trees, weight, bias)
    call.reason = reason_for_reference(
        conv=(x, conv_state, *into),
        inputs=(weight,) if bias is None else (weight, bias),
        width=weight.shape[1],
        nodes=parents.shape[1],
    )
    if call.reason is not None:
        return
    call.copies = find_copies(tensors, whole=(2, 3, 4, 5, 6), rows=(0,))
    params = call.params
    set_tree(params.tree, parents, conv_state.shape[0])
    set_weights(params.weights, weight)
    params.x_stride[:] = x.stride()[:2]
    params.y_stride[:] = x.shape[1] * x.shape[2], x.shape[2]
    params.state_stride[:] = conv_state.stride()[:2]
    params.dtype, params.channels = DTYPES[x.dtype], x.shape[2]
    call.address(params, "x", "conv_state")
    call.address(params.tree, "slot", "parents", "num_nodes")
    call.address(params.weights, "weight", "bias")
    for stash in into:
        params.stash_stride[:] = stash.stride()[:2]
        call.address(params, "stash")
    call.address(params, "y")


def conv_commit(
    conv_state: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    accepted: Tensor,
    x: Tensor,
) -> None:
    """`ops.conv_commit` by one launch for all layers."""
    tensors = (conv_state, slot, parents, num_nodes, accepted, x)
    call, ready = prepare("conv_commit", tensors, _setup_conv_commit)
    if call.reason is not None:
        call_reference("conv_commit", call, tensors)
    else:
        call.launch(ready)


def _setup_conv_commit(call: Call, *tensors: Any) -> None:
    from .. import ops

    ops._check_conv_commit(*tensors)
    conv_state, _, parents, _, _, x = tensors
    width = conv_state.shape[-2] + 1
    call.reason = reason_for_reference(conv=(x, conv_state), width=width, nodes=parents.shape[1])
    if call.reason is not None:
        return
    call.copies = find_copies(tensors, whole=(1, 2, 3, 4), rows=(5,))
    params = call.params
    set_tree(params.tree, parents, conv_state.shape[1])
    params.x_stride[:] = x.stride()[:3]
    params.state_stride[:] = conv_state.stride()[:3]
    params.dtype, params.width = DTYPES[x.dtype], width
    params.layers, params.channels = conv_state.shape[0], conv_state.shape[3]
    call.count_errors(params)
    call.address(params, "conv_state")
    call.address(params.tree, "slot", "parents", "num_nodes")
    call.address(params, "accepted", "x")


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
    """`ops.path_conv` by one launch for all layers."""
    tensors: tuple[Tensor | None, ...]
    tensors = (y, conv_state, slot, parents, num_nodes, accepted, x, weight, bias)
    call, ready = prepare("path_conv", tensors, _setup_path_conv)
    if call.reason is not None:
        call_reference("path_conv", call, tensors)
    else:
        call.launch(ready)


def _setup_path_conv(call: Call, *tensors: Any) -> None:
    from .. import ops

    ops._check_path_conv(*tensors)
    y, conv_state, _, parents, _, _, x, weight, bias = tensors
    call.reason = reason_for_reference(
        conv=(x, conv_state, y),
        inputs=(weight,) if bias is None else (weight, bias),
        width=weight.shape[-1],
        nodes=parents.shape[1],
    )
    if call.reason is not None:
        return
    whole = weight.stride()[1:] == (weight.shape[2], 1)  # within a layer
    call.copies = find_copies(tensors, whole=(2, 3, 4, 5), rows=(6, 8))
    call.copies += () if whole else (7,)
    params = call.params
    set_tree(params.tree, parents, conv_state.shape[1])
    set_weights(params.weights, weight)
    params.weight_stride = weight.stride(0)
    params.bias_stride = 0 if bias is None else bias.stride(0)
    for name, tensor in (("x", x), ("y", y), ("state", conv_state)):
        getattr(params, f"{name}_stride")[:] = tensor.stride()[:3]
    params.dtype = DTYPES[x.dtype]
    params.layers, params.channels = conv_state.shape[0], conv_state.shape[3]
    call.address(params, "y", "conv_state")
    call.address(params.tree, "slot", "parents", "num_nodes")
    call.address(params, "accepted", "x")
    call.address(params.weights, "weight", "bias")


def prefill_conv(
    x: Tensor,
    conv_state: Tensor,
    slot: Tensor,
    cu_seqlens: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """`ops.prefill_conv` by one launch; two where width or addresses are odd."""
    tensors: tuple[Tensor | None, ...] = (x, conv_state, slot, cu_seqlens, weight, bias)
    call, tensors = prepare("prefill_conv", tensors, _setup_prefill_conv)
    if call.reason is not None:
        result: Tensor = call_reference("prefill_conv", call, tensors)
        return result
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    call.launch((*tensors, y))
    return y


def _setup_prefill_conv(call: Call, *tensors: Any) -> None:
    from .. import ops

    x, conv_state, slot, cu_seqlens, weight, bias = tensors
    op_checks.expect_dims("prefill_conv", "x", x, "tokens, C")
    ops._check_conv("prefill_conv", x, conv_state, weight, bias)
    ops._check_packed("prefill_conv", slot, cu_seqlens, x.device)
    call.reason = reason_for_reference(
        conv=(x, conv_state),
        inputs=(weight,) if bias is None else (weight, bias),
        width=weight.shape[1],
    )
    if call.reason is not None:
        return
    call.copies = find_copies(tensors, whole=(2, 3, 4, 5), rows=(0,))
    params = call.params
    set_packed(params.packed, slot, x.shape[0], conv_state.shape[0])
    set_weights(params.weights, weight)
    params.x_stride, params.y_stride = x.stride(0), x.shape[1]
    params.state_stride[:] = conv_state.stride()[:2]
    params.dtype, params.channels = DTYPES[x.dtype], x.shape[1]
    call.address(params, "x", "conv_state")
    call.address(params.packed, "slot", "cu_seqlens")
    call.address(params.weights, "weight", "bias")
    call.address(params, "y")
