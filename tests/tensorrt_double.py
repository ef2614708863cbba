"""A double of TensorRT's runtime for machines without one: not TensorRT, and no proof of it.

It has the classes and rules that the executor relies on, and runs the exported ONNX file in ONNX
Runtime over the very addresses that it is given. What TensorRT would leave undefined is an error
here: a context changed after its graph was captured, a graph that outlives its context, a capture
without a run before it, scratch memory that was not given, a state that is not bound in place.
test_tensorrt_api.py holds its names and parameters to those of real TensorRT.
"""

from __future__ import annotations

import ctypes
import enum
import json
import types
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from trtllm_treewy.plugin_contract import NAMESPACE, PLUGINS
from trtllm_treewy.plugin_contract import VERSION as PLUGIN_VERSION
from trtllm_treewy.runtime.network_onnx_ranks import COLLECTIVE, OnnxRankSession

VERSION, GPU = "10.14.1.48", "Double GPU sm_00"
HANDLE = 7
SCRATCH = 4096
_NUMPY = {1: np.float32, 6: np.int32, 7: np.int64, 9: np.bool_, 10: np.float16}


class DataType(enum.Enum):
    FLOAT, HALF, BF16, INT32, BOOL = range(5)


class TensorIOMode(enum.Enum):
    NONE, INPUT, OUTPUT = range(3)


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC, USER_MANAGED = range(2)


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    def __init__(self):
        pass


class IPluginRegistry:
    """Takes any file for the plugins' library."""

    def __init__(self):
        self._creators = []
        self._loaded = []

    @property
    def all_creators(self):
        return list(self._creators)

    def load_library(self, plugin_path):
        if self._creators or not Path(plugin_path).is_file():
            return None
        self._loaded.append(plugin_path)
        self._creators += [
            types.SimpleNamespace(
                name=name, plugin_namespace=NAMESPACE, plugin_version=PLUGIN_VERSION
            )
            for name in PLUGINS
        ]
        return object()


class Runtime:
    _registry: IPluginRegistry
    _events: list

    def __init__(self, logger):
        self._logger = logger

    def deserialize_cuda_engine(self, serialized_engine):
        # As large plans are, it may be a map of a file that is closed later.
        data = bytes(serialized_engine)
        head, _, body = data.partition(b"\n")
        model = onnx.ModelProto.FromString(body)
        known = {creator.name for creator in self._registry.all_creators} | {COLLECTIVE}
        for node in model.graph.node:
            if node.domain == NAMESPACE and node.op_type not in known:
                self._logger.log(ILogger.ERROR, f"no creator for {node.op_type}")
                return None
        return ICudaEngine(self, json.loads(head), model)


