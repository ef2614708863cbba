"""Engines of whole models by real TensorRT: tokens, graphs, states in place; the stream alone.

Needs the `tensorrt` package (10.14 to 11) and build/libtreewy_tensorrt.so. The same executor over a
double, without a GPU, is in ../test_engine_tensorrt.py.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from trtllm_treewy import LLM, SamplingParams
from trtllm_treewy.engine_config import EngineMismatchError, gpu_identity
from trtllm_treewy.runtime.cuda_streams import CudaStreams
from trtllm_treewy.runtime.engine_files import check_engine
from trtllm_treewy.tensorrt_package import plugin_candidates

pytestmark = pytest.mark.gpu

PROMPTS = [f"{start} {end}" for start in ("The river", "Once upon", "He said", "In the")
           for end in ("was", "and then", "of the old house", "a")]  # fmt: skip
PARAMS = SamplingParams(max_tokens=64, ignore_eos=True)
SETTINGS = {"max_batch_size": 8, "max_seq_len": 128}


@pytest.fixture(scope="module", params=["float32", "float16", "bfloat16"])
def engine(request, tmp_path_factory, shipped_model):
    if importlib.util.find_spec("tensorrt") is None:
        pytest.skip("no package tensorrt: pip install 'tensorrt>=10.14,<12'")
    pytest.importorskip("onnx")
    from trtllm_treewy.export.build_engine import BuildOptions, build_engine_directory
    from trtllm_treewy.export.profiles import BuildLimits
    from trtllm_treewy.export.tensorrt_builder import TensorRTBuilder

    library = next((path for path in plugin_candidates() if path.is_file()), None)
    if library is None:
        pytest.fail("no plugin library: run ./build.sh first")
    out = tmp_path_factory.mktemp("tensorrt") / request.param
    limits = BuildLimits(max_seq_len=256, max_nodes=40, max_num_tokens=64)
    builder = TensorRTBuilder(library, gpu=gpu_identity(torch.device("cuda")))
    build_engine_directory(shipped_model, out, BuildOptions(request.param, limits=limits), builder)
    return request.param, out


@pytest.mark.parametrize(
    "speculation",
    [None, {"draft_tree_widths": [3, 3, 3]}, {"use_dynamic_tree": True}],
    ids=["plain", "tree", "dynamic"],
)
def test_same_tokens_as_torch(engine, shipped_model, speculation):
    """In float32 all; in 16 bits most of the first ones, where no two logits are close."""
    dtype, folder = engine
    with LLM(shipped_model, dtype=dtype, device="cuda", **SETTINGS) as llm:
        wanted = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS)]
    with LLM(folder, speculative_config=speculation, **SETTINGS) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        parts = llm._engine._executor._parts
    got = [o.outputs[0].token_ids for o in outputs]
    if dtype == "float32":
        assert got == wanted
    else:
        same = sum(a[:8] == b[:8] for a, b in zip(got, wanted, strict=True))
        assert same >= len(PROMPTS) * 3 // 4
    if speculation:
        assert max(o.speculation.acceptance_length for o in outputs) > 1.5
    assert any(step.replay is not None for step in parts["verify"]._steps.values())


def test_engines_of_other_gpus_are_refused(engine):
    from dataclasses import replace

    from trtllm_treewy.engine_config import EngineConfig

    _, folder = engine
    read = EngineConfig.read(folder)
    check_engine(read, folder, torch.device("cuda"))
    with pytest.raises(EngineMismatchError, match="for the GPU other sm_10, and this is"):
        check_engine(replace(read, gpu="other sm_10"), folder, torch.device("cuda"))


def test_the_stream_captures_without_running_and_replays():
    """No TensorRT: torch's own work on the stream, before and behind the caller's."""
    device = torch.device("cuda")
    streams = CudaStreams(device)
    x = torch.zeros(1 << 20, device=device)
    assert streams.handle != torch.cuda.default_stream().cuda_stream
    with streams.scope():
        x += 1
        replay = streams.capture(lambda: x.add_(10))
    assert x.eq(1).all(), "a capture runs nothing"
    for _ in range(3):
        x *= 2
        with streams.scope():
            replay()
    streams.synchronize()
    assert x.eq(((1 * 2 + 10) * 2 + 10) * 2 + 10).all()


def test_what_cannot_be_captured_is_an_error_and_leaves_the_stream_usable():
    device = torch.device("cuda")
    streams = CudaStreams(device)
    x = torch.ones(4, device=device)
    with streams.scope(), pytest.raises(RuntimeError):
        streams.capture(lambda: x.sum().item())
    with streams.scope():
        x += 1
    assert x.eq(2).all()
