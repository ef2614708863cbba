"""The model repository and what the Triton model is made of, without a server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import types
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("prometheus_client", reason="the extra triton is not installed")
pytest.importorskip("yaml", reason="the extra test is not installed")

import yaml
from serving import until

from trtllm_treewy.cli import arguments, main
from trtllm_treewy.outputs import AcceptanceStats, CompletionOutput, RequestOutput
from trtllm_treewy.runtime.metrics import Metrics
from trtllm_treewy.runtime.triton import repository as writing
from trtllm_treewy.runtime.triton.answers import Answer
from trtllm_treewy.runtime.triton.front import Front
from trtllm_treewy.runtime.triton.interpreter import candidates, find_interpreter
from trtllm_treewy.runtime.triton.metrics import MetricsMirror
from trtllm_treewy.runtime.triton.model import TritonPythonModel, TritonResponder, _check_arrays
from trtllm_treewy.runtime.triton.places import device_of
from trtllm_treewy.runtime.triton.requests import check_parameters, parse
from trtllm_treewy.runtime.triton.settings import parameters_of, read_parameters
from trtllm_treewy.runtime.triton.tensors import INPUT, OUTPUT
from trtllm_treewy.runtime.triton.watch import Watch
from trtllm_treewy.sampling_params import SamplingParams
from trtllm_treewy.serve.errors import ApiError


@pytest.fixture
def write(shipped_model, tmp_path):
    """Runs triton-repo; the exit code."""

    def run(*flags, model=shipped_model):
        return main(["triton-repo", str(model), "--output", str(tmp_path / "models"), *flags])

    return run


def read(tmp_path, name="treewy-tiny"):
    return (tmp_path / "models" / name / "config.pbtxt").read_text()


def everything_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_what_is_written(write, tmp_path, shipped_model, capsys):
    assert write("--dtype", "float32") == 0
    assert f"[wrote {tmp_path}/models/treewy-tiny; serve it with" in capsys.readouterr().err
    folder = tmp_path / "models" / "treewy-tiny"
    files = [f"1/checkpoint/{file.name}" for file in shipped_model.iterdir()]
    assert everything_below(folder) == sorted(
        ["1", "1/checkpoint", "1/model.py", "config.pbtxt", *files]
    )
    for file in shipped_model.iterdir():
        assert (folder / "1" / "checkpoint" / file.name).read_bytes() == file.read_bytes()
    assert os.listdir(tmp_path / "models") == ["treewy-tiny"]


def test_no_path_of_this_machine_is_in_it(write, tmp_path, repository):
    assert write("--draft-tree-widths", "2,2") == 0
    places = [str(tmp_path), str(repository), sys.prefix, os.path.expanduser("~")]
    for file in (tmp_path / "models").rglob("*"):
        if file.is_file() and "checkpoint" not in file.parts:
            assert not any(place in file.read_text() for place in places if len(place) > 1), file
        assert not file.is_symlink()


def test_links_and_what_nobody_reads(shipped_model, tmp_path, write):
    """As a cache of Hugging Face's hub has it: links to files elsewhere, and other formats."""
    model = tmp_path / "linked"
    model.mkdir()
    for file in shipped_model.iterdir():
        (model / file.name).symlink_to(file)
    for name in ("pytorch_model.bin", "modeling.py", ".gitattributes"):
        (model / name).write_text("not read")
    (model / ".cache").mkdir()
    (model / ".cache" / "x.json").write_text("{}")
    assert write("--quiet", model=model) == 0
    copied = tmp_path / "models" / "linked" / "1" / "checkpoint"
    assert sorted(x.name for x in copied.iterdir()) == sorted(
        x.name for x in shipped_model.iterdir()
    )
    assert not any(x.is_symlink() for x in copied.iterdir())


def test_random_weights_need_no_weights(write, tmp_path, shipped_model):
    """A model that is only measured is not copied with what nobody reads of it."""
    assert write("--load-format", "dummy", "--quiet") == 0
    copied = tmp_path / "models" / "treewy-tiny" / "1" / "checkpoint"
    missing = {x.name for x in shipped_model.iterdir()} - {x.name for x in copied.iterdir()}
    assert missing == {"model.safetensors"}


