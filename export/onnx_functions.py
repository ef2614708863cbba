"""What the plugins' nodes mean, as ONNX model-local functions in standard operators.

A file with these functions runs where no plugin is: ONNX Runtime inlines them, and TensorRT expands
them unless the plugin is registered. A function is made for the fields of the model's nodes and
declares them, with `plugin_namespace` and `plugin_version`, as its attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from onnx import TensorProto, helper

from trtllm_treewy.plugin_contract import CONV, PREFILL, PREFILL_CONV, VERIFY, PluginSpec

from .onnx_delta_rule import Heads, Inputs, apply_state, prepare, solve
from .onnx_nodes import OPSET, Nodes
from .onnx_trees import Tree, segments, slot_rows, tree, write_slots

DOMAIN = "treewy"
# Tokens of a prompt that are solved together where there is no plugin.
CHUNK = 64


def function_for(
    plugin: PluginSpec, fields: Mapping[str, int | str], width: int = 0, opset: int = OPSET
) -> Any:
    """The FunctionProto of a plugin's nodes with these fields (`plugin.values`).

    `width` is that of the conv, for the conv plugins; `opset` the graph's.

    Raises:
        ValueError: the plugin, or `state_commit` deferred, has no meaning in standard operators
            here.
    """
    # TensorRT's parser mixes up values of a function and of the graph that have one name.
    f = Nodes(f"{plugin.name}/", opset)
    if fields.get("state_commit", "reconstruct") != "reconstruct":
        raise ValueError(
            f"{plugin.name}: the function for state_commit must be reconstruct, got "
            f"{fields['state_commit']}"
        )
    if plugin is VERIFY:
        _verify(f, fields)
    elif plugin is PREFILL:
        _prefill(f, fields)
    elif plugin is CONV:
        _tree_conv(f, width, bool(fields["bias"]))
    elif plugin is PREFILL_CONV:
        _prefill_conv(f, width, bool(fields["bias"]))
    else:
        raise ValueError(f"{plugin.name} has no function in standard operators")
    inputs, outputs = plugin.inputs_with(**fields), plugin.outputs_with(**fields)
    return helper.make_function(
        DOMAIN,
        plugin.name,
        [spec.name for spec in inputs],
        [_result(spec.name, spec.in_place) for spec in outputs],
        f.nodes,
        [helper.make_opsetid("", opset)],
        ["plugin_namespace", "plugin_version", *fields],
        doc_string=plugin.meaning,
    )


def _result(name: str, in_place: str | None) -> str:
    """A function's values have one name each: an output in place is not its input."""
    return f"{name}_out" if in_place else name


def _heads(fields: Mapping[str, int | str]) -> Heads:
    names = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
    return Heads(*(int(fields[name]) for name in names))


def _real_nodes(f: Nodes, nodes: Tree, real: str, *behind: int) -> str:
    """Bool [B, N, 1, ..]: nodes of rows that have a slot, with axes of 1 `behind`."""
    return f.unsqueeze(f.op("And", nodes.valid, f.unsqueeze(real, 1)), *behind)


def _verify(f: Nodes, fields: Mapping[str, int | str]) -> None:
    h = _heads(fields)
    x = prepare(f, h, "qkv", "a", "b", "A_log", "dt_bias")
    nodes = tree(f, "parents", "num_nodes")
    row, real = slot_rows(f, "slot", "state")
    state = f.cast(f.gather("state", row), torch.float32)
    base_k, base_q = apply_state(f, h, x.k, state), apply_state(f, h, x.q, state)
    out, u, bad = solve(f, x, base_k, base_q, f.unsqueeze(nodes.ancestors, 1, 2))
    real = _real_nodes(f, nodes, real, 2, 3)

    def per_node(y: str) -> str:
        y = f.reshape(f.transpose(y, 0, 3, 1, 2, 4), 0, 0, h.value_heads, -1)
        return f.where(real, y, f.f32(0.0))

    f.outputs("CastLike", [per_node(out), "qkv"], ["out"])
    if fields["stash"] == "pseudo_values":
        u = per_node(f.where(bad, f.f32(np.nan), u))
        kind = TensorProto.BFLOAT16 if fields["u_dtype"] == "bfloat16" else TensorProto.FLOAT
        f.outputs("Cast", [u], ["u"], to=kind)
        g = f.where(x.bad_kv, f.f32(np.nan), x.g)
        f.outputs("Squeeze", [per_node(g), f.ints(3)], ["g"])


