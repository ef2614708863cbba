"""Engines of several ranks: built whole or not at all, a process for each, refused when unfit.

Over ONNX Runtime the ranks' sums and gathers go through gloo. For TensorRT there is a double in its
place (tensorrt_double.py), in every process: all but TensorRT and NCCL is the real thing.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import hf_config, write_checkpoint

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnx
import onnxruntime
from tensorrt_double import DoubleBuilder
from test_engine_build import OPTIONS, Recorder, tree

from trtllm_treewy import LLM, SamplingParams
from trtllm_treewy.cli import main
from trtllm_treewy.config import ModelConfig
from trtllm_treewy.engine_config import EngineConfig, EngineMismatchError
from trtllm_treewy.export.build_engine import BuildOptions, build_engine_directory, plan_build
from trtllm_treewy.export.profiles import BuildLimits, make_profile
from trtllm_treewy.export.tensorrt_builder import TensorRTBuilder
from trtllm_treewy.plugin_contract import LIBRARY
from trtllm_treewy.rank_config import bound_config
from trtllm_treewy.runtime import engine_files
from trtllm_treewy.runtime.engine_files import check_engine, open_engine
from trtllm_treewy.runtime.errors import EngineDeadError
from trtllm_treewy.runtime.executor import ExecutorLimits
from trtllm_treewy.runtime.network_onnx_ranks import OnnxRankSession, segments
from trtllm_treewy.runtime.network_tensorrt import TensorRTEngines
from trtllm_treewy.runtime.process_group import ProcessGroup, make_store

CPU = torch.device("cpu")
BUILD = BuildOptions(
    "float32",
    limits=BuildLimits(max_seq_len=256, max_nodes=40, max_num_tokens=64),
    tensor_parallel_size=2,
)
PAIR = BuildOptions(OPTIONS.dtype, limits=OPTIONS.limits, tensor_parallel_size=2)
PROMPTS = ["The river", "Once upon a time there was", "He"]
PARAMS = SamplingParams(max_tokens=32, ignore_eos=True)
SETTINGS = {"max_batch_size": 3, "max_seq_len": 128, "device": "cpu"}
SPECULATION = {
    "tree": {"draft_tree_widths": [3, 3, 3]},
    "dynamic": {"use_dynamic_tree": True, "max_total_draft_tokens": 12, "dynamic_tree_max_topK": 3},
}
NETWORKS = ("prefill", "verify", "draft")


@pytest.fixture(scope="module")
def expected(shipped_model):
    """Tokens and speculation of one device, by torch."""
    found = {}
    for name, speculation in SPECULATION.items():
        with LLM(
            shipped_model, dtype="float32", speculative_config=speculation,
            max_num_tokens=BUILD.limits.max_num_tokens, **SETTINGS,
        ) as llm:  # fmt: skip
            found[name] = answers(llm)
    return found


def answers(llm):
    outputs = llm.generate(PROMPTS, PARAMS)
    assert [o.error for o in outputs] == [None] * len(PROMPTS)
    return [(o.outputs[0].token_ids, o.speculation) for o in outputs]


@pytest.fixture(scope="module")
def pair(tmp_path_factory, shipped_model):
    """The shipped model as two ranks' networks for ONNX Runtime."""
    folder = tmp_path_factory.mktemp("pair") / "engine"
    assert build_engine_directory(shipped_model, folder, BUILD)
    return folder


@pytest.fixture
def broken(pair, tmp_path):
    """A copy, to be spoiled."""
    return Path(shutil.copytree(pair, tmp_path / "engine"))


# ------------------------------------------------------------------------------ builds


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, hf_config(vocab_size=96))
    return folder


def test_every_rank_has_its_networks_and_checksums(pair, shipped_model):
    engine = EngineConfig.read(pair)
    assert engine.tensor_parallel_size == 2
    own = {"weights.bin", *(f"{name}.onnx" for name in NETWORKS)}
    for rank in range(2):
        assert {p.name for p in (pair / f"rank{rank}").iterdir()} == own
        assert engine.rank_files(rank).keys() == own
    ours = {f"rank{rank}/{name}" for rank in range(2) for name in own}
    shared = {p.name for p in pair.iterdir() if p.is_file()} - {"config.json"}
    assert engine.files.keys() == ours | shared
    engine.check_files(pair, contents=True)
    weights = [engine.rank_files(rank)["weights.bin"] for rank in range(2)]
    assert weights[0].sha256 != weights[1].sha256
    assert weights[0].bytes == weights[1].bytes
    whole = 2 * (shipped_model / "model.safetensors").stat().st_size  # float32 of bfloat16
    assert weights[0].bytes < 0.55 * whole
    assert engine.seconds.keys() == {"export"}


