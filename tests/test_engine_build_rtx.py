"""A real parser and builder without a GPU: TensorRT-RTX builds the export ahead of time.

It has no plugins, so the GDN nodes are expanded to their functions. It runs in a process of its
own, as it must not meet the plugins' library. Needs `tensorrt-rtx-cu13-libs` and `-bindings`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import hf_config, write_checkpoint

pytest.importorskip("onnx")
if importlib.util.find_spec("tensorrt_rtx_bindings") is None:
    pytest.skip("no tensorrt_rtx_bindings", allow_module_level=True)

PROGRAM = """
import sys
from pathlib import Path
import tensorrt_rtx_bindings as trt
from trtllm_treewy.export.build_engine import BuildOptions, build_engine_directory
from trtllm_treewy.export.profiles import BuildLimits
from trtllm_treewy.export.tensorrt_builder import TensorRTBuilder

def for_blackwell(config):
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM120, 0)

stages = set()
def progress(stage, done, total):
    stages.add(stage)

limits = BuildLimits(max_batch_size=2, max_seq_len=128, max_nodes=8, max_num_tokens=64)
builder = TensorRTBuilder(trt=trt, configure=for_blackwell, gpu="any sm_120", measure=False)
build_engine_directory(
    sys.argv[1], sys.argv[2], BuildOptions(sys.argv[3], limits=limits), builder, progress=progress
)
assert len(stages) > 1, stages
"""


def run(*arguments):
    libraries = Path(importlib.util.find_spec("tensorrt_rtx_libs").origin).parent
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        env={**os.environ, "LD_LIBRARY_PATH": str(libraries)},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize(
    ("moe", "dtype"), [(False, "float32"), (False, "float16"), (True, "bfloat16")]
)
def test_every_network_parses_and_builds(tmp_path, moe, dtype):
    """Prefill, verify and draft, with their profiles, strongly typed."""
    layers = ["linear_attention", "full_attention"]
    raw = hf_config(moe=moe, num_hidden_layers=2, layer_types=layers, dtype=dtype)
    write_checkpoint(tmp_path / "model", raw)
    done = run(tmp_path / "model", tmp_path / "engine", dtype)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("prefill", "verify", "draft"):
        assert (tmp_path / "engine" / f"{name}.engine").stat().st_size > 10_000


def test_what_tensorrt_refuses_is_told(tmp_path):
    """A network that is no network: its reasons in the error, and nothing left behind."""
    program = PROGRAM.replace(
        "build_engine_directory(\n",
        "import onnx\n"
        "onnx.save(onnx.helper.make_model(onnx.helper.make_graph([onnx.helper.make_node("
        "'NoSuchOperator', ['x'], ['y'])], 'g', [onnx.helper.make_tensor_value_info('x', 1, [1])],"
        "[onnx.helper.make_tensor_value_info('y', 1, [1])])), sys.argv[2])\n"
        "builder.build(Path(sys.argv[2]), Path(sys.argv[2] + '.engine'), [], Path('t'))\n"
        "build_engine_directory(\n",
        1,
    )
    libraries = Path(importlib.util.find_spec("tensorrt_rtx_libs").origin).parent
    done = subprocess.run(
        [sys.executable, "-c", program, "x", str(tmp_path / "bad.onnx"), "float32"],
        env={**os.environ, "LD_LIBRARY_PATH": str(libraries)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "ValueError: bad.onnx: TensorRT cannot parse it" in done.stderr, done.stderr[-2000:]
    assert "NoSuchOperator" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bad.onnx"]
