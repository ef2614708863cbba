"""The flags of this command, in errors of the Python API that speak of its settings."""

from __future__ import annotations

import re

# The flags behind which settings of the Python API stand, for its errors.
FLAG_OF_SETTING = {
    "draft_tree_widths": "--draft-tree-widths",
    "draft_tree_parents": "--draft-tree-parents",
    "use_dynamic_tree=True": "--dynamic-tree",
    "max_total_draft_tokens": "--dynamic-tree",
    "dynamic_tree_max_topK": "--dynamic-tree-top-k",
    "max_draft_len": "--max-draft-len",
    "batch_sizes": "--cuda-graph-batch-sizes",
    "load_format": "--load-format",
    "kv_cache_config.memory_bytes": "--memory",
    "max_batch_size": "--max-batch-size",
    "max_seq_len": "--max-seq-len",
    "max_tokens": "--max-tokens",
    "tree_policy": "--tree-policy",
    "temperature": "--temperature",
    "top_p": "--top-p",
    "top_k": "--top-k",
    "seed": "--seed",
    "num_nodes": "--num-nodes",
    "gpus": "--gpus",
    "python_executable": "--python-executable",
    "tensor_parallel_size": "--tensor-parallel-size",
}


def in_flags(message: str) -> str:
    """A message of the Python API with the flags of this command in place of its settings."""
    for setting, flag in FLAG_OF_SETTING.items():
        # Not within a longer name, such as kv_cache_config.max_tokens, nor within a path.
        message = re.sub(rf"(?<![\w./'\"-]){re.escape(setting)}(?![\w/'\"])", flag, message)
    message = re.sub(
        r"=\((-?\d[-\d, ]*)\)", lambda found: "=" + found[1].replace(" ", "").strip(","), message
    )
    return re.sub(r"^(MTPDecodingConfig|CudaGraphConfig|SamplingParams): ", "", message)