def test_tensorrt_builds_each_ranks_networks_with_its_heads(model, tmp_path):
    """One timing cache for all; the scratch of the hungriest rank."""
    out, builder = tmp_path / "engine", Recorder()
    assert build_engine_directory(model, out, PAIR, builder)
    assert [name for name, _, _ in builder.calls] == [f"{n}.onnx" for n in NETWORKS] * 2
    assert [known for _, _, known in builder.calls] == ["t" * n for n in range(6)]
    part = bound_config(ModelConfig.from_pretrained(model), 2)
    for name, (profile,), _ in builder.calls:
        assert profile == make_profile(name.removesuffix(".onnx"), part, PAIR.limits)
    engine = EngineConfig.read(out)
    assert {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()} == {
        *(f"rank{rank}/{name}.engine" for rank in range(2) for name in NETWORKS),
        "timing.cache", "config.json", "generation_config.json",
    }  # fmt: skip
    assert engine.scratch == dict(zip(NETWORKS, (1004, 1005, 1006), strict=True))
    assert engine.seconds.keys() == {"export", *NETWORKS}


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_in_any_rank_leaves_what_was_there(model, tmp_path, rank):
    class Interrupted(Recorder):
        def build(self, onnx_file, *args):
            if onnx_file.parent.name == f"rank{rank}" and onnx_file.stem == "verify":
                raise KeyboardInterrupt
            return super().build(onnx_file, *args)

    out = tmp_path / "engine"
    with pytest.raises(KeyboardInterrupt):
        build_engine_directory(model, out, PAIR, Interrupted())
    assert not list(tmp_path.iterdir())
    build_engine_directory(model, out, OPTIONS)
    before = tree(out)
    with pytest.raises(KeyboardInterrupt):
        build_engine_directory(model, out, PAIR, Interrupted())
    assert tree(out) == before
    assert list(tmp_path.iterdir()) == [out]


def test_another_number_of_ranks_is_another_engine(model, tmp_path):
    out = tmp_path / "engine"
    assert build_engine_directory(model, out, PAIR)
    assert not build_engine_directory(model, out, PAIR)
    (out / "rank1/verify.onnx").unlink()
    assert build_engine_directory(model, out, PAIR), "a file of a rank was missing"
    assert build_engine_directory(model, out, OPTIONS)
    assert not (out / "rank0").exists()
    assert EngineConfig.read(out).tensor_parallel_size == 1


def test_what_cannot_be_divided_is_refused_before_anything_is_made(model, tmp_path):
    seven = BuildOptions("float32", limits=OPTIONS.limits, tensor_parallel_size=7)
    with pytest.raises(ValueError, match="tensor parallel size 7 does not divide"):
        build_engine_directory(model, tmp_path / "engine", seven)
    with pytest.raises(ValueError, match="tensor_parallel_size must be an integer >= 1, got 0"):
        BuildOptions(tensor_parallel_size=0)
    assert not list(tmp_path.iterdir())


def test_a_tensorrt_without_collectives_is_named(model, tmp_path):
    """10.14 and 10.15: before anything is exported, and from the module itself."""
    builder = Recorder()
    builder.version, builder.collectives = "tensorrt 10.14.1.48", False
    with pytest.raises(
        ValueError, match=r"is 2, and tensorrt 10.14.1.48 has no collectives: .* 10.16 or later"
    ):
        build_engine_directory(model, tmp_path / "engine", PAIR, builder)
    assert not builder.calls
    assert not list(tmp_path.iterdir())
    for kinds, known in (({}, False), ({"DIST_COLLECTIVE": 1}, True)):
        trt = SimpleNamespace(
            __name__="tensorrt", __version__="10.16", ILogger=type("L", (), {"ERROR": 1}),
            LayerType=SimpleNamespace(**kinds),
        )  # fmt: skip
        assert TensorRTBuilder(trt=trt).collectives == known


