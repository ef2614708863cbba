"""Fences in a network for TensorRT 8.6, and parts of a network.

That TensorRT fuses what lies between plugins into regions, and ends without an engine where it has
no implementation for one, whose name is all it says. A fence (plugins/tests/tensorrt/fence_v2.h)
copies a tensor: it ends a region, and the tensor keeps the type of the file. The head of a network
finds the region's bad place: the shortest head that cannot be built ends with it.

Needs the `onnx` package.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper
from onnx_tensorrt86 import value_types

from trtllm_treewy.plugin_contract import NAMESPACE, PLUGINS

# nvinfer1::DataType of what a fence may copy.
FENCED = {TensorProto.FLOAT: 0, TensorProto.FLOAT16: 1, TensorProto.INT32: 3}
# How close together fences are: around products; at the borders of steps of the model too; behind
# every node.
PRODUCTS = frozenset(("MatMul",))
STEPS = PRODUCTS | {"Gather", "GatherND", "Softmax", "Cos", "Sin", "Concat", "ReduceSum"}
LEVELS = {"none": frozenset(), "products": PRODUCTS, "steps": STEPS, "all": None}
# Tensors of these shape others, or are known when the engine is built: TensorRT keeps them itself.
HOST = frozenset(("Constant", "Shape"))


def fence(model, level):
    """A copy of a lowered network with fences: `level` is one of `LEVELS`.

    The inputs of a node that is fenced have fences too, where they are not the network's.
    """
    kinds = LEVELS[level]
    if kinds is not None and not kinds:
        return model
    types, fixed = value_types(model), _fixed(model)
    fenced = onnx.ModelProto()
    fenced.CopyFrom(model)
    graph, outputs = fenced.graph, {x.name for x in model.graph.output}
    wanted = _wanted(model, kinds, types, fixed)
    nodes, renamed = [], {}
    for node in model.graph.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.input[:] = [renamed.get(name, name) for name in node.input]
        nodes.append(copy)
        for name in node.output:
            if name in wanted and name not in outputs:
                renamed[name] = f"{name}/fence"
                nodes.append(_node(name, renamed[name], FENCED[types[name]]))
    del graph.node[:]
    graph.node.extend(nodes)
    return fenced


def head(model, count):
    """The first `count` nodes of a lowered network as a network, with what the rest takes of them.

    Inputs that none of them reads are no inputs of it.
    """
    types, fixed = value_types(model), _fixed(model)
    nodes, rest = list(model.graph.node[:count]), model.graph.node[count:]
    made = {name for node in nodes for name in node.output}
    read = {name for node in rest for name in node.input}
    outputs = [x for x in model.graph.output if x.name in made]
    known = {x.name for x in outputs}
    for name in sorted((made & read) - known - fixed):
        if types[name] in FENCED:
            outputs.append(helper.make_tensor_value_info(name, types[name], None))
    taken = {name for node in nodes for name in node.input}
    part = onnx.ModelProto()
    part.CopyFrom(model)
    graph = part.graph
    for field, keep in (
        (graph.node, nodes),
        (graph.output, outputs),
        (graph.input, [x for x in model.graph.input if x.name in taken]),
        (graph.initializer, [x for x in model.graph.initializer if x.name in taken]),
    ):
        kept = [type(x)() for x in keep]
        for copy, x in zip(kept, keep, strict=True):
            copy.CopyFrom(x)
        del field[:]
        field.extend(kept)
    return part


def _fixed(model):
    """Names of values that no input changes, or that are shapes."""
    fixed = {x.name for x in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type in HOST or all(name in fixed for name in node.input):
            fixed.update(node.output)
    return fixed


def _wanted(model, kinds, types, fixed):
    wanted = set()
    for node in model.graph.node:
        plugin = node.op_type in PLUGINS
        if kinds is None or node.op_type in kinds:
            # What a plugin makes is behind a fence already.
            wanted.update([] if plugin else node.output)
            wanted.update(node.input)
        if plugin:
            wanted.difference_update(node.output)
    return {name for name in wanted - fixed if types.get(name) in FENCED}


def _node(name, output, number):
    return helper.make_node(
        "Fence", [name], [output], type=number, plugin_namespace=NAMESPACE, plugin_version="1"
    )
