"""The check of whole models under TensorRT 8.6, with ONNX Runtime in that TensorRT's place.

What runs here: the networks as that parser takes them (functions kept), the network over bindings,
the runtime on top, forced trees, and the verdicts. TensorRT itself runs on a GPU alone:
check_tensorrt_model.py.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import check_tensorrt_model as script
import onnx
import onnxruntime
from model_check import (
    DRAFTS,
    Errors,
    Reference,
    Sizes,
    differences,
    errors_of,
    generate,
    limits_of,
    network_executor,
)
from network_tensorrt86 import TensorRT86Network
from onnx_tensorrt86 import SUPPORTED, float_types, lower, value_types

from trtllm_treewy.binding_names import bindings, networks
from trtllm_treewy.config import ModelConfig
from trtllm_treewy.export.onnx_export import ExportTypes, export_onnx
from trtllm_treewy.plugin_contract import PLUGINS
from trtllm_treewy.tokenizer import load_tokenizer

CPU = torch.device("cpu")
SIZES = Sizes(batch=3, max_seq_len=96, max_num_tokens=64, new_tokens=16)
KINDS = {
    name: ExportTypes().of(name)
    for name in ("activation", "state", "stash", "kv", "float32", "int32")
}


class Engine:
    """A double of `engine_backends.Engine86`: fills the bound outputs by ONNX Runtime."""

    def __init__(self, model):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        self._session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self._inputs = [x.name for x in self._session.get_inputs()]
        self._outputs = [x.name for x in self._session.get_outputs()]

    def names(self):
        return self._inputs + self._outputs

    def context(self):
        return self

    def run(self, tensors):
        assert tensors.keys() == set(self.names())
        for x in tensors.values():
            assert x.is_contiguous()
            assert x.data_ptr() % 64 == 0
        values = self._session.run(self._outputs, {n: tensors[n].numpy() for n in self._inputs})
        for name, value in zip(self._outputs, values, strict=True):
            tensors[name].copy_(torch.from_numpy(value))


@pytest.fixture(scope="module")
def exported(tmp_path_factory, shipped_model):
    folder = tmp_path_factory.mktemp("export86")
    export_onnx(shipped_model, folder, dtype="float32")
    names = networks(ModelConfig.from_pretrained(shipped_model))
    return folder, {n: onnx.load(folder / f"{n}.onnx", load_external_data=False) for n in names}


@pytest.fixture(scope="module")
def parts(exported, shipped_model):
    folder, models = exported
    config = ModelConfig.from_pretrained(shipped_model)
    return {
        name: TensorRT86Network(
            Engine(lower(model, folder, functions=True)), bindings(name, config), KINDS
        )
        for name, model in models.items()
    }


@pytest.fixture(scope="module")
def prompts(repository, shipped_model):
    lines = (repository / "examples/training/heldout.jsonl").read_text(encoding="utf-8")
    tokenizer = load_tokenizer(shipped_model)
    texts = [json.loads(line)["prompt"] for line in lines.splitlines()[:4]]
    return [list(tokenizer.encode(text)) for text in texts]


@pytest.fixture(scope="module")
def plain(shipped_model, prompts):
    return generate(shipped_model, prompts, SIZES, drafts="plain", dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def wanted(shipped_model, prompts, plain):
    reference = Reference(shipped_model, CPU, SIZES)
    pairs = list(zip(prompts, plain.tokens, strict=True))
    return [reference.logits(p + t) for p, t in pairs], [reference.drafter(p) for p in prompts]


def test_files_have_what_the_parser_takes_and_nothing_else(exported):
    folder, models = exported
    plugins = set(PLUGINS)
    for model in models.values():
        lowered = lower(model, folder)
        assert not lowered.functions
        assert lowered.ir_version <= 8
        assert [(x.domain, x.version) for x in lowered.opset_import] == [("", 17)]
        used = {node.op_type for node in lowered.graph.node}
        assert used <= SUPPORTED | plugins
        for node in lowered.graph.node:
            assert not node.domain
            assert node.op_type != "Shape" or not node.attribute
        types = {x.type.tensor_type.elem_type for x in lowered.graph.input}
        assert onnx.TensorProto.BOOL not in types
        assert not any(x.external_data for x in lowered.graph.initializer)
        kept = float_types(lowered)
        assert set(kept.values()) == {torch.float32}
        assert kept.keys() >= {"logits", "hidden"}


def test_types_are_those_of_onnx(exported, tmp_path):
    """Against ONNX's own inference, in float16, where they matter."""
    for model in half_networks(tmp_path, exported).values():
        inferred = onnx.shape_inference.infer_shapes(model)
        types = value_types(model)
        compared = 0
        for x in inferred.graph.value_info:
            if x.type.tensor_type.elem_type:
                assert types[x.name] == x.type.tensor_type.elem_type, x.name
                compared += 1
        assert compared > 100


