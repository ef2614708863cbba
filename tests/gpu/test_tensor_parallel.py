"""Two GPUs with NCCL: the tokens of one, drafts included, and the loss of a rank."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
import torch

from trtllm_treewy import LLM, SamplingParams
from trtllm_treewy.runtime.errors import EngineDeadError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason="tensor parallelism over NCCL needs two CUDA devices"
    ),
]
PARAMS = SamplingParams(max_tokens=64, ignore_eos=True)


@pytest.fixture
def prompts(repository):
    lines = (repository / "examples/training/heldout.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["prompt"] for line in lines.splitlines()[:8]]


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def make_llm(model, ranks, dtype, **settings):
    return LLM(
        model,
        dtype=dtype,
        max_seq_len=512,
        speculative_config={"draft_tree_widths": [3, 3, 3], **settings},
        tensor_parallel_size=ranks,
    )


@pytest.mark.parametrize("settings", [{}, {"state_commit": "deferred"}])
def test_the_tokens_of_one_gpu(shipped_model, prompts, settings):
    """float32, so that another order of summation changes no token; twice, to run what is warm."""
    texts = []
    for ranks in (1, 2):
        with make_llm(shipped_model, ranks, "float32", **settings) as llm:
            for _ in range(2):
                outputs = llm.generate(prompts, PARAMS)
                texts.append([output.outputs[0].token_ids for output in outputs])
            assert llm.stats.executor_faults == 0
    assert all(other == texts[0] for other in texts[1:])


def test_bfloat16_accepts_as_many_drafts(shipped_model, prompts):
    lengths = []
    for ranks in (1, 2):
        with make_llm(shipped_model, ranks, "bfloat16") as llm:
            outputs = llm.generate(prompts, PARAMS)
        stats = sum((o.speculation for o in outputs[1:]), outputs[0].speculation)
        lengths.append(stats.acceptance_length)
    assert lengths[1] == pytest.approx(lengths[0], rel=0.15)
    assert lengths[1] > 2.0


def test_a_rank_that_is_killed_ends_the_step(shipped_model):
    """NCCL's kernels wait for it for ever; the group's watch ends them."""
    with make_llm(shipped_model, 2, "bfloat16") as llm:
        (worker,) = llm._engine._executor.process_ids
        stream = llm.generate_async("Once upon a time", SamplingParams(max_tokens=400), True)
        next(stream)
        os.kill(worker, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
            stream.result()
        assert time.monotonic() - began < 30
