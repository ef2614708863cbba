"""Engine directories: whole or not there, rebuilt when something changed, refused when unfit.

`Recorder` stands where TensorRT builds: it records what it is asked for and writes a few bytes. A
real builder is in test_engine_build_rtx.py.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import hf_config, write_checkpoint

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx_cases import LIMITS

from trtllm_treewy.binding_names import bindings, networks
from trtllm_treewy.cli import main
from trtllm_treewy.config import ModelConfig
from trtllm_treewy.engine_config import KEY, EngineConfig, digest
from trtllm_treewy.export import build_engine as module
from trtllm_treewy.export.build_engine import (
    BuildOptions,
    build_engine_directory,
    plan_build,
)
from trtllm_treewy.export.profiles import BuildLimits, make_profile
from trtllm_treewy.runtime import engine_files
from trtllm_treewy.runtime.engine_files import (
    check_engine,
    check_limits,
    open_engine,
)
from trtllm_treewy.tensorrt_package import check_version

OPTIONS = BuildOptions(dtype="float32", limits=BuildLimits(max_seq_len=256, max_nodes=24))
CPU = torch.device("cpu")


class Recorder:
    version, gpu, plugins, collectives = "recorder 1", "some GPU sm_90", True, True

    def __init__(self, fail_at=None):
        self.calls, self.fail_at = [], fail_at

    def build(self, onnx_file, plan, profiles, timing_cache, progress=None):
        assert onnx_file.is_file()
        assert (onnx_file.parent / "weights.bin").is_file()
        known = timing_cache.read_text() if timing_cache.is_file() else ""
        self.calls.append((onnx_file.name, profiles, known))
        if onnx_file.stem == self.fail_at:
            raise KeyboardInterrupt
        plan.write_text(onnx_file.name)
        timing_cache.write_text(known + "t")
        return 1000 + len(self.calls)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, hf_config())
    (folder / "generation_config.json").write_text("{}")
    return folder


def tree(folder):
    """Every file below, with its contents."""
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_an_onnx_engine(model, tmp_path):
    """Files, config and checksums; config.json is still the model's."""
    out = tmp_path / "engine"
    assert build_engine_directory(model, out, OPTIONS)
    engine = EngineConfig.read(out)
    assert (engine.kind, engine.activation_dtype, engine.gpu) == ("onnx", "float32", None)
    files = {"weights.bin", "prefill.onnx", "verify.onnx", "draft.onnx", "generation_config.json"}
    assert engine.files.keys() == files
    assert {p.name for p in out.iterdir()} == files | {"config.json"}
    engine.check_files(out, contents=True)
    assert engine.files["weights.bin"].sha256 == digest(out / "weights.bin")
    assert ModelConfig.from_pretrained(out) == ModelConfig.from_pretrained(model)
    assert list(tmp_path.iterdir()) == [out]
    assert open_engine(out, LIMITS, CPU).limits == LIMITS


def test_a_tensorrt_engine(model, tmp_path):
    """Every network with its profile; the ONNX files go, timings come back at the next build."""
    out, builder = tmp_path / "engine", Recorder()
    assert build_engine_directory(model, out, OPTIONS, builder)
    config = ModelConfig.from_pretrained(model)
    assert [name for name, _, _ in builder.calls] == [f"{n}.onnx" for n in networks(config)]
    assert [known for _, _, known in builder.calls] == ["", "t", "tt"]
    for name, (profile,), _ in builder.calls:
        wanted = make_profile(name.removesuffix(".onnx"), config, OPTIONS.limits)
        assert profile == wanted
    engine = EngineConfig.read(out)
    assert (engine.kind, engine.builder, engine.gpu) == ("tensorrt", "recorder 1", "some GPU sm_90")
    assert {p.name for p in out.iterdir()} == {
        "prefill.engine", "verify.engine", "draft.engine", "timing.cache", "config.json",
        "generation_config.json",
    }  # fmt: skip
    assert engine.seconds.keys() == {"export", *networks(config)}
    assert engine.scratch == {"prefill": 1001, "verify": 1002, "draft": 1003}
    assert engine.plugins
    again = Recorder()
    assert build_engine_directory(model, out, OPTIONS, again, force=True)
    assert again.calls[0][2] == "ttt"


