"""Runs our plugins' nodes by torch.ops.treewy, after holding them to `plugin_contract`."""

from __future__ import annotations

import torch

from trtllm_treewy import ops  # noqa: F401  (registers torch.ops.treewy)
from trtllm_treewy.plugin_contract import PLUGINS

from .network import torch_dtype


def plugin_node(network, inputs, plugin):
    spec = PLUGINS[plugin.name]
    fields = spec.values(**plugin.fields)
    given = spec.inputs_with(**fields)
    assert len(inputs) == len(given), (plugin.name, len(inputs))
    kinds = {}
    sizes = {}
    for tensor, want in zip(inputs, given, strict=True):
        name = str(torch_dtype(tensor.dtype)).removeprefix("torch.")
        assert name in want.dtypes, (plugin.name, want.name, name)
        assert kinds.setdefault(want.kind, tensor.dtype) == tensor.dtype, (plugin.name, want.kind)
        assert len(tensor.shape) == len(want.shape), (plugin.name, want.name, tensor.shape)
        for symbol, size in zip(want.shape, tensor.shape, strict=True):
            if size != -1:
                assert sizes.setdefault(symbol, size) == size, (plugin.name, symbol, size)
    dims = {"HV": "num_v_heads", "V": "head_v_dim", "K": "head_k_dim", "HK": "num_k_heads"}
    for symbol, field in dims.items():
        if field in fields:
            assert sizes.setdefault(symbol, fields[field]) == fields[field], (symbol, sizes)
    outputs = []
    for want in spec.outputs_with(**fields):
        dtype = {"stash": 0, "float32": 0}.get(want.kind)
        dtype = kinds[want.kind] if dtype is None else dtype
        outputs.append((type(inputs[0].dtype)(dtype), [sizes.get(x, -1) for x in want.shape]))
    return network.add(spec.name, inputs, outputs, _FUNCTIONS[spec.name](fields), fields)


def _heads(fields, qkv):
    hk, hv = fields["num_k_heads"], fields["num_v_heads"]
    k, v = fields["head_k_dim"], fields["head_v_dim"]
    q, key, value = qkv.split([hk * k, hk * k, hv * v], -1)
    return q.unflatten(-1, (hk, k)), key.unflatten(-1, (hk, k)), value.unflatten(-1, (hv, v))


def _conv(fields):
    def run(x, conv_state, weight, slot, parents, num_nodes):
        return torch.ops.treewy.tree_conv(x, conv_state, slot, parents, num_nodes, weight)

    return run


def _prefill_conv(fields):
    def run(x, conv_state, weight, slot, cu_seqlens):
        if not len(slot):
            return x.clone(), conv_state
        y = torch.ops.treewy.prefill_conv(x, conv_state, slot, cu_seqlens, weight)
        return y, conv_state

    return run


def _verify(fields):
    def run(qkv, a, b, a_log, dt_bias, state, slot, parents, num_nodes):
        q, k, v = _heads(fields, qkv)
        return torch.ops.treewy.tree_verify(
            q, k, v, a, b, a_log, dt_bias, state, slot, parents, num_nodes
        )

    return run


def _prefill(fields):
    def run(qkv, a, b, a_log, dt_bias, state, slot, cu_seqlens):
        q, k, v = _heads(fields, qkv)
        if not len(slot):
            return v.clone(), state
        out = torch.ops.treewy.prefill(q, k, v, a, b, a_log, dt_bias, state, slot, cu_seqlens)
        return out, state

    return run


_FUNCTIONS = {
    "TreeConv1d": _conv,
    "GdnPrefillConv1d": _prefill_conv,
    "TreeWyVerify": _verify,
    "GdnPrefill": _prefill,
}