def half_networks(folder, exported):
    from trtllm_treewy.export.onnx_export import make_network

    config = ModelConfig.from_pretrained(script.ROOT / "examples/treewy-tiny")
    types = ExportTypes(torch.float16)
    return {name: make_network(name, config, types) for name in exported[1]}


def test_an_operator_that_the_parser_has_not_is_refused(exported):
    folder, models = exported
    model = onnx.ModelProto()
    model.CopyFrom(models["draft"])
    model.graph.node[-1].op_type = "Gelu"
    with pytest.raises(ValueError, match="has no Gelu"):
        lower(model, folder)


def test_texts_of_the_networks_are_torchs(parts, shipped_model, prompts, plain, wanted):
    for kind in ("tree", "dynamic"):
        got = generate(
            shipped_model, prompts, SIZES, drafts=kind, dtype=torch.float32, device=CPU, parts=parts
        )
        by_torch = generate(
            shipped_model, prompts, SIZES, drafts=kind, dtype=torch.float32, device=CPU
        )
        assert got.tokens == plain.tokens
        assert got.acceptance_length == by_torch.acceptance_length > 1.2
        _, said = script.check_texts(
            kind, got, by_torch, plain, prompts, wanted[0].__getitem__, 1e-4
        )
        assert f"texts as torch's {len(prompts)}/{len(prompts)}" in said
    assert all(part.runs > 3 for part in parts.values())


def test_forced_trees(parts, shipped_model, prompts, plain, wanted):
    """Small errors over the right networks; a wrong one is seen, and judged."""
    config = ModelConfig.from_pretrained(shipped_model)

    def measure(some):
        limits = limits_of(SIZES)
        executor = network_executor(config, limits, some, torch.float32, SIZES, CPU)
        return errors_of(executor, wanted, prompts, plain.tokens, SIZES)

    good = measure(parts)
    assert max(good.worst, good.drafter, good.prefill) < 1e-4
    assert good.agree == 1
    script.check_errors("float32", good, good)
    half = Errors(mean=1e-3, worst=2e-3, largest=0.1, agree=0.99, drafter=1e-3, prefill=1e-3)
    for name, change in (("verify", _siblings), ("prefill", _forget), ("draft", _forget)):
        bad = measure({**parts, name: Changed(parts[name], change)})
        with pytest.raises(AssertionError, match="is above"):
            script.check_errors("float32", bad, good)
        with pytest.raises(AssertionError, match="is above"):
            script.check_errors("float16", bad, half)


class Changed:
    """A network with a fault."""

    def __init__(self, network, change):
        self.bind, self._run, self._change = network.bind, network.run, change

    def run(self, inputs):
        return self._run(self._change(dict(inputs)))


def _siblings(inputs):
    """Every tree taken for a chain."""
    parents = inputs["parents"]
    chain = torch.arange(-1, parents.shape[1] - 1, dtype=torch.int32)
    return {**inputs, "parents": chain.expand_as(parents).contiguous()}


def _forget(inputs):
    """Token ids one off."""
    return {**inputs, "token_ids": inputs["token_ids"].roll(1, -1)}


def test_verdicts_on_texts(prompts, plain, wanted):
    """Where a text differs, the reference must have been unsure; lengths must be alike."""
    tokens = [list(text) for text in plain.tokens]
    row = wanted[0][1][len(prompts[1]) + 4]
    tokens[1][5:] = [int(row.argsort()[-2])] * (len(tokens[1]) - 5)
    found = differences(prompts, plain.tokens, tokens, wanted[0].__getitem__)
    top = row.topk(2).values
    assert found == [{"prompt": 1, "token": 5, "gap": pytest.approx(float(top[0] - top[1]))}]
    other, gap = replace(plain, tokens=tokens), found[0]["gap"]
    args = plain, plain, prompts, wanted[0].__getitem__
    script.check_texts("plain", other, *args, gap)
    with pytest.raises(AssertionError, match="where the reference is sure"):
        script.check_texts("plain", other, *args, gap / 3)
    stats = replace(plain.stats, num_steps=10, num_accepted=10)
    fewer = replace(plain.stats, num_steps=10, num_accepted=8)
    a, b = replace(plain, stats=stats), replace(plain, stats=fewer)
    with pytest.raises(AssertionError, match=r"acceptance length 1\.800, torch 2\.000"):
        script.check_texts("tree", b, a, plain, prompts, wanted[0].__getitem__, 0.0)


