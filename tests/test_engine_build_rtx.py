"""A real parser and builder without a GPU: TensorRT-RTX builds the export ahead of time.

It has no plugins, so the GDN nodes are expanded to their functions. It runs in a process of its
own, as it must not meet the plugins' library.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from checkpoints import hf_config, write_checkpoint
from tensorrt_packages import rtx

pytest.importorskip("onnx")

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
options = BuildOptions(sys.argv[3], attention=sys.argv[4], limits=limits)
build_engine_directory(
    sys.argv[1], sys.argv[2], options, builder, progress=progress
)
assert len(stages) > 1, stages
"""


@pytest.fixture
def run(repository):
    """Runs a program over TensorRT-RTX."""
    folder = rtx(repository)
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]

    def call(program, *arguments):
        return subprocess.run(
            [sys.executable, "-c", program, *map(str, arguments)],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "LD_LIBRARY_PATH": str(folder / "tensorrt_rtx_libs"),
            },
            capture_output=True,
            text=True,
            timeout=600,
        )

    return call


@pytest.mark.parametrize(
    ("moe", "dtype", "attention"),
    [
        (False, "float16", "onnx"),
        (True, "bfloat16", "standard"),
        pytest.param(False, "float32", "standard", marks=pytest.mark.slow),
        pytest.param(False, "bfloat16", "onnx", marks=pytest.mark.slow),
    ],
)
def test_every_network_parses_and_builds(run, tmp_path, moe, dtype, attention):
    """Prefill, verify and draft, with their profiles, strongly typed."""
    layers = ["linear_attention", "full_attention"]
    raw = hf_config(moe=moe, num_hidden_layers=2, layer_types=layers, dtype=dtype)
    write_checkpoint(tmp_path / "model", raw)
    done = run(PROGRAM, tmp_path / "model", tmp_path / "engine", dtype, attention)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("prefill", "verify", "draft"):
        assert (tmp_path / "engine" / f"{name}.engine").stat().st_size > 10_000


RANKS = """
import sys
from pathlib import Path
import tensorrt_rtx_bindings as trt
from trtllm_treewy.binding_names import networks
from trtllm_treewy.config import ModelConfig
from trtllm_treewy.export.onnx_export import export_onnx
from trtllm_treewy.export.profiles import BuildLimits, make_profile
from trtllm_treewy.export.tensorrt_builder import TensorRTBuilder
from trtllm_treewy.rank_config import bound_config

ranks, seen = 2, []
class Builder(TensorRTBuilder):
    def _allow_collectives(self, network, config):
        super()._allow_collectives(network, config)
        layers = [network.get_layer(i) for i in range(network.num_layers)]
        found = [x.num_ranks for x in layers if x.type == trt.LayerType.DIST_COLLECTIVE]
        logits = [x for x in map(network.get_output, range(network.num_outputs))
                  if x.name == "logits"]
        seen.append((found, logits[0].shape[-1]))

def for_blackwell(config):
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM120, 0)

folder = Path(sys.argv[2])
export_onnx(sys.argv[1], folder, dtype=sys.argv[3], ranks=ranks, rank=1)
config = bound_config(ModelConfig.from_pretrained(sys.argv[1]), ranks)
limits = BuildLimits(max_batch_size=2, max_seq_len=128, max_nodes=8, max_num_tokens=64)
builder = Builder(trt=trt, configure=for_blackwell, gpu="any sm_120", measure=False)
for name in networks(config):
    profile = make_profile(name, config, limits)
    builder.build(folder / f"{name}.onnx", folder / f"{name}.engine", [profile], folder / "times")
assert [x for x, _ in seen] == [[2] * 6, [2] * 6, [2] * 4], seen
assert {x for _, x in seen} == {config.vocab_size}, seen
"""


@pytest.mark.parametrize(("moe", "dtype"), [(False, "float16"), (True, "bfloat16")])
def test_networks_of_a_rank_build_with_their_collectives(run, tmp_path, moe, dtype):
    """TensorRT's own layers for them, of two ranks; the logits are whole."""
    layers = ["linear_attention", "full_attention"]
    raw = hf_config(moe=moe, num_hidden_layers=2, layer_types=layers, dtype=dtype, vocab_size=96)
    write_checkpoint(tmp_path / "model", raw)
    done = run(RANKS, tmp_path / "model", tmp_path / "engine", dtype)
    assert done.returncode == 0, done.stderr[-3000:]


def test_what_tensorrt_refuses_is_told(run, tmp_path):
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
    done = run(program, "x", tmp_path / "bad.onnx", "float32", "standard")
    assert "ValueError: bad.onnx: TensorRT cannot parse it" in done.stderr, done.stderr[-2000:]
    assert "NoSuchOperator" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bad.onnx"]
