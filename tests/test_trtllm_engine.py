"""Engines of trtllm-build before the runtime; doctor --trtllm; the page that lists the contract."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import hf_config, write_checkpoint
from trtllm_world import build, trtllm_double

from trtllm_treewy import LLM, doctor
from trtllm_treewy.cli import main
from trtllm_treewy.config import ModelConfig
from trtllm_treewy.export.trtllm import contract
from trtllm_treewy.export.trtllm.convert import convert_checkpoint
from trtllm_treewy.export.trtllm.custom_module import PATH
from trtllm_treewy.llmapi import KvCacheConfig, MTPDecodingConfig
from trtllm_treewy.runtime import trtllm_network
from trtllm_treewy.runtime.executor import ExecutorLimits
from trtllm_treewy.runtime.trtllm_engine import TrtllmEngine, executor_maker
from trtllm_treewy.runtime.trtllm_executor import load_drafter
from trtllm_treewy.runtime.trtllm_network import TrtllmNetwork
from trtllm_treewy.trtllm_bindings import engine_inputs, engine_outputs

CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """An engine of the double, which no test changes."""
    folder = tmp_path_factory.mktemp("built")
    raw = hf_config(vocab_size=96)
    write_checkpoint(folder / "hf", raw)
    convert_checkpoint(folder / "hf", folder / "ckpt")
    patch = pytest.MonkeyPatch()
    with trtllm_double(patch):
        build(folder / "ckpt", folder / "engine", folder / "libtreewy_tensorrt.so")
    patch.undo()
    return folder / "engine"


@pytest.fixture
def engine(built, tmp_path):
    """A copy, to be spoilt."""
    for path in built.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_recognised(built):
    found = TrtllmEngine.read(built)
    raw = ModelConfig.from_dict(hf_config(vocab_size=96))
    assert found == TrtllmEngine(
        directory=built,
        config=raw,
        ranks=1,
        dtype="float32",
        plugin_dtype="float32",
        logits_dtype="float32",
        max_batch_size=5,
        max_seq_len=192,
        max_num_tokens=512,
        max_nodes=40,
        tokens_per_block=32,
        version="1.2.0",
    )
    # What else reads a model's directory, such as the Triton repository, knows it by this.
    assert ModelConfig.from_pretrained(built) == raw


def test_a_triton_repository_takes_it(built, tmp_path, monkeypatch):
    """All of it, and what is there is an engine again."""
    pytest.importorskip("prometheus_client", reason="the extra triton is not installed")
    from trtllm_treewy.cli import main

    models = tmp_path / "models"
    assert main(["triton-repo", str(built), "--output", str(models), "--name", "tiny"]) == 0
    copy = models / "tiny" / "1" / "checkpoint"
    assert {x.name for x in copy.iterdir()} == {x.name for x in built.iterdir()}
    assert TrtllmEngine.read(copy).config == TrtllmEngine.read(built).config
    assert (copy / "rank0.engine").read_bytes() == (built / "rank0.engine").read_bytes()


def test_others_are_not_taken_for_one(tmp_path, shipped_model):
    assert TrtllmEngine.read(shipped_model) is None
    assert TrtllmEngine.read(tmp_path) is None


def edit(engine, change):
    path = engine / "config.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda raw: raw["pretrained_config"].update(architecture="LlamaForCausalLM"),
         "architecture is 'LlamaForCausalLM'"),
        (lambda raw: raw.pop("build_config"), "build_config: expected an object"),
        (lambda raw: raw["build_config"].update(max_batch_size="8"), "max_batch_size: expected"),
        (lambda raw: raw["build_config"]["plugin_config"].update(treewy_plugin=None),
         "treewy_plugin is disable"),
        (lambda raw: raw["build_config"]["plugin_config"].update(treewy_max_nodes=0),
         "treewy_max_nodes: expected"),
        (lambda raw: raw["pretrained_config"]["treewy"].update(format=0), "format 0"),
        (lambda raw: raw["pretrained_config"].update(dtype="int8"), "dtype must be one of"),
    ],
)  # fmt: skip
def test_engines_that_are_not_understood(engine, change, reason):
    edit(engine, change)
    with pytest.raises(ValueError, match=re.escape(reason)) as error:
        TrtllmEngine.read(engine)
    assert str(engine) in str(error.value)
    with pytest.raises(ValueError):
        LLM(engine)


def check(engine, *, drafts=None, device=CUDA, dtype="auto", **cache):
    speculation = drafts or MTPDecodingConfig(draft_tree_widths=(2,))
    TrtllmEngine.read(engine).check(
        dtype=dtype, speculation=speculation, cache=KvCacheConfig(**cache), device=device
    )


def test_settings(engine):
    check(engine)
    check(engine, dtype=torch.float32)
    for reason, settings in {
        "engine for a GPU, and the device is cpu": {"device": torch.device("cpu")},
        "dtype is float32 as built, got bfloat16": {"dtype": torch.bfloat16},
        "the state's type is float32": {"mamba_ssm_cache_dtype": "bfloat16"},
        "blocks of 32 tokens, got tokens_per_block=16": {"tokens_per_block": 16},
        "commits by reconstruct": {
            "drafts": MTPDecodingConfig(draft_tree_widths=(2,), state_commit="snapshot")
        },
    }.items():
        with pytest.raises(ValueError, match=re.escape(reason)):
            check(engine, **settings)
    (engine / "draft.safetensors").unlink()
    with pytest.raises(ValueError, match="draft.safetensors is missing"):
        check(engine)
    check(engine, drafts=MTPDecodingConfig(draft_tree_widths=()))  # not needed without drafts
    (engine / "rank0.engine").unlink()
    with pytest.raises(ValueError, match="rank0.engine is missing"):
        check(engine, drafts=MTPDecodingConfig(draft_tree_widths=()))


def test_ranks(engine):
    mapping = {"world_size": 2, "tp_size": 2, "pp_size": 1}
    edit(engine, lambda raw: raw["pretrained_config"].update(mapping=mapping))
    with pytest.raises(ValueError, match="an engine of 2 ranks, and the runtime runs one"):
        check(engine)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_batch_size": 6}, "build with --max_batch_size 6"),
        ({"max_seq_len": 193}, "build with --max_seq_len 193"),
        ({"max_nodes": 41}, "build with --treewy_max_nodes 41"),
    ],
)
def test_limits(built, changes, reason):
    limits = ExecutorLimits(5, 192, 40, 40, 30, 32)
    found = TrtllmEngine.read(built)
    found.check_limits(limits)
    with pytest.raises(ValueError, match=reason):
        found.check_limits(replace(limits, **changes))
    with pytest.raises(ValueError, match="build with --max_num_tokens 200"):
        replace(found, max_num_tokens=199).check_limits(limits)


def test_without_tensorrt_llm(built):
    source = executor_maker(
        TrtllmEngine.read(built),
        MTPDecodingConfig(draft_tree_widths=(2,)),
        KvCacheConfig(),
        "auto",
        CUDA,
    )
    limits = ExecutorLimits(2, 64, 3, 3, 8, 32)
    files = [built / "rank0.engine", built / "draft.safetensors"]
    assert source.weights(limits) == sum(path.stat().st_size for path in files)
    assert source.weights(replace(limits, max_nodes=1)) == files[0].stat().st_size
    assert source.steps(limits) > 512 * 32 * 4
    assert source.max_batch_size == 5
    with pytest.raises(ValueError, match="needs tensorrt_llm to run"):
        source.make(limits)


def test_llm_names_what_is_missing(built):
    with pytest.raises(ValueError, match="engine for a GPU, and the device is cpu"):
        LLM(built, device="cpu", skip_tokenizer_init=True)
    with pytest.raises(ValueError, match="got max_seq_len|was built for|at most|device is cpu"):
        LLM(built, device="cpu", skip_tokenizer_init=True, max_seq_len=5000)


@pytest.mark.parametrize("setting", [{"tensor_parallel_size": 2}, {"load_format": "dummy"}])
def test_settings_that_an_engine_does_not_have(built, setting):
    (name,) = setting
    with pytest.raises(ValueError, match=f"{name} is .* is an engine for one device"):
        LLM(built, device="cpu", skip_tokenizer_init=True, **setting)


def test_drafter_file(engine):
    config = TrtllmEngine.read(engine).config
    args = config, torch.float32, torch.device("cpu")
    module = load_drafter(engine, *args)
    assert module.mtp is not None
    assert module.model.layers[0].input_layernorm.weight.is_meta
    other = replace(config, tie_word_embeddings=True)
    with pytest.raises(ValueError, match="missing or unknown: lm_head.weight"):
        load_drafter(engine, other, *args[1:])
    with pytest.raises(ValueError, match="size mismatch"):
        load_drafter(engine, replace(config, hidden_size=64), *args[1:])
    (engine / "draft.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        load_drafter(engine, *args)


class FakeEngine:
    """An engine and context of TensorRT with these tensors; the context takes no shape."""

    def __init__(self, names, logger=None, has_context=True):
        self.names, self.num_io_tensors = names, len(names)
        self.logger, self.has_context = logger, has_context

    def get_tensor_name(self, index):
        return self.names[index]

    def create_execution_context(self):
        if not self.has_context:
            self.logger.log(self.logger.ERROR, "out of memory: 7 bytes")
        return self if self.has_context else None

    def set_input_shape(self, name, shape):
        self.logger.log(self.logger.INFO, "not a reason")
        self.logger.log(self.logger.ERROR, f"{name}: {shape} is outside of the profile")
        return False


@pytest.fixture
def load(built, monkeypatch):
    """Makes the network of an engine that TensorRT's double gives; None is refused."""
    pytest.importorskip("onnx", reason="the extra test is not installed")
    from tensorrt_double import ILogger

    found = TrtllmEngine.read(built)

    def run(make):
        class Runtime:
            def __init__(self, logger):
                self.logger = logger

            def deserialize_cuda_engine(self, data):
                engine = make(self.logger)
                if engine is None:
                    self.logger.log(self.logger.ERROR, "a plan of TensorRT 9")
                return engine

        trt = SimpleNamespace(ILogger=ILogger, Runtime=Runtime, __version__="10.14")
        monkeypatch.setattr(trtllm_network, "_load_plugins", lambda: trt)
        return TrtllmNetwork(built / "rank0.engine", found.inputs, found.outputs)

    run.names = [x.name for x in (*found.inputs, *found.outputs)]
    return run


