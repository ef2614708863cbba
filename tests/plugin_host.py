"""Drives the TensorRT plugins from tests, as TensorRT would: see plugins/tests/tensorrt/."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from kernel_suite import Machine

from trtllm_treewy import cuda_ops
from trtllm_treewy import ops as ops  # registers torch.ops.treewy
from trtllm_treewy.plugin_contract import PLUGINS

ROOT = Path(__file__).resolve().parent.parent
# nvinfer1::DataType
TYPES = {
    torch.float32: 0, torch.float16: 1, torch.int8: 2, torch.int32: 3, torch.bfloat16: 7,
    torch.int64: 8,
}  # fmt: skip
DTYPES = {number: dtype for dtype, number in TYPES.items()}
NAMES = {"float32": 0, "float16": 1, "int32": 3, "bfloat16": 7}
# nvinfer1::PluginFieldType
FIELD_INT32, FIELD_CHAR, FIELD_INT64, FIELD_FLOAT32 = 5, 6, 10, 1
BUILD, RUNTIME = 0, 1
LINEAR, CHW32 = 0, 5


class Refused(Exception):
    """A plugin refused; the text is what it logged."""


class HostTensor(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("dims", ctypes.c_int64 * 24),
        ("data", ctypes.c_void_p),
    ]


def cuda_home():
    """Folder with CUDA's headers, or None."""
    nvcc = shutil.which("nvcc")
    places = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    if nvcc:
        places.append(str(Path(nvcc).resolve().parent.parent))
    for place in places:
        if place and (Path(place) / "include" / "cuda_bf16.h").is_file():
            return place
    return None


def find_headers():
    """Folder of TensorRT's headers, or None where there are none to be had."""
    script = ROOT / "plugins" / "tensorrt_headers.sh"
    env = {**os.environ, "PYTHON": sys.executable}
    run = subprocess.run([str(script)], env=env, capture_output=True, text=True)
    return run.stdout.strip() if run.returncode == 0 else None


def build_host(folder, kernels=None):
    """Builds the driver, and over `kernels` (objects for the CPU) the plugins, into a folder."""
    headers, home = find_headers(), cuda_home()
    if headers is None or home is None or shutil.which(os.environ.get("CXX", "g++")) is None:
        return False
    script = ROOT / "plugins" / "tests" / "tensorrt" / "build_host_plugin.sh"
    command = [str(script), str(folder), *([] if kernels is None else [str(kernels)])]
    env = {**os.environ, "TENSORRT_INCLUDE": headers, "CUDA_HOME": home}
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return True


class PluginLibrary:
    """A plugin library, opened as TensorRT's registry opens it."""

    def __init__(self, host, path):
        self.host = ctypes.CDLL(str(host))
        for name in ("create", "clone", "attach", "reload"):
            getattr(self.host, f"host_{name}").restype = ctypes.c_void_p
        for name in ("error", "log", "creator", "describe", "output_shapes"):
            getattr(self.host, f"host_{name}").restype = ctypes.c_char_p
        self.host.host_workspace.restype = ctypes.c_int64
        count = self.host.host_open(str(path).encode())
        assert count > 0, self.host.host_error().decode()
        self.creators = {}
        self.fields = {}
        for index in range(count):
            name, space, version, *fields = self.host.host_creator(index).decode().split()
            assert (space, version) == ("treewy", "1")
            self.creators[name] = index
            self.fields[name] = [(x.split(":")[0], int(x.split(":")[1])) for x in fields]
        self.log()

    def log(self):
        """What was logged since."""
        return self.host.host_log().decode()

    def create_raw(self, name, fields, phase=BUILD):
        """A node from (name, type, bytes, length) fields; raises Refused."""
        count = len(fields)
        datas = [ctypes.create_string_buffer(data, max(len(data), 1)) for _, _, data, _ in fields]
        handle = self.host.host_create(
            self.creators[name],
            phase,
            count,
            (ctypes.c_char_p * count)(*[f[0].encode() for f in fields]),
            (ctypes.c_int32 * count)(*[f[1] for f in fields]),
            (ctypes.c_void_p * count)(*[ctypes.addressof(data) for data in datas]),
            (ctypes.c_int32 * count)(*[f[3] for f in fields]),
        )
        return self.node(name, handle)

    def create(self, name, phase=BUILD, **fields):
        """A node from fields; raises Refused."""
        return self.create_raw(name, [field_of(*item) for item in fields.items()], phase)

    def node(self, name, handle):
        if not handle:
            raise Refused(self.log())
        return PluginNode(self, name, handle)


