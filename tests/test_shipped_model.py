"""The trained model in the repository: parity with transformers, words, real acceptance."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open

from trtllm_treewy import LLM, SamplingParams
from trtllm_treewy.batch import PrefillBatch
from trtllm_treewy.config import ModelConfig


@pytest.fixture(scope="module")
def prompts(repository):
    lines = (repository / "examples/training/heldout.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["prompt"] for line in lines.splitlines()]


@pytest.fixture(scope="module")
def reference(shipped_model):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        shipped_model, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def make_llm(directory, config, **settings):
    return LLM(
        directory,
        dtype="float32",
        device="cpu",
        speculative_config=config,
        max_seq_len=512,
        **settings,
    )


def test_it_is_what_it_says(shipped_model):
    """At most 25 MB, bf16, the genuine architecture with its MTP weights."""
    assert sum(file.stat().st_size for file in shipped_model.iterdir()) <= 25_000_000
    config = ModelConfig.from_pretrained(shipped_model)
    assert config.model_type == "qwen3_5_text"
    assert config.linear_key_head_dim == config.linear_value_head_dim == 128
    assert config.linear_num_value_heads == 2 * config.linear_num_key_heads
    assert len(config.linear_layers) == 3 * len(config.attention_layers)
    with safe_open(shipped_model / "model.safetensors", "pt") as file:
        dtypes = {file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
        assert dtypes == {torch.bfloat16}
        assert any(name.startswith("mtp.") for name in file.keys())  # noqa: SIM118


def test_parity_with_transformers(shipped_model, reference, prompts):
    """Logits within 1e-4 and the same greedy tokens over 128 steps, plain and speculative."""
    ids = torch.tensor([reference_ids(shipped_model, prompts[0])])
    with torch.no_grad():
        expected = reference(ids).logits[0]
        whole = reference.generate(ids, max_new_tokens=128, do_sample=False, eos_token_id=None)
    continuation = whole[0, ids.shape[1] :].tolist()
    params = SamplingParams(max_tokens=128, ignore_eos=True)
    for config in (None, {"draft_tree_widths": [3, 3, 3]}, {"max_draft_len": 3}):
        with make_llm(shipped_model, config, max_batch_size=1) as llm:
            assert llm.generate(ids[0].tolist(), params).outputs[0].token_ids == continuation
            executor = llm._engine._executor
            if config is None:
                logits = prompt_logits(executor, ids[0].tolist())
                torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def reference_ids(directory, prompt):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory).encode(prompt)


def prompt_logits(executor, ids):
    assert executor.try_allocate(0, len(ids))
    output = executor.prefill(PrefillBatch.pack(ids, [len(ids)], [0], [0], executor.device))
    with torch.inference_mode():
        logits = executor.model.logits(output.hidden)
    executor.free(0)
    return logits


def test_acceptance_is_real(shipped_model, prompts):
    """Chain of 3 at least 2.0 tokens a step, (3,3,3) above it, same text with and without."""
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    lengths, texts = {}, {}
    for widths in ((), (1, 1, 1), (3, 3, 3)):
        with make_llm(shipped_model, {"draft_tree_widths": widths} if widths else None) as llm:
            outputs = llm.generate(prompts[:8], params)
        texts[widths] = [output.outputs[0].text for output in outputs]
        if widths:
            stats = sum((o.speculation for o in outputs[1:]), outputs[0].speculation)
            lengths[widths] = stats.acceptance_length
    assert texts[()] == texts[1, 1, 1] == texts[3, 3, 3]
    assert lengths[1, 1, 1] >= 2.0
    assert lengths[3, 3, 3] > lengths[1, 1, 1]
    words = " ".join(texts[()]).split()
    assert len(set(words)) > 80, "text that repeats itself makes acceptance easy"