@pytest.mark.parametrize(
    ("flags", "group"),
    [
        (["--tp", "2"], "{ count: 1 kind: KIND_MODEL }"),
        (["--tp", "2", "--cpu", "--replicas", "2"], "{ count: 2 kind: KIND_CPU }"),
        (["--tp", "2", "--gpus", "0,2,4,5", "--replicas", "3"], "{ count: 6 kind: KIND_MODEL }"),
        ([], "{ count: 1 }"),
        (["--replicas", "2"], "{ count: 2 }"),
        (["--cpu"], "{ count: 1 kind: KIND_CPU }"),
        (["--gpus", "0,2", "--replicas", "3"], "{ count: 3 kind: KIND_GPU gpus: [ 0, 2 ] }"),
    ],
)
def test_instance_groups(flags, group, write, tmp_path):
    assert write("--model-path", "/models/weights", "--quiet", *flags) == 0
    assert f"instance_group [ {group} ]\n" in read(tmp_path)


def test_a_model_that_stays_where_it_is(write, tmp_path):
    assert write("--model-path", "/weights/tiny", "--name", "far", "--quiet") == 0
    assert 'key: "model" value { string_value: "/weights/tiny" }' in read(tmp_path, "far")
    assert everything_below(tmp_path / "models" / "far") == ["1", "1/model.py", "config.pbtxt"]


def test_a_model_of_that_name_is_replaced_only_by_force(write, tmp_path, capsys):
    assert write("--quiet") == 0
    (tmp_path / "models" / "treewy-tiny" / "mine").write_text("kept")
    assert write("--quiet") == 2
    assert "treewy-tiny exists; --force replaces it" in capsys.readouterr().err
    assert (tmp_path / "models" / "treewy-tiny" / "mine").exists()
    assert write("--quiet", "--force", "--replicas", "2") == 0
    assert "count: 2" in read(tmp_path)
    assert os.listdir(tmp_path / "models") == ["treewy-tiny"]
    assert not (tmp_path / "models" / "treewy-tiny" / "mine").exists()


REFUSED = [
    (["--name", "a/b"], "'a/b' cannot be the name of a Triton model"),
    (["--name", ".a"], "cannot be the name"),
    (["--name", ""], "'' cannot be the name"),
    (["--dtype", "int8"], "invalid choice: 'int8'"),
    (["--gpus", "-1"], "--gpus has -1"),
    (["--gpus", "0", "--cpu"], "not allowed with argument"),
    (["--replicas", "0"], "expected an integer >= 1"),
    (["--draft-tree-widths", "9,9,9"], "820 nodes"),
    (["--no-speculation", "--max-draft-len", "2"], "not allowed with argument"),
    (["--tp", "2", "--gpus", "0,1,2"], "--gpus names 3 GPUs, expected a multiple of --tensor-p"),
    (["--tp", "2", "--gpus", "1,1"], "--gpus has a GPU twice: 1,1"),
    (["--tp", "5"], "tensor parallel size 5 does not divide"),
    (["--python-executable", "/usr/bin/python3"], "--python-executable needs --tensor-parallel-si"),
    (["--request-timeout", "0"], "expected an integer >= 1"),
    (["--device", "cpu"], "unrecognized arguments: --device"),
    (["--cuda-graph-batch-sizes", "0"], "each of --cuda-graph-batch-sizes must be an integer >= 1"),
    (["--shutdown-timeout", "3"], "unrecognized arguments: --shutdown-timeout"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_what_is_refused_leaves_nothing_behind(flags, message, write, tmp_path, capsys):
    try:
        code = write(*flags)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "models").exists()


def test_models_that_are_none(write, tmp_path, capsys):
    assert write(model=tmp_path / "nothing") == 2
    assert "does not exist" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert write(model=tmp_path / "empty") == 2
    assert "config.json" in capsys.readouterr().err
    assert not (tmp_path / "models").exists()


def test_a_failure_while_copying_leaves_nothing_behind(write, tmp_path, monkeypatch, capsys):
    copies = []

    def copyfile(source, target):
        copies.append(source)
        if len(copies) == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing.shutil, "copyfile", copyfile)
    assert write() == 2
    assert "No space left on device" in capsys.readouterr().err
    assert not (tmp_path / "models").exists()


def test_a_disk_that_is_too_small_is_known_before_copying(write, tmp_path, monkeypatch, capsys):
    usage = types.SimpleNamespace(free=1000)
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda _: usage)
    assert write() == 2
    assert "has 1000 bytes left and the model takes" in capsys.readouterr().err
    assert not (tmp_path / "models").exists()


