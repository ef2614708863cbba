"""Tracing the model definition: its own code runs on `Value`s, which write ONNX nodes.

A `Value` stands for a tensor: it has a type and a shape, whose dynamic dimensions are names. torch
hands it every function that is called with it (`__torch_function__`). What the model definition
uses is in the table at the end, and nothing else: an operation that is not there is refused by
name, so a change of the model cannot be exported wrongly in silence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import EllipsisType
from typing import Any, Union

import numpy as np
import torch
from torch import nn

from .onnx_nodes import TYPES, Nodes

Dim = Union[int, str]  # noqa: UP007  (evaluated at run time on Python 3.10)
Index = Union[slice, None, EllipsisType]  # noqa: UP007


class Value:
    """A tensor of the graph.

    Attributes:
        f: the graph's nodes.
        name: in the graph.
        shape: numbers, and names of dynamic dimensions.
        dtype: torch's.
    """

    def __init__(self, f: Nodes, name: str, shape: Sequence[Dim], dtype: torch.dtype) -> None:
        self.f, self.name, self.shape, self.dtype = f, name, tuple(shape), dtype

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(function, "__name__", str(function)).strip("_")
        if name not in FUNCTIONS:
            raise NotImplementedError(f"the ONNX export has no translation for torch's {name}")
        return FUNCTIONS[name](*args, **(kwargs or {}))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def device(self) -> torch.device:
        """Where constants that the model makes for this tensor are computed."""
        return torch.device("cpu")

    def like(self, name: str, shape: Sequence[Dim] | None = None) -> Value:
        """Another value of this type, and of this shape unless another is given."""
        return Value(self.f, name, self.shape if shape is None else shape, self.dtype)

    def axis(self, axis: int) -> int:
        return axis % self.ndim

    # ---- arithmetic

    def __add__(self, other: Any) -> Value:
        return _binary("Add", self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Value:
        return _binary("Sub", self, other)

    def __mul__(self, other: Any) -> Value:
        return _binary("Mul", self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Value:
        return _binary("Div", self, other)

    def __neg__(self) -> Value:
        return _unary("Neg")(self)

    def __ge__(self, other: Any) -> Value:
        return _compare("GreaterOrEqual", self, other)

    def __lt__(self, other: Any) -> Value:
        return _compare("Less", self, other)

    def __and__(self, other: Value) -> Value:
        return _binary("And", self, other)

    def clamp(self, low: float, high: float) -> Value:
        return _binary("Max", _binary("Min", self, high), low)

    def square(self) -> Value:
        return self * self

    def cos(self) -> Value:
        return _unary("Cos")(self)

    def sin(self) -> Value:
        return _unary("Sin")(self)

    def to(self, dtype: torch.dtype) -> Value:
        if dtype == self.dtype:
            return self
        return Value(self.f, self.f.cast(self.name, dtype), self.shape, dtype)

    def mean(self, dim: int, keepdim: bool = False) -> Value:
        axis = self.axis(dim)
        name = self.f.mean(self.name, axis, keepdim)
        return self.like(name, _reduced(self.shape, axis, keepdim))

    def sum(self, dim: int, keepdim: bool = False) -> Value:
        axis = self.axis(dim)
        return self.like(
            self.f.total(self.name, axis, keepdim), _reduced(self.shape, axis, keepdim)
        )

    def topk(self, k: int, dim: int) -> tuple[Value, Value]:
        f, axis = self.f, self.axis(dim)
        names = [f.fresh("top_values"), f.fresh("top_indices")]
        f.outputs("TopK", [self.name, f.ints(k)], names, axis=axis)
        shape = (*self.shape[:axis], k, *self.shape[axis + 1 :])
        return self.like(names[0], shape), Value(f, names[1], shape, torch.int64)

    # ---- shapes

    def view(self, *shape: Dim) -> Value:
        return self.reshape(*shape)

    def reshape(self, *shape: Dim) -> Value:
        shape = self._resolved(shape)
        target, free = [], 0
        for axis, size in enumerate(shape):
            if isinstance(size, int):
                target.append(size)
            elif axis < self.ndim and self.shape[axis] == size:
                target.append(0)
            else:
                target.append(-1)
                free += 1
        if free > 1:
            raise NotImplementedError(
                f"reshape of {list(self.shape)} to {list(shape)}: more than one new dynamic "
                "dimension"
            )
        return self.like(self.f.reshape(self.name, *target), shape)

    def _resolved(self, shape: Sequence[Dim]) -> tuple[Dim, ...]:
        """`shape` with what its -1 stands for."""
        if -1 not in shape:
            return tuple(shape)
        known = math.prod(size for size in shape if isinstance(size, int) and size != -1)
        fixed = math.prod(size for size in self.shape if isinstance(size, int))
        names = [size for size in self.shape if isinstance(size, str)]
        for size in shape:
            if isinstance(size, str):
                names.remove(size)
        factor = fixed // known
        if not names:
            rest: Dim = factor
        else:
            rest = "*".join([*names, *([str(factor)] if factor != 1 else [])])
        return tuple(rest if size == -1 else size for size in shape)

    def view_as(self, other: Value) -> Value:
        shape = self.f.op("Shape", other.name)
        return self.like(self.f.op("Reshape", self.name, shape), other.shape)

    def flatten(self, start_dim: int) -> Value:
        start = self.axis(start_dim)
        return self.reshape(*self.shape[:start], math.prod(fixed(self.shape[start:])))

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Value:
        axis = self.axis(dim)
        return self.reshape(*self.shape[:axis], *sizes, *self.shape[axis + 1 :])

    def squeeze(self, dim: int) -> Value:
        axis = self.axis(dim)
        shape = (*self.shape[:axis], *self.shape[axis + 1 :])
        return self.like(self.f.squeeze(self.name, axis), shape)

    def permute(self, *axes: int) -> Value:
        return self.like(
            self.f.transpose(self.name, *axes), tuple(self.shape[axis] for axis in axes)
        )

    def split(self, sizes: Sequence[int], dim: int) -> list[Value]:
        axis, bounds = self.axis(dim), np.cumsum([0, *sizes]).tolist()
        return [
            self.like(
                self.f.slice(self.name, start, stop, axis),
                (*self.shape[:axis], stop - start, *self.shape[axis + 1 :]),
            )
            for start, stop in pairwise(bounds)
        ]

    def chunk(self, chunks: int, dim: int) -> list[Value]:
        (size,) = fixed([self.shape[self.axis(dim)]])
        if size % chunks:
            raise NotImplementedError(f"chunk of {size} in {chunks} unequal parts")
        return self.split([size // chunks] * chunks, dim)

    def __getitem__(self, index: Value | Index | tuple[Index, ...]) -> Value:
        """Slices of static dimensions, `None`, `...`; or rows by an index tensor."""
        if isinstance(index, Value):
            shape = (*index.shape, *self.shape[1:])
            return self.like(self.f.gather(self.name, index.name), shape)
        items = list(index) if isinstance(index, tuple) else [index]
        if ... in items:
            at = items.index(...)
            taken = sum(item is not None for item in items) - 1
            items[at : at + 1] = [slice(None)] * (self.ndim - taken)
        value = self
        for axis, item in enumerate(items):
            if item is None:
                value = value._unsqueezed(axis)
            elif isinstance(item, slice) and item != slice(None):
                value = value._sliced(item, axis)
            elif not isinstance(item, slice):
                raise NotImplementedError(f"the ONNX export has no translation for [{item}]")
        return value

    def _unsqueezed(self, axis: int) -> Value:
        shape = (*self.shape[:axis], 1, *self.shape[axis:])
        return self.like(self.f.unsqueeze(self.name, axis), shape)

    def _sliced(self, item: slice, axis: int) -> Value:
        (size,) = fixed([self.shape[axis]])
        start, stop, step = item.indices(size)
        if step != 1:
            raise NotImplementedError("the ONNX export has no translation for a slice with a step")
        shape = (*self.shape[:axis], stop - start, *self.shape[axis + 1 :])
        return self.like(self.f.slice(self.name, start, stop, axis), shape)


class Weight(Value):
    """A parameter of the model, by its name in the checkpoint."""


def fixed(shape: Sequence[Dim]) -> list[int]:
    """`shape`, which must be of numbers; NotImplementedError where it is not."""
    sizes = [size for size in shape if isinstance(size, int)]
    if len(sizes) != len(shape):
        raise NotImplementedError(f"dynamic dimensions where numbers are needed: {list(shape)}")
    return sizes


def _reduced(shape: Sequence[Dim], axis: int, keep: bool) -> tuple[Dim, ...]:
    return (*shape[:axis], *((1,) if keep else ()), *shape[axis + 1 :])


def _operand(f: Nodes, x: Any, dtype: torch.dtype) -> tuple[str, tuple[Dim, ...], torch.dtype]:
    """Name, shape and type of an operand; numbers and tensors become constants.

    numpy has no bfloat16, so those are made in float32 and cast.
    """
    if isinstance(x, Value):
        return x.name, x.shape, x.dtype
    tensor = torch.as_tensor(x)
    own = tensor.dtype if isinstance(x, torch.Tensor) else dtype
    wide = f.array(tensor.to(torch.float32).numpy(), np.float32)
    if own not in (torch.float32, *TYPES):
        raise NotImplementedError(f"a constant of type {own}")
    name = wide if own == torch.float32 else f.cast(wide, own)
    return name, tuple(tensor.shape), own


def _binary(kind: str, x: Any, y: Any) -> Value:
    f, dtype = (x if isinstance(x, Value) else y).f, (x if isinstance(x, Value) else y).dtype
    a, a_shape, a_type = _operand(f, x, dtype)
    b, b_shape, b_type = _operand(f, y, dtype)
    result = torch.promote_types(a_type, b_type)
    a = a if a_type == result else f.cast(a, result)
    b = b if b_type == result else f.cast(b, result)
    return Value(f, f.op(kind, a, b), _broadcast(a_shape, b_shape), result)


def _compare(kind: str, x: Value, y: Any) -> Value:
    result = _binary(kind, x, y)
    return Value(result.f, result.name, result.shape, torch.bool)


def _where(condition: Value, x: Any, y: Any) -> Value:
    f, dtype = condition.f, (x if isinstance(x, Value) else y).dtype
    a, a_shape, a_type = _operand(f, x, dtype)
    b, b_shape, b_type = _operand(f, y, dtype)
    if a_type != b_type:
        raise NotImplementedError(f"where of {a_type} and {b_type}")
    shape = _broadcast(condition.shape, _broadcast(a_shape, b_shape))
    return Value(f, f.where(condition.name, a, b), shape, a_type)


def _broadcast(a: Sequence[Dim], b: Sequence[Dim]) -> tuple[Dim, ...]:
    rank = max(len(a), len(b))
    a, b = (1,) * (rank - len(a)) + tuple(a), (1,) * (rank - len(b)) + tuple(b)
    shape = []
    for x, y in zip(a, b, strict=True):
        if x != y and 1 not in (x, y):
            raise NotImplementedError(f"shapes {list(a)} and {list(b)} do not broadcast")
        shape.append(y if x == 1 else x)
    return tuple(shape)


def _unary(kind: str) -> Callable[[Value], Value]:
    return lambda x: x.like(x.f.op(kind, x.name))


def _linear(x: Value, weight: Value, bias: Value | None = None) -> Value:
    f = x.f
    product = f.op("MatMul", x.name, f.transpose(weight.name, 1, 0))
    y = x.like(product, (*x.shape[:-1], weight.shape[0]))
    return y if bias is None else y + bias


def _embedding(index: Value, weight: Value, *_: Any, **__: Any) -> Value:
    return weight[index]


def _cat(values: Sequence[Value], dim: int = 0) -> Value:
    first = values[0]
    axis = first.axis(dim)
    size = sum(fixed([value.shape[axis] for value in values]))
    name = first.f.concat(*(value.name for value in values), axis=axis)
    return first.like(name, (*first.shape[:axis], size, *first.shape[axis + 1 :]))


def _softmax(x: Value, dim: int, dtype: torch.dtype | None = None, **_: Any) -> Value:
    x = x if dtype is None else x.to(dtype)
    return x.like(x.f.op("Softmax", x.name, axis=x.axis(dim)))


def _matmul(x: Value, y: Value) -> Value:
    shape = (*_broadcast(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-1])
    return x.like(x.f.op("MatMul", x.name, y.name), shape)


def _rsqrt(x: Value) -> Value:
    return x.like(x.f.op("Reciprocal", x.f.op("Sqrt", x.name)))


def _silu(x: Value, inplace: bool = False) -> Value:
    return x * _unary("Sigmoid")(x)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: _binary("Add", x, y),
    "cat": _cat,
    "embedding": _embedding,
    "linear": _linear,
    "matmul": _matmul,
    "mul": lambda x, y: _binary("Mul", x, y),
    "rmul": lambda x, y: _binary("Mul", x, y),
    "radd": lambda x, y: _binary("Add", x, y),
    "rsqrt": _rsqrt,
    "sigmoid": _unary("Sigmoid"),
    "silu": _silu,
    "softmax": _softmax,
    "where": _where,
}


def take_parameters(module: nn.Module, f: Nodes, dtypes: Callable[[str], torch.dtype]) -> None:
    """Puts a `Weight` in place of every parameter; the module can only be traced from then on.

    Args:
        module: the model, which may be on the meta device.
        f: the graph.
        dtypes: the type of a parameter by its name.
    """
    for prefix, part in module.named_modules():
        for name in list(part._parameters):
            parameter = part._parameters[name]
            if parameter is None:
                continue
            full = f"{prefix}.{name}" if prefix else name
            del part._parameters[name]
            part.__dict__[name] = Weight(f, full, tuple(parameter.shape), dtypes(full))
