"""Tensor parallel shards: together they are the whole, and they compute what it computes."""

from __future__ import annotations

import pytest
import torch
from checkpoints import hf_config
from onnx_cases import LIMITS
from parallel_ranks import (
    KINDS,
    Meeting,
    Parallel,
    ThreadedCollectives,
    compare,
    random_model,
    rank_model,
)

from trtllm_treewy.config import ModelConfig, read_json, shipped_configs
from trtllm_treewy.export.sharding import join_shards, shard_tensor
from trtllm_treewy.rank_config import shard_config
from trtllm_treewy.runtime.executor_torch import TorchExecutor


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
@torch.inference_mode()
def test_ranks_compute_what_the_whole_computes(kind, ranks):
    """Prompts, trees and drafts; KV heads are repeated with 4 ranks."""
    model, meeting = random_model(kind), Meeting(ranks)
    ends = [ThreadedCollectives(rank, meeting) for rank in range(ranks)]
    parts = [rank_model(model, ranks, end.rank, end) for end in ends]
    parallel = Parallel([TorchExecutor(part, LIMITS) for part in parts])
    compare(TorchExecutor(model, LIMITS), parallel, model.config)


@pytest.mark.parametrize(("name", "ranks"), [("qwen3.5-35b-a3b", 8), ("qwen3.5-397b-a17b", 16)])
def test_the_shipped_configs_divide(name, ranks):
    """Their end tokens are ids that no rank has."""
    file = shipped_configs()[name]
    config = ModelConfig.from_dict(read_json(file), source=file.name)
    part = shard_config(config, ranks)
    assert part.vocab_size * ranks == config.vocab_size
    assert part.num_key_value_heads == 1
    assert part.linear_num_value_heads * ranks == config.linear_num_value_heads


def test_what_does_not_divide_is_told():
    config = ModelConfig.from_dict(hf_config())
    with pytest.raises(ValueError, match="size 3 does not divide num_attention_heads 4"):
        shard_config(config, 3)
    with pytest.raises(ValueError, match=r"does not divide vocab_size 97"):
        shard_config(config, 2)
    whole = random_model("dense")
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\), got 2"):
        shard_tensor("lm_head.weight", whole.lm_head.weight, whole.config, 2, 2)