def test_an_interrupted_replacement_keeps_the_old_model(write, tmp_path, monkeypatch):
    assert write("--quiet") == 0
    rename = writing.Path.rename

    def interrupted(path, target):
        if ".building-" in path.name and not path.name.endswith("-old"):
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(writing.Path, "rename", interrupted)
    assert write("--quiet", "--force", "--replicas", "2") == 130
    assert "count: 1" in read(tmp_path)
    assert os.listdir(tmp_path / "models") == ["treewy-tiny"]


def test_an_engine_that_is_not_whole(shipped_model, tmp_path, write, capsys):
    pytest.importorskip("onnx", reason="the extra test is not installed")
    engine = tmp_path / "engine"
    flags = ["--backend", "onnx", "--dtype", "float32", "--max-nodes", "4", "--quiet"]
    assert main(["build", str(shipped_model), "--output", str(engine), *flags]) == 0
    assert write("--cpu", "--max-draft-len", "2", model=engine) == 0
    copied = tmp_path / "models" / "engine" / "1" / "checkpoint"
    assert everything_below(copied) == [
        x for x in everything_below(engine) if not x.startswith(".")
    ]
    for flags in (["--tp", "2"], ["--load-format", "dummy"]):
        assert write("--cpu", "--force", *flags, model=engine) == 2
        assert "is an engine for one device, with its weights in it" in capsys.readouterr().err
    next(engine.glob("*.onnx")).unlink()
    capsys.readouterr()
    assert write("--cpu", "--force", model=engine) == 2
    assert "is missing: build the engine again" in capsys.readouterr().err


# --- parameters ---


def test_help_says_every_default(capsys):
    (commands,) = arguments._parser()._subparsers._group_actions
    for action in commands.choices["triton-repo"]._actions:
        assert action.help, action
        assert not action.option_strings or action.dest == "help" or "(default: " in action.help


SETTINGS = [
    [],
    ["--dtype", "float32", "--max-batch-size", "3", "--max-queue", "9"],
    ["--max-batch-size", "auto"],
    ["--block-reuse", "--state-dtype", "bfloat16", "--max-seq-len", "99"],
    ["--draft-tree-widths", "2,3", "--state-commit", "deferred"],
    ["--draft-tree-parents", "-1,0,0,1", "--stash", "inputs"],
    ["--dynamic-tree", "12", "--dynamic-tree-top-k", "3", "--tree-policy", "auto"],
    ["--tensor-parallel-size", "2", "--gpus", "1,3", "--python-executable", "/opt/p/bin/python3"],
    ["--request-timeout", "90"],
    ["--free-gpu-memory-fraction", "0.45", "--memory", "60000000000"],
    ["--no-cuda-graphs", "--load-format", "dummy"],
    ["--batch-wait-iters", "4", "--batch-wait-max-tokens-ratio", "0.125"],
    ["--cuda-graph-batch-sizes", "1,4", "--no-cuda-graph-padding"],
    ["--cuda-graph-max-batch-size", "2"],
    ["--no-speculation", "--no-exclude-input-in-output", "--max-prompt-tokens", "7"],
]


@pytest.mark.parametrize("flags", SETTINGS)
def test_parameters_say_what_the_flags_said(flags):
    args = arguments.parse(["triton-repo", "m", "--output", "o", *flags])
    parameters = parameters_of(args)
    as_triton = {name: {"string_value": value} for name, value in parameters.items()}
    found = vars(read_parameters(as_triton))
    for name in found.keys() - {"usage_error", "quiet"}:
        assert found[name] == getattr(args, name), name
    assert len(parameters) == 1 + len([x for x in flags if x.startswith("--")])


