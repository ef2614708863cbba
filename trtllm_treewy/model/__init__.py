"""The model definition: weights and arithmetic, no state and no caches."""

from .collectives import SINGLE_RANK, Collectives
from .fused import FusedModel, fuse
from .qwen3_5 import Qwen3_5ForCausalLM
from .steps import AttentionStep, GdnStep, PackedAttentionStep, PackedHeads, StoringStep

__all__ = [
    "SINGLE_RANK",
    "AttentionStep",
    "Collectives",
    "FusedModel",
    "GdnStep",
    "PackedAttentionStep",
    "PackedHeads",
    "Qwen3_5ForCausalLM",
    "StoringStep",
    "fuse",
]
