"""Tensor parallel shards: together they are the whole, and they compute what it computes."""

from __future__ import annotations

import pytest
import torch
from checkpoints import hf_config
from gdn_cases import generator
from onnx_cases import LIMITS, random_prompts, random_tree
from torch.nn import functional as F

from trtllm_treewy.config import ModelConfig
from trtllm_treewy.export.sharding import join_shards, shard_config, shard_tensor
from trtllm_treewy.model import Qwen3_5ForCausalLM
from trtllm_treewy.model.rotary import rotary_tables
from trtllm_treewy.runtime.acceptance import greedy_accept
from trtllm_treewy.runtime.executor_torch import TorchExecutor

SIZES = {"vocab_size": 96, "attention_bias": True, "linear_num_key_heads": 4,
         "linear_num_value_heads": 8}  # fmt: skip
KINDS = {"dense": {}, "moe": {"moe": True}, "tied": {"tie_word_embeddings": True}}


def random_model(kind):
    changes = {**SIZES, **KINDS[kind]}
    config = ModelConfig.from_dict(hf_config(moe=changes.pop("moe", False), **changes))
    model = Qwen3_5ForCausalLM(config)
    gen = generator(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=gen) * 0.2)
    return model.eval().requires_grad_(False)


def rank_model(model, ranks, rank):
    part = Qwen3_5ForCausalLM(shard_config(model.config, ranks))
    whole = model.state_dict()
    part.load_state_dict(
        {name: shard_tensor(name, x, model.config, ranks, rank) for name, x in whole.items()}
    )
    return part.eval().requires_grad_(False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_are_the_whole(kind, ranks):
    """Every tensor comes back bit for bit, from shards of the shapes that a rank's model has."""
    model = random_model(kind)
    parts = [rank_model(model, ranks, rank).state_dict() for rank in range(ranks)]
    divided = 0
    for name, tensor in model.state_dict().items():
        joined = join_shards(name, [part[name] for part in parts], model.config)
        assert torch.equal(joined, tensor), name
        divided += parts[0][name].numel() < tensor.numel()
    assert divided > 20 or ranks == 1


class Parallel:
    """Ranks in one process: partial results are summed where a collective would sum them."""

    def __init__(self, model, ranks):
        self.config = model.config
        self.ranks = [TorchExecutor(rank_model(model, ranks, r), LIMITS) for r in range(ranks)]

    def embed(self, token_ids):
        size = self.config.vocab_size // len(self.ranks)
        total = 0
        for rank, executor in enumerate(self.ranks):
            local = token_ids - rank * size
            own = (local >= 0) & (local < size)
            rows = F.embedding(local.clamp(0, size - 1), executor.model.model.embed_tokens.weight)
            total = total + torch.where(own[..., None], rows, 0.0)
        return total

    def layers(self, layers, x, positions, indices, gdn, attention):
        config = self.config
        rotary = rotary_tables(positions, config.rotary_dim, config.rope_theta, x.dtype)
        for parts, index in zip(zip(*layers, strict=True), indices, strict=True):
            normed = parts[0].input_layernorm(x)
            if parts[0].is_linear:
                mixed = [p.linear_attn(normed, index, s) for p, s in zip(parts, gdn, strict=True)]
            else:
                pairs = zip(parts, attention, strict=True)
                mixed = [p.self_attn(normed, rotary, index, s) for p, s in pairs]
            x = x + sum(mixed)
            normed = parts[0].post_attention_layernorm(x)
            # The shared expert's gate is whole on every rank and multiplies each partial sum.
            x = x + sum(p.mlp(normed) for p in parts)
        return x

    def run(self, batch, step):
        models = [executor.model.model for executor in self.ranks]
        x = self.layers(
            [model.layers for model in models],
            self.embed(batch.token_ids),
            batch.positions,
            models[0].layer_index,
            [getattr(executor.state, step)(batch) for executor in self.ranks],
            [getattr(executor.kv_cache, step)(batch) for executor in self.ranks],
        )
        hidden = models[0].norm(x)
        return torch.cat([e.model.logits(hidden) for e in self.ranks], -1), hidden


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
@torch.inference_mode()
def test_ranks_compute_what_the_whole_computes(kind, ranks):
    """Prefill, a random tree, its commit and another tree; KV heads are repeated with 4 ranks."""
    model, gen = random_model(kind), generator(2)
    whole, parallel = TorchExecutor(model, LIMITS), Parallel(model, ranks)
    for executor in (whole, *parallel.ranks):
        assert executor.try_allocate(0, 60)
        assert executor.try_allocate(2, 60)
    batch = random_prompts(gen, 96, [9, 4], [2, 0], [0, 0])
    logits, hidden = parallel.run(batch, "prefill")
    expected = whole.prefill(batch)
    torch.testing.assert_close(hidden, expected.hidden, atol=1e-4, rtol=1e-4)
    contexts = [9, 4]
    for _ in range(2):
        tree = random_tree(gen, 96, [2, 0], contexts, 7)
        logits, hidden = parallel.run(tree, "verify")
        expected = whole.verify(tree)
        torch.testing.assert_close(logits, expected.logits, atol=1e-4, rtol=1e-4)
        target = torch.full_like(tree.token_ids, -1)
        target[:, 0] = tree.token_ids[:, 1]
        acceptance = greedy_accept(tree, target)
        for executor in (whole, *parallel.ranks):
            executor.commit(tree, acceptance)
        moved = acceptance.num_accepted.tolist()
        contexts = [c + n for c, n in zip(contexts, moved, strict=True)]
    states = torch.cat([executor.state.state for executor in parallel.ranks], 2)
    torch.testing.assert_close(states, whole.state.state, atol=1e-4, rtol=1e-4)
    assert sum(contexts) > 9 + 4 + 4


def test_what_does_not_divide_is_told():
    config = ModelConfig.from_dict(hf_config())
    with pytest.raises(ValueError, match="size 3 does not divide num_attention_heads 4"):
        shard_config(config, 3)
    with pytest.raises(ValueError, match=r"does not divide vocab_size 97"):
        shard_config(config, 2)
    whole = random_model("dense")
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\), got 2"):
        shard_tensor("lm_head.weight", whole.lm_head.weight, whole.config, 2, 2)