def test_what_is_up_to_date_is_skipped(model, tmp_path):
    """By weights, options, builder, GPU and the files themselves."""
    copy, out = tmp_path / "model", tmp_path / "engine"
    shutil.copytree(model, copy)
    assert build_engine_directory(copy, out, OPTIONS)
    before = tree(out)
    assert not build_engine_directory(copy, out, OPTIONS)
    assert tree(out) == before
    assert build_engine_directory(copy, out, OPTIONS, force=True)
    assert build_engine_directory(copy, out, replace(OPTIONS, dtype="float16"))
    assert build_engine_directory(copy, out, OPTIONS, Recorder())
    assert not build_engine_directory(copy, out, OPTIONS, Recorder())
    other = Recorder()
    other.gpu = "another"
    assert build_engine_directory(copy, out, OPTIONS, other)
    os.utime(copy / "model.safetensors", ns=(1, 1))
    assert build_engine_directory(copy, out, OPTIONS, other)
    (out / "verify.engine").write_text("spoiled by someone")
    assert build_engine_directory(copy, out, OPTIONS, other)


@pytest.mark.parametrize("stage", ["prefill", "verify", "draft"])
def test_an_interrupt_leaves_what_was_there(model, tmp_path, stage):
    out = tmp_path / "engine"
    with pytest.raises(KeyboardInterrupt):
        build_engine_directory(model, out, OPTIONS, Recorder(stage))
    assert list(tmp_path.iterdir()) == []
    build_engine_directory(model, out, OPTIONS)
    before = tree(out)
    with pytest.raises(KeyboardInterrupt):
        build_engine_directory(model, out, OPTIONS, Recorder(stage))
    assert tree(out) == before
    assert list(tmp_path.iterdir()) == [out]


def test_an_interrupt_at_any_progress_leaves_what_was_there(model, tmp_path):
    """Ctrl-C at every tensor of the export and at every step of TensorRT."""
    out = tmp_path / "engine"
    build_engine_directory(model, out, replace(OPTIONS, dtype="float16"))
    before = tree(tmp_path)

    class Steps(Recorder):
        def build(self, onnx_file, plan, profiles, timing_cache, progress=None):
            scratch = super().build(onnx_file, plan, profiles, timing_cache)
            progress(onnx_file.stem, 1, 1)
            return scratch

    for interrupt_at in range(1000):
        calls = 0

        def progress(*_, interrupt_at=interrupt_at):
            nonlocal calls
            calls += 1
            if calls == interrupt_at + 1:
                raise KeyboardInterrupt

        try:
            build_engine_directory(model, out, OPTIONS, Steps(), progress=progress)
        except KeyboardInterrupt:
            assert tree(tmp_path) == before
            continue
        break
    assert interrupt_at == calls > 20
    assert EngineConfig.read(out).kind == "tensorrt"
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


@pytest.mark.parametrize("move", [1, 2])
def test_an_interrupt_behind_a_move_leaves_a_whole_engine(model, tmp_path, monkeypatch, move):
    """The old engine or the new one, and nothing else, when Ctrl-C comes right after a rename."""
    out = tmp_path / "engine"
    build_engine_directory(model, out, replace(OPTIONS, dtype="float16"))
    before, original, moves = tree(out), Path.rename, 0

    def rename(self, target):
        nonlocal moves
        result = original(self, target)
        moves += 1
        if moves == move:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        build_engine_directory(model, out, OPTIONS)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]
    EngineConfig.read(out).check_files(out, contents=True)
    assert (tree(out) == before) == (move == 1)


@pytest.mark.parametrize("call", ["write_bytes", "open", "rename"])
def test_a_failing_disk_leaves_what_was_there(model, tmp_path, monkeypatch, call):
    """The n-th write, open or move fails, for every n until all goes well."""
    out = tmp_path / "engine"
    build_engine_directory(model, out, replace(OPTIONS, dtype="float16"))
    before = tree(out)
    original = getattr(Path, call)
    for fail_at in range(40):
        count = 0

        def failing(self, *args, fail_at=fail_at, **kwargs):
            nonlocal count
            reads = call == "open" and "w" not in (args[0] if args else kwargs.get("mode", "r"))
            if ".building-" in str(self) and not reads:
                count += 1
                if count == fail_at + 1:
                    raise OSError(28, "No space left on device")
            return original(self, *args, **kwargs)

        monkeypatch.setattr(Path, call, failing)
        try:
            build_engine_directory(model, out, OPTIONS)
        except OSError:
            monkeypatch.setattr(Path, call, original)
            assert tree(out) == before
            assert list(tmp_path.iterdir()) == [out]
            continue
        break
    assert fail_at > 0
    assert EngineConfig.read(out).activation_dtype == "float32"


