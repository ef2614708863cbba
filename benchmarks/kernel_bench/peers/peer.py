"""What a peer's adapter offers, and what adapters share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..cases import BATCHES, QUICK_BATCHES, Case
from ..layer import Layer

INT32_ELEMENTS = 2**31


class Peer(ABC):
    """Somebody else's kernel for verification of one layer.

    Attributes:
        name: in tables and results.
        distributions: its packages, for the versions.
        state: type of its state.
        shapes: (topology, nodes) that it is measured at.
        quick_shapes: those of the quick mode.
        stash: what it leaves behind: "none" or "snapshots".
        bound: greatest relative error of its output against the reference; what it rounds on the
            way is its own affair, so this only tells a right kernel from a wrong call.
        key_major: its states are [slots, HV, K, V], ours [slots, HV, V, K].
        draws_slots: its states are found by slot, which are drawn anew for every replay.
        gates_inside: it computes gates from the raw projections.
    """

    name: str
    distributions: tuple[str, ...]
    state: str
    shapes: Sequence[tuple[str, int]]
    quick_shapes: Sequence[tuple[str, int]]
    stash = "none"
    bound = 1e-2
    key_major = False
    draws_slots = True
    gates_inside = True

    @abstractmethod
    def load(self) -> None:
        """Import it.

        Raises:
            ImportError: it is not installed, or something that it takes is not.
        """

    @abstractmethod
    def calls(self, layer: Layer, slots: Sequence[Tensor]) -> list[Callable[[], Tensor]]:
        """A call for each of the slots, int32 [B]; each returns its output [B, N, HV, V]."""

    def refusal(self, layer: Layer) -> str:
        """Why it must not be called on this shape; empty if it may."""
        return ""

    def cases(self, quick: bool) -> list[Case]:
        """What it is measured at."""
        batches = QUICK_BATCHES if quick else BATCHES
        first = Case("tree_verify", self.state, "chain", 1, 1, self.stash)
        return [
            replace(first, topology=topology, nodes=nodes, batch=batch)
            for topology, nodes in (self.quick_shapes if quick else self.shapes)
            for batch in batches
        ]


def contiguous_projections(layer: Layer) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, a, b of their own, for kernels that do not read a conv's output in place."""
    q, k, v, a, b = (x.contiguous() for x in (layer.q, layer.k, layer.v, layer.a, layer.b))
    return q, k, v, a, b


def gates_of(layer: Layer) -> tuple[Tensor, Tensor]:
    """g and beta, float32 [B, N, HV], for kernels that take them ready made."""
    pre = layer.a.float() + layer.dt_bias
    g = -layer.A_log.exp() * torch.nn.functional.softplus(pre)
    return g, layer.b.float().sigmoid()


def snapshot_elements(layer: Layer) -> int:
    """Elements of the states of all nodes of one layer."""
    return layer.batch * layer.nodes * layer.dims.state_elements