class ICudaEngine:
    """All methods that the executor uses, over a model that ONNX Runtime runs."""

    _divided = False  # one rank alone, also where a test computes by other means

    def __init__(self, runtime, profiles, model):
        self._runtime, self._profiles = runtime, profiles
        # A graph of one of several ranks is cut at its collectives, for a context's group.
        self._divided = any(node.op_type == COLLECTIVE for node in model.graph.node)
        self._model = model if self._divided else None
        data = model.SerializeToString(deterministic=True)
        self._session = None if self._divided else _session(data)
        self._tensors = {}
        for mode, some in (
            (TensorIOMode.INPUT, model.graph.input),
            (TensorIOMode.OUTPUT, model.graph.output),
        ):
            for x in some:
                kind = x.type.tensor_type
                dims = [d.dim_value if d.HasField("dim_value") else -1 for d in kind.shape.dim]
                self._tensors[x.name] = mode, _NUMPY[kind.elem_type], tuple(dims)
        self._in_place = dict(_states(model))

    @property
    def num_io_tensors(self):
        return len(self._tensors)

    @property
    def num_optimization_profiles(self):
        return len(self._profiles)

    @property
    def device_memory_size_v2(self):
        return SCRATCH

    def get_tensor_name(self, index):
        return list(self._tensors)[index]

    def get_tensor_mode(self, name):
        return self._tensors[name][0] if name in self._tensors else TensorIOMode.NONE

    def get_tensor_dtype(self, name):
        kinds = {
            np.float32: DataType.FLOAT,
            np.float16: DataType.HALF,
            np.int32: DataType.INT32,
            np.bool_: DataType.BOOL,
        }
        return kinds[self._tensors[name][1]]

    def get_tensor_shape(self, name):
        return self._tensors[name][2]

    def get_tensor_profile_shape(self, name, profile_index):
        return [tuple(shape) for shape in self._profiles[profile_index][name]]

    def _joined(self, group):
        """The session of all ranks together."""
        if self._session is None:
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads, options.log_severity_level = 1, 3
            self._session = OnnxRankSession(self._model, Path.cwd(), group, options)
        return self._session

    def _compute(self, shapes, addresses, scratch, group):
        ctypes.memset(scratch[0], 0xAB, scratch[1])
        feed = {}
        for name, (mode, kind, _) in self._tensors.items():
            if mode == TensorIOMode.INPUT:
                feed[name] = _memory(addresses[name], shapes[name], kind).copy()
        names = [n for n, x in self._tensors.items() if x[0] == TensorIOMode.OUTPUT]
        session = self._joined(group) if self._divided else self._session
        for name, value in zip(names, session.run(names, feed), strict=True):
            _memory(addresses[name], value.shape, value.dtype)[...] = value

    def create_execution_context(self, strategy):
        assert strategy == ExecutionContextAllocationStrategy.USER_MANAGED
        self._runtime._events.append(("context", self))
        return IExecutionContext(self)


def _memory(address, shape, kind):
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), kind).reshape(shape)


@lru_cache(maxsize=8)
def _session(model):
    """Many tests load the same plans."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _states(model):
    """Names of outputs that a plugin wants at the address of an input, and that input's."""
    for node in model.graph.node:
        if node.op_type not in PLUGINS:
            continue
        spec = PLUGINS[node.op_type]
        inputs = [x.name for x in spec.inputs_with(**_fields(node))]
        for output, tensor in zip(node.output, spec.outputs_with(**_fields(node)), strict=True):
            if tensor.in_place:
                yield output, node.input[inputs.index(tensor.in_place)]


def _fields(node):
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    del values["plugin_namespace"], values["plugin_version"]
    return {n: x.decode() if isinstance(x, bytes) else x for n, x in values.items()}


