"""Double of Parameter: a weight that becomes a constant of the network."""

from __future__ import annotations

import tensorrt as trt
import torch

from ._utils import str_dtype_to_trt
from .network import torch_dtype


class Parameter:
    def __init__(self, value=None, shape=None, dtype=None, is_buffer=False, prefer_managed=False):
        self.dtype = str_dtype_to_trt(dtype) if isinstance(dtype, str) else dtype
        self.is_buffer = is_buffer
        self._value = None if value is None else torch.as_tensor(value)
        self.shape = tuple(shape if value is None else self._value.shape)

    @property
    def value(self):
        from .functional import constant_tensor

        assert self._value is not None, "not loaded"
        return constant_tensor(self._value, self.dtype)

    @value.setter
    def value(self, tensor):
        assert tuple(tensor.shape) == self.shape, (tuple(tensor.shape), self.shape)
        if torch_dtype(self.dtype) != tensor.dtype:  # warned of, and taken over
            self.dtype = {v: k for k, v in _types().items()}[tensor.dtype]
        self._value = tensor

    @property
    def raw_value(self):
        return self._value


def _types():
    return {x: torch_dtype(x) for x in (trt.float32, trt.float16, trt.bfloat16)}
