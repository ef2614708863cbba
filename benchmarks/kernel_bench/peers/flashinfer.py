"""FlashInfer's kernels for chains with a bfloat16 state: output alone, and with snapshots.

Both compile when first called, through nvidia-cutlass-dsl. Read in flashinfer-python 0.7.2.post1,
`flashinfer/gdn_kernels/`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..layer import Layer
from .peer import INT32_ELEMENTS, Peer, contiguous_projections, snapshot_elements

DISTRIBUTIONS = ("flashinfer-python", "nvidia-cutlass-dsl", "apache-tvm-ffi")


class FlashInferOutputOnly(Peer):
    """`gated_delta_rule_mtp` of `gdn_decode_bf16_wy_output_only`: WY form, writes no state.

    It reads A_log and dt_bias rounded to bfloat16, and takes K = V = 128 and up to 16 tokens; its
    compiled descriptors assume tensors aligned to 16 bytes.
    """

    name = "flashinfer"
    distributions = DISTRIBUTIONS
    state = "bf16"
    shapes: Sequence[tuple[str, int]] = (("chain", 4), ("chain", 8), ("chain", 16))
    quick_shapes: Sequence[tuple[str, int]] = (("chain", 16),)
    bound = 3e-2
    module = "flashinfer.gdn_kernels.gdn_decode_bf16_wy_output_only"

    def load(self) -> None:
        self._kernel = importlib.import_module(self.module).gated_delta_rule_mtp

    def calls(self, layer: Layer, slots: Sequence[Tensor]) -> list[Callable[[], Tensor]]:
        q, k, v, a, b = contiguous_projections(layer)
        call = partial(
            self._kernel,
            A_log=layer.A_log,
            a=a,
            dt_bias=layer.dt_bias,
            q=q,
            k=k,
            v=v,
            b=b,
            initial_state_source=layer.pool[0],
            disable_state_update=True,
            use_qk_l2norm_in_kernel=True,
            **self.more(layer),
        )
        return [partial(call, initial_state_indices=slot) for slot in slots]

    def more(self, layer: Layer) -> dict[str, Any]:
        """Further arguments. With 16 tokens it writes the output given; else it makes its own."""
        return {"output": layer.out} if layer.nodes == 16 else {}


class FlashInferSnapshots(FlashInferOutputOnly):
    """`gated_delta_rule_mtp` of `gdn_decode_bf16_state`: a step a token, all states stored."""

    name = "flashinfer-snapshots"
    shapes = (("chain", 4), ("chain", 16))
    quick_shapes = (("chain", 4),)
    stash = "snapshots"
    module = "flashinfer.gdn_kernels.gdn_decode_bf16_state"

    def refusal(self, layer: Layer) -> str:
        elements = snapshot_elements(layer)
        return "" if elements < INT32_ELEMENTS else f"{elements} elements of snapshots"

    def more(self, layer: Layer) -> dict[str, Any]:
        dims = layer.dims
        shape = (layer.batch, layer.nodes, dims.value_heads, dims.value_dim, dims.key_dim)
        snapshots = torch.empty(shape, dtype=torch.bfloat16, device=layer.device)
        return {"output": layer.out, "intermediate_states_buffer": snapshots}