def test_not_a_number_fails():
    good = Errors(mean=1e-3, worst=2e-3, largest=0.1, agree=0.99, drafter=1e-3, prefill=1e-3)
    for what in ("mean", "worst", "drafter", "prefill", "agree"):
        with pytest.raises(AssertionError):
            script.check_errors("float16", replace(good, **{what: float("nan")}), good)


def test_stages_go_on_after_a_failure(capsys):
    stages = script.Stages()
    assert stages.run("one", lambda: 1 / 0) is None
    assert stages.run("two", lambda x: (x, "fine"), 2) == 2
    assert [row["passed"] for row in stages.rows] == [False, True]
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_failed_builds_try_again_and_say_why(tmp_path, shipped_model):
    """No TensorRT here: every attempt is made in a process of its own, and reported."""
    import argparse

    given = argparse.Namespace(tensorrt86=tmp_path, level=1, limit=60)
    config = ModelConfig.from_pretrained(shipped_model)
    builds = script.Builds(given, config, tmp_path, "float16", SIZES)
    builds._build("draft")
    assert not builds.built
    assert builds.said["draft"].count("rc 1") == len(script.ATTEMPTS)
    assert "libnvinfer.so.8" in builds.said["draft"]
    job = json.loads((tmp_path / "draft.0.json").read_text())
    assert job["level"] == 1
    assert job["half"]
    assert "mask" in job["profiles"]
    assert set(DRAFTS) > set(script.KINDS)


class Backend:
    """A double of `engine_backends.TensorRT86` over the files that were exported."""

    version = "8.6.0"

    def __init__(self, folder):
        pass

    def log(self):
        return ""

    def load(self, path, *, half):
        assert not half
        model = onnx.load(path.with_suffix(".onnx"), load_external_data=False)
        return Engine(lower(model, path.parent, functions=True))


def raced_engines(folder, model, without=()):
    """A folder as race_tensorrt86.py leaves it."""
    (folder / "float32").mkdir(parents=True)
    export_onnx(model, folder / "float32", dtype="float32")
    built = [p for p in (folder / "float32").glob("*.onnx") if p.stem not in without]
    for path in built:
        path.with_suffix(".engine").write_text("an engine")
    winners = {"float32": {p.stem: {"name": "fences at steps"} for p in built}}
    (folder / "winners.json").write_text(json.dumps(winners))
    return folder


@pytest.mark.parametrize("raced", [False, True], ids=["builds", "of a race"])
@pytest.mark.parametrize("broken", [False, True], ids=["good", "without a drafter"])
def test_the_whole_script(tmp_path, shipped_model, repository, monkeypatch, capsys, broken, raced):
    """All stages in order, the report, and the exit status; without a GPU and TensorRT."""
    import argparse

    import engine_backends

    class Left(Exception):
        pass

    def leave(status):
        raise Left(status)

    def build(self, name):
        assert (self.folder / f"{name}.86.onnx").is_file()
        assert (self.folder / f"{name}.types.json").is_file()
        if not (broken and name == "draft"):
            (self.folder / f"{name}.engine").write_text("an engine")
            self.built.add(name)
        self.said[name] = "by a double"

    given = argparse.Namespace(
        tensorrt86=tmp_path, model=shipped_model, prompts=3, tokens=8, types="float32",
        texts=repository / "examples/training/heldout.jsonl", json=tmp_path / "report.json",
        level=1, limit=10, engines=None,
    )  # fmt: skip
    if raced:
        without = ("draft",) if broken else ()
        given.engines = raced_engines(tmp_path / "engines", shipped_model, without)
    monkeypatch.setattr(script, "arguments", lambda: given)
    monkeypatch.setattr(script, "DEVICE", CPU)
    monkeypatch.setattr(script, "Sizes", lambda new_tokens: replace(SIZES, new_tokens=new_tokens))
    monkeypatch.setattr(script.Builds, "_build", build)
    monkeypatch.setattr(script.cuda_library, "find_library", lambda: tmp_path)
    monkeypatch.setattr(script.os, "_exit", leave)
    monkeypatch.setattr(engine_backends, "TensorRT86", Backend)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a double")
    with pytest.raises(Left) as left:
        script.main()
    assert ("variant 'fences at steps'" in capsys.readouterr().out) == raced
    report = json.loads(given.json.read_text())
    failed = [row["check"] for row in report["stages"] if not row["passed"]]
    if broken:
        assert left.value.args == (1,)
        assert failed == ["float32: engines built"]
        return
    assert left.value.args == (0,), report
    assert not failed
    found = report["results"]["float32"]
    assert found["acceptance_length"] == found["torch_acceptance_length"]
    assert found["errors"]["worst"] < 1e-4
