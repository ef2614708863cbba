"""Settings of an `LLM`: speculation and caches, with the names of TensorRT-LLM's LLM API."""

from __future__ import annotations

from .cuda_graphs import (
    CudaGraphConfig,
    cuda_graph_config_from,
)
from .draft_shape import (
    MAX_TREE_NODES,
    MAX_TREE_WIDTH,
)
from .kv_cache import (
    KvCacheConfig,
    kv_cache_config_from,
)
from .speculation import (
    DEFAULT_CHAIN,
    DEFAULT_DYNAMIC_DEPTH,
    DEFAULT_DYNAMIC_DRAFT_TOKENS,
    DEFAULT_DYNAMIC_TOP_K,
    STASHES,
    STATE_COMMITS,
    TREE_POLICIES,
    MTPDecodingConfig,
    StashKind,
    StateCommit,
    TreePolicyName,
    speculation_config_from,
)

__all__ = [
    "CudaGraphConfig",
    "DEFAULT_CHAIN",
    "DEFAULT_DYNAMIC_DEPTH",
    "DEFAULT_DYNAMIC_DRAFT_TOKENS",
    "DEFAULT_DYNAMIC_TOP_K",
    "KvCacheConfig",
    "MAX_TREE_NODES",
    "MAX_TREE_WIDTH",
    "MTPDecodingConfig",
    "STASHES",
    "STATE_COMMITS",
    "StashKind",
    "StateCommit",
    "TREE_POLICIES",
    "TreePolicyName",
    "cuda_graph_config_from",
    "kv_cache_config_from",
    "speculation_config_from",
]