def test_a_build_that_was_killed_is_cleared_away(model, tmp_path):
    """Its directory goes at the next build; one of a running process stays."""
    dead, alive = tmp_path / ".engine.building-99999999-x", tmp_path / ".engine.building-1-x"
    for folder in (dead, alive):
        folder.mkdir()
        (folder / "weights.bin").write_text("half")
    build_engine_directory(model, tmp_path / "engine", OPTIONS)
    assert not dead.exists()
    assert alive.exists()


def test_a_full_disk_is_seen_before(model, tmp_path, monkeypatch):
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: full)
    with pytest.raises(OSError, match="the build needs 0.1 GiB .* 0.0 GiB free"):
        build_engine_directory(model, tmp_path / "engine", OPTIONS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: data[:-100], "truncated or corrupt"),
        (lambda data: data[:5], "truncated or corrupt"),
        (lambda data: b"", "truncated or corrupt"),
        (lambda data: b"\xff" * 8 + data[8:], "truncated or corrupt"),
        (lambda data: data[:8] + b"[" + data[9:], "truncated or corrupt"),
    ],
    ids=["tail", "head", "empty", "length", "header"],
)
def test_a_corrupt_checkpoint_leaves_nothing(model, tmp_path, spoil, message):
    copy, out = tmp_path / "model", tmp_path / "out" / "engine"
    shutil.copytree(model, copy)
    data = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(spoil(data))
    with pytest.raises(ValueError, match=message):
        build_engine_directory(copy, out, OPTIONS)
    assert not out.parent.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({"hidden_size": 1 << 20}, "does not fit the model"),
        ({"num_hidden_layers": 3}, "does not fit the model"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_is_not_supported_leaves_nothing(model, tmp_path, capsys, change, message):
    """A clear error from the command, and no directory."""
    copy, out = tmp_path / "model", tmp_path / "out" / "engine"
    shutil.copytree(model, copy)
    raw = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**raw, **change}))
    with pytest.raises(ValueError, match=message):
        build_engine_directory(copy, out, OPTIONS)
    assert main(["build", str(copy), "--output", str(out), "--backend", "onnx"]) == 2
    assert capsys.readouterr().err.startswith("trtllm-treewy: error: ")
    assert not out.parent.exists()


def test_what_is_not_an_engine_is_never_replaced(model, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty and holds no engine"):
        build_engine_directory(model, tmp_path, OPTIONS, force=True)
    with pytest.raises(ValueError, match="holds no engine"):
        build_engine_directory(model, model, OPTIONS, force=True)
    with pytest.raises(ValueError, match="is a file, expected a directory"):
        build_engine_directory(model, tmp_path / "notes.txt", OPTIONS)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_engine_is_not_a_checkpoint(model, tmp_path):
    build_engine_directory(model, tmp_path / "a", OPTIONS)
    with pytest.raises(ValueError, match="is an engine already"):
        build_engine_directory(tmp_path / "a", tmp_path / "b", OPTIONS)


def test_plans_say_what_a_build_takes(model, tmp_path):
    out = tmp_path / "engine"
    plan = plan_build(model, out, OPTIONS)
    weights = sum(t.numel() for t in ModelWeights(model)) * 4
    assert plan.weight_bytes == weights
    assert not plan.up_to_date
    assert list(tmp_path.iterdir()) == []
    build_engine_directory(model, out, OPTIONS)
    later = plan_build(model, out, OPTIONS)
    assert later.up_to_date
    assert later.seconds["export"] > 0
    assert (out / "weights.bin").stat().st_size < plan.disk_bytes


def ModelWeights(model):
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors").values()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_nodes": 129}, "max_nodes must be at most 128, got 129"),
        ({"max_batch_size": 0}, "max_batch_size must be an integer >= 1, got 0"),
        ({"max_num_tokens": 4}, "max_num_tokens must be at least max_batch_size"),
    ],
)
def test_limits_that_make_no_sense(change, message):
    with pytest.raises(ValueError, match=message):
        BuildLimits(**change)


def test_profiles_cover_the_limits(model):
    """Every dynamic input has a range; sums such as B+1 follow their parts."""
    config, limits = ModelConfig.from_pretrained(model), BuildLimits(max_batch_size=3, max_nodes=9)
    for network in networks(config):
        profile = make_profile(network, config, limits)
        for x in bindings(network, config).inputs:
            if not any(isinstance(size, str) for size in x.shape):
                assert x.name not in profile.shapes
                continue
            low, usual, high = profile.shapes[x.name]
            assert all(a <= b <= c for a, b, c in zip(low, usual, high, strict=True))
    prefill = make_profile("prefill", config, limits).shapes
    assert prefill["cu_seqlens"] == ((2,), (2,), (4,))
    assert make_profile("verify", config, limits).shapes["parents"] == ((1, 1), (3, 9), (3, 9))


