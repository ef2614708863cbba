"""This project's own baseline: the kernel of the policy `snapshot`, with a state of every node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..layer import Layer
from .peer import Peer


class Snapshots(Peer):
    """`triton_ops.snapshots.verify_snapshots`, meant to be as fast as others of its kind."""

    name = "treewy-snapshots"
    distributions = ("triton",)
    state = "fp32"
    shapes = (("chain", 4), ("tree", 15), ("tree", 40))
    quick_shapes = shapes
    stash = "snapshots"

    def load(self) -> None:
        from trtllm_treewy.triton_ops.snapshots import verify_snapshots

        self._kernel = verify_snapshots

    def calls(self, layer: Layer, slots: Sequence[Tensor]) -> list[Callable[[], Tensor]]:
        dims, trees, state = layer.dims, layer.trees, layer.pool[0]
        shape = (layer.batch, layer.nodes, dims.value_heads, dims.value_dim, dims.key_dim)
        states = torch.empty(shape, dtype=state.dtype, device=layer.device)
        given = (layer.q, layer.k, layer.v, layer.a, layer.b, layer.A_log, layer.dt_bias, state)
        return [
            partial(self._kernel, *given, slot, trees.parents, trees.num_nodes, states=states)
            for slot in slots
        ]
