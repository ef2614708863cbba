"""trtllm-treewy: tree speculative decoding for Gated DeltaNet hybrid models.

    from trtllm_treewy import LLM, SamplingParams

The names below load on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine_config import EngineMismatchError
    from .llm import LLM
    from .llmapi import CudaGraphConfig, KvCacheConfig, MTPDecodingConfig
    from .outputs import AcceptanceStats, CompletionOutput, RequestOutput
    from .sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AcceptanceStats",
    "CompletionOutput",
    "CudaGraphConfig",
    "EngineMismatchError",
    "KvCacheConfig",
    "MTPDecodingConfig",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

_HOME = {
    "LLM": "llm",
    "AcceptanceStats": "outputs",
    "CompletionOutput": "outputs",
    "CudaGraphConfig": "llmapi",
    "EngineMismatchError": "engine_config",
    "KvCacheConfig": "llmapi",
    "MTPDecodingConfig": "llmapi",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