def test_the_command_says_what_each_rank_has(model, tmp_path, capsys):
    out = tmp_path / "engine"
    command = ["build", str(model), "--output", str(out), "--backend", "onnx", "--tp", "2"]
    command += ["--max-seq-len", "256", "--dtype", "float32"]
    assert main([*command, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "rank 0 in rank0/: attention heads 0 to 1" in said
    assert "rank 1 in rank1/: attention heads 2 to 3" in said
    assert "tokens 48 to 95" in said
    assert not out.exists()
    one = plan_build(model, out, OPTIONS)
    two = plan_build(model, out, PAIR)
    assert two.state_bytes == one.state_bytes / 2
    assert one.weight_bytes / 2 < two.weight_bytes < 0.8 * one.weight_bytes
    assert two.disk_bytes > 1.9 * two.weight_bytes
    assert main(command) == 0
    assert EngineConfig.read(out).tensor_parallel_size == 2
    assert main([*command, "--dry-run"]) == 0
    assert "up to date" in capsys.readouterr().out


# ------------------------------------------------------------------------------ ONNX Runtime


@pytest.mark.parametrize("kind", SPECULATION)
def test_the_tokens_of_one_device(pair, expected, kind):
    """Drafts, acceptance and all; each rank has half of the weights in memory."""
    # The number of ranks may be said, and need not be.
    ranks = {"tree": 1, "dynamic": 2}[kind]
    with LLM(
        pair, speculative_config=SPECULATION[kind], tensor_parallel_size=ranks, **SETTINGS
    ) as llm:
        assert answers(llm) == expected[kind]
        assert len(llm._engine._executor.process_ids) == 1
        weights = EngineConfig.read(pair).rank_files(0)["weights.bin"].bytes
        assert llm.memory_report()["weights_bytes"] == weights
    assert max(s.acceptance_length for _, s in expected[kind]) > 1.5


def test_experts_over_ranks_and_prefixes_taken_over(tmp_path):
    write_checkpoint(tmp_path / "moe", hf_config(moe=True, vocab_size=96), seed=3)
    options = BuildOptions("float32", limits=BUILD.limits, tensor_parallel_size=2)
    build_engine_directory(tmp_path / "moe", tmp_path / "engine", options)
    settings = {
        **SETTINGS, "skip_tokenizer_init": True, "dtype": "float32",
        "speculative_config": {"max_draft_len": 3},
        "kv_cache_config": {"enable_block_reuse": True, "tokens_per_block": 8},
    }  # fmt: skip
    prompts = [[5, 6, 7, 8] * 9, [11, 3], [5, 6, 7, 8] * 9 + [1, 2]]
    texts = []
    for source in ("moe", "engine"):
        with LLM(tmp_path / source, **settings) as llm:
            runs = [llm.generate(prompts, PARAMS) for _ in range(2)]
            texts.append([[o.outputs[0].token_ids for o in run] for run in runs])
            assert llm.stats.checkpoints_used > 0
    assert texts[0] == texts[1]


@pytest.mark.parametrize("size", [3, 4])
def test_another_number_of_ranks_is_refused(pair, size):
    with pytest.raises(
        ValueError, match=f"tensor_parallel_size is {size}, expected 2: .* 2 ranks, a device each"
    ):
        LLM(pair, tensor_parallel_size=size, **SETTINGS)
    with pytest.raises(EngineMismatchError, match="tensor_parallel_size is 1, expected 2"):
        open_engine(pair, ExecutorLimits(2, 64, 1, 1, 8, 32), CPU)


def test_an_engine_of_one_device_is_not_divided(model, tmp_path):
    build_engine_directory(model, tmp_path / "engine", OPTIONS)
    settings = {**SETTINGS, "skip_tokenizer_init": True}
    with pytest.raises(ValueError, match="tensor_parallel_size is 2, expected 1: .* one device"):
        LLM(tmp_path / "engine", tensor_parallel_size=2, **settings)


def test_a_ranks_file_that_is_missing_or_cut_short_is_named(broken):
    path = broken / "rank1/weights.bin"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=r"rank1/weights.bin has \d+ bytes, expected"):
        LLM(broken, **SETTINGS)
    path.unlink()
    with pytest.raises(ValueError, match=r"rank1/weights.bin is missing"):
        LLM(broken, **SETTINGS)


def test_a_ranks_network_that_is_corrupt_is_named(broken):
    """Of the length that it should have: rank 1 cannot open it, and says so."""
    path = broken / "rank1/verify.onnx"
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(EngineDeadError, match=r"rank 1: .*rank1/verify.onnx: ONNX Runtime cannot"):
        LLM(broken, **SETTINGS)


def test_networks_of_another_number_of_ranks_are_refused(pair, tmp_path):
    """A graph whose collectives are of two ranks, in a group of three."""
    graph = onnx.load(pair / "rank0/verify.onnx", load_external_data=False).graph
    with pytest.raises(ValueError, match="its collectives are of 2 ranks, there are 3"):
        segments(graph.node, 3)
    parts = segments(graph.node, 2)
    assert sum(len(part.nodes) for part in parts) + len(parts) - 1 == len(graph.node)
    for node in graph.node:
        for field in node.attribute:
            if field.name == "reduce_op" and field.s == b"sum":
                field.s = b"max"
    with pytest.raises(ValueError, match="its collective all_reduce with max is not known"):
        segments(graph.node, 2)


def test_a_machine_without_onnx_is_told(pair, monkeypatch):
    monkeypatch.setattr(
        engine_files, "find_spec", lambda name: None if name == "onnx" else object()
    )
    with pytest.raises(ValueError, match="package onnx is not installed: pip install onnx"):
        check_engine(EngineConfig.read(pair), pair, CPU)


def test_other_settings_know_of_the_ranks(pair, tmp_path, capsys):
    """Random weights, and a Triton repository that has to name the ranks for their GPUs."""
    with pytest.raises(
        ValueError, match="'auto': .* is an engine for 2 ranks, a device each, with"
    ):
        LLM(pair, load_format="dummy", **SETTINGS)
    command = ["triton-repo", str(pair), "--output", str(tmp_path / "models"), "--name", "tiny"]
    assert main(command) != 0
    assert "for 2 ranks, a device each, with its weights in it: expected" in capsys.readouterr().err
    assert not (tmp_path / "models/tiny").exists()
    assert main([*command, "--tp", "2", "--cpu"]) == 0
    copy = tmp_path / "models/tiny/1/checkpoint"
    EngineConfig.read(copy).check_files(copy, contents=True)


class Alone:
    """A group of two whose other rank has the same values."""

    rank, ranks = 0, 2

    def all_reduce(self, x):
        return 2 * x

    def all_gather(self, x):
        return torch.cat([x, x], -1)


def test_segments_carry_out_sums_and_gathers():
    """Values that skip a segment, an output of the middle, a gather along the first axis."""
    f = onnx.helper
    value = f.make_tensor_value_info
    fields = {"nb_rank": 2, "root": -1, "group_size": 0, "domain": "treewy"}
    nodes = [
        f.make_node("Neg", ["x"], ["a"]),
        f.make_node(
            "DistCollective", ["a"], ["b"], collective_operation="all_reduce", reduce_op="sum",
            **fields,
        ),
        f.make_node("Add", ["a", "b"], ["c"]),
        f.make_node(
            "DistCollective", ["c"], ["d"], collective_operation="all_gather", reduce_op="none",
            **fields,
        ),
        f.make_node("Abs", ["d"], ["y"]),
        f.make_node("Identity", ["a"], ["z"]),
    ]  # fmt: skip
    graph = f.make_graph(
        nodes, "g", [value("x", 1, ["n", 2])],
        [value("y", 1, None), value("c", 1, None), value("z", 1, None)],
    )  # fmt: skip
    model = f.make_model(graph, opset_imports=[f.make_opsetid("", 17)], ir_version=8)
    session = OnnxRankSession(model, Path.cwd(), Alone(), onnxruntime.SessionOptions())
    assert [(x.name, x.type) for x in session.get_inputs()] == [("x", "tensor(float)")]
    x = torch.randn(3, 2)
    y, c, z = map(torch.from_numpy, session.run(["y", "c", "z"], {"x": x.numpy()}))
    torch.testing.assert_close(z, -x)
    torch.testing.assert_close(c, -3 * x)
    torch.testing.assert_close(y, torch.cat([3 * x, 3 * x]).abs())


# ------------------------------------------------------------------------------ TensorRT


TENSORRT = """
import sys
from tensorrt_double import make_module
from trtllm_treewy.runtime import engine_files, process_group
module = make_module()
module.__version__, module.__spec__ = {version!r}, __spec__
engine_files.make_streams = lambda device: module.streams
# NCCL's communicator is gloo's group here.
process_group.ProcessGroup.communicator = lambda self: id(self)
if {old}:
    del module.IExecutionContext.set_communicator
sys.modules[__name__] = module
"""


@pytest.fixture(scope="module")
def plans(tmp_path_factory, shipped_model):
    """The shipped model as plans of two ranks, for a GPU that is the CPU."""
    folder = tmp_path_factory.mktemp("plans") / "engine"
    build_engine_directory(shipped_model, folder, BUILD, DoubleBuilder(gpu=None))
    return folder


@pytest.fixture
def double(tmp_path, monkeypatch):
    """The package `tensorrt` of this process and of the ranks that it starts; its version."""
    kept = engine_files.make_streams, ProcessGroup.communicator

    def install(version="10.14.1.48", *, old=False):
        (tmp_path / "tensorrt.py").write_text(TENSORRT.format(version=version, old=old))
        (tmp_path / LIBRARY).write_text("a library")
        monkeypatch.setenv("TREEWY_TENSORRT_LIBRARY", str(tmp_path))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "tensorrt", raising=False)

    yield install
    sys.modules.pop("tensorrt", None)
    engine_files.make_streams, ProcessGroup.communicator = kept


