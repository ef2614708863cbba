"""`benchmarks/executor.py`: a whole run on the CPU, and what is made of a profile."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import hf_config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import step_profile
from step_profile import DeviceEvent

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def script():
    """benchmarks/executor.py."""
    path = REPOSITORY / "benchmarks" / "executor.py"
    spec = importlib.util.spec_from_file_location("executor_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["executor.py", "serving.py"])
def test_it_finds_its_parts_where_python_does_not_look_beside_a_script(name, tmp_path):
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "benchmarks" / name), "--help"],
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "--state-dtype" in done.stdout


def test_a_run_of_a_config_alone(script, tmp_path, capsys):
    """Every policy and type of states; on a CPU there is no GPU time to tell of."""
    (tmp_path / "config.json").write_text(json.dumps(hf_config()))
    output = tmp_path / "rows.json"
    script.main(
        [
            str(tmp_path), "--device", "cpu", "--dtype", "float32", "--batch", "1", "2",
            "--tree", "none", "2", "--commit", "reconstruct", "deferred", "snapshot",
            "--state-dtype", "float32", "bfloat16", "--context", "8", "--steps", "14",
            "--repeats", "1", "--output", str(output),
        ]
    )  # fmt: skip
    saved = json.loads(output.read_text())
    rows = saved["rows"]
    assert len(rows) == 2 * 2 * 3 * 2
    assert not [row["error"] for row in rows if "error" in row]
    assert {row["commit"] for row in rows} == {"reconstruct", "deferred", "snapshot"}
    for row in rows:
        parts = {"fill", "verify", "accept", "commit", "step"} | (
            {"draft"} if row["nodes"] > 1 else set()
        )
        assert row["parts_ms"].keys() == parts
        assert min(row["parts_ms"].values()) > 0
        assert row["tokens_per_s"] > 0
        assert row["graph_misses"] == 0
        assert not row.keys() & {"gdn_part", "idle_part", "kinds_ms"}
    assert saved["about"]["settings"]["state_dtype"] == ["float32", "bfloat16"]
    shown = capsys.readouterr().out
    assert len(re.findall("deferred at least as fast as reconstruct.*(met|missed)", shown)) == 8


def test_the_command_refuses_an_unknown_policy(script, capsys):
    with pytest.raises(SystemExit):
        script.main(["qwen3.5-35b-a3b", "--commit", "never"])
    assert "invalid choice: 'never'" in capsys.readouterr().err


def rows_of(script, **changes):
    row = {
        "commit": "reconstruct", "state_dtype": "float32", "tree": "3", "batch": 64, "nodes": 4,
        "context": 512, "parts_ms": {"verify": 20.0, "step": 26.0}, "wall_ms": 25.9,
        "tokens_per_s": 7302.4, "gdn_part": 0.1347, "idle_part": 0.043, "idle_between_part": 0.011,
        "launches": 3.2,
    }  # fmt: skip
    return {**row, **changes}


def test_the_goals_are_judged(script):
    rows = [
        rows_of(script),
        rows_of(script, commit="deferred", tokens_per_s=7449.0, gdn_part=0.08),
        rows_of(script, batch=8, idle_between_part=0.021),
        {
            "commit": "deferred",
            "state_dtype": "float32",
            "tree": "3",
            "batch": 256,
            "error": "full",
        },
    ]
    one, other = (f"{c}, float32, tree 3, batch 64" for c in ("reconstruct", "deferred"))
    assert script.goals(rows) == [
        f"GDN of a step, {one}: 13.5% of at most 10%, missed",
        f"idle between launches, {one}: 1.1% of at most 2%, met",
        f"GDN of a step, {other}: 8.0% of at most 10%, met",
        f"idle between launches, {other}: 1.1% of at most 2%, met",
        "idle between launches, reconstruct, float32, tree 3, batch 8: 2.1% of at most 2%, missed",
        "deferred at least as fast as reconstruct, float32, tree 3, batch 64: 1.020x, met",
    ]


def test_the_table_has_a_line_a_row(script, capsys):
    script.print_table([rows_of(script), rows_of(script, batch=1, error="out of memory")])
    header, first, second = capsys.readouterr().out.splitlines()[-3:]
    assert first.split() == [
        "reconstruct", "float32", "3", "64", "20.000", "26.000", "25.900", "7302", "13.5%", "4.3%",
        "1.1%", "3.2",
    ]  # fmt: skip
    assert "out of memory" in second
    assert header.split()[-4:] == ["GDN", "idle", "between", "launches"]


# ------------------------------------------------------------------ profiles


def test_idle_time_between_launches_and_within():
    """A copy after a gap of 5; a graph of two kernels with 20 between; one beside the last."""
    events = [
        DeviceEvent("a", 0, 100, 1),
        DeviceEvent("copy", 105, 10, 2),
        DeviceEvent("b", 115, 50, 3),
        DeviceEvent("c", 185, 15, 3),
        DeviceEvent("d", 190, 10, 4),
    ]
    assert step_profile.idle_parts(events) == {"idle_part": 0.125, "idle_between_part": 0.025}
    assert step_profile.per_step(events, 2) == {"launches": 2.0, "kernels": 2.5}
    assert step_profile.idle_parts([]) == {"idle_part": 0.0, "idle_between_part": 0.0}


def test_kinds_and_shares():
    events = [
        DeviceEvent("void treewy::tree_verify_small_kernel<float>", 0, 2_000_000, 1),
        DeviceEvent("void treewy::(anonymous namespace)::update_states<16>", 0, 4_000_000, 1),
        DeviceEvent("_gate_up", 0, 30_000_000, 2),
    ]
    kinds = step_profile.kinds_ms(events, 2)
    assert kinds == {"GDN verify": 1.0, "GDN commit": 2.0, "experts": 15.0}
    assert step_profile.gdn_part(kinds, 20.0) == 0.15
    assert step_profile.largest_ms(events, 2, 1) == {"_gate_up": 15.0}


def kernels():
    """Names of all CUDA kernels of this project, in the files of `plugins/kernels`."""
    for path in sorted((REPOSITORY / "plugins" / "kernels").glob("*.cu*")):
        text = re.sub(r"__launch_bounds__\s*\([^;{]*?\)\s*(?=\w)", "", path.read_text())
        for name in re.findall(r"__global__\s+void\s+(\w+)\s*\(", text):
            yield path.name, name


def test_every_kernel_has_its_kind():
    kinds = {name: step_profile.kind_of(name) for _, name in kernels()}
    assert kinds["update_states"] == kinds["append_paths"] == "GDN commit"
    assert kinds["advance_history"] == kinds["clear_history"] == "GDN commit"
    assert kinds["fold_histories"] == kinds["commit_inputs"] == "GDN commit"
    assert {kind for name, kind in kinds.items() if "verify" in name} == {"GDN verify"}
    assert {kind for name, kind in kinds.items() if "conv" in name} == {"conv"}
    # A baseline's kernels are Triton's.
    assert step_profile.kind_of("_verify") == "GDN verify"
    assert step_profile.kind_of("_commit") == "GDN commit"
