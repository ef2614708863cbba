"""Correctness before time: verification and peers against the float64 reference on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_treewy import ops

from .bench import Bench
from .cases import header_tiles, read_header
from .layer import DTYPES, Layer, new_pool

# Bounds relative to the reference: of float32 u by state, of what is rounded to bfloat16 (the
# output always), of the log decays.
U_BOUND = {"bf16": 1e-5, "fp32": 1e-6}
ROUNDED = 4e-3
G_BOUND = 1e-6
BATCH, SLOTS = 3, 5
HEADS = 4  # value heads compared; the CPU takes its time


@dataclass(frozen=True)
class Truth:
    """The reference's results for the first heads: out, u [B, N, heads, V], g [B, N, heads]."""

    out: Tensor
    u: Tensor
    g: Tensor
    heads: slice


def reference(layer: Layer, slot: Tensor, states: Tensor) -> Truth:
    """Verification in float64.

    Args:
        layer: the inputs.
        slot: int32 [B].
        states: [slots, HV, V, K].
    """
    group = layer.dims.value_heads // layer.dims.key_heads
    heads = min(max(HEADS, group), layer.dims.value_heads) // group * group
    values, keys = slice(0, heads), slice(0, heads // group)
    inputs = [layer.q[:, :, keys], layer.k[:, :, keys], layer.v[:, :, values]]
    inputs += [layer.a[..., values], layer.b[..., values]]
    inputs += [layer.A_log[values], layer.dt_bias[values], states[:, values]]
    wide = [x.double().cpu() for x in inputs]
    trees = (slot.cpu(), layer.trees.parents.cpu(), layer.trees.num_nodes.cpu())
    out, u, g = ops.tree_verify(*wide, *trees)
    return Truth(out, u, g, values)


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Frobenius error over the truth's size; infinite where a value is not finite."""
    error = ((found.double().cpu() - truth).norm() / truth.norm()).item()
    return error if error == error else float("inf")


def check_verify(bench: Bench, quick: bool) -> float:
    """All tiles and stashes, both states, chains and trees. Returns the worst error of float32 u.

    Raises:
        RuntimeError: a result is wrong; the message says which.
        ValueError: the library refuses what every library takes.
    """
    worst = 0.0
    for state in DTYPES:
        for name, tile in {"auto": 0, **header_tiles(read_header(), "treewy_verify_tile")}.items():
            for stash in ("fp32", "bf16", "none") if name == "auto" else ("fp32",):
                is_optional = (name, stash) != ("auto", "fp32")
                for nodes in (16, 40) if quick else (1, 7, 16, 33, 40, 64, 128):
                    for topology in ("chain", "tree"):
                        what = f"tile {name}, stash {stash}, {topology} of {nodes} nodes"
                        try:
                            errors = _errors(bench, state, stash, tile, nodes, topology)
                        except ValueError:
                            if not is_optional:  # a tile of other states, a library without it
                                raise
                            continue
                        _require(errors, state, stash, what)
                        worst = max([worst, *errors[1:2]] if stash == "fp32" else [worst])
    return worst


def _errors(
    bench: Bench, state: str, stash: str, tile: int, nodes: int, topology: str
) -> list[float]:
    """Relative errors of out, and of u and g where they are kept."""
    pool = new_pool(bench.dims, state, SLOTS, bench.device)
    layer = Layer(bench.dims, topology, nodes, BATCH, pool, stash=stash, seed=nodes)
    layer.trees.num_nodes[1] = max(1, nodes - 3)
    slot = torch.tensor([3, 0, -1], dtype=torch.int32, device=bench.device)
    kept = [] if layer.u is None else [layer.u[0], layer.g[0]]
    for tensor in (layer.out, *kept):
        tensor.fill_(torch.nan)
    bench.launch("treewy_tree_verify", layer.verify(slot, tile=tile))
    truth = reference(layer, slot, pool[0])
    pairs = zip([layer.out, *kept], (truth.out, truth.u, truth.g), strict=False)
    return [relative_error(x[:, :, truth.heads], y) for x, y in pairs]


def _require(errors: Sequence[float], state: str, stash: str, what: str) -> None:
    u_bound = ROUNDED if stash == "bf16" else U_BOUND[state]
    bounds = (ROUNDED, u_bound, G_BOUND)
    if not all(error <= bound for error, bound in zip(errors, bounds, strict=False)):
        raise RuntimeError(
            f"tree_verify is wrong: state {state}, {what}: relative errors of out, u, g "
            f"{tuple(errors)}, expected at most {bounds}"
        )