def test_tensors_of_the_engine_are_compared(load):
    load(lambda logger: FakeEngine(load.names))
    with pytest.raises(ValueError, match="missing or unknown tensors: input_ids, odd"):
        load(lambda logger: FakeEngine([*load.names[1:], "odd"]))


def test_errors_have_tensorrts_own_reasons(load):
    with pytest.raises(ValueError, match=r"build it again \(a plan of TensorRT 9\)"):
        load(lambda logger: None)
    with pytest.raises(RuntimeError, match="no context: out of memory: 7 bytes"):
        load(lambda logger: FakeEngine(load.names, logger, has_context=False))
    network = load(lambda logger: FakeEngine(load.names, logger))
    for size in (3, 4):  # a reason is told once
        with pytest.raises(RuntimeError) as error:
            network.run({"input_ids": torch.zeros(size, dtype=torch.int32)})
        assert str(error.value) == (
            "TensorRT does not take the shape of input_ids: "
            f"input_ids: ({size},) is outside of the profile"
        )


# ---- doctor


def test_doctor_without_the_library(capsys):
    assert main(["doctor", "--trtllm"]) == 1
    assert "tensorrt_llm is not installed: pip install" in capsys.readouterr().out


@pytest.mark.parametrize("version", ["1.0.0", "1.2.0"])
def test_doctor_on_the_double(monkeypatch, capsys, version):
    """The double has every symbol of the contract, with the parameters that are passed."""
    with trtllm_double(monkeypatch, version):
        code = main(["doctor", "--trtllm"])
    out = capsys.readouterr().out
    count = len(contract.SYMBOLS)
    assert code == 0, out
    assert out.splitlines() == [
        f"tensorrt_llm {version}: a version that we know",
        f"{count} of {count} symbols are as expected",
    ]


