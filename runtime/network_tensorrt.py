"""An exported network as a TensorRT engine: pools in place, fixed buffers, a CUDA graph a shape.

Steps of verification and of the drafter are padded to buckets. A bucket has an execution context
of its own, as a graph ends with the context that it was captured from; all contexts share one piece
of scratch memory. The first step of a bucket is enqueued, which also is the warm-up that TensorRT
wants before a capture, and then captured; later ones are replayed. Prompts, and whatever else is
larger than the buckets, are enqueued with their own shapes.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtllm_treewy.binding_names import DRAFT, PREFILL, Binding, Bindings
from trtllm_treewy.engine_config import EngineMismatchError
from trtllm_treewy.tensorrt_package import make_logger, reasons

from .buckets import Buckets, context_bucket
from .cuda_streams import Streams
from .step_buffers import StepBuffers, copy_padded, shape_of, size_of, sizes_of

# Contexts with a graph that a network keeps; those that were not used for longest go.
MAX_GRAPHS = 64
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepShapes:
    """Which shapes the steps of a network are padded to.

    Attributes:
        buckets: rows and nodes of a step.
        max_rows: the largest context.
        largest: sizes of the largest steps, which the engine must take.
    """

    buckets: Buckets
    max_rows: int
    largest: Sequence[Mapping[str, int]] = ()

    def pad(self, network: str, sizes: Mapping[str, int]) -> dict[str, int] | None:
        """The bucket of a step, by dimension; None for one that has none."""
        width = "W" if network == DRAFT else "N"
        most_rows, most_nodes = self.buckets.batch[-1], self.buckets.nodes[-1]
        if network == PREFILL or sizes["B"] > most_rows or sizes[width] > most_nodes:
            return None
        rows, nodes = self.buckets.pad(sizes["B"], sizes[width])
        padded = {**sizes, "B": rows, width: nodes, "S": context_bucket(sizes["S"], self.max_rows)}
        if network == DRAFT and sizes["Q"] > 1:
            padded["Q"] = self.buckets.pad(0, sizes["Q"])[1]
        return padded


class TensorRTEngines:
    """Loads the engines of one directory, which share a stream, buffers and scratch memory.

    Args:
        trt: the module `tensorrt`.
        streams: where they run.
        device: where their memory is.
        communicator: gives the address of the ranks' NCCL communicator, which must outlive the
            contexts; None for engines of one rank. Called when the first context is made.
    """

    def __init__(
        self,
        trt: Any,
        streams: Streams,
        device: torch.device,
        communicator: Callable[[], int] | None = None,
    ) -> None:
        self.trt, self.streams, self.device = trt, streams, device
        self._communicator = communicator
        self.logger = make_logger(trt)
        self._runtime = trt.Runtime(self.logger)
        self.scratch = torch.empty(0, dtype=torch.uint8, device=device)

    def load(self, plan: Path) -> Any:
        """The engine of a plan, which is mapped and not read into memory.

        Raises:
            EngineMismatchError: TensorRT refuses it.
        """
        with plan.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            engine = self._runtime.deserialize_cuda_engine(data)
        if engine is None:
            raise EngineMismatchError(f"{plan}: TensorRT cannot load it: {reasons(self.logger)}")
        return engine

    def reserve_scratch(self, engines: Mapping[str, Any]) -> None:
        """Allocates what the hungriest engine needs; they run one after the other."""
        size = max(int(engine.device_memory_size_v2) for engine in engines.values())
        self.scratch = torch.empty(size, dtype=torch.uint8, device=self.device)

    def context(self, engine: Any, name: str) -> Any:
        """A context over the shared scratch memory."""
        strategy = self.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = engine.create_execution_context(strategy)
        if context is None:
            raise RuntimeError(f"{name}: TensorRT gives no context: {reasons(self.logger)}")
        if self.scratch.numel():
            context.set_device_memory(self.scratch.data_ptr(), self.scratch.numel())
        if self._communicator is not None:
            # From TensorRT 11 on this waits for the other ranks, which make the same contexts.
            done = context.set_communicator(_capsule(self._communicator()))
            if not done:
                said = reasons(self.logger)
                raise RuntimeError(
                    f"{name}: TensorRT does not take the ranks' communicator: {said}"
                )
        return context


def _capsule(address: int) -> Any:
    """A pointer as TensorRT's Python package takes it."""
    make = ctypes.pythonapi.PyCapsule_New
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return make(address, None, None)


