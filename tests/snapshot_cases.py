"""Random trees for the kernels of `snapshot`, and what they are in float64.

Used by the interpreter's tests and by the GPU's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gdn_cases import (
    Dims,
    expected_step,
    generator,
    projections,
    random_accepted,
    random_slots,
    random_state,
    random_trees,
)
from torch import Tensor

LAYERS, SLOTS = 2, 7
# Relative to the largest value; states of 16 bits are rounded at every sibling.
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass
class SnapshotCase:
    """Trees of B rows in slots of no order, some rows padded, over two layers.

    Attributes:
        raw: the projections of each layer, by name, in the activations' type.
        state: [layers, SLOTS, HV, V, K].
        kept: NaN [layers, B + 1, N + 2, HV, V, K]: a buffer for more rows and nodes than come.
        slot, parents, num_nodes, accepted: of the trees.
    """

    raw: list[dict[str, Tensor]]
    state: Tensor
    kept: Tensor
    slot: Tensor
    parents: Tensor
    num_nodes: Tensor
    accepted: Tensor

    @property
    def trees(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.slot, self.parents, self.num_nodes

    @property
    def rows(self) -> Tensor:
        """The part of the buffer that the trees use."""
        batch, nodes = self.parents.shape
        return self.kept[:, :batch, :nodes]

    @property
    def real(self) -> Tensor:
        """bool [B, N]."""
        index = torch.arange(self.parents.shape[1], device=self.slot.device)
        return (index < self.num_nodes[:, None]) & (self.slot >= 0)[:, None]

    def verify(self, layer: int, tile=None) -> Tensor:
        """By the kernel, into the buffer."""
        from trtllm_treewy.triton_ops.snapshots import verify_snapshots

        return verify_snapshots(
            *self.raw[layer].values(),
            self.state[layer],
            *self.trees,
            states=self.rows[layer],
            tile=tile,
        )

    def expected(self, layer: int) -> tuple[Tensor, Tensor]:
        """Outputs and states of the float64 recurrence."""
        raw, state = self.raw[layer], self.state[layer]
        return expected_step(raw, state, self.slot, self.parents, self.real)

    def check(self, layer: int, out: Tensor, chain: bool = False) -> None:
        """Outputs and snapshots against float64; what is padding is zero, or as it was."""
        want, states = self.expected(layer)
        activations, stored = CLOSE[out.dtype], CLOSE[self.state.dtype]
        exact = chain or self.state.dtype == torch.float32
        close(out[self.real], want[self.real], max(activations, 2e-5 if exact else stored))
        kept = self.rows[layer]
        close(kept[self.real], states[self.real], stored)
        assert not out[~self.real].any()
        assert kept[~self.real].isnan().all()

    def commit(self) -> Tensor:
        """A pool after the kernel's commit of all layers."""
        from trtllm_treewy.triton_ops.snapshots import commit_snapshots

        pool = self.state.clone()
        commit_snapshots(pool, self.slot, self.num_nodes, self.accepted, self.rows)
        return pool

    def committed(self) -> Tensor:
        """What it has to be, to the bit."""
        pool, nodes = self.state.clone(), self.num_nodes.tolist()
        for row, (slot, node) in enumerate(
            zip(self.slot.tolist(), self.accepted.tolist(), strict=True)
        ):
            if slot >= 0 and 0 <= node < nodes[row]:
                pool[:, slot] = self.rows[:, row, node]
        return pool


def close(got: Tensor, want: Tensor, part: float) -> None:
    """To a part of the largest value, everywhere."""
    torch.testing.assert_close(
        got.double(), want, rtol=part, atol=part * float(want.abs().max().clamp(min=1.0))
    )


def make_snapshots(
    seed: int,
    dims: Dims,
    *,
    batch: int = 4,
    nodes: int = 6,
    shape: str = "random",
    decay: str = "mild",
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> SnapshotCase:
    """A case; one row of several has no slot, one keeps its state, one's node is out of range."""
    gen = generator(seed)
    parents, num_nodes = random_trees(gen, batch, nodes, shape=shape)
    slots = max(SLOTS, batch)
    state = random_state(gen, dims, LAYERS, slots, dtype=state_dtype)
    accepted = random_accepted(gen, num_nodes)
    slot = random_slots(gen, batch, slots, pads=1 if batch > 1 else 0)
    if batch > 2:
        first, second = (slot >= 0).nonzero()[:2, 0].tolist()
        accepted[first], accepted[second] = -1, num_nodes[second]
    raw = [projections(gen, dims, batch, nodes, dtype=dtype, decay=decay) for _ in range(LAYERS)]
    kept = state.new_full((LAYERS, batch + 1, nodes + 2, *state.shape[2:]), float("nan"))
    return SnapshotCase(
        [{name: x.to(device) for name, x in layer.items()} for layer in raw],
        *(x.to(device) for x in (state, kept, slot, parents, num_nodes, accepted)),
    )
