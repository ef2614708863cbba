"""The model definition: weights and arithmetic, no state and no caches."""

from .collectives import SINGLE_RANK, Collectives
from .qwen3_5 import Qwen3_5ForCausalLM
from .steps import AttentionStep, GdnStep

__all__ = ["SINGLE_RANK", "AttentionStep", "Collectives", "GdnStep", "Qwen3_5ForCausalLM"]
