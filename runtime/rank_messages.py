"""Calls of an executor as messages: their tensors apart, which travel by broadcast.

What is left can be pickled and is small; and tensors on a GPU go from GPU to GPU, without the host
waiting for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorPlace:
    """Stands for a tensor: the `index`-th of its call."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> Tensor:
        """As large, without memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def take_tensors(value: Any) -> tuple[Any, list[Tensor]]:
    """`value` with a `TensorPlace` for every tensor, and the tensors in order.

    Looks into tuples, lists and dataclasses; what a dataclass has computed for itself (a
    `cached_property`) is left behind.
    """
    tensors: list[Tensor] = []

    def take(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        tensors.append(x)
        return TensorPlace(len(tensors) - 1, tuple(x.shape), x.dtype)

    return _mapped(value, take), tensors


def places(value: Any) -> list[TensorPlace]:
    """Every `TensorPlace` in what `take_tensors` gave, in order."""
    found: list[TensorPlace] = []

    def note(x: Any) -> Any:
        if isinstance(x, TensorPlace):
            found.append(x)
        return x

    _mapped(value, note)
    return found


def put_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """The other way round of `take_tensors`."""
    return _mapped(value, lambda x: tensors[x.index] if isinstance(x, TensorPlace) else x)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(x, change) for x in value)
    if is_dataclass(value) and not isinstance(value, (type, TensorPlace)):
        parts = {x.name: _mapped(getattr(value, x.name), change) for x in fields(value)}
        return type(value)(**parts)
    return change(value)
