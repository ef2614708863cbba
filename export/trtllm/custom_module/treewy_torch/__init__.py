"""`torch.ops.treewy.*` in TensorRT-LLM 1.3 and later, which run models in PyTorch.

`trtllm-serve MODEL --custom_module_dirs .../treewy_torch` (also `trtllm-bench` and `trtllm-eval`)
imports this folder before the model is made. It registers the operators, with the CUDA kernels
behind them where `libtreewy.so` is found, and changes nothing else: docs/trtllm.md says what takes
the place of what in the library's GDN layer.
"""

from __future__ import annotations

import logging

from trtllm_treewy import cuda_library, ops

OPERATORS = (
    "tree_conv",
    "tree_verify",
    "commit",
    "conv_commit",
    "commit_inputs",
    "prefill_conv",
    "prefill",
    "greedy_accept",
)

_found = cuda_library.find_library()
logging.getLogger(__name__).info(
    "torch.ops.treewy is registered, with %s",
    "the reference operators alone" if _found is None else f"the kernels of {_found}",
)

__all__ = ["OPERATORS", "ops"]
