"""Kernels in Triton for what the model does beside TreeWY's delta rule, on NVIDIA GPUs.

Each has a torch twin where it is used, which runs everywhere else: `serves` decides which.
Attention over the paged cache, the experts of a mixture, norms, and the delta rule with snapshots,
which is what TreeWY is compared with. Nothing here waits for the device or depends on values on the
host, so all of it can be captured in a CUDA graph.

With TRITON_INTERPRET=1, Triton's interpreter plays the kernels on the CPU; the tests use that.
"""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@lru_cache(maxsize=1)
def installed() -> bool:
    """Whether Triton is there; it comes with torch's CUDA builds for Linux."""
    return find_spec("triton") is not None


def interpreted() -> bool:
    """Whether kernels are played on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@lru_cache(maxsize=16)
def processors(device: torch.device) -> tuple[int, int]:
    """Multiprocessors of a GPU, and bytes of shared memory that a block may have."""
    if device.type != "cuda":
        return 8, 227 * 1024
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 99 * 1024)
    return properties.multi_processor_count, int(shared)


def serves(x: Tensor) -> bool:
    """Whether the kernels take tensors like `x`; if not, plain torch does the work."""
    return isinstance(x, Tensor) and x.dtype in DTYPES and runs_on(x)


def runs_on(x: Tensor) -> bool:
    """Whether kernels run where `x` is, whatever its type."""
    # What stands in for tensors where a model is traced or exported, gets torch's own operators.
    if not isinstance(x, Tensor) or not (x.is_cuda or interpreted()):
        return False
    return installed() and not torch.compiler.is_compiling()