def _tree_conv(f: Nodes, width: int, bias: bool) -> None:
    nodes = tree(f, "parents", "num_nodes")
    row, real = slot_rows(f, "slot", "conv_state")
    window = f.cast(f.gather("conv_state", row), torch.float32)
    rows = f.concat(window, f.cast("x", torch.float32), axis=1)
    # Where each node's taps lie in `rows`: see `reference.tap_rows`.
    old = np.maximum(np.arange(-1, width - 2), 0)
    shape = f.concat(f.size("parents", 0), f.ints(width - 1), axis=0)
    before = f.op("Expand", f.array(old, np.int32), shape)
    above = f.where(nodes.valid, "parents", f.i32(-1))
    before = f.concat(before, f.op("Add", above, f.i32(width - 1)), axis=1)
    first = f.unsqueeze(f.op("Add", nodes.index, f.i32(width - 1)), 0)
    at = f.op("Expand", first, f.op("Shape", "parents"))
    taps = [at]
    for _ in range(width - 1):
        at = f.op("GatherElements", before, at, axis=1)
        taps.append(at)
    picked = []
    for tap in taps[::-1]:
        index = f.unsqueeze(f.cast(tap, torch.int64), 2)
        picked.append(f.op("GatherND", rows, index, batch_dims=1))
    y = _weighted(f, picked, bias)
    y = f.where(_real_nodes(f, nodes, real, 2), y, f.f32(0.0))
    f.outputs("CastLike", [y, "x"], ["y"])


def _weighted(f: Nodes, taps: list[str], bias: bool) -> str:
    """SiLU of the taps, oldest first, times the columns of `weight`."""
    weight = f.cast("weight", torch.float32)
    total = f.cast("bias", torch.float32) if bias else ""
    for column, tap in enumerate(taps):
        factor = f.squeeze(f.slice(weight, column, column + 1, 1), 1)
        product = f.op("Mul", tap, factor)
        total = f.op("Add", total, product) if total else product
    return f.op("Mul", total, f.op("Sigmoid", total))


def _prefill_conv(f: Nodes, width: int, bias: bool) -> None:
    kept = width - 1
    where = segments(f, "cu_seqlens", "x")
    row, real = slot_rows(f, "slot", "conv_state")
    window = f.cast(f.gather("conv_state", row), torch.float32)
    x = f.cast("x", torch.float32)
    token = f.count(f.size("x", 0))
    last = f.op("Sub", f.cast(f.size("x", 0), torch.int32), f.i32(1))
    taps = []
    for back in range(kept, -1, -1):
        inside = f.op("GreaterOrEqual", where.place, f.i32(back))
        new = f.gather(x, f.clamp(f.op("Sub", token, f.i32(back)), last))
        at = f.clamp(f.op("Add", where.place, f.i32(kept - back)), f.i32(kept - 1))
        taps.append(f.where(f.unsqueeze(inside, 1), new, _pairs(f, window, where.row, at)))
    y = f.where(f.unsqueeze(f.gather(real, where.row), 1), _weighted(f, taps, bias), f.f32(0.0))
    f.outputs("CastLike", [y, "x"], ["y"])
    # The last W - 1 of (old window, tokens): entry w is token n - (W-1) + w, or old entry n + w.
    entry = f.unsqueeze(f.array(np.arange(kept), np.int32), 0)
    old = f.op("Add", f.unsqueeze(where.length, 1), entry)
    place = f.op("Sub", old, f.i32(kept))
    new = f.gather(x, f.clamp(f.op("Add", f.unsqueeze(where.start, 1), place), last))
    index = f.unsqueeze(f.cast(f.clamp(old, f.i32(kept - 1)), torch.int64), 2)
    before = f.op("GatherND", window, index, batch_dims=1)
    inside = f.unsqueeze(f.op("GreaterOrEqual", place, f.i32(0)), 2)
    after = f.op("CastLike", f.where(inside, new, before), "conv_state")
    pool = write_slots(f, "conv_state", "slot", after, 3)
    f.outputs("Identity", [pool], ["conv_state_out"])