class TensorRTNetwork:
    """`executor_network.Network` over an engine.

    Args:
        name: the network's.
        engine: TensorRT's.
        tensors: its inputs and outputs.
        types: torch's type of each `Binding.kind`.
        engines: what it shares with the others.
        buffers: its inputs' and outputs' memory.
        shapes: what its steps are padded to.
        captures: whether its steps become CUDA graphs; those of prompts never do.

    Raises:
        EngineMismatchError: the engine is not this network: a tensor, a type or a shape differs.
        ValueError: it was not built for the largest steps.
    """

    def __init__(
        self,
        name: str,
        engine: Any,
        tensors: Bindings,
        types: Mapping[str, torch.dtype],
        engines: TensorRTEngines,
        buffers: StepBuffers,
        shapes: StepShapes,
        *,
        captures: bool = True,
    ) -> None:
        self.name = name
        self._engine, self._tensors, self._types = engine, tensors, types
        self._shared, self._buffers, self._shapes = engines, buffers, shapes
        self._pools: dict[str, Tensor] = {}
        self._steps: OrderedDict[tuple[int, ...], _Step] = OrderedDict()
        self._free: _Step | None = None  # the context for shapes without a bucket
        self._captures = captures and name != PREFILL
        self._inputs = _check_tensors(name, engine, tensors, types, engines.trt)
        for sizes in shapes.largest:
            given = {x.name: shape_of(x, sizes) for x in self._inputs if not x.is_pool}
            self._profile(given)

    def close(self) -> None:
        """Lets go of all contexts, which may not outlive the ranks' communicator."""
        self._shared.streams.synchronize()
        self._steps.clear()
        self._free = None

    def bind(self, pools: Mapping[str, Tensor]) -> None:
        """See `executor_network.Network`; the pools' memory must stay where it is."""
        wanted = {x.name: x for x in self._inputs if x.is_pool}
        if pools.keys() != wanted.keys():
            odd = ", ".join(sorted(pools.keys() ^ wanted.keys()))
            raise ValueError(f"{self.name}: missing or unknown pools: {odd}")
        for name, pool in pools.items():
            if pool.dtype != self._types[wanted[name].kind] or not pool.is_contiguous():
                raise ValueError(
                    f"{self.name}: {name} must be a contiguous {self._types[wanted[name].kind]}, "
                    f"got {pool.dtype} with strides {pool.stride()}"
                )
        self._pools = dict(pools)
        self._profile({name: tuple(pool.shape) for name, pool in pools.items()})

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `executor_network.Network`."""
        sizes = sizes_of(inputs, self._tensors.inputs)
        padded = self._shapes.pad(self.name, sizes)
        with self._shared.streams.scope():
            step = self._open(sizes) if padded is None else self._bucket(padded)
            for x in self._inputs:
                if not x.is_pool:
                    copy_padded(step.inputs[x.name], inputs[x.name], x, sizes, step.sizes)
            self._launch(step, captures=padded is not None)
        return self._outputs(step, sizes)

    # ---- steps

    def _bucket(self, sizes: dict[str, int]) -> _Step:
        """The step of a bucket: a context that keeps its shapes and addresses."""
        key = tuple(sizes.values())
        if key in self._steps:
            self._steps.move_to_end(key)
            return self._steps[key]
        if len(self._steps) == MAX_GRAPHS:
            self._shared.streams.synchronize()  # what goes may still run
            self._steps.popitem(last=False)
        step = _Step(self._shared.context(self._engine, self.name), sizes)
        self._configure(step)
        self._steps[key] = step
        return step

    def _open(self, sizes: dict[str, int]) -> _Step:
        """A step without a bucket: one context takes them all, in turn."""
        if self._free is None:
            self._free = _Step(self._shared.context(self._engine, self.name), sizes)
        self._free.sizes = sizes
        self._configure(self._free)
        return self._free

    def _configure(self, step: _Step) -> None:
        """Profile, shapes and addresses of a step."""
        step.inputs, step.outputs = {}, self._make_outputs(step.sizes)
        shapes, addresses = {}, {}
        for x in self._inputs:
            tensor = self._pools.get(x.name)
            if tensor is None:
                shape = shape_of(x, step.sizes)
                tensor = self._buffers.view(x.name, shape, self._types[x.kind])
                step.inputs[x.name] = tensor
            shapes[x.name], addresses[x.name] = tuple(tensor.shape), tensor.data_ptr()
        layers: dict[str, int] = {}
        for x in self._tensors.outputs:
            if x.in_place is not None:
                addresses[x.name] = addresses[x.in_place]
                continue
            tensor = step.outputs[x.group]
            if x.has_layer:
                layer = layers[x.group] = layers.get(x.group, -1) + 1
                tensor = tensor[layer]
            addresses[x.name] = tensor.data_ptr()
        self._apply(step.context, shapes, addresses)

    def _apply(
        self, context: Any, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]
    ) -> None:
        profile = self._profile(shapes)
        handle = self._shared.streams.handle
        if profile != context.active_optimization_profile:
            self._check(context.set_optimization_profile_async(profile, handle), "profile")
        for name, shape in shapes.items():
            self._check(context.set_input_shape(name, shape), f"shape of {name}, {list(shape)}")
        for name, address in addresses.items():
            self._check(context.set_tensor_address(name, address), f"address of {name}")
        missing = context.infer_shapes()
        self._check(not missing, f"shapes without those of {', '.join(missing)}")

    def _make_outputs(self, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """Outputs by group, [layers, ..] where there is one for each layer."""
        groups: dict[str, list[Binding]] = {}
        for x in self._tensors.outputs:
            if x.in_place is None:
                groups.setdefault(x.group, []).append(x)
        result = {}
        for name, members in groups.items():
            shape, dtype = shape_of(members[0], sizes), self._types[members[0].kind]
            if members[0].has_layer:
                result[name] = self._buffers.layers(name, len(members), shape, dtype)
            else:
                result[name] = self._buffers.view(name, shape, dtype)
        return result

    def _profile(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """The first profile that holds these shapes.

        Raises:
            ValueError: there is none; the message has the first tensor that does not fit.
        """
        reason = ""
        for index in range(self._engine.num_optimization_profiles):
            reason = self._misfit(shapes, index)
            if not reason:
                return index
        raise ValueError(f"{self.name}: {reason}")

    def _misfit(self, shapes: Mapping[str, tuple[int, ...]], profile: int) -> str:
        inputs = {x.name: x for x in self._inputs}
        for name, shape in shapes.items():
            if all(isinstance(size, int) for size in inputs[name].shape):
                continue
            low, _, high = map(tuple, self._engine.get_tensor_profile_shape(name, profile))
            if any(not a <= n <= b for a, n, b in zip(low, shape, high, strict=True)):
                return (
                    f"{name} is {list(shape)}, and the engine was built for {list(low)} to "
                    f"{list(high)}: lower the limits, or build it with larger ones"
                )
        return ""

    # ---- running

    def _launch(self, step: _Step, *, captures: bool) -> None:
        if step.replay is not None:
            step.replay()
            return
        self._enqueue(step)
        if captures and self._captures:
            try:
                step.replay = self._shared.streams.capture(lambda: self._enqueue(step))
            except RuntimeError as error:
                self._captures = False
                _log.warning("%s runs without CUDA graphs: %s", self.name, error)

    def _enqueue(self, step: _Step) -> None:
        self._check(step.context.execute_async_v3(self._shared.streams.handle), "step")

    def _check(self, done: bool, what: str) -> None:
        if not done:
            said = reasons(self._shared.logger)
            raise RuntimeError(f"{self.name}: TensorRT does not take the {what}: {said}")

    def _outputs(self, step: _Step, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """The step's outputs without their padding."""
        result = {}
        for x in self._tensors.outputs:
            if x.in_place is None and x.group not in result:
                cut = tuple(slice(0, size_of(dim, sizes)) for dim in x.shape)
                layers = (slice(None),) if x.has_layer else ()
                whole: tuple[slice, ...] = (*layers, *cut)
                result[x.group] = step.outputs[x.group][whole]
        return result