def test_doctor_names_what_changed(monkeypatch, capsys):
    with trtllm_double(monkeypatch):
        from tensorrt_llm import layers
        from tensorrt_llm.commands import build as command

        monkeypatch.delattr(command, "parse_arguments")
        monkeypatch.setattr(layers, "RowLinear", lambda in_features, out_features: None)
        monkeypatch.setattr(layers, "AttentionMaskType", object())
        code = main(["doctor", "--trtllm"])
        out = capsys.readouterr().out
        assert main(["doctor", "--trtllm", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert code == 1
    expected = [
        "tensorrt_llm.commands.build.parse_arguments: missing",
        "tensorrt_llm.layers.AttentionMaskType.causal: missing",
        "tensorrt_llm.layers.RowLinear: takes no parameter bias, dtype, tp_group, tp_size",
    ]
    assert report["failed"] == expected
    assert [x for x in out.splitlines() if x.startswith("not as expected")] == [
        f"not as expected  {line}" for line in expected
    ]


def test_doctor_on_another_version(monkeypatch, capsys):
    with trtllm_double(monkeypatch, "1.3.0"):
        assert main(["doctor", "--trtllm"]) == 1
    assert "ended with 1.2" in capsys.readouterr().out


def test_doctor_survives_a_broken_installation(monkeypatch, tmp_path):
    (tmp_path / "tensorrt_llm").mkdir()
    (tmp_path / "tensorrt_llm" / "__init__.py").write_text("raise RuntimeError('no libcuda')")
    monkeypatch.syspath_prepend(tmp_path)
    report = doctor.check_trtllm()
    assert "no libcuda" in report["failed"][0]


# ---- the custom module


def test_custom_module():
    """As the library imports it: the folder by its name, its parent first on the path."""
    assert sorted(p.name for p in PATH.parent.iterdir() if p.name != "__pycache__") == [
        "__init__.py",
        PATH.name,
    ]
    code = (
        f"import sys; sys.path.insert(0, {str(PATH.parent)!r});"
        f"import importlib, torch; module = importlib.import_module({PATH.name!r});"
        "print([name for name in module.OPERATORS if not hasattr(torch.ops.treewy, name)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- the page


def test_page_lists_the_contract(repository):
    text = (repository / "docs" / "trtllm.md").read_text()
    rows = re.findall(r"^\| `(\S+)` \| `(\S+)` \| (.*) \| (.*) \| (.*) \|$", text, re.M)
    listed = [
        (module, name, tuple(re.findall(r"`(\w+)`", parameters)), use, read)
        for module, name, parameters, use, read in rows
    ]
    assert listed == [(x.module, x.name, x.parameters, x.use, x.read) for x in contract.SYMBOLS]
    tags = {tag for x in contract.SYMBOLS for tag in x.read.split()}
    assert tags == set(re.findall(r"^\| ([A-Z][A-Z0-9]*) \| `", text, re.M))


def test_page_lists_the_tensors(repository):
    """Names, shapes and meanings of an engine's tensors, those of layer i once."""
    text = (repository / "docs" / "trtllm.md").read_text()
    config = ModelConfig.from_dict(hf_config(vocab_size=96))
    last = config.linear_layers[-1]
    for bindings in (
        engine_inputs(config, "float16", 40, 2),
        engine_outputs(config, "float16", "float16"),
    ):
        for x in bindings:
            name = re.sub(r"_\d+$", "_{i}", x.name)
            if name == x.name or x.name.endswith(f"_{last}"):
                assert re.search(
                    rf"^\| `{re.escape(name)}` \|.*\| {re.escape(x.meaning)} \|$", text, re.M
                ), name


def test_page_says_what_it_is_not(repository):
    text = (repository / "docs" / "trtllm.md").read_text()
    assert "Not yet run against a real tensorrt_llm" in " ".join(text.split())
    assert Path(repository / "tests" / "trtllm_double" / "README.md").is_file()