def edited(folder, **changes):
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw[KEY].update(changes)
    path.write_text(json.dumps(raw))


def test_engines_that_do_not_fit_are_refused(model, tmp_path, monkeypatch):
    """Another plugin version, device, type, format, limit; files missing or cut short."""
    out = tmp_path / "engine"
    build_engine_directory(model, out, OPTIONS)
    engine = EngineConfig.read(out)
    with pytest.raises(ValueError, match="set device to cpu"):
        check_engine(engine, out, torch.device("cuda"))
    with pytest.raises(ValueError, match="dtype is float32 as built, got bfloat16"):
        check_engine(engine, out, CPU, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="built for version 7 of the plugins"):
        check_engine(replace(engine, plugin_version="7"), out, CPU)
    with pytest.raises(ValueError, match="has no bfloat16"):
        check_engine(replace(engine, activation_dtype="bfloat16"), out, CPU)
    with monkeypatch.context() as patch:
        patch.setattr(engine_files, "find_spec", lambda name: None)
        with pytest.raises(ValueError, match="onnxruntime is not installed: pip install onnxrun"):
            open_engine(out, LIMITS, CPU)
    with pytest.raises(ValueError, match="max_nodes is 25, .* at most 24: lower it, or build with"):
        check_limits(engine, replace(LIMITS, max_nodes=25))
    with pytest.raises(ValueError, match="is not an engine"):
        open_engine(model, LIMITS, CPU)
    for key, value in (
        ("max_batch_size", "8"), ("max_nodes", 0), ("max_seq_len", True), ("max_num_tokens", None),
        ("kv_dtype", "float8"), ("stash_dtype", 1), ("kind", []), ("attention", "flash"),
        ("plugins", 1), ("gpu", 3), ("builder", None), ("scratch", {"verify": -1}),
        ("tensor_parallel_size", 0), ("seconds", {"verify": "1"}), ("files", []),
        ("files", {"a": {"bytes": 1}}), ("files", {"a": {"bytes": "1", "sha256": ""}}),
    ):  # fmt: skip
        good = (out / "config.json").read_text()
        edited(out, **{key: value})
        with pytest.raises(ValueError, match=f"{key} must be .*, got .*changed after the build"):
            EngineConfig.read(out)
        (out / "config.json").write_text(good)
    edited(out, surprise=1)
    with pytest.raises(ValueError, match="missing or unknown: surprise"):
        EngineConfig.read(out)
    edited(out, format=2)
    with pytest.raises(ValueError, match="has format 2, this version reads 3"):
        EngineConfig.read(out)
    # One of another format is an engine all the same, and may be replaced.
    assert build_engine_directory(model, out, OPTIONS)
    data = (out / "weights.bin").read_bytes()
    (out / "weights.bin").write_bytes(data[:-1])
    with pytest.raises(ValueError, match=r"weights.bin has \d+ bytes, expected"):
        open_engine(out, LIMITS, CPU)
    (out / "weights.bin").write_bytes(data[:-1] + b"x")
    with pytest.raises(ValueError, match="its checksum differs"):
        engine.check_files(out, contents=True)
    (out / "weights.bin").unlink()
    with pytest.raises(ValueError, match=r"weights.bin is missing"):
        open_engine(out, LIMITS, CPU)


@pytest.mark.parametrize("version", ["10.13.3", "8.6.0", "12.0.1"])
def test_other_versions_of_tensorrt_are_refused(version):
    with pytest.raises(ValueError, match=f"10.14 or later and below 12, got {version}"):
        check_version(version)
    for known in ("10.14.1", "10.16.1.11", "11.4.0.106"):
        check_version(known)


def test_the_command(model, tmp_path, capsys):
    """Plan, build, skip; errors in one line."""
    out = str(tmp_path / "engine")
    command = ["build", str(model), "--output", out, "--backend", "onnx", "--max-seq-len", "256"]
    assert main([*command, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert "weights" in plan
    assert "not known before a build" in plan
    assert not Path(out).exists()
    assert main(command) == 0
    assert "engine built" in capsys.readouterr().err
    assert main(command) == 0
    assert "is up to date" in capsys.readouterr().err
    assert main([*command, "--dry-run"]) == 0
    assert "(the last build)" in capsys.readouterr().out
    assert main(["build", str(model), "--output", out, "--backend", "onnx", "--max-nodes", "500"])
    assert "max_nodes must be at most 128" in capsys.readouterr().err.replace(
        "--max-nodes", "max_nodes"
    )
