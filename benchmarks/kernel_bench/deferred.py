"""Times of whole steps by commit policy: every layer verified, then one commit of all layers.

Deferred: histories begin with one path, and a graph holds the steps of a whole period, so that its
last commit folds every history and leaves one path again. The flush is in the time, and replays
repeat the same period. Reconstruct is timed over as many steps. States of all layers are far larger
than the cache, and so cold. A time is of one step's layer.
"""

from __future__ import annotations

import torch

from trtllm_treewy import cuda_library

from .bench import Bench
from .cases import HISTORY, PATH, Case
from .clock import Call
from .commits import Errors, commit_params, slots_for
from .layer import CODES, Layer, new_pool, set_strides


class Histories:
    """Histories of all layers in the stash's types: `PATH` random entries a slot.

    Attributes:
        u [L, slots, H, HV, V], k [L, slots, H, HK, K], g [L, slots, H, HV], length int32 [slots].
    """

    def __init__(self, layer: Layer, capacity: int) -> None:
        dims, (layers, slots) = layer.dims, layer.pool.shape[:2]
        shape = (layers, slots, capacity)
        stash, to = layer.g if layer.u is None else layer.u, {"device": layer.device}
        self.u = torch.randn(*shape, dims.value_heads, dims.value_dim, dtype=stash.dtype, **to)
        self.k = torch.randn(*shape, dims.key_heads, dims.key_dim, dtype=layer.k.dtype, **to)
        self.g = torch.rand(*shape, dims.value_heads, device=layer.device).neg_()
        self.length = torch.empty(slots, dtype=torch.int32, device=layer.device)
        self.capacity = capacity
        self.restart()

    def restart(self) -> None:
        self.length.fill_(PATH)

    def params(self, layer: int = 0) -> cuda_library.History:
        """From this layer on; verification reads one layer, the commit all."""
        params = cuda_library.History(length=self.length.data_ptr(), capacity=self.capacity)
        params.u_dtype, params.k_dtype = CODES[self.u.dtype], CODES[self.k.dtype]
        for name in ("u", "k", "g"):
            tensor = getattr(self, name)
            setattr(params, name, tensor[layer].data_ptr())
            set_strides(params, f"{name}_stride", tensor)
        return params


def time_step(bench: Bench, case: Case) -> float:
    """A step's layer of policy "reconstruct" or "deferred", after the operation's name."""
    slots = slots_for(case.batch)
    pool = new_pool(bench.dims, case.state, slots, bench.device, layers=bench.dims.layers)
    layer = Layer(bench.dims, case.topology, case.nodes, case.batch, pool, stash=case.stash)
    errors, drawn = Errors(bench.device), bench.draw_slots(case.batch, 1, slots)
    histories = Histories(layer, HISTORY) if case.operation == "step_deferred" else None
    accepted = layer.trees.at_depth(PATH)
    commit = commit_params(layer, drawn.slot[0], accepted, errors)
    calls = step_calls(bench, layer, drawn.slot[0], commit, histories)
    if histories is not None:
        check_period(calls, histories, drawn.slot[0])
    steps = HISTORY // PATH

    def before() -> None:
        drawn.draw()
        if histories is not None:
            histories.restart()

    def period() -> None:
        for _ in range(steps):
            for call in calls:
                call()

    us = bench.clock.us([period], before)
    errors.check(case.operation)
    return us / steps / bench.dims.layers


def check_period(calls: list[Call], histories: Histories, slot: torch.Tensor) -> None:
    """Runs a period step by step: histories fill up, and the last commit folds them.

    Raises:
        RuntimeError: they do not, so that a time would not be of a whole period.
    """
    histories.restart()
    for length in [*range(2 * PATH, HISTORY + 1, PATH), PATH]:
        for call in calls:
            call()
        found = histories.length[slot.long()]
        if bool((found != length).any()):
            raise RuntimeError(
                f"histories hold {found.tolist()} entries after a step, expected {length} each: "
                "a period would not be timed as a whole"
            )


def step_calls(
    bench: Bench,
    layer: Layer,
    slot: torch.Tensor,
    commit: cuda_library.CommitParams,
    histories: Histories | None,
) -> list[Call]:
    """The launches of one step."""
    calls = []
    for index in range(bench.dims.layers):
        verify = layer.verify(slot, index)
        if histories is not None:
            verify.history = histories.params(index)
        calls.append(bench.call("treewy_tree_verify", verify))
    if histories is None:
        return [*calls, bench.call("treewy_commit", commit)]
    both = cuda_library.CommitDeferredParams(commit=commit, history=histories.params())
    return [*calls, bench.call("treewy_commit_deferred", both)]
