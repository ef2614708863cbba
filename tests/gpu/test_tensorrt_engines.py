"""Engines of whole models by real TensorRT: tokens, graphs, states in place.

These need the `tensorrt` package (10.14 to 11) and build/libtreewy_tensorrt.so. The last tests need
neither: the stream, and a network whose engine is a double that launches torch's kernels, so that
captures and replays are CUDA's. The executor over a double is in ../test_engine_tensorrt.py.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

pytest.importorskip("onnx")

import tensorrt_double as double

from trtllm_treewy import LLM, SamplingParams
from trtllm_treewy.binding_names import VERIFY, Binding, Bindings
from trtllm_treewy.engine_config import EngineMismatchError, gpu_identity
from trtllm_treewy.runtime.buckets import Buckets
from trtllm_treewy.runtime.cuda_streams import CudaStreams
from trtllm_treewy.runtime.engine_files import check_engine
from trtllm_treewy.runtime.network_tensorrt import StepShapes, TensorRTEngines, TensorRTNetwork
from trtllm_treewy.runtime.step_buffers import StepBuffers
from trtllm_treewy.tensorrt_package import plugin_candidates

pytestmark = pytest.mark.gpu

PROMPTS = [f"{start} {end}" for start in ("The river", "Once upon", "He said", "In the")
           for end in ("was", "and then", "of the old house", "a")]  # fmt: skip
PARAMS = SamplingParams(max_tokens=64, ignore_eos=True)
SETTINGS = {"max_batch_size": 8, "max_seq_len": 128}


@pytest.fixture(scope="module", params=["float32", "float16", "bfloat16"])
def engine(request, tmp_path_factory, shipped_model):
    if importlib.util.find_spec("tensorrt") is None:
        pytest.skip("no package tensorrt: pip install 'tensorrt>=10.14,<12'")
    from trtllm_treewy.export.build_engine import BuildOptions, build_engine_directory
    from trtllm_treewy.export.profiles import BuildLimits
    from trtllm_treewy.export.tensorrt_builder import TensorRTBuilder

    library = next((path for path in plugin_candidates() if path.is_file()), None)
    if library is None:
        pytest.fail("no plugin library: run ./build.sh first")
    out = tmp_path_factory.mktemp("tensorrt") / request.param
    limits = BuildLimits(max_seq_len=256, max_nodes=40, max_num_tokens=64)
    builder = TensorRTBuilder(library, gpu=gpu_identity(torch.device("cuda")))
    build_engine_directory(shipped_model, out, BuildOptions(request.param, limits=limits), builder)
    return request.param, out


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_give_the_tokens_of_one(tmp_path, shipped_model, dtype):
    """Collectives over NCCL inside the engines; in 16 bits most of the first tokens."""
    trt = pytest.importorskip("tensorrt")
    if not hasattr(trt.LayerType, "DIST_COLLECTIVE"):
        pytest.skip(f"tensorrt {trt.__version__} has no collectives: 10.16 or later has")
    from trtllm_treewy.export.build_engine import BuildOptions, build_engine_directory
    from trtllm_treewy.export.profiles import BuildLimits
    from trtllm_treewy.export.tensorrt_builder import TensorRTBuilder

    library = next((path for path in plugin_candidates() if path.is_file()), None)
    if library is None:
        pytest.fail("no plugin library: run ./build.sh first")
    limits = BuildLimits(max_seq_len=256, max_nodes=40, max_num_tokens=64)
    options = BuildOptions(dtype, limits=limits, tensor_parallel_size=2)
    builder = TensorRTBuilder(library, gpu=gpu_identity(torch.device("cuda")))
    build_engine_directory(shipped_model, tmp_path / "engine", options, builder)
    with LLM(shipped_model, dtype=dtype, device="cuda", **SETTINGS) as llm:
        wanted = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS)]
    speculation = {"draft_tree_widths": [3, 3, 3]}
    with LLM(tmp_path / "engine", speculative_config=speculation, **SETTINGS) as llm:
        got = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS)]
        assert len(llm._engine._executor.process_ids) == 1
    same = sum(a[:8] == b[:8] for a, b in zip(got, wanted, strict=True))
    assert same >= len(PROMPTS) * 3 // 4
    assert dtype != "float32" or sum(a == b for a, b in zip(got, wanted, strict=True)) >= 12


@pytest.mark.parametrize(
    "speculation",
    [None, {"draft_tree_widths": [3, 3, 3]}, {"use_dynamic_tree": True}],
    ids=["plain", "tree", "dynamic"],
)
def test_same_tokens_as_torch(engine, shipped_model, speculation):
    """In float32 all; in 16 bits most of the first ones, where no two logits are close."""
    dtype, folder = engine
    with LLM(shipped_model, dtype=dtype, device="cuda", **SETTINGS) as llm:
        wanted = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS)]
    with LLM(folder, speculative_config=speculation, **SETTINGS) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        parts = llm._engine._executor._parts
    got = [o.outputs[0].token_ids for o in outputs]
    if dtype == "float32":
        assert got == wanted
    else:
        same = sum(a[:8] == b[:8] for a, b in zip(got, wanted, strict=True))
        assert same >= len(PROMPTS) * 3 // 4
    if speculation:
        assert max(o.speculation.acceptance_length for o in outputs) > 1.5
    assert any(step.replay is not None for step in parts["verify"]._steps.values())


def test_engines_of_other_gpus_are_refused(engine):
    from dataclasses import replace

    from trtllm_treewy.engine_config import EngineConfig

    _, folder = engine
    read = EngineConfig.read(folder)
    check_engine(read, folder, torch.device("cuda"))
    with pytest.raises(EngineMismatchError, match="for the GPU other sm_10, and this is"):
        check_engine(replace(read, gpu="other sm_10"), folder, torch.device("cuda"))


def test_the_stream_captures_without_running_and_replays():
    """No TensorRT: torch's own work on the stream, before and behind the caller's."""
    device = torch.device("cuda")
    streams = CudaStreams(device)
    x = torch.zeros(1 << 20, device=device)
    assert streams.handle != torch.cuda.default_stream().cuda_stream
    with streams.scope():
        x += 1
        replay = streams.capture(lambda: x.add_(10))
    assert x.eq(1).all(), "a capture runs nothing"
    for _ in range(3):
        x *= 2
        with streams.scope():
            replay()
    streams.synchronize()
    assert x.eq(((1 * 2 + 10) * 2 + 10) * 2 + 10).all()


def test_what_cannot_be_captured_is_an_error_and_leaves_the_stream_usable():
    device = torch.device("cuda")
    streams = CudaStreams(device)
    x = torch.ones(4, device=device)
    with streams.scope(), pytest.raises(RuntimeError):
        streams.capture(lambda: x.sum().item())
    with streams.scope():
        x += 1
    assert x.eq(2).all()


# What a network of one layer would have: its outputs and a state that it counts up in place.
TENSORS = Bindings(
    (
        Binding("token_ids", ("B", "N"), "int32"),
        Binding("slot", ("B",), "int32"),
        Binding("kv_rows", ("B", "S"), "int32"),
        Binding("state.0", ("slots", 4), "state"),
    ),
    (
        Binding("logits", ("B", "N"), "float32"),
        Binding("u.0", ("B", "N"), "float32"),
        Binding("u.1", ("B", "N"), "float32"),
        Binding("state_out.0", ("slots", 4), "state", in_place="state.0"),
    ),
)
TYPES = {"int32": torch.int32, "float32": torch.float32, "state": torch.float32}
ROWS, NODES, CONTEXT = 4, 16, 200


class Streams(CudaStreams):
    """CUDA's own, with what the double asks of a stream; nothing is recorded but by CUDA."""

    depth, recording = 1, None


