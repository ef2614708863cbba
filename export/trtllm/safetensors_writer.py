"""A safetensors file written as its tensors come, so that nobody has to hold all of them.

The format: 8 bytes with the header's length, the header as JSON, the tensors one after the other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class SafetensorsWriter:
    """Writes one file; a context manager.

    Args:
        path: of the file.
        tensors: shape and type of each tensor by name; they must be written in this order.

    Raises:
        ValueError: in `write`, for a tensor out of turn or of another shape or type; at the end,
            if some were not written.
        OSError: the file cannot be written.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, tuple[Sequence[int], torch.dtype]]
    ) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        start = 0
        for name, (shape, dtype) in tensors.items():
            end = start + math.prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": CODES[dtype],
                "shape": list(shape),
                "data_offsets": [start, end],
            }
            start = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._expected = list(tensors.items())
        self._next = 0
        self._path = path
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes the next tensor, from any device."""
        expected, (shape, dtype) = self._expected[self._next]
        if (name, tuple(tensor.shape), tensor.dtype) != (expected, tuple(shape), dtype):
            raise ValueError(
                f"{self._path}: expected {expected} {list(shape)} {dtype}, got {name} "
                f"{list(tensor.shape)} {tensor.dtype}"
            )
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        self._file.write(flat.view(torch.uint8).numpy().data)
        self._next += 1

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if kind is None and self._next < len(self._expected):
            raise ValueError(f"{self._path}: {self._expected[self._next][0]} was not written")