def test_tensorrt_ranks_give_the_tokens_of_one_device(plans, double, expected):
    """Every context of every rank has the communicator before its first step, graphs included."""
    double()
    with LLM(plans, speculative_config=SPECULATION["tree"], **SETTINGS) as llm:
        assert answers(llm) == expected["tree"]
        executor = llm._engine._executor
        trt = sys.modules["tensorrt"]
        kinds = [what for what, _ in trt.events]
        assert kinds.count("communicator") == kinds.count("context") > 1
        assert kinds.index("communicator") < kinds.index("enqueue")
        assert trt.streams.replays > 0
        assert len(executor.process_ids) == 1
    assert not executor._local._parts["verify"]._steps, "contexts outlive the communicator"


def test_a_plan_of_a_rank_that_tensorrt_refuses_is_named(plans, double, tmp_path):
    double()
    broken = Path(shutil.copytree(plans, tmp_path / "engine"))
    path = broken / "rank1/prefill.engine"
    path.write_bytes(path.read_bytes().replace(b"GdnPrefill", b"GdnRefillP"))
    with pytest.raises(
        EngineDeadError, match="rank 1: .*rank1/prefill.engine: TensorRT cannot load it: no creator"
    ):
        LLM(broken, **SETTINGS)


def test_a_tensorrt_that_takes_no_communicator_is_named(plans, double):
    double(old=True)
    with pytest.raises(
        ValueError, match=r"2 ranks, and tensorrt 10.14.1.48 takes no communicator: .* 10.16 or"
    ):
        LLM(plans, **SETTINGS)


