"""Times of commits: all layers in one launch; a time is a layer's share."""

from __future__ import annotations

import torch

from trtllm_treewy import cuda_library

from .bench import Bench
from .cases import Case, header_tiles, read_header
from .layer import CODES, Layer, Trees, new_pool, set_strides

NODES = 16  # of the trees whose paths are committed
ITEMS = (1, 2, 4, 8)  # tiles of state that a block moves, those tried


class Errors:
    """Counts rows that a commit could not move; there must be none."""

    def __init__(self, device: str) -> None:
        self.count = torch.zeros(1, dtype=torch.int32, device=device)

    def check(self, what: str) -> None:
        """Raises RuntimeError where a row was left behind: the time would be of less work."""
        if int(self.count):
            raise RuntimeError(f"{what}: {int(self.count)} rows could not be moved")


def calls_for(batch: int) -> int:
    """Of a graph: a replay's own start, 6 us, is to be a small part of short calls too."""
    return 8 if batch <= 8 else 2


def slots_for(batch: int) -> int:
    """Of a pool of all layers: enough that the states of a call are cold."""
    return max(2 * batch, 64)


def commit_params(
    layer: Layer, slot: torch.Tensor, accepted: torch.Tensor, errors: Errors, tile: str = "auto"
) -> cuda_library.CommitParams:
    """Parameters of a commit of all layers from pseudo-values."""
    params = cuda_library.CommitParams(
        tree=layer.trees.params(slot),
        state=layer.states(),
        stash=layer.stashed(),
        accepted=accepted.data_ptr(),
        errors=errors.count.data_ptr(),
    )
    params.tile, params.items = commit_tile(tile)
    return params


def commit_tiles() -> list[str]:
    """All ways to cut a commit that can be asked for: "TILE:ITEMS"."""
    tiles = header_tiles(read_header(), "treewy_commit_tile")
    return [f"{name}:{items}" for name in tiles for items in ITEMS]


def commit_tile(name: str) -> tuple[int, int]:
    """Values of the fields `tile` and `items`.

    Raises:
        ValueError: there is no such tile.
    """
    if name == "auto":
        return 0, 0
    tile, _, items = name.partition(":")
    tiles = header_tiles(read_header(), "treewy_commit_tile")
    if tile not in tiles:
        raise ValueError(f"no commit tile {tile!r}, there are {', '.join(tiles)}")
    return tiles[tile], int(items or 0)


def time_commit(bench: Bench, case: Case) -> float:
    """Commit from pseudo-values; `case.nodes` is the length of the path."""
    slots = slots_for(case.batch)
    pool = new_pool(bench.dims, case.state, slots, bench.device, layers=bench.dims.layers)
    layer = Layer(bench.dims, "chain", NODES, case.batch, pool, stash=case.stash)
    if layer.u is not None:
        layer.u.normal_()
    layer.g.uniform_(-1.0, 0.0)
    accepted, errors = layer.trees.at_depth(case.nodes), Errors(bench.device)
    drawn = bench.draw_slots(case.batch, calls_for(case.batch), slots)
    params = [commit_params(layer, slot, accepted, errors, case.tile) for slot in drawn.slot]
    calls = [bench.call("treewy_commit", p) for p in params]
    us = bench.clock.us(calls, drawn.draw)
    errors.check("commit")
    return us / bench.dims.layers


def time_conv_commit(bench: Bench, case: Case) -> float:
    """Windows of all layers; `case.nodes` is the length of the path."""
    dims, slots = bench.dims, slots_for(case.batch)
    taps, device = dims.conv_width - 1, bench.device
    windows = torch.randn(dims.layers, slots, taps, dims.conv_dim, device=device).bfloat16()
    x = torch.randn(dims.layers, case.batch, NODES, dims.conv_dim, device=device).bfloat16()
    trees = Trees("chain", NODES, case.batch, slots, bench.device)
    accepted, errors = trees.at_depth(case.nodes), Errors(bench.device)
    drawn = bench.draw_slots(case.batch, calls_for(case.batch), slots)
    calls = []
    for slot in drawn.slot:
        params = cuda_library.ConvCommitParams(
            tree=trees.params(slot), accepted=accepted.data_ptr(), errors=errors.count.data_ptr()
        )
        params.x, params.conv_state = x.data_ptr(), windows.data_ptr()
        set_strides(params, "x_stride", x)
        set_strides(params, "state_stride", windows)
        params.dtype, params.layers = CODES[x.dtype], dims.layers
        params.channels, params.width = dims.conv_dim, dims.conv_width
        calls.append(bench.call("treewy_conv_commit", params))
    us = bench.clock.us(calls, drawn.draw)
    errors.check("conv_commit")
    return us / dims.layers