BAD_PARAMETERS = [
    ({"dtype": "int8"}, "parameter dtype: invalid choice: 'int8'"),
    (
        {"batch_wait_max_tokens_ratio": "-1"},
        "parameter batch_wait_max_tokens_ratio: expected a number from 0 to 1, got '-1'",
    ),
    (
        {"max_batch_size": "0"},
        "parameter max_batch_size: expected an integer >= 1 or auto, got '0'",
    ),
    ({"draft_tree_width": "2"}, "draft_tree_width; did you mean draft_tree_widths"),
    ({"block_reuse": "perhaps"}, "parameter block_reuse must be true or false, got 'perhaps'"),
    (
        {"stash": "inputs", "state_commit": "deferred"},
        "parameter stash inputs: needs state_commit reconstruct",
    ),
    ({"no_speculation": "true", "max_draft_len": "2"}, "not allowed with parameter max_draft_len"),
    ({"draft_tree_widths": "2", "dynamic_tree": "4"}, "not allowed with parameter draft_tree_wid"),
    (
        {"no_cuda_graphs": "true", "cuda_graph_batch_sizes": "2"},
        "parameter no_cuda_graphs: not allowed with parameter cuda_graph_batch_sizes",
    ),
    ({"gpus": "0,1"}, "parameter gpus needs tensor_parallel_size above 1"),
    ({"tensor_parallel_size": "2", "gpus": "0,1,2"}, "gpus names 3 GPUs, expected a multiple"),
    ({"load_format": "random"}, "parameter load_format: invalid choice: 'random'"),
    ({"model": ""}, "required: model"),
]


@pytest.mark.parametrize(("parameters", "message"), BAD_PARAMETERS)
def test_bad_parameters_are_refused_in_their_own_words(parameters, message):
    given = {name: {"string_value": x} for name, x in ({"model": "m"} | parameters).items()}
    with pytest.raises(ValueError) as error:
        read_parameters(given)
    assert message in str(error.value)


def test_parameters_of_triton_and_empty_ones_are_passed_over():
    given = {"model": "m", "FORCE_CPU_ONLY_INPUT_TENSORS": "no", "dtype": "", "block_reuse": "true"}
    args = read_parameters({name: {"string_value": x} for name, x in given.items()})
    assert (args.dtype, args.block_reuse) == ("auto", True)
    assert read_parameters({"model": {"string_value": "m"}, "no_speculation": "false"}).model == "m"


# --- requests and answers ---


def request(**raw):
    return parse({"text_input": "a", **raw}, model="m", exclude_input=True)


def test_a_float_is_the_decimal_that_was_written():
    value = INPUT["temperature"].read(np.array([[0.7]], np.float32))
    assert value == 0.7
    assert request(temperature=value).generation.sampling_params(9)[0].temperature == 0.7


def test_settings_reach_the_sampling_params():
    raw = {"max_tokens": 5, "top_k": 3, "top_p": 0.5, "min_p": 0.25, "random_seed": 2**64 - 1}
    raw |= {"stop_words": ["", "b"], "end_id": 4, "min_tokens": 2, "ignore_eos": False}
    raw |= {"repetition_penalty": 1.5, "presence_penalty": -0.5, "frequency_penalty": 0.25}
    raw |= {"return_log_probs": True, "pad_id": 3, "beam_width": 1, "temperature": 2.5}
    (params,) = request(**raw, priority=3, speculation=False).generation.sampling_params(9)
    assert params == SamplingParams(
        max_tokens=5,
        top_k=3,
        top_p=0.5,
        min_p=0.25,
        seed=2**64 - 1,
        stop=["b"],
        end_id=4,
        min_tokens=2,
        ignore_eos=False,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logprobs=0,
        temperature=2.5,
    )
    own = request(priority=3, speculation=False).generation.request_settings
    assert own == {"priority": 3, "speculation": False}
    assert request(speculation=True).generation.request_settings == {}


def test_parameters_that_nobody_reads_are_refused():
    check_parameters(["id", "priority", "timeout", "triton_enable_empty_final_response"])
    with pytest.raises(ApiError, match="unknown input 'maxtokens'; did you mean 'max_tokens'"):
        check_parameters(["maxtokens"])


def output(text, diff, tokens, finished=False, stats=None):
    completion = CompletionOutput(
        text=text,
        text_diff=diff,
        token_ids=tokens,
        finish_reason="stop" if finished else None,
        stop_reason=7 if finished else None,
    )
    return RequestOutput(0, "a", [1, 2], [completion], finished=finished, speculation=stats)


