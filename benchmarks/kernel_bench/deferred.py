"""Times of whole steps by commit policy: every layer verified, then one commit of all layers.

Deferred: histories begin with one path, and a graph holds the steps of a whole period, so that its
last step folds every history and leaves one path again. The fold is in the time, and replays repeat
the same period. Either the last verifications fold ("step_deferred", as the engine does) or the
last commit ("step_deferred_apart"). Reconstruct is timed over as many steps. States of all layers
are far larger than the cache, and so cold. A time is of one step's layer.

The phases of a period are timed alone, too: verification behind a history that stays and behind one
that it folds, and the commit that appends behind either.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_treewy import cuda_library
from trtllm_treewy.op_inputs import Folds

from .bench import Bench
from .cases import HISTORY, PATH, Case
from .clock import Call
from .commits import Errors, commit_params, slots_for
from .layer import CODES, Layer, new_pool, set_strides


class Histories:
    """Histories of all layers in the stash's types, of random entries.

    Args:
        layer: whose stash they are of.
        capacity: entries of a slot, at most.
        folds: verification folds those that one more path of `PATH` does not fit behind.

    Attributes:
        u [L, slots, H, HV, V], k [L, slots, H, HK, K], g [L, slots, H, HV], length int32 [slots].
        folds: what verification has folded, or None.
    """

    def __init__(self, layer: Layer, capacity: int, *, folds: bool = False) -> None:
        dims, (layers, slots) = layer.dims, layer.pool.shape[:2]
        shape = (layers, slots, capacity)
        stash, to = layer.g if layer.u is None else layer.u, {"device": layer.device}
        self.u = torch.randn(*shape, dims.value_heads, dims.value_dim, dtype=stash.dtype, **to)
        self.k = torch.randn(*shape, dims.key_heads, dims.key_dim, dtype=layer.k.dtype, **to)
        self.g = torch.rand(*shape, dims.value_heads, device=layer.device).neg_()
        self.length = torch.empty(slots, dtype=torch.int32, device=layer.device)
        self.capacity = capacity
        self.folds: Folds | None = None
        if folds:
            sizes = layers, slots, dims.value_heads, dims.value_dim
            self.folds = Folds.new(*sizes, torch.device(layer.device))
        self.restart()

    def restart(self, length: int = PATH, folded: bool = False) -> None:
        """Of every slot `length` entries, which the states hold already if `folded`."""
        self.length.fill_(length)
        for flags in self.folds or ():
            flags.fill_(int(folded))

    def params(self, layer: int = 0) -> cuda_library.History:
        """From this layer on; verification reads one layer, the commit all."""
        params = cuda_library.History(length=self.length.data_ptr(), capacity=self.capacity)
        params.u_dtype, params.k_dtype = CODES[self.u.dtype], CODES[self.k.dtype]
        for name in ("u", "k", "g"):
            tensor = getattr(self, name)
            setattr(params, name, tensor[layer].data_ptr())
            set_strides(params, f"{name}_stride", tensor)
        if self.folds is not None:
            params.folded = self.folds.folded[layer].data_ptr()
            params.folding = self.folds.folding.data_ptr()
            set_strides(params, "folded_stride", self.folds.folded)
        return params

    def count_folding(self, slot: torch.Tensor) -> int:
        """Rows of which verification has folded something."""
        return 0 if self.folds is None else int(self.folds.folding[slot.long()].sum())


def time_step(bench: Bench, case: Case) -> float:
    """A step's layer of policy "reconstruct" or "deferred", after the operation's name."""
    slots = slots_for(case.batch)
    pool = new_pool(bench.dims, case.state, slots, bench.device, layers=bench.dims.layers)
    layer = Layer(bench.dims, case.topology, case.nodes, case.batch, pool, stash=case.stash)
    errors, drawn = Errors(bench.device), bench.draw_slots(case.batch, 1, slots)
    histories = None
    if case.operation != "step_reconstruct":
        histories = Histories(layer, HISTORY, folds=case.operation == "step_deferred")
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
    """Runs a period step by step: histories fill up, and the last step folds them.

    Raises:
        RuntimeError: they do not, so that a time would not be of a whole period; or it is not the
            last verification that folds, where it should.
    """
    histories.restart()
    for length in [*range(2 * PATH, HISTORY + 1, PATH), PATH]:
        for call in calls[:-1]:
            call()
        _expect_folding(histories, slot, length == PATH)
        calls[-1]()
        found = histories.length[slot.long()]
        if bool((found != length).any()):
            raise RuntimeError(
                f"histories hold {found.tolist()} entries after a step, expected {length} each: "
                "a period would not be timed as a whole"
            )


def _expect_folding(histories: Histories, slot: torch.Tensor, all_rows: bool) -> None:
    """Raises RuntimeError unless verification has folded something of all rows, or of none."""
    wanted = len(slot) if all_rows and histories.folds is not None else 0
    found = histories.count_folding(slot)
    if found != wanted:
        raise RuntimeError(f"verification folded histories of {found} rows, expected {wanted}")


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
            verify.fold_above = HISTORY - PATH
        calls.append(bench.call("treewy_tree_verify", verify))
    if histories is None:
        return [*calls, bench.call("treewy_commit", commit)]
    both = cuda_library.CommitDeferredParams(commit=commit, history=histories.params())
    return [*calls, bench.call("treewy_commit_deferred", both)]


@dataclass(frozen=True)
class Phase:
    """What a phase of a period finds.

    Attributes:
        length: entries of every history.
        verifies: it is the verification, of one layer; else the commit of all.
        folds: the verification folds them; they are folded, for the commit.
    """

    length: int
    verifies: bool
    folds: bool


def phase_of(operation: str) -> Phase:
    """The phase of an operation "deferred_*"."""
    return {
        "deferred_verify": Phase(HISTORY - PATH, True, False),
        "deferred_fold": Phase(HISTORY, True, True),
        "deferred_append": Phase(PATH, False, False),
        "deferred_append_folded": Phase(HISTORY, False, True),
    }[operation]


def time_phase(bench: Bench, case: Case) -> float:
    """A layer's share of a phase; every call is of another layer, or of all."""
    phase, slots = phase_of(case.operation), slots_for(case.batch)
    pool = new_pool(bench.dims, case.state, slots, bench.device, layers=bench.dims.layers)
    layer = Layer(bench.dims, case.topology, case.nodes, case.batch, pool, stash=case.stash)
    errors, drawn = Errors(bench.device), bench.draw_slots(case.batch, 1, slots)
    histories = Histories(layer, HISTORY, folds=True)
    accepted = layer.trees.at_depth(PATH)  # held as long as parameters name its address
    commit = commit_params(layer, drawn.slot[0], accepted, errors)
    calls = step_calls(bench, layer, drawn.slot[0], commit, histories)
    calls = calls[:-1] if phase.verifies else calls[-1:]

    def before() -> None:
        drawn.draw()
        histories.restart(phase.length, phase.folds and not phase.verifies)

    us = bench.clock.us(calls, before)
    errors.check(case.operation)
    _expect_folding(histories, drawn.slot[0], phase.verifies and phase.folds)
    if phase.verifies:
        return us
    wanted = PATH if phase.folds else phase.length + PATH
    found = histories.length[drawn.slot[0].long()]
    if bool((found != wanted).any()):
        raise RuntimeError(f"histories hold {found.tolist()} entries, expected {wanted} each")
    return us / bench.dims.layers
