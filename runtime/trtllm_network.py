"""An engine of `trtllm-build` in TensorRT: its plugins loaded, its tensors bound by name.

Needs `tensorrt_llm`, which brings the plugins of attention and experts with it. Steps are enqueued
on torch's current stream, each with its own shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtllm_treewy.tensorrt_package import load_plugins, make_logger, reasons
from trtllm_treewy.trtllm_bindings import EngineBinding


class TrtllmNetwork:
    """`trtllm_executor.EngineNetwork` over an engine.

    Args:
        plan: `rank0.engine`.
        inputs, outputs: the tensors that it should have.

    Raises:
        ValueError: tensorrt_llm or the plugin library is missing, TensorRT refuses the engine, or
            its tensors are others.
        RuntimeError: TensorRT gives no context. Its own reasons are in both messages.
    """

    def __init__(
        self, plan: Path, inputs: Sequence[EngineBinding], outputs: Sequence[EngineBinding]
    ) -> None:
        trt = _load_plugins()
        self._outputs = tuple(outputs)
        self._logger: Any = make_logger(trt)
        self._runtime: Any = trt.Runtime(self._logger)
        self._engine: Any = self._runtime.deserialize_cuda_engine(plan.read_bytes())
        if self._engine is None:
            raise ValueError(
                f"{plan}: TensorRT {trt.__version__} cannot load it: build it again "
                f"({reasons(self._logger)})"
            )
        there = {
            self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)
        }
        wanted = {x.name for x in (*inputs, *outputs)}
        if there != wanted:
            odd = ", ".join(sorted(there ^ wanted)[:8])
            raise ValueError(f"{plan}: missing or unknown tensors: {odd}")
        self._context: Any = self._engine.create_execution_context()
        if self._context is None:
            raise RuntimeError(f"{plan}: TensorRT gives no context: {reasons(self._logger)}")

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `trtllm_executor.EngineNetwork`.

        Raises:
            RuntimeError: TensorRT refuses the step; the message has its reasons.
        """
        context = self._context
        for name, tensor in inputs.items():
            self._check(context.set_input_shape(name, tuple(tensor.shape)), f"shape of {name}")
            self._check(context.set_tensor_address(name, _address(tensor)), f"address of {name}")
        results = {}
        for x in self._outputs:
            if x.in_place is not None:
                address = _address(inputs[x.in_place])
            else:
                shape = tuple(context.get_tensor_shape(x.name))
                results[x.name] = torch.empty(shape, dtype=getattr(torch, x.dtype), device="cuda")
                address = _address(results[x.name])
            self._check(context.set_tensor_address(x.name, address), f"address of {x.name}")
        stream = torch.cuda.current_stream()
        self._check(context.execute_async_v3(stream.cuda_stream), "step")
        stream.synchronize()  # the host inputs of this step may go now
        return results

    def _check(self, done: bool, what: str) -> None:
        if not done:
            raise RuntimeError(f"TensorRT does not take the {what}: {reasons(self._logger)}")


# An empty tensor has no address, and TensorRT takes none for missing.
_NOWHERE: dict[torch.device, Tensor] = {}


def _address(tensor: Tensor) -> int:
    if tensor.numel():
        return tensor.data_ptr()
    if tensor.device not in _NOWHERE:
        _NOWHERE[tensor.device] = torch.zeros(256, dtype=torch.uint8, device=tensor.device)
    return _NOWHERE[tensor.device].data_ptr()


def _load_plugins() -> Any:
    """TensorRT with the library's plugins and ours.

    Raises:
        ValueError: either is missing.
    """
    try:
        import tensorrt as trt
        import tensorrt_llm  # noqa: F401  (registers its plugins)
    except ImportError as error:
        raise ValueError(f"an engine of trtllm-build needs tensorrt_llm to run: {error}") from None
    load_plugins(trt)
    return trt