def test_an_output_without_text_waits_for_the_next():
    """Half a character is nothing to show; its tokens are counted with the rest of it."""
    answer = Answer(request(stream=True, return_num_output_tokens=True))
    assert answer.values(output("", "", [5])) is None
    values = answer.values(output("é", "é", [5, 6]))
    assert values == {"text_output": "é", "num_output_tokens": 2}
    stats = AcceptanceStats(num_steps=2, num_drafted=6, num_accepted=1, accepted_per_depth=[1])
    values = answer.values(output("é", "", [5, 6, 7], finished=True, stats=stats))
    assert (values["finish_reason"], values["stop_reason"]) == ("stop", "7")
    assert (values["num_output_tokens"], values["acceptance_length"]) == (1, 1.5)
    assert set(values) <= set(OUTPUT)


def test_tensors_have_the_batch_in_front():
    shapes = {"text_output": ("é", (1, 1)), "output_log_probs": ([[-1.0, -2.0]], (1, 1, 2))}
    shapes |= {"cum_log_probs": ([-3.0], (1, 1)), "accepted_per_depth": ([], (1, 0))}
    shapes |= {"acceptance_length": (2.5, (1, 1)), "num_output_tokens": (3, (1, 1))}
    for name, (value, shape) in shapes.items():
        array = OUTPUT[name].write(value)
        assert array.shape == shape
        assert len(array.shape) == 1 + len(OUTPUT[name].dims)
    assert OUTPUT["text_output"].write("é").item() == "é".encode()


# --- the parts that talk to Triton ---


class FakeSender:
    """Triton's, which must not be asked once the last response is sent."""

    def __init__(self):
        self.ended = False

    def send(self, response, flags):
        assert not self.ended
        self.ended = flags == 1

    def is_cancelled(self):
        assert not self.ended, "this crashes a real server"
        return False


def test_a_sender_is_not_asked_after_its_last_response():
    utils = types.SimpleNamespace(
        Tensor=lambda *_: None,
        InferenceResponse=lambda **_: None,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
    )
    responder = TritonResponder(utils, FakeSender())
    responder.send({"text_output": "a"}, final=False)
    assert not responder.cancelled()
    responder.send({"text_output": "b"}, final=True)
    assert not responder.cancelled()


def test_an_error_in_one_request_is_its_own():
    class Request:
        def __init__(self, parameters):
            self.parameters, self.told = lambda: parameters, []

        def get_response_sender(self):
            return types.SimpleNamespace(send=lambda response, flags: self.told.append(response))

        def inputs(self):
            tensor = np.array([[b"x"]], dtype=np.object_)
            return [types.SimpleNamespace(name=lambda: "text_input", as_numpy=lambda: tensor)]

    class Error(Exception):
        INTERNAL = "INTERNAL"

        def __init__(self, message, code):
            super().__init__(code, message)

    model, begun = TritonPythonModel(), []
    model._model, model._exclude_input = "m", True
    model._front = types.SimpleNamespace(start=lambda parsed, _: begun.append(parsed))
    model._utils = types.SimpleNamespace(
        InferenceResponse=lambda output_tensors, error: error,
        TritonError=Error,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
    )
    requests = [Request("{}"), Request("no JSON"), Request("{}")]
    model.execute(requests)
    assert len(begun) == 2
    (error,) = requests[1].told
    assert error.args[0] == "INTERNAL"
    assert "internal error: JSONDecodeError" in error.args[1]


PLACES = [
    ("GPU", 1, None, "m_0_0", "cuda:5"),
    ("CPU", 1, None, "m_0_0", "cpu"),
    ("CPU", 2, None, "m_0_3", "cpu"),
    ("MODEL", 2, None, "m_0_0", None),
    ("MODEL", 2, (0, 2, 4, 7), "m_0_0", "cuda:0,cuda:2"),
    ("MODEL", 2, (0, 2, 4, 7), "m_0_1", "cuda:4,cuda:7"),
    ("MODEL", 2, (0, 2, 4, 7), "m_0_2", "cuda:0,cuda:2"),
    ("MODEL", 4, (0, 2, 4, 7), "m", "cuda:0,cuda:2,cuda:4,cuda:7"),
]


def place(kind, ranks, gpus, name):
    args = {"model_instance_kind": kind, "model_instance_device_id": "5"}
    args["model_instance_name"] = name
    return device_of(args, types.SimpleNamespace(tensor_parallel_size=ranks, gpus=gpus))


@pytest.mark.parametrize(("kind", "ranks", "gpus", "name", "device"), PLACES)
def test_an_instance_runs_where_its_group_says(kind, ranks, gpus, name, device):
    assert place(kind, ranks, gpus, name) == device