class TorchEngine(double.ICudaEngine):
    """logits = tokens + the sum of kv_rows, u = 2 and 3 times tokens, state + 1, by torch."""

    def __init__(self, runtime):
        low = {"B": 1, "N": 1, "S": 1, "slots": 1}
        high = {"B": ROWS, "N": NODES, "S": CONTEXT, "slots": 8}
        profile = {}
        for x in TENSORS.inputs:
            ends = [[sizes.get(dim, dim) for dim in x.shape] for sizes in (low, high)]
            profile[x.name] = ends[0], ends[1], ends[1]
        self._profiles = [profile]
        self._runtime, self._views = runtime, {}
        self._in_place = {"state_out.0": "state.0"}
        kinds = {"int32": double.np.int32, "float32": double.np.float32, "state": double.np.float32}
        modes = double.TensorIOMode
        self._tensors = {
            x.name: (mode, kinds[x.kind], tuple(-1 if isinstance(d, str) else d for d in x.shape))
            for mode, some in ((modes.INPUT, TENSORS.inputs), (modes.OUTPUT, TENSORS.outputs))
            for x in some
        }

    def view(self, name, address, shape):
        """Memory as a tensor; made at the run before a capture, and kept."""
        key = name, address, tuple(shape)
        if key not in self._views:
            kind = {double.np.int32: "<i4", double.np.float32: "<f4"}[self._tensors[name][1]]
            layout = {"shape": key[2], "typestr": kind, "data": (address, False), "version": 2}
            memory = type("Memory", (), {"__cuda_array_interface__": layout})()
            self._views[key] = torch.as_tensor(memory, device="cuda")
        return self._views[key]

    def _compute(self, shapes, addresses, scratch, group):
        given = {n: self.view(n, addresses[n], shape) for n, shape in shapes.items()}
        tokens, rows = given["token_ids"], given["kv_rows"]
        out = {n: self.view(n, addresses[n], tokens.shape) for n in ("logits", "u.0", "u.1")}
        out["logits"].copy_(tokens + rows.sum(1, keepdim=True))
        out["u.0"].copy_(tokens * 2)
        out["u.1"].copy_(tokens * 3)
        given["state.0"].add_(1)


