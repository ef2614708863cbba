"""The whole model against transformers, an implementation no one here wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import hf_config, write_checkpoint
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer

from trtllm_treewy import LLM, SamplingParams
from trtllm_treewy.batch import PrefillBatch
from trtllm_treewy.config import ModelConfig
from trtllm_treewy.export.checkpoint import load_model
from trtllm_treewy.runtime.executor import ExecutorLimits
from trtllm_treewy.runtime.executor_torch import TorchExecutor

CASES = {
    "dense": {},
    "dense tied": {"tie_word_embeddings": True},
    "GVA 1": {"linear_num_key_heads": 3, "linear_num_value_heads": 3},
    "GVA 4": {"linear_num_key_heads": 1, "linear_num_value_heads": 4},
    "square heads": {"linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "attention bias": {"attention_bias": True},
    "conv of 3": {"linear_conv_kernel_dim": 3},
    "MoE": {"moe": True},
    "MoE tied": {"moe": True, "tie_word_embeddings": True, "num_experts_per_tok": 3},
}
LIMITS = ExecutorLimits(
    max_batch_size=3,
    max_seq_len=512,
    max_nodes=8,
    scratch_rows=8,
    num_blocks=64,
    tokens_per_block=32,
)


def greedy_by_transformers(model, prompt: list[int], steps: int) -> list[int]:
    ids = model.generate(
        torch.tensor([prompt]), max_new_tokens=steps, do_sample=False, eos_token_id=None
    )
    return ids[0, len(prompt) :].tolist()


def executor_of(directory: Path) -> TorchExecutor:
    return TorchExecutor(load_model(directory, dtype="float32"), LIMITS)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens(case, tmp_path):
    """Logits of every prompt position within 1e-4, and 128 greedy steps token for token."""
    reference = write_checkpoint(tmp_path, hf_config(**CASES[case]), seed=len(case))
    vocab = reference.config.vocab_size
    prompt = torch.randint(vocab, (37,)).tolist()
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0]
    executor = executor_of(tmp_path)
    assert executor.try_allocate(1, 64)
    output = executor.prefill(PrefillBatch.pack(prompt, [37], [1], [0], executor.device))
    with torch.inference_mode():
        logits = executor.model.logits(output.hidden)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(output.logits[0], expected[-1], atol=1e-4, rtol=0)

    with LLM(tmp_path, skip_tokenizer_init=True, dtype="float32", device="cpu") as llm:
        ours = llm.generate(prompt, SamplingParams(max_tokens=128)).outputs[0].token_ids
    assert ours == greedy_by_transformers(reference, prompt, 128)
    assert len(set(ours)) > 5, "a degenerate text would prove little"


@pytest.mark.parametrize("max_num_tokens", [8192, 96])
def test_long_prompt(max_num_tokens, tmp_path):
    """A prompt of several chunks of the WY form, whole and in pieces of the token budget."""
    reference = write_checkpoint(tmp_path, hf_config(), seed=5)
    prompt = torch.randint(97, (333,)).tolist()
    with LLM(
        tmp_path,
        skip_tokenizer_init=True,
        dtype="float32",
        device="cpu",
        max_num_tokens=max_num_tokens,
    ) as llm:
        ours = llm.generate(prompt, SamplingParams(max_tokens=128)).outputs[0].token_ids
    assert ours == greedy_by_transformers(reference, prompt, 128)
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0]
    executor = executor_of(tmp_path)
    assert executor.try_allocate(2, 333)
    hidden = []
    for start in range(0, 333, max_num_tokens):
        piece = prompt[start : start + max_num_tokens]
        batch = PrefillBatch.pack(piece, [len(piece)], [2], [start], executor.device)
        hidden.append(executor.prefill(batch).hidden)
    with torch.inference_mode():
        logits = executor.model.logits(torch.cat(hidden))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_mtp_module(tmp_path):
    """The MTP module against transformers' own decoder layer, over a whole sequence."""
    raw = hf_config()
    reference = write_checkpoint(tmp_path, raw)
    config = ModelConfig.from_dict(raw)
    executor = executor_of(tmp_path)
    mtp = executor.model.mtp
    layer_config = reference.config.__class__(
        **{**reference.config.to_dict(), "layer_types": ["full_attention"], "num_hidden_layers": 1}
    )
    layer_config._attn_implementation = "eager"
    layer = Qwen3_5DecoderLayer(layer_config, 0).eval()
    layer.load_state_dict(mtp.layers[0].state_dict())

    length = 21
    tokens = torch.randint(config.vocab_size, (length,))
    hidden = torch.randn(length, config.hidden_size)
    norm = reference.model.norm.__class__

    def normed(x, ours):
        module = norm(config.hidden_size, config.rms_norm_eps)
        module.load_state_dict(ours.state_dict())
        return module(x)

    with torch.no_grad():
        embedded = reference.model.embed_tokens(tokens)
        pair = (normed(embedded, mtp.pre_fc_norm_embedding), normed(hidden, mtp.pre_fc_norm_hidden))
        x = torch.cat(pair, -1) @ mtp.fc.weight.T
        positions = torch.arange(length)[None]
        rotary = reference.model.rotary_emb(x[None], positions.expand(3, 1, -1))
        causal = torch.full((length, length), -torch.inf).triu(1)[None, None]
        expected = normed(layer(x[None], rotary, attention_mask=causal)[0], mtp.norm)

    assert executor.try_allocate(2, 64)
    batch = PrefillBatch.pack(tokens.tolist(), [length], [2], [0], executor.device)
    output = executor.draft_extend(batch, hidden)
    torch.testing.assert_close(output.hidden[0], expected[-1], atol=1e-4, rtol=0)