def test_places_that_contradict_one_another():
    with pytest.raises(ValueError, match="tensor_parallel_size 2 needs instances of KIND_MODEL"):
        place("GPU", 2, None, "m_0_0")
    with pytest.raises(ValueError, match="gpus names GPUs, and the instance group is of KIND_CPU"):
        place("CPU", 2, (0, 1), "m_0_0")


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_the_interpreter_of_the_ranks(tmp_path, monkeypatch):
    """In a stub `sys.executable` is not to be relied on: it is tried before it is used."""
    assert find_interpreter(sys.executable) == sys.executable
    for name in ("executable", "_base_executable"):
        monkeypatch.setattr(sys, name, "/opt/backends/python/triton_python_backend_stub")
    assert all("_stub" not in found for found in candidates())
    found = find_interpreter()
    assert os.path.dirname(found) in {
        os.path.join(x, "bin") for x in (sys.prefix, sys.exec_prefix, sys.base_prefix)
    }
    # The first in PATH, of another version: the next one is taken.
    other = script(tmp_path / "python3", "echo cpython 3 6 with torch")
    monkeypatch.setattr(sys, "executable", other)
    assert next(candidates()) == other
    assert find_interpreter() == found


def test_no_interpreter_for_the_ranks(tmp_path, monkeypatch):
    bad = script(tmp_path / "bad", "echo ModuleNotFoundError: no trtllm_treewy >&2; exit 1")
    for given, why in (
        (str(tmp_path / "none"), "No such file or directory"),
        (str(tmp_path), "Permission denied"),
        (bad, "it does not import trtllm_treewy: ModuleNotFoundError: no trtllm_treewy"),
        (script(tmp_path / "old", "echo cpython 3 6 with torch"), "it says 'cpython 3 6 with to"),
    ):
        with pytest.raises(ValueError) as error:
            find_interpreter(given)
        assert str(error.value).startswith(f"parameter python_executable: {given!r} cannot run")
        assert why in str(error.value)
    monkeypatch.setattr(sys, "executable", "")
    monkeypatch.setattr(sys, "_base_executable", None)
    for name in ("prefix", "exec_prefix", "base_prefix", "base_exec_prefix"):
        monkeypatch.setattr(sys, name, str(tmp_path))
    with pytest.raises(ValueError, match=r"the parameter python_executable \(tried none\)"):
        find_interpreter()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(bad)
    with pytest.raises(ValueError, match="tried .*/bin/python3: it does not import trtllm_treewy"):
        find_interpreter()


@pytest.mark.parametrize("strides", [(4,), (0,)])
def test_a_backend_that_reads_arrays_wrongly_is_refused(strides):
    """What a backend for numpy 1 makes of numpy 2: the first value again and again."""

    class Tensor:
        @staticmethod
        def from_dlpack(_, tensor):
            array = np.lib.stride_tricks.as_strided(tensor.numpy(), strides=strides)
            return types.SimpleNamespace(as_numpy=lambda: array)

    utils = types.SimpleNamespace(Tensor=Tensor)
    if strides == (4,):
        _check_arrays(utils)
        return
    with pytest.raises(RuntimeError, match=f"does not work with numpy {np.__version__}"):
        _check_arrays(utils)


class FakeFamily:
    COUNTER, GAUGE = "counter", "gauge"
    made: dict = {}

    def __init__(self, name, description, kind):
        self.kind, self.metrics = kind, {}
        assert name not in FakeFamily.made
        FakeFamily.made[name] = self

    def Metric(self, labels):
        metric = types.SimpleNamespace(value=0.0, labels=labels)

        def increment(by):
            assert self.kind == "counter"
            assert by >= 0
            metric.value += by

        def put(value):
            assert self.kind == "gauge"
            metric.value = value

        metric.increment, metric.set = increment, put
        key = tuple(sorted(labels.items()))
        assert key not in self.metrics
        self.metrics[key] = metric
        return metric


