"""What builds and runs the engines of engine_suite.py.

`HostBackend` has no TensorRT: it drives the plugins themselves, on the CPU. `TensorRT86` is the
complete TensorRT 8.6 of PyPI behind plugins/tests/tensorrt/engine86.cpp. `TensorRT` is the
`tensorrt` Python package, 10 or later.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from plugin_host import BUILD, NAMES, TYPES, Refused, describe, field_of


class HostBackend:
    """The networks by the plugins alone; "files" are kept in memory."""

    def __init__(self, library):
        self.library = library
        self.files = {}

    def log(self):
        return self.library.log()

    def build(self, network, path):
        nodes = []
        shapes = {name: (low, high) for name, _, low, _, high in network.inputs}
        for step in network.steps:
            if step[0] == "plugin":
                node = self.library.create(step[1], BUILD, **step[2])
                self._configure(node, step, network, shapes)
                nodes.append(node.reload())
            elif step[0] == "constant":
                shapes[step[1]] = (step[2].shape, step[2].shape)
            else:
                shapes[step[1]] = shapes[step[2]]
        self.files[path] = network, nodes

    def _configure(self, node, step, network, shapes):
        values = node.values()
        inputs, outputs = node.spec.inputs_with(**values), node.spec.outputs_with(**values)
        tensors = []
        for spec, name in zip(inputs, step[3], strict=True):
            low, high = shapes[name]
            x = torch.empty(low)
            number = NAMES[spec.dtypes[0]]
            tensors.append(describe(x, low=low, high=high, dtype=number))
        texts = node.output_shapes([len(shapes[name][0]) for name in step[3]], len(outputs))
        for spec, name, text in zip(outputs, step[4], texts, strict=True):
            ends = tuple(
                tuple(self._size(x, step[3], shapes, end) for x in text) for end in range(2)
            )
            shapes[name] = ends
            x = torch.empty(ends[0])
            tensors.append(describe(x, low=ends[0], high=ends[1], dtype=NAMES[spec.dtypes[0]]))
        node.configure(tensors, len(inputs), len(outputs))

    @staticmethod
    def _size(text, inputs, shapes, end):
        if text.startswith("["):
            return int(text[1:-1])
        tensor, dim = text.split(".")
        return shapes[inputs[int(tensor)]][end][int(dim)]

    def load(self, path):
        return HostEngine(*self.files[path])


class HostEngine:
    def __init__(self, network, nodes):
        self.network, self.nodes = network, nodes

    def context(self):
        return HostContext(self.network, [node.attach() for node in self.nodes])


class HostContext:
    def __init__(self, network, nodes):
        self.network, self.nodes = network, nodes

    def run(self, bindings, *, stream=None):
        if stream is None:
            self._run(bindings, None)
            return
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            self._run(bindings, stream)

    def _run(self, bindings, stream):
        tensors = dict(bindings)
        nodes = iter(self.nodes)
        for step in self.network.steps:
            if step[0] == "constant":
                tensors[step[1]] = step[2]
            elif step[0] == "sum":
                total = tensors[step[2]] + tensors[step[3]]
                if step[1] in tensors:
                    tensors[step[1]].copy_(total)
                tensors.setdefault(step[1], total)
            else:
                node = next(nodes)
                inputs = [tensors[name] for name in step[3]]
                outputs = node.allocate(inputs)
                outputs = [tensors.get(n, x) for n, x in zip(step[4], outputs, strict=True)]
                node.run(inputs, outputs, stream=stream)
                tensors.update(zip(step[4], outputs, strict=True))


# ------------------------------------------------------------------ TensorRT 8.6


class TensorRT86:
    """TensorRT 8.6 from a folder with libnvinfer.so.8, its builder resource and libengine86.so.

    LD_LIBRARY_PATH has to name the folder, as TensorRT looks for the builder resource there.
    """

    def __init__(self, folder):
        for name in ("libnvinfer.so.8", "libnvinfer_plugin.so.8"):
            ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(folder / "libengine86.so"))
        self.parser = folder / "libnvonnxparser.so.8"
        for name in ("network_new", "engine_load", "context_new"):
            getattr(self.library, name).restype = ctypes.c_void_p
        for name in ("engine_log", "engine_tensor"):
            getattr(self.library, name).restype = ctypes.c_char_p
        self._half = False

    @property
    def version(self):
        number = self.library.engine_version()
        return f"{number // 1000}.{number // 100 % 10}.{number % 100}"

    def log(self):
        return self.library.engine_log().decode(errors="replace")

    def check(self, what, status):
        if status:
            raise Refused(f"{what} ({status}): {self.log()}")

    def build(self, network, path):
        self.log()
        self._half = any(dtype == torch.float16 for _, dtype, *_ in network.inputs)
        handle = ctypes.c_void_p(self.library.network_new(int(self._half)))
        if not handle:
            raise Refused(self.log())
        try:
            for name, dtype, *shapes in network.inputs:
                dims = _profile(shapes)
                status = self.library.network_input(
                    handle, name.encode(), TYPES[dtype], len(shapes[0]), dims
                )
                self.check(f"input {name}", status)
            for step in network.steps:
                self._add(handle, step)
            for name, dtype in network.outputs:
                self.check(name, self.library.network_output(handle, name.encode(), TYPES[dtype]))
            status = self.library.network_build(handle, str(path).encode())
            self.check("building the engine", status)
        finally:
            self.library.network_delete(handle)

    def _add(self, handle, step):
        name = step[1].encode()
        if step[0] == "constant":
            x = step[2]
            data = ctypes.c_void_p(x.data_ptr())
            size = ctypes.c_int64(x.numel() * x.element_size())
            dims = (ctypes.c_int64 * 8)(*x.shape)
            status = self.library.network_constant(
                handle, name, TYPES[x.dtype], x.dim(), dims, data, size
            )
        elif step[0] == "sum":
            status = self.library.network_sum(handle, name, step[2].encode(), step[3].encode())
        else:
            status = self.library.network_plugin(
                handle, name, *_fields(step[2]), *_names(step[3]), *_names(step[4])
            )
        self.check(f"{step[0]} {step[1]}", status)

    def log_to(self, path):
        """All that TensorRT says from now on goes to a file as well, verbose."""
        self.check(f"log {path}", self.library.engine_log_to(str(path).encode()))

    def build_onnx(
        self, model, profiles, path, *, half=True, level=3, types=None, workspace=0, cublas=False
    ):
        """An engine of an ONNX file (bytes).

        Args:
            model: the bytes.
            profiles: smallest, usual and largest shapes of inputs, by name.
            path: of the engine.
            half: whether activations are float16.
            level: how much the builder may search, 0 to 5.
            types: torch's types of float tensors by name, which the builder is to keep to.
            workspace: bytes of scratch of one kernel, 0 for 1 GiB.
            cublas: whether cuBLAS 12 is there and may be used.

        Returns:
            Layers whose type was asked for.
        """
        self.log()
        self._half, asked = half, 0
        handle = ctypes.c_void_p(self.library.network_new(int(half)))
        if not handle:
            raise Refused(self.log())
        try:
            status = self.library.network_parse(
                handle, str(self.parser).encode(), model, ctypes.c_int64(len(model))
            )
            self.check("parsing", status)
            for name, shapes in profiles.items():
                status = self.library.network_profile(
                    handle, name.encode(), len(shapes[0]), _profile(shapes)
                )
                self.check(f"profile of {name}", status)
            self.library.network_level(handle, level)
            if workspace:
                self.library.network_workspace(handle, ctypes.c_int64(workspace))
            if cublas:
                self.library.network_cublas(handle)
            if types:
                numbers = (ctypes.c_int32 * len(types))(*[TYPES[x] for x in types.values()])
                asked = self.library.network_types(handle, *_names(list(types)), numbers)
            status = self.library.network_build(handle, str(path).encode())
            self.check("building the engine", status)
        finally:
            self.library.network_delete(handle)
        return asked

    def load(self, path, *, half=None):
        """The engine of a file; `half` as it was built, by default like the last one built."""
        half = self._half if half is None else half
        handle = self.library.engine_load(str(path).encode(), int(half))
        if not handle:
            raise Refused(self.log())
        return Engine86(self, ctypes.c_void_p(handle))


def _profile(shapes):
    dims = (ctypes.c_int64 * 24)()
    for place, shape in enumerate(shapes):
        dims[8 * place : 8 * place + len(shape)] = list(shape)
    return dims


def _names(names):
    return len(names), (ctypes.c_char_p * len(names))(*[name.encode() for name in names])


def _fields(fields):
    given = [field_of(*item) for item in fields.items()]
    count = len(given)
    datas = [ctypes.create_string_buffer(data, max(len(data), 1)) for _, _, data, _ in given]
    pointers = (ctypes.c_void_p * count)(*[ctypes.addressof(data) for data in datas])
    pointers._keep = datas
    return (
        count,
        (ctypes.c_char_p * count)(*[f[0].encode() for f in given]),
        (ctypes.c_int32 * count)(*[f[1] for f in given]),
        pointers,
        (ctypes.c_int32 * count)(*[f[3] for f in given]),
    )


class Engine86:
    def __init__(self, backend, handle):
        self.backend, self.handle = backend, handle

    def __del__(self):
        self.backend.library.engine_delete(self.handle)

    def names(self):
        """Of its inputs and outputs."""
        names = []
        while name := self.backend.library.engine_tensor(self.handle, len(names)):
            names.append(name.decode())
        return names

    def context(self):
        return Context86(self)


class Context86:
    def __init__(self, engine):
        self.engine, self.backend = engine, engine.backend
        self.library = engine.backend.library
        self.handle = ctypes.c_void_p(self.library.context_new(engine.handle))
        if not self.handle:
            raise Refused(self.backend.log())

    def __del__(self):
        self.library.context_delete(self.handle)

    def run(self, bindings, *, stream=None):
        self.backend.log()
        if stream is None:
            stream = torch.cuda.current_stream().cuda_stream
        for name, x in bindings.items():
            assert x.is_contiguous(), name
            if self.library.engine_is_input(self.engine.handle, name.encode()):
                dims = (ctypes.c_int64 * 8)(*x.shape)
                status = self.library.context_shape(self.handle, name.encode(), x.dim(), dims)
                self.backend.check(f"shape of {name}", status)
            address = ctypes.c_void_p(x.data_ptr())
            self.backend.check(
                f"address of {name}",
                self.library.context_address(self.handle, name.encode(), address),
            )
        status = self.library.context_enqueue(self.handle, ctypes.c_void_p(stream))
        self.backend.check("enqueue", status)


# ------------------------------------------------------------------ the tensorrt package


class TensorRT:
    """The `tensorrt` Python package, 10 or later, with the plugin library loaded."""

    def __init__(self, plugins):
        import tensorrt

        self.trt = tensorrt
        self.lines = []

        class Logger(tensorrt.ILogger):
            def __init__(logger):
                tensorrt.ILogger.__init__(logger)

            def log(logger, severity, message):
                if int(severity) <= int(tensorrt.ILogger.Severity.WARNING):
                    self.lines.append(message)

        self.logger = Logger()
        self.runtime = tensorrt.Runtime(self.logger)
        if tensorrt.get_plugin_registry().load_library(str(plugins)) is None:
            raise Refused(f"TensorRT did not load {plugins}: {self.log()}")
        self.types = {
            torch.float32: tensorrt.float32,
            torch.float16: tensorrt.float16,
            torch.bfloat16: tensorrt.bfloat16,
            torch.int32: tensorrt.int32,
        }

    @property
    def version(self):
        return self.trt.__version__

    def log(self):
        text = "\n".join(self.lines)
        self.lines.clear()
        return text

    def build(self, network, path):
        trt = self.trt
        self.log()
        builder = trt.Builder(self.logger)
        flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
        definition = builder.create_network(0 if flag is None else 1 << int(flag))
        config, profile = builder.create_builder_config(), builder.create_optimization_profile()
        tensors, kept = {}, []
        for name, dtype, low, opt, high in network.inputs:
            shape = [a if a == b else -1 for a, b in zip(low, high, strict=True)]
            tensors[name] = definition.add_input(name, self.types[dtype], shape)
            tensors[name].allowed_formats = 1 << int(trt.TensorFormat.LINEAR)
            profile.set_shape(name, low, opt, high)
        for step in network.steps:
            self._add(definition, tensors, kept, step)
        for name, _ in network.outputs:
            tensors[name].name = name
            definition.mark_output(tensors[name])
            tensors[name].allowed_formats = 1 << int(trt.TensorFormat.LINEAR)
        config.add_optimization_profile(profile)
        plan = builder.build_serialized_network(definition, config)
        if plan is None:
            raise Refused(self.log())
        path.write_bytes(bytes(memoryview(plan)))

    def _add(self, definition, tensors, kept, step):
        trt = self.trt
        if step[0] == "constant":
            x = step[2]
            weights = trt.Weights(self.types[x.dtype], x.data_ptr(), x.numel())
            kept.append(x)
            layer = definition.add_constant(tuple(x.shape), weights)
            tensors[step[1]] = layer.get_output(0)
        elif step[0] == "sum":
            layer = definition.add_elementwise(
                tensors[step[2]], tensors[step[3]], trt.ElementWiseOperation.SUM
            )
            tensors[step[1]] = layer.get_output(0)
        else:
            creator = trt.get_plugin_registry().get_creator(step[1], "1", "treewy")
            fields = []
            for name, value in step[2].items():
                text = isinstance(value, str)
                data = np.frombuffer(value.encode(), np.int8) if text else np.int32([value])
                kind = trt.PluginFieldType.CHAR if text else trt.PluginFieldType.INT32
                fields.append(trt.PluginField(name, data, kind))
                kept.append(data)
            collection = trt.PluginFieldCollection(fields)
            plugin = creator.create_plugin(step[1], collection, trt.TensorRTPhase.BUILD)
            if plugin is None:
                raise Refused(self.log())
            inputs = [tensors[name] for name in step[3]]
            layer = definition.add_plugin_v3(inputs, [], plugin)
            if layer is None or layer.num_outputs != len(step[4]):
                raise Refused(self.log())
            for index, name in enumerate(step[4]):
                tensors[name] = layer.get_output(index)

    def load(self, path):
        engine = self.runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            raise Refused(self.log())
        return TensorRTEngine(self, engine)


class TensorRTEngine:
    def __init__(self, backend, engine):
        self.backend, self.engine = backend, engine

    def context(self):
        return TensorRTContext(self)


class TensorRTContext:
    def __init__(self, engine):
        self.owner, self.backend = engine, engine.backend
        self.context = engine.engine.create_execution_context()
        mode = self.backend.trt.TensorIOMode.INPUT
        count = engine.engine.num_io_tensors
        names = [engine.engine.get_tensor_name(i) for i in range(count)]
        self.inputs = {name for name in names if engine.engine.get_tensor_mode(name) == mode}

    def run(self, bindings, *, stream=None):
        self.backend.log()
        if stream is None:
            stream = torch.cuda.current_stream().cuda_stream
        for name, x in bindings.items():
            assert x.is_contiguous(), name
            if name in self.inputs and not self.context.set_input_shape(name, tuple(x.shape)):
                raise Refused(self.backend.log())
            if not self.context.set_tensor_address(name, x.data_ptr()):
                raise Refused(self.backend.log())
        if not self.context.execute_async_v3(stream):
            raise Refused(self.backend.log())
