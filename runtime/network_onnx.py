"""An exported network in ONNX Runtime on the CPU: the plugins' nodes run as their functions.

Needs the `onnxruntime` package. For checking exports and for machines without a GPU; the copy of
the states that a prefill makes would not do for serving.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtllm_treewy.binding_names import Bindings

_NUMPY_TYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(int32)": torch.int32,
    "tensor(bool)": torch.bool,
}


class OnnxNetwork:
    """A network in a session of its own.

    Args:
        path: the ONNX file; its weights lie beside it.
        tensors: its inputs and outputs.
        threads: of the session; 0 leaves it to ONNX Runtime.

    Raises:
        ImportError: there is no `onnxruntime`.
        ValueError: the file is not a network that ONNX Runtime can run, or not this one.
    """

    def __init__(self, path: Path, tensors: Bindings, threads: int = 0) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        try:
            self._session = self._open(path, options)
        except Exception as error:  # its exceptions have no common base of their own
            raise ValueError(f"{path}: ONNX Runtime cannot open it: {error}") from None
        self._tensors = tensors
        given = [x.name for x in self._session.get_inputs()]
        if given != [x.name for x in tensors.inputs]:
            raise ValueError(f"{path}: not the network of this model: its inputs differ")
        self._types = {x.name: _NUMPY_TYPES[x.type] for x in self._session.get_inputs()}
        self._pools: dict[str, Tensor] = {}

    def _open(self, path: Path, options: Any) -> Any:
        """A session over the file."""
        import onnxruntime

        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def close(self) -> None:
        """See `executor_network.Network`; the session goes with the network."""

    def bind(self, pools: Mapping[str, Tensor]) -> None:
        """See `executor_network.Network`."""
        self._pools = dict(pools)

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `executor_network.Network`."""
        given = {**inputs, **self._pools}
        feed = {
            name: given[name].to(dtype).contiguous().numpy() for name, dtype in self._types.items()
        }
        names = [x.name for x in self._tensors.outputs]
        values = self._session.run(names, feed)
        groups: dict[str, list[Tensor]] = {}
        for x, value in zip(self._tensors.outputs, values, strict=True):
            tensor = torch.from_numpy(value)
            if x.in_place is None:
                groups.setdefault(x.group, []).append(tensor)
            else:
                self._pools[x.in_place].copy_(tensor)
        layered = {x.group for x in self._tensors.outputs if x.has_layer}
        return {
            name: torch.stack(parts) if name in layered else parts[0]
            for name, parts in groups.items()
        }
