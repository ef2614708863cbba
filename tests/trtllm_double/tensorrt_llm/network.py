"""The recorded network: nodes with a function in torch each, run once all inputs are given."""

from __future__ import annotations

import torch

from . import _common


class ITensor:
    def __init__(self, dtype, shape, name=""):
        self.dtype, self.shape, self.name = dtype, tuple(shape), name


class Node:
    """One layer.

    `function` takes the values of its inputs; a collective's takes a list of them, one a rank.
    """

    def __init__(self, op, inputs, outputs, function, fields=None):
        self.op, self.inputs, self.outputs = op, list(inputs), list(outputs)
        self.function, self.fields, self.name, self.info = function, dict(fields or {}), None, None

    def get_output(self, index):
        return self.outputs[index]


class TrtNetwork:
    """What default_trtnet gives."""

    def __init__(self):
        self.nodes = []

    def add(self, op, inputs, dtypes_shapes, function, fields=None):
        outputs = [ITensor(dtype, shape) for dtype, shape in dtypes_shapes]
        node = Node(op, inputs, outputs, function, fields)
        self.nodes.append(node)
        return node

    def add_plugin_v3(self, inputs, shape_inputs, plugin):
        assert shape_inputs == []
        from .plugin_runner import plugin_node

        return plugin_node(self, inputs, plugin)


class Network:
    """What default_net gives."""

    strongly_typed = True

    def __init__(self, plugin_config):
        self.trt_network = TrtNetwork()
        self.plugin_config = plugin_config
        self.inputs, self.outputs, self.ranges = {}, {}, {}

    def __enter__(self):
        _common.stack.append(self)
        return self

    def __exit__(self, *_):
        _common.stack.pop()

    def add_input(self, tensor):
        assert tensor.name not in self.inputs, f"two inputs named {tensor.name}"
        for name, values in tensor.dim_range.items():
            assert self.ranges.setdefault(name, values) == values, f"{name} has two ranges"
        self.inputs[tensor.name] = tensor

    def run(self, feeds):
        return run_ranks([self], [feeds])[0]

    def find(self, op):
        return [node for node in self.trt_network.nodes if node.op == op]


def run_ranks(networks, feeds):
    """Outputs by name of each rank; the networks have the same nodes, run in step."""
    values = []
    for network, given in zip(networks, feeds, strict=True):
        assert given.keys() == network.inputs.keys(), given.keys() ^ network.inputs.keys()
        known = {}
        for name, tensor in network.inputs.items():
            value = given[name]
            assert value.dtype == torch_dtype(tensor.dtype), (name, value.dtype, tensor.dtype)
            assert value.dim() == len(tensor.shape), (name, value.shape, tensor.shape)
            for axis, (have, want) in enumerate(zip(value.shape, tensor.shape, strict=True)):
                low_high = list(tensor.dim_range.values())[axis][0]
                low, high = (
                    (low_high[0], low_high[2]) if isinstance(low_high, list) else (low_high,) * 2
                )
                assert want in (-1, have) and low <= have <= high, (
                    name,
                    value.shape,
                    axis,
                    low_high,
                )
            known[tensor.trt_tensor] = value
        values.append(known)
    for nodes in zip(*(network.trt_network.nodes for network in networks), strict=True):
        assert len({node.op for node in nodes}) == 1
        arguments = [
            [known[x] for x in node.inputs] for node, known in zip(nodes, values, strict=True)
        ]
        if nodes[0].op in ("allreduce", "allgather"):
            results = nodes[0].function([x[0] for x in arguments])
            results = [(x,) for x in results]
        else:
            results = [node.function(*x) for node, x in zip(nodes, arguments, strict=True)]
        for node, known, result in zip(nodes, values, results, strict=True):
            result = result if isinstance(result, tuple) else (result,)
            for tensor, value in zip(node.outputs, result, strict=True):
                assert value.dtype == torch_dtype(tensor.dtype), (
                    node.op,
                    value.dtype,
                    tensor.dtype,
                )
                shape = tuple(value.shape)
                fits = len(shape) == len(tensor.shape) and all(
                    want in (-1, have) for want, have in zip(tensor.shape, shape, strict=True)
                )
                assert fits, (node.op, shape, tensor.shape)
                known[tensor] = value
    return [
        {name: known[x.trt_tensor] for name, x in network.outputs.items()}
        for network, known in zip(networks, values, strict=True)
    ]


def torch_dtype(dtype):
    import tensorrt as trt

    return {
        trt.float32: torch.float32,
        trt.float16: torch.float16,
        trt.bfloat16: torch.bfloat16,
        trt.int32: torch.int32,
        trt.int64: torch.int64,
        trt.bool: torch.bool,
    }[dtype]


def net_guard(network):
    return network