def field_of(name, value):
    """A field as TensorRT's parsers give it."""
    if isinstance(value, str):
        return name, FIELD_CHAR, value.encode(), len(value)
    return name, FIELD_INT32, int(value).to_bytes(4, "little", signed=True), 1


class PluginNode:
    """One plugin object."""

    def __init__(self, library, name, handle):
        self.library, self.name = library, name
        self.handle = ctypes.c_void_p(handle)
        self.host = library.host

    def __del__(self):
        self.host.host_destroy(self.handle)

    def clone(self):
        return self.library.node(self.name, self.host.host_clone(self.handle))

    def attach(self):
        return self.library.node(self.name, self.host.host_attach(self.handle))

    def reload(self):
        """Through an engine file."""
        return self.library.node(self.name, self.host.host_reload(self.handle))

    def describe(self):
        return self.host.host_describe(self.handle).decode()

    def values(self):
        """All fields, as serialised."""
        text = self.describe().split("|")[3]
        pairs = (item.split("=") for item in text.split())
        return {name: int(x) if x.lstrip("-").isdigit() else x for name, x in pairs}

    @property
    def spec(self):
        return PLUGINS[self.name]

    def check(self, status):
        if status:
            raise Refused(self.library.log())

    def output_types(self, inputs, num_outputs):
        """Types of the outputs for input types, all as nvinfer1::DataType."""
        out = (ctypes.c_int32 * max(num_outputs, 1))()
        given = (ctypes.c_int32 * len(inputs))(*inputs)
        status = self.host.host_output_types(self.handle, len(inputs), given, num_outputs, out)
        self.check(status)
        return list(out)[:num_outputs]

    def output_shapes(self, ranks, num_outputs):
        """Shapes of the outputs: "i.j" for dimension j of input i, or "[n]"."""
        given = (ctypes.c_int32 * len(ranks))(*ranks)
        text = self.host.host_output_shapes(self.handle, len(ranks), given, num_outputs)
        if text is None:
            raise Refused(self.library.log())
        return [shape.split(",") for shape in text.decode().split(";")]

    def supports(self, position, tensors, num_inputs, num_outputs):
        array = (HostTensor * len(tensors))(*tensors)
        return bool(self.host.host_supports(self.handle, position, array, num_inputs, num_outputs))

    def configure(self, tensors, num_inputs, num_outputs):
        array = (HostTensor * len(tensors))(*tensors)
        self.check(self.host.host_configure(self.handle, array, num_inputs, num_outputs))

    def run(self, inputs, outputs, *, steps=0, stream=None):
        """onShapeChange (steps 1), enqueue (2), or both."""
        array = [describe(x) for x in (*inputs, *outputs)]
        array = (HostTensor * len(array))(*array)
        status = self.host.host_run(
            self.handle, array, len(inputs), len(outputs), steps, ctypes.c_void_p(stream)
        )
        self.check(status)

    def allocate(self, inputs, *, fill=float("nan")):
        """Outputs for these inputs, by what the plugin says of types and shapes."""
        specs = self.spec.outputs_with(**self.values())
        names = [x.name for x in self.spec.inputs_with(**self.values())]
        types = self.output_types([TYPES[x.dtype] for x in inputs], len(specs))
        shapes = self.output_shapes([x.dim() for x in inputs], len(specs))
        outputs = []
        for spec, number, shape in zip(specs, types, shapes, strict=True):
            sizes = [_size(text, inputs) for text in shape]
            if spec.in_place:
                outputs.append(inputs[names.index(spec.in_place)])
                assert list(outputs[-1].shape) == sizes
                assert TYPES[outputs[-1].dtype] == number
            else:
                new = torch.empty(sizes, dtype=DTYPES[number], device=inputs[0].device)
                outputs.append(new.fill_(fill if new.is_floating_point() else -7))
        return outputs


def _size(text, inputs):
    if text.startswith("["):
        return int(text[1:-1])
    tensor, dim = text.split(".")
    return inputs[int(tensor)].shape[int(dim)]


def describe(x, *, low=None, high=None, form=LINEAR, dtype=None, address=None):
    """A tensor for the driver; `low` and `high` are shapes of a profile."""
    assert x.is_contiguous()
    result = HostTensor(TYPES[x.dtype] if dtype is None else dtype, form, x.dim())
    for place, shape in enumerate((low or x.shape, x.shape, high or x.shape)):
        for i, size in enumerate(shape):
            result.dims[8 * place + i] = size
    result.data = x.data_ptr() if address is None else address
    return result


