"""The config of one rank's share of a model that is divided over several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .config import ModelConfig


def shard_config(config: ModelConfig, ranks: int) -> ModelConfig:
    """The config of one rank's share: heads, inner sizes and vocabulary divided.

    KV heads that are fewer than ranks are repeated, each on as many ranks.

    Raises:
        ValueError: something does not divide; all of it in one message.
    """
    if ranks < 1:
        raise ValueError(f"tensor parallel size must be >= 1, got {ranks}")
    if ranks == 1:
        return config
    kv_heads = config.num_key_value_heads
    sizes = {
        "num_attention_heads": config.num_attention_heads,
        "linear_num_key_heads": config.linear_num_key_heads,
        "linear_num_value_heads": config.linear_num_value_heads,
        "intermediate_size": config.intermediate_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        "vocab_size": config.vocab_size,
    }
    uneven = [f"{name} {size}" for name, size in sizes.items() if size % ranks]
    if kv_heads % ranks and ranks % kv_heads:
        uneven.append(f"num_key_value_heads {kv_heads}")
    if uneven:
        raise ValueError(f"tensor parallel size {ranks} does not divide {', '.join(uneven)}")
    divided: dict[str, Any] = {name: size // ranks for name, size in sizes.items()}
    # End tokens are ids of the whole vocabulary; a rank's model has no use for them.
    return replace(
        config, num_key_value_heads=max(1, kv_heads // ranks), eos_token_id=(), **divided
    )


def bound_config(config: ModelConfig, ranks: int) -> ModelConfig:
    """What a rank's networks are bound with: its share of the heads, logits of all tokens."""
    return replace(shard_config(config, ranks), vocab_size=config.vocab_size)
