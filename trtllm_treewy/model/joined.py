"""Weights of layers that share an input, as one matrix: one product in the place of several.

The parameters stay what they are, under their names and in their shapes, and become slices of the
matrix: nothing is held twice, checkpoints load as before, and a model that is joined computes what
it did.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Rows are a multiple of it, so that a row of the product starts at a multiple of 16 bytes.
ROWS_MULTIPLE = 8


def join(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor of all rows of `parameters`, which become slices of it, one after the other.

    Those that are joined already stay where they are. Until this returns, the memory of the
    parameters is held twice.

    Args:
        parameters: [rows, ...] each, of one type and device, alike but for their rows.

    Returns:
        [rows of all, ...], rounded up to ROWS_MULTIPLE; rows beyond are zero.

    Raises:
        ValueError: they differ in more than rows.
    """
    first = parameters[0]
    for other in parameters:
        if (other.shape[1:], other.dtype, other.device) != (
            first.shape[1:],
            first.dtype,
            first.device,
        ):
            raise ValueError(
                "weights of one input must agree in all but rows: "
                f"{list(first.shape)} {first.dtype} {first.device} and "
                f"{list(other.shape)} {other.dtype} {other.device}"
            )
    rows = sum(p.shape[0] for p in parameters)
    rows += -rows % ROWS_MULTIPLE
    known = _joined(parameters, rows)
    if known is not None:
        return known
    whole = torch.zeros(rows, *first.shape[1:], dtype=first.dtype, device=first.device)
    start = 0
    for parameter in parameters:
        part = whole[start : start + parameter.shape[0]]
        part.copy_(parameter.data)
        parameter.data = part
        start += parameter.shape[0]
    return whole


def _joined(parameters: Sequence[Tensor], rows: int) -> Tensor | None:
    """What `join` gave for these parameters before, or None."""
    first = parameters[0].data
    storage, offset = first.untyped_storage(), first.storage_offset()
    shape = (rows, *first.shape[1:])
    stride = torch.empty(shape, device="meta").stride()
    for parameter in parameters:
        if (
            parameter.untyped_storage().data_ptr() != storage.data_ptr()
            or parameter.storage_offset() != offset
            or parameter.stride() != stride
        ):
            return None
        offset += parameter.numel()
    end = (first.storage_offset() + rows * stride[0]) * first.element_size()
    if end > storage.nbytes():
        return None
    return first.as_strided(shape, stride, first.storage_offset())