class _Step:
    """A context with its sizes, the memory of its tensors, and the graph where there is one."""

    def __init__(self, context: Any, sizes: dict[str, int]) -> None:
        self.context, self.sizes = context, sizes
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.replay: Callable[[], None] | None = None


def _check_tensors(
    name: str, engine: Any, tensors: Bindings, types: Mapping[str, torch.dtype], trt: Any
) -> tuple[Binding, ...]:
    """The inputs that an engine has: TensorRT may drop those that nothing depends on.

    Raises:
        EngineMismatchError: its tensors are not those of the network.
    """
    there = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
    outputs = {x.name for x in tensors.outputs}
    needed = outputs | {x.name for x in tensors.inputs if x.is_pool}
    odd = (needed - there) | (there - outputs - {x.name for x in tensors.inputs})
    if odd:
        listed = ", ".join(sorted(odd)[:4])
        raise EngineMismatchError(f"{name}: not this model's network: it differs in {listed}")
    inputs = tuple(x for x in tensors.inputs if x.name in there)
    for mode, some in (
        (trt.TensorIOMode.INPUT, inputs),
        (trt.TensorIOMode.OUTPUT, tensors.outputs),
    ):
        for x in some:
            _check_tensor(name, engine, x, mode, types[x.kind], trt.DataType)
    return inputs


def _check_tensor(
    name: str, engine: Any, x: Binding, mode: Any, dtype: torch.dtype, kinds: Any
) -> None:
    names = {
        torch.float32: kinds.FLOAT,
        torch.float16: kinds.HALF,
        torch.bfloat16: kinds.BF16,
        torch.int32: kinds.INT32,
        torch.bool: kinds.BOOL,
    }
    shape, found = tuple(engine.get_tensor_shape(x.name)), engine.get_tensor_dtype(x.name)
    fits = len(shape) == len(x.shape) and all(
        isinstance(dim, str) or size in (dim, -1) for dim, size in zip(x.shape, shape, strict=True)
    )
    if not fits or engine.get_tensor_mode(x.name) != mode or found != names[dtype]:
        raise EngineMismatchError(
            f"{name}: {x.name} must be {dtype} {list(x.shape)}, the engine has {found} "
            f"{list(shape)}"
        )