class IExecutionContext:
    def __init__(self, engine):
        self._engine = engine
        self._log = engine._runtime._logger
        self._events = engine._runtime._events
        self._shapes, self._addresses = {}, {}
        self._scratch = self._group = None
        self._profile = 0
        self._ran = False
        self._changes = 0

    @property
    def active_optimization_profile(self):
        return self._profile

    def set_optimization_profile_async(self, profile_index, stream_handle):
        assert stream_handle == self._engine._runtime._streams.handle
        self._profile, self._ran = profile_index, False
        self._shapes.clear()
        self._changes += 1
        return True

    def set_device_memory(self, memory, size):
        assert memory % 64 == 0  # of the CPU's allocator; on a GPU it is 256
        assert size >= self._engine.device_memory_size_v2
        self._scratch = memory, size

    def set_communicator(self, communicator):
        """A capsule of the address of a group, which stands for a NCCL communicator's."""
        if not self._engine._divided:
            return self._refuse("the engine is of one rank")
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        self._group = ctypes.cast(get(communicator, None), ctypes.py_object).value
        self._events.append(("communicator", self))
        return True

    def set_input_shape(self, name, shape):
        assert self._engine.get_tensor_mode(name) == TensorIOMode.INPUT
        ranges = self._engine._profiles[self._profile].get(name)
        low, high = (ranges[0], ranges[2]) if ranges else [self._engine.get_tensor_shape(name)] * 2
        if len(shape) != len(low) or any(
            not a <= n <= b for a, n, b in zip(low, shape, high, strict=True)
        ):
            return self._refuse(f"{name}: {shape} is not within {low} and {high}")
        if self._shapes.get(name) != tuple(shape):
            self._ran = False
        self._shapes[name] = tuple(shape)
        self._changes += 1
        return True

    def set_tensor_address(self, name, memory):
        if name not in self._engine._tensors or not memory:
            return self._refuse(f"{name}: no such tensor, or no address")
        self._addresses[name] = memory
        self._changes += 1
        return True

    def infer_shapes(self):
        tensors = self._engine._tensors.items()
        return [n for n, x in tensors if x[0] == TensorIOMode.INPUT and n not in self._shapes]

    def execute_async_v3(self, stream_handle):
        state = self._engine._runtime._streams
        assert stream_handle == state.handle
        assert state.depth, "enqueued outside the stream's scope"
        if self._scratch is None:
            return self._refuse("there is no scratch memory")
        if self._engine._divided and self._group is None:
            return self._refuse("there is no communicator")
        missing = self._engine._tensors.keys() - self._addresses.keys()
        if missing or self.infer_shapes():
            return self._refuse(f"no address or shape of {missing} {self.infer_shapes()}")
        for output, given in self._engine._in_place.items():
            if self._addresses[output] != self._addresses[given]:
                return self._refuse(f"{output} must be bound to the address of {given}")
        if state.recording is not None:
            if not self._ran:
                return self._refuse("captured without a run before it, since its shapes changed")
            state.recording.append((weakref.ref(self), self._changes))
            self._events.append(("capture", self))
            return True
        self._events.append(("enqueue", self))
        self._compute()
        self._ran = True
        return True

    def _refuse(self, message):
        self._log.log(ILogger.ERROR, message)
        return False

    def _compute(self):
        self._engine._compute(self._shapes, self._addresses, self._scratch, self._group)


class HostStreams:
    """`cuda_streams.Streams` without CUDA: what is captured is computed when it is replayed."""

    handle = HANDLE

    def __init__(self):
        self.depth, self.recording, self.waits = 0, None, 0
        self.replays = 0

    @contextmanager
    def scope(self):
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        self.recording = []
        try:
            enqueue()
        finally:
            recorded, self.recording = self.recording, None

        def replay():
            assert self.depth, "replayed outside the stream's scope"
            self.replays += 1
            for context, changes in recorded:
                assert context() is not None, "the graph's context is gone"
                assert context()._changes == changes, "the context was changed after its capture"
                context()._compute()

        return replay

    def synchronize(self):
        self.waits += 1


def make_module(streams=None):
    """A module to stand for `tensorrt`; `events` is the order of calls, `streams` goes with it."""
    module = types.ModuleType("tensorrt")
    module.__version__ = VERSION
    registry, events, streams = IPluginRegistry(), [], streams or HostStreams()
    module.Runtime = type(
        "Runtime", (Runtime,), {"_registry": registry, "_events": events, "_streams": streams}
    )
    for value in (
        DataType,
        TensorIOMode,
        ExecutionContextAllocationStrategy,
        ILogger,
        IExecutionContext,
    ):
        setattr(module, value.__name__, value)
    module.get_plugin_registry = lambda: registry
    module.events, module.streams, module.registry = events, streams, registry
    return module


class DoubleBuilder:
    """`NetworkBuilder` of plans that the double loads: the profiles, and the whole ONNX file.

    Inputs that nothing depends on are dropped, as TensorRT may do.
    """

    version, gpu, plugins, collectives = f"tensorrt {VERSION}", GPU, True, True

    def __init__(self, gpu=GPU):
        self.gpu = gpu

    def build(self, onnx_file, plan, profiles, timing_cache, progress=None):
        model = onnx.load(onnx_file)
        used = {name for node in model.graph.node for name in node.input}
        for x in [x for x in model.graph.input if x.name not in used]:
            model.graph.input.remove(x)
        head = json.dumps([profile.shapes for profile in profiles]).encode()
        plan.write_bytes(head + b"\n" + model.SerializeToString())
        return SCRATCH
