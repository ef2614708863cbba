"""Memory of an engine's steps: inputs and outputs at fixed addresses, allocated once.

One buffer for each name, as large as the largest shape needs, shared by all shapes and by the
networks of an engine, which never run at the same time. So graphs captured for many shapes cost no
memory of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import prod

import torch
from torch import Tensor

from trtllm_treewy.binding_names import PREFILL, VERIFY, Binding, bindings
from trtllm_treewy.config import ModelConfig
from trtllm_treewy.cuda_library import MAX_NODES

from .executor import ExecutorLimits

Sizes = Mapping[str, int]
# What padded places hold. All else is zero, and nothing that is padded is seen or stored.
PADDING = {"parents": -1, "slot": -1}
# Outputs that the memory plan counts as the stash already.
STASH = ("u", "g", "conv_x")
# TensorRT wants the addresses of inputs and outputs at multiples of it.
ALIGNMENT = 256


def size_of(dim: int | str, sizes: Sizes) -> int:
    """A dimension; names may be sums, such as S+W."""
    return sum(extent for _, extent in _parts(dim, sizes))


def _parts(dim: int | str, sizes: Sizes) -> list[tuple[str, int]]:
    parts = str(dim).split("+")
    return [(part, int(part) if part.isdigit() else sizes[part]) for part in parts]


def shape_of(x: Binding, sizes: Sizes) -> tuple[int, ...]:
    """A tensor's shape."""
    return tuple(size_of(dim, sizes) for dim in x.shape)


def sizes_of(inputs: Mapping[str, Tensor], tensors: tuple[Binding, ...]) -> dict[str, int]:
    """The dimensions of a step by their names.

    Raises:
        ValueError: an input is missing or has not the shape that the others imply.
    """
    sizes: dict[str, int] = {}
    given = [x for x in tensors if not x.is_pool]
    for x in given:
        if x.name not in inputs:
            raise ValueError(f"the network's input {x.name} is missing")
        if len(x.shape) == inputs[x.name].dim():
            for dim, size in zip(x.shape, inputs[x.name].shape, strict=True):
                if isinstance(dim, str) and "+" not in dim:
                    sizes[dim] = size
    for x in given:
        found, wanted = tuple(inputs[x.name].shape), shape_of(x, sizes)
        if found != wanted:
            raise ValueError(
                f"the network's input {x.name} must be {list(wanted)}, got {list(found)}"
            )
    return sizes


def copy_padded(target: Tensor, source: Tensor, x: Binding, sizes: Sizes, padded: Sizes) -> None:
    """`source` of `sizes` into `target` of `padded` sizes; the parts of a sum keep their starts."""
    if target.shape == source.shape:
        target.copy_(source)
        return
    target.fill_(PADDING.get(x.name, 0))
    for place, origin in _regions(x, sizes, padded):
        target[place].copy_(source[origin])


def _regions(
    x: Binding, sizes: Sizes, padded: Sizes
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    axes = []
    for dim in x.shape:
        spans, place, origin = [], 0, 0
        for (_, size), (_, room) in zip(_parts(dim, sizes), _parts(dim, padded), strict=True):
            spans.append((slice(place, place + size), slice(origin, origin + size)))
            place, origin = place + room, origin + size
        axes.append(spans)
    for spans_of_axes in product(*axes):
        yield tuple(p for p, _ in spans_of_axes), tuple(o for _, o in spans_of_axes)


def largest_steps(
    network: str, limits: ExecutorLimits, max_num_tokens: int
) -> list[dict[str, int]]:
    """Sizes of the steps that need the most of each tensor.

    Args:
        network: one of `binding_names.networks`.
        limits: of the executor.
        max_num_tokens: prompt tokens of a step, and verified tokens that the drafter takes.
    """
    rows = {"B": limits.max_batch_size, "S": max_rows(limits)}
    if network == PREFILL:
        return [{**rows, "T": max_num_tokens, "M": max_num_tokens}]
    if network == VERIFY:
        return [{**rows, "N": limits.max_nodes}]
    nodes, wide = limits.max_nodes, widest_level(limits)
    return [
        {**rows, "W": nodes, "Q": nodes},
        {**rows, "B": 1, "W": wide, "Q": wide},
        {**rows, "B": 1, "W": max_num_tokens, "Q": 1},
    ]


def max_rows(limits: ExecutorLimits) -> int:
    """Rows of a sequence, those that are not committed included."""
    return limits.max_seq_len + limits.scratch_rows


def widest_level(limits: ExecutorLimits) -> int:
    """Draft nodes that a row may have at once: a level may be wider than the final tree."""
    return min(MAX_NODES, max(limits.max_nodes, limits.scratch_rows))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class StepBuffers:
    """Buffers by name, see the module.

    Args:
        device: where they are.
        bytes_of: of each; `bytes_needed` says.
    """

    def __init__(self, device: torch.device, bytes_of: Mapping[str, int]) -> None:
        self._buffers = {
            name: torch.empty(size, dtype=torch.uint8, device=device)
            for name, size in bytes_of.items()
        }

    @property
    def bytes(self) -> int:
        """Of all."""
        return sum(buffer.numel() for buffer in self._buffers.values())

    def view(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The start of a buffer, as a tensor.

        Raises:
            ValueError: the buffer is smaller.
        """
        return self.layers(name, 1, shape, dtype)[0]

    def layers(self, name: str, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """[count, *shape] at the start of a buffer, each layer's start aligned.

        Raises:
            ValueError: the buffer is smaller.
        """
        buffer, stride = self._buffers[name], _aligned(prod(shape) * dtype.itemsize)
        if count * stride > buffer.numel():
            raise ValueError(
                f"{name} {list(shape)} takes {count * stride} bytes, and there are "
                f"{buffer.numel()}: the step is larger than the limits allow"
            )
        rows = buffer[: count * stride].view(dtype).view(count, stride // dtype.itemsize)
        return rows[:, : prod(shape)].view(count, *shape)


def bytes_needed(
    config: ModelConfig,
    parts: tuple[str, ...],
    types: Mapping[str, torch.dtype],
    limits: ExecutorLimits,
    max_num_tokens: int,
) -> dict[str, int]:
    """Bytes of each buffer of the networks `parts`, for the largest steps.

    `types` are by `Binding.kind`. Outputs of all layers share a buffer.
    """
    needed: dict[str, int] = {}
    for network in parts:
        tensors = bindings(network, config)
        for sizes in largest_steps(network, limits, max_num_tokens):
            group: dict[str, int] = {}
            for x in (*tensors.inputs, *tensors.outputs):
                if not x.is_pool:
                    size = _aligned(prod(shape_of(x, sizes)) * types[x.kind].itemsize)
                    group[x.group] = group.get(x.group, 0) + size
            for name, size in group.items():
                needed[name] = max(needed.get(name, 0), size)
    return needed