def test_a_communicator_is_nccls_and_wanted_late():
    """gloo has none; TensorRT gets the address when the first context is made, as a capsule."""
    with_gloo = ProcessGroup(make_store(1, 5.0), 0, 1, CPU, 5.0)
    with pytest.raises(RuntimeError, match=r"no NCCL communicator on cpu: .* torch 2.8 or later"):
        with_gloo.communicator()
    with_gloo._backend = SimpleNamespace(_comm_ptr=lambda: 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device", lambda device: pytest.MonkeyPatch.context())
        with pytest.raises(RuntimeError, match="the ranks have not met"):
            with_gloo.communicator()
        with_gloo._backend = SimpleNamespace(_comm_ptr=lambda: 4096)
        assert with_gloo.communicator() == 4096


def test_a_communicator_that_is_refused_is_told():
    class Context:
        def set_communicator(self, capsule):
            assert type(capsule).__name__ == "PyCapsule"
            return False

    engine = SimpleNamespace(create_execution_context=lambda strategy: Context())
    trt = SimpleNamespace(
        ILogger=type("L", (), {"ERROR": 1}), Runtime=lambda logger: None,
        ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED=1),
    )  # fmt: skip
    shared = TensorRTEngines(trt, SimpleNamespace(), CPU, lambda: 64)
    with pytest.raises(RuntimeError, match="verify: TensorRT does not take the ranks' communica"):
        shared.context(engine, "verify")


def test_an_engine_without_the_networks_of_a_rank_is_refused(pair):
    """As of a config that was changed by hand."""
    engine = replace(EngineConfig.read(pair), tensor_parallel_size=4)
    with pytest.raises(EngineMismatchError, match="of 4 ranks, and has no networks of rank 2"):
        check_engine(engine, pair, CPU)
