"""ONNX nodes in the making: values are names, nodes come out in the order they were asked for.

Used for whole graphs and for the bodies of functions and loops alike, so constants are nodes.
Needs the `onnx` package, as all of the export does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
# The first that has Attention. TensorRT takes it from 10.14 on.
ATTENTION_OPSET = 23
IR_VERSIONS = {OPSET: 8, ATTENTION_OPSET: 11}
TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int32: TensorProto.INT32,
    torch.int64: TensorProto.INT64,
    torch.bool: TensorProto.BOOL,
}
# The largest finite float32: what is at most this in magnitude is neither NaN nor infinite.
LARGEST = float(np.finfo(np.float32).max)


class Nodes:
    """A list of nodes that grows; every method adds nodes and returns the name of a result."""

    def __init__(self, prefix: str = "", opset: int = OPSET) -> None:
        self.opset = opset
        self.nodes: list[Any] = []
        self._prefix = prefix
        self._counts: dict[str, int] = {}
        self._constants: dict[tuple[bytes, str, tuple[int, ...]], str] = {}

    def fresh(self, hint: str) -> str:
        """A name that no other value has."""
        count = self._counts.get(hint, 0)
        self._counts[hint] = count + 1
        return f"{self._prefix}{hint}_{count}"

    def outputs(
        self,
        op: str,
        inputs: Sequence[str],
        names: Sequence[str],
        domain: str = "",
        **attributes: Any,
    ) -> None:
        """A node whose results have these names.

        Standard nodes have no name of their own: a function is expanded many times, and TensorRT
        warns of names that occur twice.
        """
        name = names[0] if domain else None
        node = helper.make_node(
            op, list(inputs), list(names), name=name, domain=domain, **attributes
        )
        self.nodes.append(node)

    def op(self, kind: str, *inputs: str, hint: str = "", **attributes: Any) -> str:
        """A node with one result."""
        name = self.fresh(hint or kind)
        self.outputs(kind, inputs, [name], **attributes)
        return name

    def array(self, value: Any, dtype: Any) -> str:
        """A constant; equal ones are one."""
        array = np.asarray(value, dtype=dtype)
        key = (array.tobytes(), array.dtype.str, array.shape)
        if key not in self._constants:
            name = self.fresh("const")
            self.outputs("Constant", [], [name], value=numpy_helper.from_array(array, name))
            self._constants[key] = name
        return self._constants[key]

    def ints(self, *values: int) -> str:
        """A 1-D int64 constant: axes, shapes, bounds."""
        return self.array(values, np.int64)

    def f32(self, value: float) -> str:
        """A float32 scalar."""
        return self.array(value, np.float32)

    def i32(self, value: int) -> str:
        """An int32 scalar."""
        return self.array(value, np.int32)

    def cast(self, x: str, dtype: torch.dtype) -> str:
        return self.op("Cast", x, to=TYPES[dtype])

    def reshape(self, x: str, *shape: int) -> str:
        """0 keeps a dimension, one -1 takes what is left."""
        return self.op("Reshape", x, self.ints(*shape))

    def transpose(self, x: str, *perm: int) -> str:
        return self.op("Transpose", x, perm=perm)

    def unsqueeze(self, x: str, *axes: int) -> str:
        return self.op("Unsqueeze", x, self.ints(*axes))

    def squeeze(self, x: str, *axes: int) -> str:
        return self.op("Squeeze", x, self.ints(*axes))

    def slice(self, x: str, start: int, stop: int, axis: int) -> str:
        return self.op("Slice", x, self.ints(start), self.ints(stop), self.ints(axis))

    def gather(self, x: str, index: str, axis: int = 0) -> str:
        return self.op("Gather", x, index, axis=axis)

    def concat(self, *xs: str, axis: int) -> str:
        return self.op("Concat", *xs, axis=axis)

    def total(self, x: str, axis: int, keep: bool = False) -> str:
        """The sum along one axis."""
        return self.op("ReduceSum", x, self.ints(axis), keepdims=int(keep))

    def mean(self, x: str, axis: int, keep: bool = False) -> str:
        """The mean along one axis, which opset 18 made an input."""
        if self.opset < 18:
            return self.op("ReduceMean", x, axes=[axis], keepdims=int(keep))
        return self.op("ReduceMean", x, self.ints(axis), keepdims=int(keep))

    def where(self, condition: str, yes: str, no: str) -> str:
        return self.op("Where", condition, yes, no)

    def size(self, x: str, axis: int) -> str:
        """One dimension of x, int64 [1]."""
        return self.op("Shape", x, start=axis, end=axis + 1)

    def count(self, size: str) -> str:
        """0, 1, .. below `size` (int64 [1]), int32."""
        zero, one = self.array(0, np.int64), self.array(1, np.int64)
        return self.cast(self.op("Range", zero, self.squeeze(size, 0), one), torch.int32)

    def finite(self, x: str) -> str:
        """Where float32 x is neither NaN nor infinite."""
        return self.op("LessOrEqual", self.op("Abs", x), self.f32(LARGEST))

    def clamp(self, x: str, high: str) -> str:
        """int32 x within [0, high]."""
        return self.op("Max", self.op("Min", x, high), self.i32(0))