class PluginMachine(Machine):
    """A machine whose operators are plugins: built, written to a file, loaded, and run."""

    def __init__(self, device, library):
        super().__init__(device)
        self.library = library
        self.nodes = {}

    def node(self, name, inputs, **fields):
        """A node in an execution context, which went through everything that TensorRT does."""
        key = name, tuple(fields.items())
        if key not in self.nodes:
            self.nodes[key] = self.library.create(name, BUILD, **fields)
        built = self.nodes[key].clone()
        outputs = built.allocate(inputs)
        count = len(inputs), len(outputs)
        tensors = [describe(x) for x in (*inputs, *outputs)]
        for position in range(sum(count)):
            assert built.supports(position, tensors, *count), (name, position)
        built.configure(tensors, *count)
        assert built.host.host_workspace(built.handle) == 0
        return built.reload().attach()

    def execute(self, name, inputs, **fields):
        """The outputs of a node."""
        node = self.node(name, inputs, **fields)
        outputs = node.allocate(inputs)
        stream = None
        if self.device != "cpu":
            stream = torch.cuda.current_stream().cuda_stream
        node.run(inputs, outputs, stream=stream)
        return outputs

    def call(self, name, *args):
        """An operator of torch.ops.treewy by the plugin of the same meaning."""
        return getattr(self, f"_{name}")(*args)

    def _count(self, errors):
        cuda_ops.errors.error_address(errors.device)  # makes the counter
        cuda_ops.errors._error_counters[errors.device].add_(errors)

    def _tree_verify(self, q, k, v, a, b, A_log, dt_bias, state, *rest):
        qkv = torch.cat([x.flatten(-2) for x in (q, k, v)], -1)
        fields = heads_of(q, v)
        if len(rest) > 3:
            fields["state_commit"] = "deferred"
        inputs = plain(qkv, a, b, A_log, dt_bias, state, *rest)
        return tuple(self.execute("TreeWyVerify", inputs, **fields))

    def _commit(self, state, *rest):
        _, errors = self.execute("TreeWyCommit", [state, *plain(*rest)])
        self._count(errors)

    def _commit_deferred(self, state, *rest):
        pools, rest = list(rest[:4]), plain(*rest[4:])
        inputs = [state, *rest, *pools]
        _, errors, *_ = self.execute("TreeWyCommit", inputs, state_commit="deferred")
        self._count(errors)

    def _flush_history(self, *args):
        torch.ops.treewy.flush_history(*args)  # no plugin: a rare call of the runtime

    def _tree_conv(self, x, state, slot, parents, num_nodes, weight, bias=None):
        inputs = plain(x, state, weight, slot, parents, num_nodes)
        return self._with_bias("TreeConv1d", inputs, bias)[0]

    def _conv_commit(self, windows, *rest):
        ours = windows.contiguous()
        _, errors = self.execute("TreeConvCommit", [ours, *plain(*rest)])
        self._count(errors)
        if ours is not windows:
            windows.copy_(ours)

    def _prefill(self, q, k, v, a, b, A_log, dt_bias, state, *rest):
        qkv = torch.cat([x.flatten(-2) for x in (q, k, v)], -1)
        inputs = [*plain(qkv, a, b, A_log, dt_bias), state, *plain(*rest)]
        return self.execute("GdnPrefill", inputs, **heads_of(q, v))[0]

    def _prefill_conv(self, x, state, slot, cu_seqlens, weight, bias=None):
        ours = state.contiguous()
        inputs = [*plain(x), ours, *plain(weight, slot, cu_seqlens)]
        y = self._with_bias("GdnPrefillConv1d", inputs, bias)[0]
        if ours is not state:
            state.copy_(ours)
        return y

    def _with_bias(self, name, inputs, bias):
        if bias is None:
            return self.execute(name, inputs)
        return self.execute(name, [*inputs, *plain(bias)], bias=1)


def plain(*tensors):
    """Tensors as TensorRT has them: contiguous."""
    return [x.contiguous() for x in tensors]


def heads_of(q, v):
    """The fields that say the heads."""
    return {
        "num_k_heads": q.shape[-2],
        "num_v_heads": v.shape[-2],
        "head_k_dim": q.shape[-1],
        "head_v_dim": v.shape[-1],
    }
