"""Times of tree verification, one layer a call."""

from __future__ import annotations

from torch import Tensor

from .bench import Bench
from .cases import Case, header_tiles, read_header
from .layer import Layer, new_pool


class Verification:
    """Times cases over one pool of states, which is kept from case to case.

    Attributes:
        tiles: ways to cut blocks by name, and their numbers.
    """

    def __init__(self) -> None:
        self._pool: tuple[str, Tensor] | None = None
        self.tiles = header_tiles(read_header(), "treewy_verify_tile")

    def pool(self, bench: Bench, state: str) -> Tensor:
        if self._pool is None or self._pool[0] != state:
            self._pool = None  # two of them may not fit
            self._pool = state, new_pool(bench.dims, state, bench.slots, bench.device)
        return self._pool[1]

    def time(self, bench: Bench, case: Case) -> float:
        pool = self.pool(bench, case.state)
        layer = Layer(bench.dims, case.topology, case.nodes, case.batch, pool, stash=case.stash)
        slots = bench.draw_slots(case.batch)
        tile = 0 if case.tile == "auto" else self.tiles[case.tile]
        params = [layer.verify(slot, tile=tile) for slot in slots.slot]
        calls = [bench.call("treewy_tree_verify", p) for p in params]
        return bench.clock.us(calls, slots.draw)