def _pairs(f: Nodes, x: str, row: str, at: str) -> str:
    """`x[row, at]` for int32 [T] each."""
    index = [f.unsqueeze(f.cast(i, torch.int64), 1) for i in (row, at)]
    return f.op("GatherND", x, f.concat(*index, axis=1))


def _prefill(f: Nodes, fields: Mapping[str, int | str]) -> None:
    """A scan over chunks of the packed tokens; the states of all sequences are carried along."""
    h = _heads(fields)
    qkv, a, b = (f.unsqueeze(name, 0) for name in ("qkv", "a", "b"))
    x = prepare(f, h, qkv, a, b, "A_log", "dt_bias")
    where = segments(f, "cu_seqlens", "qkv")
    row, real = slot_rows(f, "slot", "state")
    before = f.cast(f.gather("state", row), torch.float32)
    last = f.op("Sub", f.cast(f.size("qkv", 0), torch.int32), f.i32(1))
    chunks = f.op("Div", f.op("Add", f.size("qkv", 0), f.ints(CHUNK - 1)), f.ints(CHUNK))
    index = f.count(f.op("Mul", chunks, f.ints(CHUNK)))
    clamped = f.clamp(index, last)
    # Tokens that only fill the last chunk belong to no sequence.
    segment = f.where(f.op("LessOrEqual", index, last), f.gather(where.row, clamped), f.i32(-1))
    parts = [
        _chunked(f, f.gather(y, clamped, axis=len(lead)), lead, dim)
        for y, lead, dim in _layout(h, x)
    ]
    parts.append(f.reshape(segment, -1, CHUNK))
    after, outs = f.fresh("after"), f.fresh("outs")
    f.outputs(
        "Scan", [before, *parts], [after, outs], body=chunk_body(h), num_scan_inputs=len(parts)
    )
    out = f.gather(f.reshape(outs, -1, h.value_heads, h.value_dim), f.count(f.size("qkv", 0)))
    out = f.where(f.unsqueeze(f.gather(real, where.row), 1, 2), out, f.f32(0.0))
    f.outputs("CastLike", [out, "qkv"], ["out"])
    pool = write_slots(f, "state", "slot", f.op("CastLike", after, "state"), 4)
    f.outputs("Identity", [pool], ["state_out"])


def _layout(h: Heads, x: Inputs) -> list[tuple[str, tuple[int, ...], int]]:
    """The tensors of `x`, their dimensions before the nodes' and the one behind."""
    keys, values = (1, h.key_heads), (1, h.key_heads, h.groups)
    return [
        (x.q, keys, h.key_dim),
        (x.k, keys, h.key_dim),
        (x.v, values, h.value_dim),
        (x.g, values, 1),
        (x.beta, values, 1),
        (x.bad_q, (1, h.key_heads, 1), 1),
        (x.bad_kv, values, 1),
    ]


def _chunked(f: Nodes, x: str, lead: tuple[int, ...], dim: int) -> str:
    """[*lead, tokens, dim] to [chunks, *lead, CHUNK, dim]."""
    n = len(lead)
    return f.transpose(f.reshape(x, *lead, -1, CHUNK, dim), n, *range(n), n + 1, n + 2)