def test_the_mirror_shows_what_the_metrics_say():
    """Every sample of the page of our own server, with the labels of the model."""
    from prometheus_client.parser import text_string_to_metric_families

    FakeFamily.made = {}
    metrics = Metrics()
    engine = types.SimpleNamespace(num_running=2, num_waiting=0, alive=True, engine=None)
    metrics.watch(engine)
    mirror = MetricsMirror(metrics, FakeFamily, {"model": "m"})
    mirror.update()
    for number in range(5):
        metrics.stepped(0.02 * number, failed=number == 3)
        metrics.refused("queue_full")
        engine.num_running = number
        mirror.update()
    mirror.update()
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                labels = tuple(sorted({**sample.labels, "model": "m"}.items()))
                assert FakeFamily.made[sample.name].metrics[labels].value == sample.value
    assert FakeFamily.made["treewy_requests_running"].kind == "gauge"
    mirror.close()


class Stumbling:
    """Front and mirror of a watch; what is named in `fails` raises at its first calls."""

    def __init__(self, *fails):
        self.left = dict.fromkeys(fails, 2)
        self.calls = {name: 0 for name in ("end_cancelled", "update", "failure", "fail", "told")}

    def _call(self, name):
        self.calls[name] += 1
        if self.left.get(name):
            self.left[name] -= 1
            raise RuntimeError(f"{name} stumbled")

    def end_cancelled(self):
        self._call("end_cancelled")

    def update(self):
        self._call("update")

    @property
    def failure(self):
        self._call("failure")
        return "dead" if self.calls["end_cancelled"] > 6 else None

    def fail(self, reason):
        assert reason == "dead"
        self._call("fail")


@pytest.mark.parametrize("fails", ["end_cancelled", "update", "failure", "fail", "told"])
def test_a_watch_goes_on_after_an_error_and_tells_it_once(fails, monkeypatch):
    monkeypatch.setattr("trtllm_treewy.runtime.triton.watch.POLL_SECONDS", 0.001)
    monkeypatch.setattr("trtllm_treewy.runtime.triton.watch.METRICS_SECONDS", 0.0)
    parts = Stumbling(fails, *(["update"] if fails == "told" else []))
    told = []

    def tell(reason):
        told.append(reason)
        parts._call("told")

    watch = Watch(parts, parts, parts.fail, tell)
    try:
        until(lambda: all(parts.calls[name] > 9 for name in ("end_cancelled", "update", "failure")))
        assert parts.calls["fail"] == (3 if fails == "fail" else 1)
    finally:
        watch.close()
    (reason,) = told
    said = "update" if fails == "told" else fails
    assert reason.endswith(f" goes on after RuntimeError: {said} stumbled")


def test_a_request_of_which_triton_cannot_tell_does_not_hide_the_others():
    front, ended = Front.__new__(Front), []

    class Task:
        def __init__(self, name):
            self.cancel = lambda: ended.append(name)

    def responder(answer):
        def cancelled():
            if answer is None:
                raise RuntimeError("no sender")
            return answer

        return types.SimpleNamespace(cancelled=cancelled)

    front._loop = types.SimpleNamespace(call_soon_threadsafe=lambda cancel: cancel())
    front._running = {
        Task(name): responder(answer)
        for name, answer in (("first", True), ("bad", None), ("other", False), ("last", True))
    }
    with pytest.raises(RuntimeError, match="no sender"):
        front.end_cancelled()
    assert ended == ["first", "last"]


STUB = """
import ctypes, mmap, os, sys
from trtllm_treewy.runtime.triton.guard import end_with_server
region = os.open("/dev/shm/" + sys.argv[1], os.O_RDWR | os.O_CREAT)
os.truncate(region, 4096)
mapped = mmap.mmap(region, 4096)
end_with_server()
os.write(1, b"guarded")
os.close(1)
ctypes.PyDLL(None).sleep(600)  # keeps the lock of Python, as a wait for Triton may
"""
SERVER = """
import os, subprocess, sys, time
stub, region, server = sys.argv[1:]
# The region and the server's process stand where they do in a stub's arguments.
command = [sys.executable, "-", region, "1", "1", server or str(os.getpid())]
process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
process.stdin.write(stub.encode())
process.stdin.close()
said = process.stdout.read()  # to its end: the guard closes what is not its own
print(process.pid, said.decode(), flush=True)
time.sleep(600)
"""


@contextmanager
def guarded(server=""):
    """A server's process, its child's, which can run no Python, and the memory that they share.

    The child is told that `server` has started it.
    """
    region = Path("/dev/shm", f"treewy_test_{os.getpid()}_guarded")
    command = [sys.executable, "-c", SERVER, STUB, region.name, server]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        child, *said = server.stdout.readline().split()
        try:
            yield server, int(child), said, region
        finally:
            for process in (server.pid, int(child)):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            region.unlink(missing_ok=True)


