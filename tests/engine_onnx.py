"""The networks of engine_suite.py as ONNX files: `python tests/engine_onnx.py OUTPUT.onnx`.

The nodes are as docs/plugin.md says: the plugin's name, `plugin_namespace`, `plugin_version`, and
the fields as attributes. Needs the `onnx` package.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from engine_suite import INT32, Model, verify_network

from trtllm_treewy.plugin_contract import NAMESPACE, VERSION


def to_onnx(network):
    """The bytes of an ONNX file."""
    import onnx
    from onnx import TensorProto, helper

    types = {
        torch.float32: TensorProto.FLOAT,
        torch.float16: TensorProto.FLOAT16,
        torch.bfloat16: TensorProto.BFLOAT16,
        INT32: TensorProto.INT32,
    }

    def value(name, dtype, shape):
        return helper.make_tensor_value_info(name, types[dtype], shape)

    nodes, constants, inputs = [], [], []
    for name, dtype, low, _, high in network.inputs:
        ends = enumerate(zip(low, high, strict=True))
        shape = [a if a == b else f"{name}_{i}" for i, (a, b) in ends]
        inputs.append(value(name, dtype, shape))
    for step in network.steps:
        if step[0] == "constant":
            _, name, x = step
            data = x.numpy().tobytes()
            constants.append(helper.make_tensor(name, types[x.dtype], x.shape, data, raw=True))
        elif step[0] == "sum":
            nodes.append(helper.make_node("Add", list(step[2:]), [step[1]], name=step[1]))
        else:
            _, plugin, fields, given, made = step
            attributes = {"plugin_namespace": NAMESPACE, "plugin_version": VERSION, **fields}
            nodes.append(helper.make_node(plugin, given, made, name=made[0], **attributes))
    outputs = [value(name, dtype, None) for name, dtype in network.outputs]
    graph = helper.make_graph(nodes, "treewy", inputs, outputs, initializer=constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnx.ModelProto.SerializeToString(model)


if __name__ == "__main__":
    half = Model(torch.float16, torch.float32, "cpu")
    Path(sys.argv[1]).write_bytes(to_onnx(verify_network(half)))
