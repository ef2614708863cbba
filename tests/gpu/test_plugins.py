"""The TensorRT plugins on a GPU, driven as TensorRT drives them, against the float64 reference.

The same on the CPU is in ../test_plugin.py; engines by a real TensorRT are in ../check_tensorrt.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import kernel_suite as suite
import plugin_host as drive
import prefill_suite as prefills
from engine_backends import HostBackend
from engine_suite import run_all
from gdn_cases import DECAYS, Dims, same_bits
from kernel_suite import BF16, F16, F32, TYPES, Machine, TreeCase
from plugin_host import BUILD, RUNTIME, PluginLibrary, PluginMachine, Refused

from trtllm_treewy.plugin_contract import LIBRARY

pytestmark = pytest.mark.gpu

DIMS = (Dims(2, 2, 128, 64), Dims(1, 2, 64, 128), Dims(1, 4, 128, 128), Dims(2, 2, 256, 64))
NODES = (1, 5, 16, 17, 33, 64, 128)
SHAPES = ("random", "chain", "star", "levels")


@pytest.fixture(scope="module")
def library():
    """The shipped library; the driver is built here, or was (TensorRT's headers are needed)."""
    plugins = drive.ROOT / "build" / LIBRARY
    if not plugins.is_file():
        pytest.fail(f"no build/{LIBRARY}: run ./build.sh first")
    folder = drive.ROOT / "build" / "plugin_host"
    if not (folder / "libplugin_host.so").is_file() and not drive.build_host(folder):
        pytest.skip("no build/plugin_host/libplugin_host.so, and nothing to build it with")
    return PluginLibrary(folder / "libplugin_host.so", plugins)


@pytest.fixture
def gpu(library):
    return PluginMachine("cuda", library)


def types_id(types):
    return "-".join(str(t)[6:] for t in types)


@pytest.mark.parametrize("types", TYPES, ids=types_id)
@pytest.mark.parametrize("nodes", NODES)
def test_verify_equals_the_reference(gpu, nodes, types):
    for index, decay in enumerate(DECAYS):
        dims = DIMS[(nodes + index) % len(DIMS)]
        if types[0] == F32 and nodes > 64 and dims.key_dim == 256:
            dims = DIMS[0]  # more shared memory than a block has
        case = TreeCase(
            nodes * 10 + index, dims, nodes, dtype=types[0], state_dtype=types[1], decay=decay,
            shape=SHAPES[(nodes + index) % 4], pads=index % 2, full=index == 2,
        )  # fmt: skip
        suite.check_verify(gpu, case)
        if nodes < 64:
            suite.check_verify(gpu, case, history=suite.random_history(case, 8, stash=F32))


@pytest.mark.parametrize("types", TYPES, ids=types_id)
@pytest.mark.parametrize("nodes", NODES)
def test_commit_moves_every_layer_to_the_accepted_node(gpu, nodes, types):
    for index, decay in enumerate(DECAYS):
        case = TreeCase(
            nodes + index, DIMS[(nodes + index) % 4], nodes, dtype=types[0], state_dtype=types[1],
            decay=decay, shape=SHAPES[(nodes + index + 1) % 4], layers=2, pads=index % 2,
        )  # fmt: skip
        suite.check_commit(gpu, case)
    suite.check_nothing_accepted(gpu, TreeCase(nodes, DIMS[1], max(nodes, 2), layers=2))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_the_other_plugins_equal_the_reference(gpu, dtype):
    case = TreeCase(5, DIMS[2], 6, layers=2, dtype=dtype)
    suite.check_deferred(gpu, case, capacity=6, stash=F32)
    for channels, width in ((1024, 4), (20, 3)):
        case = suite.conv_case(width, nodes=33, dtype=dtype, channels=channels, width=width)
        suite.check_conv(gpu, case, bias=channels == 20, pad=0)
        suite.check_conv_commit(gpu, case, pad=0)
        lengths = (1, 0, 90, 200)
        suite.check_prefill_conv(
            gpu, channels, dtype=dtype, channels=channels, width=width, lengths=lengths
        )
    for state_dtype in (F32, BF16):
        prefills.check_prefill(
            gpu, 3, DIMS[0], lengths=(1, 140, 0, 7), dtype=dtype, state_dtype=state_dtype
        )


def test_refusals_leave_the_device_as_it_was(gpu, library):
    """A slot out of range is counted; other addresses, types and 129 nodes are refused."""
    case = TreeCase(4, DIMS[1], 6, layers=2, batch=3, slots=6)
    slot = case.slot.clone()
    slot[0] = 1_000_000
    state = case.state.cuda()
    inputs = [state, *(x.cuda() for x in (slot, *case.trees[1:], case.accepted))]
    inputs += [x.cuda().contiguous() for x in case.stash()]
    node = library.create("TreeWyCommit", BUILD).reload()
    outputs = node.allocate(inputs)
    with pytest.raises(Refused, match="bound to one address"):
        node.run(inputs, [torch.zeros_like(state), outputs[1]])
    torch.cuda.synchronize()
    assert same_bits(state.cpu(), case.state)
    stream = torch.cuda.current_stream().cuda_stream
    node.run(inputs, outputs, stream=stream)
    assert outputs[1].tolist() == [1]
    live = case.slot[1:].tolist()
    still = [s for s in range(6) if s not in live]
    assert same_bits(state.cpu()[:, still], case.state[:, still])
    gpu.close("state", state[:, live], _moved(case)[:, live])


def _moved(case):
    state = case.state.double()
    stash = [x.double() for x in case.stash()]
    torch.ops.treewy.commit(state, *case.trees, case.accepted, *stash)
    return state


def test_plugins_in_a_network(gpu, library, tmp_path):
    """The checks of whole engines, CUDA graphs and two contexts on two streams among them."""
    types = [(F32, F32), (F16, F32), (BF16, BF16)]
    rows = run_all(HostBackendOnGpu(library), Machine("cuda"), types, tmp_path, steps=20)
    failed = [f"{row['types']} {row['check']}: {row['said']}" for row in rows if not row["passed"]]
    assert len(rows) == 21
    assert not failed, "\n".join(failed)


class HostBackendOnGpu(HostBackend):
    """Constants on the GPU, and the current stream where none is named."""

    def build(self, network, path):
        steps = [
            (step[0], step[1], step[2].cuda()) if step[0] == "constant" else step
            for step in network.steps
        ]
        network.steps[:] = steps
        super().build(network, path)


def test_graph_replay_of_one_plugin(gpu, library):
    """A captured verification replays over another topology, and allocates nothing."""
    dims = DIMS[1]
    cases = [TreeCase(seed, dims, 12, batch=3, slots=6, pads=seed % 2) for seed in (1, 2, 3)]
    fields = drive.heads_of(cases[0].raw[0]["q"], cases[0].raw[0]["v"])
    node = library.create("TreeWyVerify", BUILD, **fields).reload().attach()

    def inputs_of(case):
        raw = case.raw[0]
        qkv = torch.cat([raw[n].flatten(-2) for n in "qkv"], -1)
        rest = [raw[n] for n in ("a", "b", "A_log", "dt_bias")]
        return [x.contiguous().cuda() for x in (qkv, *rest, case.state[0], *case.trees)]

    static = inputs_of(cases[0])
    outputs = node.allocate(static)
    node.run(static, outputs, stream=torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = torch.cuda.memory_allocated()
        node.run(static, outputs, steps=2, stream=torch.cuda.current_stream().cuda_stream)
        assert torch.cuda.memory_allocated() == held
    for case in cases[::-1]:
        for x, new in zip(static, inputs_of(case), strict=True):
            x.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        for name, mine, truth in zip(("out", "u", "g"), outputs, case.truth(), strict=True):
            gpu.close(name, mine, truth)
    large = inputs_of(TreeCase(1, dims, 129, batch=1, slots=2))
    node = library.create("TreeWyVerify", RUNTIME, **fields)
    outputs = node.allocate(large)
    with pytest.raises(Refused, match="N is 129"):
        node.run(large, outputs)