def chunk_body(h: Heads) -> Any:
    """One step of the scan: states [B, HV, V, K] and a chunk, to states and outputs."""
    f = Nodes("chunk_")
    names = ("q", "k", "v", "g", "beta", "bad_q", "bad_kv")
    x = Inputs(*(f.fresh(name) for name in names))
    state, segment = f.fresh("state"), f.fresh("segment")
    given = [(state, TensorProto.FLOAT), *((y, TensorProto.FLOAT) for y in (x.q, x.k, x.v))]
    given += [(x.g, TensorProto.FLOAT), (x.beta, TensorProto.FLOAT)]
    given += [(x.bad_q, TensorProto.BOOL), (x.bad_kv, TensorProto.BOOL)]
    given += [(segment, TensorProto.INT32)]
    place = f.array(np.arange(CHUNK), np.int32)
    together = f.op("Equal", f.unsqueeze(segment, 1), f.unsqueeze(segment, 0))
    order = f.unsqueeze(place, 1), f.unsqueeze(place, 0)
    ancestors = f.op("And", together, f.op("GreaterOrEqual", *order))
    picked = f.gather(state, f.op("Max", segment, f.i32(0)))
    base_k, base_q = _own_state(f, h, x.k, picked), _own_state(f, h, x.q, picked)
    out, u, bad = solve(f, x, base_k, base_q, f.unsqueeze(ancestors, 0, 1, 2))
    # From each token to the end of its sequence in this chunk.
    behind = f.cast(f.op("And", together, f.op("Less", *order)), torch.float32)
    scaled = f.op("Mul", f.op("Exp", f.op("MatMul", behind, x.g)), u)
    after = _advance(f, h, state, scaled, bad, x, segment)
    out = f.reshape(f.transpose(out, 3, 1, 2, 4, 0), CHUNK, h.value_heads, h.value_dim)
    return helper.make_graph(
        f.nodes,
        "chunk",
        [helper.make_tensor_value_info(name, kind, None) for name, kind in given],
        [helper.make_tensor_value_info(y, TensorProto.FLOAT, None) for y in (after, out)],
    )


def _own_state(f: Nodes, h: Heads, vectors: str, picked: str) -> str:
    """`S x` of each token's own S: [1, HK, L, K] and [L, HV, V, K] to [1, HK, G, L, V]."""
    flat = f.reshape(picked, 0, h.key_heads, h.groups * h.value_dim, h.key_dim)
    y = f.op("MatMul", flat, f.transpose(vectors, 2, 1, 3, 0))
    y = f.transpose(f.reshape(y, 0, h.key_heads, h.groups, h.value_dim), 1, 2, 0, 3)
    return f.unsqueeze(y, 0)


def _advance(f: Nodes, h: Heads, state: str, scaled: str, bad: str, x: Inputs, segment: str) -> str:
    """The states behind a chunk; those of sequences without a token in it keep their bits."""
    row = f.count(f.size(state, 0))
    own = f.op("Equal", f.unsqueeze(row, 1), f.unsqueeze(segment, 0))
    own = f.unsqueeze(f.cast(own, torch.float32), 1, 2, 3)  # [B, 1, 1, 1, L]
    total = f.op("Exp", f.op("MatMul", own, x.g))
    spoiled = f.op("MatMul", own, f.cast(bad, torch.float32))
    values = f.op("Mul", f.transpose(scaled, 0, 1, 2, 4, 3), own)
    update = f.op("MatMul", values, f.unsqueeze(x.k, 2))
    old = f.reshape(state, 0, h.key_heads, h.groups, h.value_dim, h.key_dim)
    new = f.op("Add", f.op("Mul", total, old), update)
    new = f.where(f.op("Greater", spoiled, f.f32(0.5)), f.f32(np.nan), new)
    return f.reshape(new, 0, h.value_heads, h.value_dim, h.key_dim)
