"""Times of the convolutions: of a tree's nodes, and of prompts; one layer a call."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_treewy import cuda_library

from .bench import Bench
from .cases import Case, Dims
from .layer import CODES, Trees, set_strides
from .prompts import Packed


class Convolution:
    """Weights, windows of all slots, inputs and outputs, in bfloat16.

    Attributes:
        x, y: [*rows, C]; the inputs are columns of a wider projection.
        conv_state: [slots, W-1, C].
    """

    def __init__(self, dims: Dims, slots: int, rows: tuple[int, ...], device: str) -> None:
        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device).bfloat16()

        self._dims = dims
        self._weight = draw(dims.conv_dim, dims.conv_width)
        self.conv_state = draw(slots, dims.conv_width - 1, dims.conv_dim)
        self.x = draw(*rows, dims.conv_dim + dims.value_heads)[..., : dims.conv_dim]
        self.y = torch.empty(*rows, dims.conv_dim, dtype=torch.bfloat16, device=device)

    def fill(
        self, params: cuda_library.TreeConvParams | cuda_library.PrefillConvParams
    ) -> cuda_library.TreeConvParams | cuda_library.PrefillConvParams:
        """Name the tensors in the parameters."""
        params.weights = cuda_library.ConvWeights(
            weight=self._weight.data_ptr(), dtype=CODES[torch.bfloat16], width=self._dims.conv_width
        )
        params.x, params.y = self.x.data_ptr(), self.y.data_ptr()
        params.conv_state = self.conv_state.data_ptr()
        set_strides(params, "state_stride", self.conv_state)
        params.dtype, params.channels = CODES[torch.bfloat16], self._dims.conv_dim
        return params


def time_tree_conv(bench: Bench, case: Case) -> float:
    trees = Trees(case.topology, case.nodes, case.batch, bench.slots, bench.device)
    conv = Convolution(bench.dims, bench.slots, (case.batch, case.nodes), bench.device)
    drawn = bench.draw_slots(case.batch)
    calls = []
    for slot in drawn.slot:
        params = conv.fill(cuda_library.TreeConvParams(tree=trees.params(slot)))
        set_strides(params, "x_stride", conv.x)
        set_strides(params, "y_stride", conv.y)
        calls.append(bench.call("treewy_tree_conv", params))
    return bench.clock.us(calls, drawn.draw)


def time_prefill_conv(bench: Bench, case: Case) -> float:
    packed = Packed(case.batch, case.nodes, bench.slots, bench.device)
    conv = Convolution(bench.dims, bench.slots, (packed.tokens,), bench.device)
    drawn = bench.draw_slots(case.batch)
    calls = []
    for slot in drawn.slot:
        params = conv.fill(cuda_library.PrefillConvParams(packed=packed.params(slot)))
        params.x_stride, params.y_stride = conv.x.stride(0), conv.y.stride(0)
        calls.append(bench.call("treewy_prefill_conv", params))
    return bench.clock.us(calls, drawn.draw)
