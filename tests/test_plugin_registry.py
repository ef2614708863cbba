"""The shipped plugin library in the registries of real TensorRT versions, on the CPU.

The lean runtimes on PyPI have the whole plugin registry, load on machines without a GPU, and are
small (46 MB each, kept in .cache/). Skipped where the library was not built (no nvcc) or the
runtimes cannot be had; TREEWY_REQUIRE_TENSORRT=1 makes that a failure, as in CI.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tensorrt_packages import RUNTIMES, lean_runtime, unavailable

from trtllm_treewy.plugin_contract import LIBRARY, PLUGINS

HEADS = {"num_k_heads": 16, "num_v_heads": 32, "head_k_dim": 128, "head_v_dim": 128}
GOOD = [
    ("TreeWyVerify", HEADS),
    ("TreeWyVerify", {**HEADS, "state_commit": "deferred", "u_dtype": "bfloat16"}),
    ("TreeWyVerify", {**HEADS, "stash": "inputs"}),
    ("TreeWyCommit", {}),
    ("TreeWyCommit", {"state_commit": "deferred"}),
    ("TreeWyCommitInputs", {"num_k_heads": 16}),
    ("TreeConv1d", {}),
    ("TreeConv1d", {"bias": 1}),
    ("TreeConvCommit", {}),
    ("GdnPrefill", HEADS),
    ("GdnPrefillConv1d", {"bias": 0}),
]
BAD = [
    ("TreeWyVerify", {**HEADS, "head_k_dim": 96}, "key_dim is 96, must be 64, 128 or 256"),
    ("TreeWyVerify", {k: HEADS[k] for k in list(HEADS)[1:]}, "field num_k_heads is missing"),
    ("TreeWyVerify", {**HEADS, "tile": 1}, "there is no field tile"),
    ("TreeWyVerify", {**HEADS, "head_k_dim": 128.0}, "field head_k_dim must be one int32"),
    ("TreeWyVerify", {**HEADS, "stash": "nothing"}, "must be pseudo_values or inputs"),
    ("TreeWyCommit", {"state_commit": 1}, "field state_commit must be a string"),
    ("TreeWyCommitInputs", {}, "field num_k_heads is missing"),
    ("TreeConv1d", {"bias": 2}, "field bias is 2, must be from 0 to 1"),
    ("TreeConvCommit", {"bias": 1}, "there is no field bias"),
    ("GdnPrefill", {**HEADS, "num_v_heads": 30}, "must be a multiple of HK"),
]


@pytest.fixture(scope="module")
def library(repository):
    path = repository / "build" / LIBRARY
    if not path.is_file():
        if shutil.which("nvcc"):
            pytest.fail(f"no build/{LIBRARY}: run ./build.sh first")
        unavailable(f"no build/{LIBRARY}, as there is no nvcc to build it with")
    return path


@pytest.fixture(scope="module", params=RUNTIMES)
def lean(request, repository):
    return lean_runtime(request.param, repository)


def run_registry(library, lean, way, cases=(), **environment):
    """What tests/plugin_registry.py prints, and its stderr."""
    script = Path(__file__).with_name("plugin_registry.py")
    run = subprocess.run(
        [sys.executable, str(script), str(library), way],
        input=json.dumps([list(case[:2]) for case in cases]),
        env={**os.environ, "PYTHONPATH": str(lean), **environment},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1]), run.stderr


FIELDS = {plugin.name: [field.name for field in plugin.fields] for plugin in PLUGINS.values()}


def test_the_registry_loads_the_library_and_makes_every_plugin(library, lean):
    result, _ = run_registry(library, lean, "load", GOOD)
    assert result["tensorrt"].startswith(lean.name.split("-")[0])
    assert result["loaded"]
    assert result["creators"] == FIELDS
    for (name, fields), made in zip(GOOD, result["cases"], strict=True):
        assert made == [{"made": [name, "treewy", "1"]}] * 2, fields


def test_wrong_fields_are_refused_with_the_reason(library, lean):
    """In the log where there is a GPU; the lean runtime keeps no logger where there is none."""
    result, errors = run_registry(library, lean, "load", BAD)
    lines = errors.splitlines()
    for (name, fields, message), made in zip(BAD, result["cases"], strict=True):
        for one in made:
            said = one["refused"] if result["with_gpu"] else lines
            assert any(x.startswith(f"{name}: ") and message in x for x in said), (name, fields)


def test_the_library_registers_itself_where_it_is_loaded_otherwise(library, lean):
    """As Triton loads it (dlopen beside TensorRT), and by LD_PRELOAD with TensorRT."""
    result, _ = run_registry(library, lean, "dlopen", GOOD[:1])
    assert result["creators"] == FIELDS
    assert result["cases"] == [[{"made": ["TreeWyVerify", "treewy", "1"]}] * 2]
    (nvinfer,) = (lean / "tensorrt_lean_libs").glob("libnvinfer_lean.so.*")
    result, _ = run_registry(library, lean, "none", LD_PRELOAD=f"{nvinfer} {library}")
    assert result["creators"] == FIELDS
    # Without TensorRT it has nowhere to register, and does no harm.
    result, _ = run_registry(library, lean, "none", LD_PRELOAD=str(library))
    assert result["creators"] == {}


def test_both_ways_at_once_leave_the_creators_there(library, lean):
    """TensorRT does not load a library whose creators are registered; they go on to serve."""
    result, _ = run_registry(library, lean, "both", GOOD[:1])
    assert not result["loaded"]
    assert result["creators"] == FIELDS
    assert result["cases"] == [[{"made": ["TreeWyVerify", "treewy", "1"]}] * 2]


LOAD = """
import os, sys
import tensorrt_lean_bindings as trt
from trtllm_treewy.tensorrt_package import load_plugins, make_logger
logger = make_logger(trt)
runtime = trt.Runtime(logger)
for _ in range(2):
    load_plugins(trt)
print(trt.__version__, sum(x.plugin_namespace == "treewy" for x in
                           trt.get_plugin_registry().all_creators))
sys.stdout.flush()
os._exit(0)  # without a GPU the runtime does not end well
"""


def test_the_executor_loads_the_library_once(library, lean):
    """`load_plugins`, as building and running engines do, twice over."""
    paths = [str(lean), os.environ.get("PYTHONPATH", "")]
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TREEWY_TENSORRT_LIBRARY": str(library),
    }
    run = subprocess.run(
        [sys.executable, "-c", LOAD],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [lean.name.split("-")[0], str(len(PLUGINS))]


def test_the_library_needs_nothing_but_the_system(library):
    """No libnvinfer, no CUDA runtime and no C++ runtime, and nothing undefined."""
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf")
    text = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True).stdout
    needed = [line.split("[")[1].rstrip("]") for line in text.splitlines() if "(NEEDED)" in line]
    allowed = ("libc.so", "libm.so", "libdl.so", "librt.so", "libpthread.so", "ld-linux")
    assert all(name.startswith(allowed) for name in needed), needed
