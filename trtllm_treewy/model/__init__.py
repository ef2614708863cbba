"""The model definition: weights and arithmetic, no state and no caches."""

from .qwen3_5 import Qwen3_5ForCausalLM
from .steps import AttentionStep, GdnStep

__all__ = ["AttentionStep", "GdnStep", "Qwen3_5ForCausalLM"]
