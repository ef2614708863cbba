"""An exported network as the parser of TensorRT 8.6 takes it.

That parser ignores `start` and `end` of Shape without a word, has no CastLike, and reads no
model-local functions; a bool input and a sum of integers are things that it may not take. So:

- Shape of one dimension becomes Shape and Gather, CastLike a Cast to the type at hand;
- sums of int32 are made in float32, which is exact for counts;
- bool inputs are int32, and cast;
- weights are in the file; functions and their domain go.

Needs the `onnx` package.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from trtllm_treewy.export.onnx_functions import DOMAIN
from trtllm_treewy.export.onnx_nodes import TYPES

COMPARISONS = frozenset(
    ("And", "Equal", "Greater", "GreaterOrEqual", "IsNaN", "Less", "LessOrEqual", "Not", "Or")
)
# What the networks may consist of: in the parser's docs/operators.md at its branch 8.6-EA.
SUPPORTED = COMPARISONS | frozenset(
    (
        "Abs", "Add", "Cast", "Concat", "Constant", "Cos", "Div", "Exp", "Expand", "Gather",
        "GatherND", "Identity", "MatMul", "Max", "Min", "Mul", "Neg", "Range", "Reciprocal",
        "ReduceMean", "ReduceSum", "Reshape", "Shape", "Sigmoid", "Sin", "Slice", "Softmax",
        "Sqrt", "Squeeze", "Sub", "TopK", "Transpose", "Unsqueeze", "Where",
    )
)  # fmt: skip


def value_types(model):
    """ONNX element types of all values of the main graph, by name."""
    types = {
        x.name: x.type.tensor_type.elem_type for x in (*model.graph.input, *model.graph.output)
    }
    types.update({x.name: x.data_type for x in model.graph.initializer})
    for node in model.graph.node:
        attributes = {x.name: x for x in node.attribute}
        if node.op_type == "Constant":
            kind = attributes["value"].t.data_type
        elif node.op_type == "Cast":
            kind = attributes["to"].i
        elif node.op_type == "CastLike":
            kind = types[node.input[1]]
        elif node.op_type in COMPARISONS:
            kind = TensorProto.BOOL
        elif node.op_type == "Shape":
            kind = TensorProto.INT64
        else:
            kind = types[node.input[1 if node.op_type == "Where" else 0]]
        for name in node.output:
            types.setdefault(name, kind)
        if node.op_type == "TopK":
            types[node.output[1]] = TensorProto.INT64
    return types


def lower(model, folder, *, functions=False):
    """The ModelProto for TensorRT 8.6 of one of `export_onnx`.

    Args:
        model: the ModelProto.
        folder: where its weights lie.
        functions: keep the functions, for running the result in ONNX Runtime.

    Raises:
        ValueError: there is an operator that the parser has not.
    """
    types = value_types(model)
    lowered = onnx.ModelProto()
    lowered.CopyFrom(model)
    graph = lowered.graph
    onnx.load_external_data_for_model(lowered, str(folder))
    nodes = []
    for x in graph.input:
        if x.type.tensor_type.elem_type == TensorProto.BOOL:
            x.type.tensor_type.elem_type = TensorProto.INT32
            nodes.append(
                helper.make_node("Cast", [x.name], [f"{x.name}/bool"], to=TensorProto.BOOL)
            )
    renamed = {node.input[0]: node.output[0] for node in nodes}
    for node in model.graph.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.input[:] = [renamed.get(name, name) for name in node.input]
        nodes += _lowered_node(copy, types, functions)
    del graph.node[:]
    graph.node.extend(nodes)
    if not functions:
        del lowered.functions[:]
        kept = [x for x in lowered.opset_import if x.domain != DOMAIN]
        del lowered.opset_import[:]
        lowered.opset_import.extend(kept)
    return lowered


def _lowered_node(node, types, functions):
    if node.domain == DOMAIN:
        if not functions:
            node.domain = ""
        return [node]
    if node.op_type not in SUPPORTED | {"CastLike"}:
        raise ValueError(f"TensorRT 8.6's parser has no {node.op_type}")
    (name,) = node.output if len(node.output) == 1 else (None,)
    attributes = {x.name: x.i for x in node.attribute if x.name in ("start", "end", "keepdims")}
    if node.op_type == "CastLike":
        return [helper.make_node("Cast", node.input[:1], [name], to=types[name])]
    if node.op_type == "Shape" and attributes:
        axis = attributes["start"]
        if attributes["end"] != axis + 1:
            raise ValueError("Shape of more than one dimension is not lowered")
        index = numpy_helper.from_array(np.int64([axis]), f"{name}/axis")
        return [
            helper.make_node("Shape", node.input, [f"{name}/all"]),
            helper.make_node("Constant", [], [f"{name}/axis"], value=index),
            helper.make_node("Gather", [f"{name}/all", f"{name}/axis"], [name], axis=0),
        ]
    if node.op_type == "ReduceSum" and types[name] == TensorProto.INT32:
        wide, axes = f"{name}/wide", node.input[1]
        return [
            helper.make_node("Cast", node.input[:1], [wide], to=TensorProto.FLOAT),
            helper.make_node("ReduceSum", [wide, axes], [f"{name}/sum"], **attributes),
            helper.make_node("Cast", [f"{name}/sum"], [name], to=TensorProto.INT32),
        ]
    return [node]


def float_types(model):
    """torch's float types of a lowered network's values by name: what TensorRT is to keep to."""
    known = {number: dtype for dtype, number in TYPES.items() if dtype.is_floating_point}
    weights = {x.name for x in model.graph.initializer}
    weights |= {node.output[0] for node in model.graph.node if node.op_type == "Constant"}
    return {
        name: known[kind]
        for name, kind in value_types(model).items()
        if kind in known and name not in weights
    }
