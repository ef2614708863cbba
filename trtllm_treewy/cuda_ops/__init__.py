"""The operators on CUDA: `torch.ops.treewy.*` calls the kernels of `libtreewy.so`.

`register()` adds a kernel for "cuda" to each operator that has one. What the kernels do not serve
is decided beforehand by `reason_for_reference`, from types and shapes alone, and goes to the torch
reference; an error of a kernel is raised, never covered up. Nothing here waits for the device:
wrong values in device tensors leave their rows alone, and commits count them (`error_count`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import cuda_library as lib
from .acceptance import greedy_accept
from .call import reference_calls
from .commits import (
    commit,
    commit_deferred,
    commit_deferred_folding,
    commit_inputs,
    flush_history,
    flush_history_folding,
)
from .conv import conv_commit, path_conv, prefill_conv, tree_conv, tree_conv_into
from .errors import _error_counters as _error_counters  # tests start afresh
from .errors import error_count
from .prompts import prefill
from .rules import reason_for_reference, verify_shared_bytes
from .verify import tree_outputs, tree_verify, tree_verify_folding, tree_verify_into

__all__ = [
    "KERNELS",
    "error_count",
    "greedy_accept",
    "reason_for_reference",
    "reference_calls",
    "register",
    "verify_shared_bytes",
]

KERNELS: dict[str, Callable[..., Any]] = {
    "tree_verify": tree_verify,
    "tree_verify_into": tree_verify_into,
    "tree_verify_folding": tree_verify_folding,
    "tree_outputs": tree_outputs,
    "commit": commit,
    "commit_inputs": commit_inputs,
    "commit_deferred": commit_deferred,
    "commit_deferred_folding": commit_deferred_folding,
    "flush_history": flush_history,
    "flush_history_folding": flush_history_folding,
    "tree_conv": tree_conv,
    "tree_conv_into": tree_conv_into,
    "conv_commit": conv_commit,
    "path_conv": path_conv,
    "prefill_conv": prefill_conv,
    "prefill": prefill,
    "greedy_accept": greedy_accept,
}


def register() -> bool:
    """Adds the kernels to the operators, if the library's file is there; called by `ops`.

    The library is loaded by the first call on a GPU, which says so if it is not usable.

    Returns:
        Whether the kernels serve CUDA tensors; if not, the torch reference does.
    """
    from .. import ops

    if lib.find_library() is None:
        return False
    for name, kernel in KERNELS.items():
        getattr(ops, name).register_kernel("cuda", kernel)
    return True
