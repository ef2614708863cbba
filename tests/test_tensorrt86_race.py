"""The race of builds for TensorRT 8.6, with a builder of its own in that TensorRT's place.

What runs here: fences change no value and stand where they should, heads of a network compute what
the network does, and the race finds the engine that is wanted most and the node that fails.
"""

from __future__ import annotations

import json
import threading
import time

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import numpy as np
import onnx
import onnxruntime
import race_tensorrt86 as script
from fences_tensorrt86 import FENCED, LEVELS, fence, head
from onnx_tensorrt86 import lower, value_types
from race_tensorrt86 import VARIANTS, Bisection, Builder, Outcome, Race, Variant, reasons

from trtllm_treewy.export.onnx_export import export_onnx


@pytest.fixture(scope="module")
def draft(tmp_path_factory, shipped_model):
    """The drafter's network as that TensorRT takes it."""
    return _lowered(tmp_path_factory.mktemp("race86"), shipped_model, "draft", "float32")


def _lowered(folder, model, name, dtype="float16"):
    export_onnx(model, folder, dtype=dtype)
    return lower(onnx.load(folder / f"{name}.onnx", load_external_data=False), folder)


def _values(model, feeds):
    """Outputs by name; fences are copies."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node in copy.graph.node:
        if node.op_type == "Fence":
            node.op_type = "Identity"
            del node.attribute[:]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    # No fusion: the same operators in the same order give the same bits.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        copy.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [x.name for x in session.get_outputs()]
    given = {x.name: feeds[x.name] for x in session.get_inputs()}
    return dict(zip(names, session.run(names, given), strict=True))


@pytest.fixture(scope="module")
def feeds():
    random = np.random.default_rng(4)
    mask = np.concatenate([random.integers(0, 2, (2, 5, 6)), np.tril(np.ones((2, 5, 5)))], -1)
    return {
        "token_ids": random.integers(0, 4096, (2, 5), dtype=np.int32),
        "positions": np.tile(np.arange(5, dtype=np.int32), (2, 1)),
        "hidden_in": random.standard_normal((2, 5, 256)).astype(np.float32),
        "kv_rows": random.integers(0, 9, (2, 6), dtype=np.int32),
        "logit_index": np.int32([[0, 4], [3, 1]]),
        "mask": mask.astype(np.int32),
        "k_cache.0": random.standard_normal((2, 9, 128)).astype(np.float32),
        "v_cache.0": random.standard_normal((2, 9, 128)).astype(np.float32),
    }


@pytest.mark.parametrize("level", LEVELS)
def test_fences_change_nothing(draft, feeds, level):
    fenced = fence(draft, level)
    nodes = [node for node in fenced.graph.node if node.op_type == "Fence"]
    assert bool(nodes) == (level != "none")
    types = value_types(draft)
    for node in nodes:
        (kind,) = [x.i for x in node.attribute if x.name == "type"]
        assert kind == FENCED[types[node.input[0]]]
    wanted, got = _values(draft, feeds), _values(fenced, feeds)
    assert wanted.keys() == got.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(value, got[name])


def test_a_fence_stands_before_and_behind_every_product(tmp_path, shipped_model):
    draft = _lowered(tmp_path, shipped_model, "draft")
    types = value_types(draft)
    fenced = fence(draft, "products").graph
    weights = {x.name for x in fenced.initializer}
    makers = {name: node.op_type for node in fenced.node for name in node.output}
    readers = {}
    for node in fenced.node:
        for name in node.input:
            readers.setdefault(name, []).append(node.op_type)
    products = [node for node in fenced.node if node.op_type == "MatMul"]
    assert len(products) == sum(node.op_type == "MatMul" for node in draft.graph.node) > 10
    for node in products:
        assert readers[node.output[0]] == ["Fence"]
        for name in node.input:
            source = makers.get(name)
            # A weight is transposed when the engine is built.
            assert name in weights or source in ("Fence", "Transpose"), name
            assert types.get(name.removesuffix("/fence")) in FENCED
    kinds = {x.i for node in fenced.node for x in node.attribute if x.name == "type"}
    kinds &= set(FENCED.values())
    assert kinds == {FENCED[onnx.TensorProto.FLOAT], FENCED[onnx.TensorProto.FLOAT16]}


def test_fences_everywhere_leave_single_nodes(tmp_path, shipped_model):
    """Of the verify network: what has a type that can be copied is copied, behind plugins too."""
    model = _lowered(tmp_path, shipped_model, "verify")
    types, graph = value_types(model), fence(model, "all").graph
    outputs = {x.name for x in graph.output}
    readers = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, set()).add(node.op_type)
    fenced = {node.input[0] for node in graph.node if node.op_type == "Fence"}
    assert len(fenced) > 400
    assert not any(types[name] == onnx.TensorProto.INT64 for name in fenced)
    for name in fenced - outputs - {x.name for x in graph.input}:
        assert readers[name] == {"Fence"}, name


@pytest.mark.parametrize("count", [30, 100, 160])
def test_a_head_computes_what_the_network_does(draft, feeds, count):
    part = head(draft, count)
    assert len(part.graph.node) == count
    extended = onnx.ModelProto()
    extended.CopyFrom(draft)
    named = {x.name for x in draft.graph.output}
    extended.graph.output.extend(x for x in part.graph.output if x.name not in named)
    wanted, got = _values(extended, feeds), _values(part, feeds)
    assert len(got) > 1
    for name, value in got.items():
        np.testing.assert_array_equal(value, wanted[name])


@pytest.mark.parametrize("bad", [1, 2, 17, 99, 100])
def test_bisection_finds_the_node(bad):
    search, tried = Bisection(100), 0
    while not search.done:
        lengths = search.lengths()
        assert all(search.good < n < search.bad for n in lengths)
        tried += len(lengths)
        assert search.learn({n: n < bad for n in lengths})
    assert (search.good, search.bad) == (bad - 1, bad)
    assert tried <= 18


def test_bisection_ends_where_no_build_ends():
    search = Bisection(100)
    assert not search.learn(dict.fromkeys(search.lengths()))
    assert not search.done


class Builds:
    """Fails a network whose Softmax has no fence around it; a node makes a head fail likewise."""

    def __init__(self, folder, seconds=0.0):
        self.folder, self.seconds, self.lock, self.calls = folder, seconds, threading.Lock(), []

    def engine(self, key, variant):
        return self.folder / f"{key[0]}-{key[1]}-{variant.name}".replace(" ", "-")

    def __call__(self, key, variant, model, label, seconds):
        with self.lock:
            self.calls.append((variant.name, label))
        if seconds < self.seconds:
            return Outcome(None, seconds, "")
        time.sleep(self.seconds)
        makers = {name: node.op_type for node in model.graph.node for name in node.output}
        bad = any(
            node.op_type == "Softmax" and makers[node.input[0]] != "Fence"
            for node in model.graph.node
        )
        if not bad and label == "whole":
            self.engine(key, variant).write_bytes(b"engine")
        return Outcome(not bad, self.seconds, "3 fine\n2 Skipping tactic 0x1 due to exception X\n")


def test_the_most_wanted_variant_and_the_node_that_fails(draft, tmp_path, capsys):
    builds = Builds(tmp_path)
    variants = [x for x in VARIANTS if not x.cublas]
    race = Race({("float16", "draft"): draft}, builds, variants, 60, 3)
    race.run()
    assert race.winner(("float16", "draft")).name == "fences at steps"
    said = "\n".join(race.report())
    assert "float16 draft: fences at steps" in said
    assert "Softmax" in said.splitlines()[2]
    assert len(said.splitlines()) == 3
    builds.output = tmp_path
    (tmp_path / "float16").mkdir()
    assert script.finish(race, builds)
    assert (tmp_path / "float16/draft.engine").read_bytes() == b"engine"
    winners = json.loads((tmp_path / "winners.json").read_text())
    assert winners["float16"]["draft"]["fences"] == "steps"
    out = capsys.readouterr().out
    assert "2 Skipping tactic 0x1 due to exception X" in out
    assert "FAILED  float16 draft kept" in out


def test_what_has_no_time_is_no_failure(draft, tmp_path):
    """And a type without an engine is said to have none."""
    builds = Builds(tmp_path, seconds=30)
    builds.output = tmp_path
    race = Race({("float16", "draft"): draft}, builds, [Variant("kept")], 1, 2)
    start = time.monotonic()
    race.run()
    assert time.monotonic() - start < 10
    assert not race.bisections
    assert race.winner(("float16", "draft")) is None
    assert not script.finish(race, builds)
    assert json.loads((tmp_path / "winners.json").read_text()) == {}


def test_a_build_that_cannot_start_is_a_failure_with_its_reason(draft, tmp_path):
    builder = Builder(tmp_path / "nothing", tmp_path, {"draft": {}}, {})
    variant = Variant("free", types=False)
    outcome = builder(("float16", "draft"), variant, draft, "whole", 60)
    assert outcome.built is False
    assert any("exit status" in x for x in reasons(outcome.said))
    assert "libnvinfer" in outcome.said
    assert not list(tmp_path.rglob("*.onnx"))


def test_reasons_are_the_lines_that_give_one():
    log = (
        "4 Timing Runner: A\n4 Skipping tactic 0x00000001 due to exception X\n"
        "4 Skipping tactic 0x00000002 due to exception X\n1 10: Could not find any implementation\n"
    )
    assert reasons(log) == [
        "4 Skipping tactic # due to exception X",
        "1 10: Could not find any implementation",
    ]
