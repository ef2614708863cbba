"""Tensor parallel shards: together they are the whole, and they compute what it computes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from checkpoints import hf_config
from gdn_cases import generator
from onnx_cases import LIMITS, random_prompts, random_tree

from trtllm_treewy.config import ModelConfig
from trtllm_treewy.export.sharding import join_shards, shard_config, shard_tensor
from trtllm_treewy.model import SINGLE_RANK, Qwen3_5ForCausalLM
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


def rank_model(model, ranks, rank, collectives=SINGLE_RANK):
    part = Qwen3_5ForCausalLM(shard_config(model.config, ranks), collectives)
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


class ThreadedCollectives:
    """Ranks that are threads of one process: each leaves its tensor and takes all."""

    def __init__(self, rank, ranks, shared, barrier):
        self.rank, self.ranks, self._shared, self._barrier = rank, ranks, shared, barrier

    def _exchange(self, x):
        self._shared[self.rank] = x
        self._barrier.wait()
        parts = list(self._shared)
        self._barrier.wait()
        return parts

    def all_reduce(self, x):
        return sum(self._exchange(x.clone()))

    def all_gather(self, x):
        return torch.cat(self._exchange(x), -1)


class Parallel:
    """An executor over every rank, each in a thread; methods give what rank 0 gives."""

    def __init__(self, model, ranks):
        barrier, shared = threading.Barrier(ranks, timeout=60), [None] * ranks
        self.ranks = [
            TorchExecutor(
                rank_model(model, ranks, r, ThreadedCollectives(r, ranks, shared, barrier)), LIMITS
            )
            for r in range(ranks)
        ]
        self.pool = ThreadPoolExecutor(ranks)

    def __getattr__(self, name):
        @torch.inference_mode()
        def run(executor, *args):
            return getattr(executor, name)(*args)

        def on_all(*args):
            calls = [self.pool.submit(run, rank, *args) for rank in self.ranks]
            first, *_ = [call.result() for call in calls]
            return first

        return on_all


def same(actual, expected):
    torch.testing.assert_close(actual.logits, expected.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(actual.hidden, expected.hidden, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
@torch.inference_mode()
def test_ranks_compute_what_the_whole_computes(kind, ranks):
    """Prefill, the drafter's entries and nodes, random trees and their commits.

    KV heads are repeated with 4 ranks.
    """
    model, gen = random_model(kind), generator(2)
    whole, parallel = TorchExecutor(model, LIMITS), Parallel(model, ranks)
    for executor in (whole, parallel):
        assert executor.try_allocate(0, 60)
        assert executor.try_allocate(2, 60)
    batch = random_prompts(gen, 96, [9, 4], [2, 0], [0, 0])
    expected = whole.prefill(batch)
    same(parallel.prefill(batch), expected)
    entries = random_prompts(gen, 96, [8, 3], [2, 0], [0, 0])
    pairs = torch.randn(11, model.config.hidden_size, generator=gen)
    drafted = whole.draft_extend(entries, pairs)
    same(parallel.draft_extend(entries, pairs), drafted)
    slot, offsets = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([[8, 9], [3, 4]])
    mask = torch.arange(11) < torch.tensor([[9, 10], [4, 5]])[..., None]
    token_ids = torch.randint(0, 96, (2, 2), generator=gen)
    hidden = drafted.hidden[:, None].expand(-1, 2, -1)
    nodes = (token_ids, hidden, offsets, slot, offsets, mask)
    same(parallel.draft(*nodes), whole.draft(*nodes))
    contexts = [9, 4]
    for _ in range(2):
        tree = random_tree(gen, 96, [2, 0], contexts, 7)
        same(parallel.verify(tree), whole.verify(tree))
        target = torch.full_like(tree.token_ids, -1)
        target[:, 0] = tree.token_ids[:, 1]
        acceptance = greedy_accept(tree, target)
        for executor in (whole, parallel):
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