def make_network(device):
    streams = Streams(device)
    module = double.make_module(streams)
    shared = TensorRTEngines(module, streams, device)
    engine = TorchEngine(shared._runtime)
    shared.reserve_scratch({VERIFY: engine})
    buffers = StepBuffers(device, dict.fromkeys(("token_ids", "slot", "kv_rows", "logits"), 4096))
    buffers._buffers["u"] = torch.empty(2 * 4096, dtype=torch.uint8, device=device)
    shapes = StepShapes(Buckets(ROWS, NODES), CONTEXT)
    network = TensorRTNetwork(VERIFY, engine, TENSORS, TYPES, shared, buffers, shapes)
    state = torch.zeros(8, 4, device=device)
    network.bind({"state.0": state})
    return network, state, module


def test_networks_are_captured_and_replayed_by_cuda():
    """New inputs at every replay, padded and not; pools in place; nothing runs twice."""
    device = torch.device("cuda")
    network, state, module = make_network(device)
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, 3, 9), (2, 4, 30), (1, 1, 1), (2, 3, 64), (4, 16, 200)] * 3
    for runs, (batch, nodes, context) in enumerate(sizes, 1):
        shape = {"token_ids": (batch, nodes), "kv_rows": (batch, context), "slot": (batch,)}
        given = {
            name: torch.randint(0, 1000, size, generator=generator).to(device)
            for name, size in shape.items()
        }
        out = network.run(given)
        tokens = given["token_ids"].float()
        expected = tokens + given["kv_rows"].sum(1, keepdim=True)
        torch.testing.assert_close(out["logits"], expected, atol=0, rtol=0)
        wanted = torch.stack((2 * tokens, 3 * tokens))
        torch.testing.assert_close(out["u"], wanted, atol=0, rtol=0)
        assert state.eq(runs).all(), "every run counts once, and a capture does not"
    steps = list(network._steps.values())
    assert len(steps) == 3, "buckets: 2 x 4 x 64, 1 x 1 x 64, 4 x 16 x 200"
    assert all(step.replay is not None for step in steps)
    enqueued = [what for what, _ in module.events].count("enqueue")
    assert enqueued == 2 * len(steps), "one run and one capture of each bucket"
