"""Tensor parallel shards of a checkpoint's tensors: pure functions of name, tensor and rank.

A rank holds whole heads of the GDN and attention layers, a slice of every feed-forward block's
inner dimension (of every expert's too, so the router stays whole and the load is even), and a range
of the vocabulary. Each mixer and each feed-forward block then yields a partial sum over ranks, the
embedding as well (rows of other ranks count as zero), and the head yields a range of the logits.
Everything else is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trtllm_treewy.config import ModelConfig
from trtllm_treewy.rank_config import shard_config

# Suffix of a name to the dimension that is divided.
_DIVIDED = {
    "embed_tokens.weight": 0,
    "lm_head.weight": 0,
    "q_proj.weight": 0,
    "q_proj.bias": 0,
    "o_proj.weight": 1,
    "in_proj_z.weight": 0,
    "in_proj_a.weight": 0,
    "in_proj_b.weight": 0,
    "A_log": 0,
    "dt_bias": 0,
    "out_proj.weight": 1,
    "gate_proj.weight": 0,
    "up_proj.weight": 0,
    "down_proj.weight": 1,
    "experts.down_proj": 2,
}
_KEY_VALUE = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")
_MIXED = ("in_proj_qkv.weight", "conv1d.weight")
_GATE_UP = "experts.gate_up_proj"
_SUMMED_BIAS = "o_proj.bias"


def shard_tensor(name: str, tensor: Tensor, config: ModelConfig, ranks: int, rank: int) -> Tensor:
    """One rank's share of a tensor, a view where it can be.

    Args:
        name: in the model's `state_dict`.
        tensor: the whole one.
        config: of the whole model.
        ranks, rank: how many there are, and which one.

    Raises:
        ValueError: as for `shard_config`, and for a rank out of range.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be in [0, {ranks}), got {rank}")
    shard_config(config, ranks)
    if name.endswith(_MIXED):
        parts = tensor.split([config.key_dim, config.key_dim, config.value_dim])
        return torch.cat([part.chunk(ranks)[rank] for part in parts])
    if name.endswith(_GATE_UP):
        halves = tensor.chunk(2, dim=1)
        return torch.cat([half.chunk(ranks, dim=1)[rank] for half in halves], dim=1)
    if name.endswith(_KEY_VALUE):
        copies = max(1, ranks // config.num_key_value_heads)
        return tensor.chunk(ranks // copies)[rank // copies]
    if name.endswith(_SUMMED_BIAS):
        return tensor if rank == 0 else torch.zeros_like(tensor)
    dim = _dimension(name)
    return tensor if dim is None else tensor.chunk(ranks, dim=dim)[rank]


def join_shards(name: str, shards: Sequence[Tensor], config: ModelConfig) -> Tensor:
    """The whole tensor from the shares of all ranks, in order; `config` is the whole model's."""
    ranks = len(shards)
    if name.endswith(_MIXED):
        sizes = [size // ranks for size in (config.key_dim, config.key_dim, config.value_dim)]
        parts = zip(*(shard.split(sizes) for shard in shards), strict=True)
        return torch.cat([piece for part in parts for piece in part])
    if name.endswith(_GATE_UP):
        halves = zip(*(shard.chunk(2, dim=1) for shard in shards), strict=True)
        return torch.cat([piece for half in halves for piece in half], dim=1)
    if name.endswith(_KEY_VALUE):
        return torch.cat(list(shards[:: max(1, ranks // config.num_key_value_heads)]))
    if name.endswith(_SUMMED_BIAS):
        return torch.stack(list(shards)).sum(0)
    dim = _dimension(name)
    return shards[0] if dim is None else torch.cat(list(shards), dim=dim)


def _dimension(name: str) -> int | None:
    found = [dim for suffix, dim in _DIVIDED.items() if name.endswith((f".{suffix}", suffix))]
    return found[0] if found else None