def test_the_process_of_a_model_ends_with_its_server():
    """One that was killed leaves it behind otherwise, with the memory of the GPU."""
    with guarded() as (server, child, said, region):
        (guard,) = _children(child)
        assert said == ["guarded"]
        time.sleep(0.5)
        assert _runs(child)
        assert region.exists()
        os.kill(guard, signal.SIGTERM)  # as a whole session gets it
        server.send_signal(signal.SIGKILL)
        server.wait()
        until(lambda: not _runs(child) and not _runs(guard) and not region.exists(), 10)


def test_the_guard_of_a_process_ends_with_it():
    with guarded() as (server, child, _, region):
        (guard,) = _children(child)
        os.kill(child, signal.SIGKILL)
        until(lambda: not _runs(guard), 10)
        assert server.poll() is None
        assert region.exists()  # the server's to remove


ENDING = """
import os, time
from trtllm_treewy.runtime.triton.guard import end_with_server
end_with_server()
if os.fork() == 0:
    raise SystemExit  # that is not the end of who has the guard
os.wait()
assert os.waitpid(-1, os.WNOHANG) == (0, 0)  # the guard runs
"""
FIRST = """
import ctypes, os, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # gets the children of the dead, as process 1 does
assert subprocess.run([sys.executable, "-c", sys.argv[1]]).returncode == 0
time.sleep(0.5)
try:
    print(os.waitpid(-1, 0))
except ChildProcessError:
    print("nothing")
"""


def test_a_process_that_ends_by_itself_leaves_nothing_for_its_server_to_wait_for():
    """A server that is the first process of a container does not, and its table would fill."""
    command = [sys.executable, "-c", FIRST, ENDING]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.stdout.strip() == "nothing", ended.stderr


def test_a_process_of_a_model_whose_server_has_gone_already_ends_at_once():
    """Its parent is another then."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    time.sleep(0.5)  # nobody waits for it: its number is its own
    with guarded(str(gone.pid)) as (_, child, said, region):
        until(lambda: not _runs(child), 10)
        assert said == []
        assert not region.exists()
    gone.wait()


def test_a_process_of_a_model_may_have_one_between_it_and_the_server():
    with guarded(str(os.getpid())) as (between, child, said, _):
        assert said == ["guarded"]
        time.sleep(0.5)
        assert _runs(child)
        between.kill()
        between.wait()
        until(lambda: not _runs(child), 10)


def _children(pid):
    """Those that run, of a process or of none that is there any more."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            found += [int(stat.parent.name)] * (int(parent) == pid and state != "Z")
    return found


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- Kubernetes ---


def test_the_manifests_agree(repository):
    """The flags are those of the smoke run, which a real server takes in test_triton.py."""
    folder = repository / "examples" / "kubernetes"
    smoke = yaml.safe_load((folder / "smoke.yaml").read_text())
    values = yaml.safe_load((folder / "values.yaml").read_text())
    deployment, service, scaler = yaml.safe_load_all((folder / "triton.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (tried,) = smoke["spec"]["containers"]

    def names(flags):
        return [flag.partition("=")[0] for flag in flags]

    assert names(container["args"]) == names(tried["args"])
    assert values["serverArgs"] == container["args"]
    name = container["args"][2].removeprefix("--load-model=")
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] == f"/v2/models/{name}/ready"
    ports = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} == ports
    seconds = int(container["args"][3].removeprefix("--exit-timeout-secs="))
    assert pod["terminationGracePeriodSeconds"] > seconds
    for one in (container, tried):
        mounted = {mount["name"] for mount in one["volumeMounts"]}
        volumes = (pod if one is container else smoke["spec"])["volumes"]
        assert mounted == {volume["name"] for volume in volumes}
    metric = scaler["spec"]["metrics"][0]["pods"]["metric"]["name"]
    metrics = Metrics()
    metrics.watch(types.SimpleNamespace(num_running=0, num_waiting=0, alive=True, engine=None))
    assert f"\n{metric} " in metrics.text().decode()
    rule = values["prometheus-adapter"]["rules"]["custom"][0]
    assert rule["name"]["as"] == metric
    assert json.dumps(rule).count(metric) >= 4
