"""Time of the commit from inputs: all layers in one launch; a time is a layer's share."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_treewy import cuda_library

from .bench import Bench
from .cases import Case, Dims
from .commits import NODES, Errors, calls_for, commit_tile, slots_for
from .layer import CODES, Layer, new_pool, set_strides


class Inputs:
    """What projections leave of all layers, the windows of all slots and the weights.

    Attributes:
        x [L, B, N, C], conv_state [L, slots, W-1, C], weight [L, C, W], a, b [L, B, N, HV]:
            bfloat16; the gates are columns of one projection.
        A_log, dt_bias: float32 [L, HV].
    """

    def __init__(self, dims: Dims, batch: int, slots: int, device: str) -> None:
        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device).bfloat16()

        layers, heads = dims.layers, dims.value_heads
        self.x = draw(layers, batch, NODES, dims.conv_dim)
        self.conv_state = draw(layers, slots, dims.conv_width - 1, dims.conv_dim)
        self.weight = draw(layers, dims.conv_dim, dims.conv_width)
        self.a, self.b = draw(layers, batch, NODES, 2 * heads).split(heads, -1)
        self.A_log = torch.empty(layers, heads, device=device).uniform_(-3.0, 1.0)
        self.dt_bias = torch.randn(layers, heads, device=device)

    def params(self) -> cuda_library.CommitInputsParams:
        """Parameters that name these tensors, and nothing of the batch yet."""
        params = cuda_library.CommitInputsParams()
        params.weights = cuda_library.ConvWeights(
            weight=self.weight.data_ptr(),
            dtype=CODES[self.weight.dtype],
            width=self.weight.shape[-1],
        )
        params.weight_stride = self.weight.stride(0)
        for name in ("x", "conv_state", "a", "b"):
            tensor = getattr(self, name)
            setattr(params, name, tensor.data_ptr())
            set_strides(params, f"{name}_stride", tensor)
        params.A_log, params.dt_bias = self.A_log.data_ptr(), self.dt_bias.data_ptr()
        params.A_log_stride, params.dt_bias_stride = self.A_log.stride(0), self.dt_bias.stride(0)
        params.dtype = params.gate_dtype = CODES[torch.bfloat16]
        return params


def time_commit_inputs(bench: Bench, case: Case) -> float:
    """`case.nodes` is the length of the path."""
    dims, slots = bench.dims, slots_for(case.batch)
    pool = new_pool(dims, case.state, slots, bench.device, layers=dims.layers)
    layer = Layer(dims, "chain", NODES, case.batch, pool, stash="none")
    inputs = Inputs(dims, case.batch, slots, bench.device)
    accepted, errors = layer.trees.at_depth(case.nodes), Errors(bench.device)
    drawn = bench.draw_slots(case.batch, calls_for(case.batch), slots)
    calls = []
    for slot in drawn.slot:
        params = inputs.params()
        params.tree, params.state = layer.trees.params(slot), layer.states()
        params.accepted, params.errors = accepted.data_ptr(), errors.count.data_ptr()
        params.tile, params.items = commit_tile(case.tile)
        calls.append(bench.call("treewy_commit_inputs", params))
    us = bench.clock.us(calls, drawn.draw)
    errors.check("commit_inputs")
    return us / dims.layers
