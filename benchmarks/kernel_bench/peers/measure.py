"""Checks peers against the reference, and times those that are right."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..bench import Bench
from ..cases import STATES, Case
from ..check import reference, relative_error
from ..clock import flusher
from ..layer import Layer, new_pool
from ..results import Row
from .peer import Peer

# Of the check. FlashInfer's snapshots take another kernel from four sequences on.
BATCH, SLOTS = 5, 8


def measure_peers(bench: Bench, peers: Sequence[Peer], quick: bool) -> dict[str, str]:
    """Adds rows of all peers that are installed.

    Returns:
        The others, with the reason.
    """
    absent: dict[str, str] = {}
    present: list[Peer] = []
    for peer in peers:
        try:
            peer.load()
            present.append(peer)
        except Exception as error:  # whatever goes wrong in a peer's import is its absence
            absent[peer.name] = f"{type(error).__name__}: {error}"
            bench.say(f"{peer.name} is absent: {absent[peer.name]}")
    for state in STATES:
        theirs = [peer for peer in present if peer.state == state]
        if not theirs:
            continue
        pool = new_pool(bench.dims, state, bench.slots, bench.device)
        for peer in theirs:
            measure_peer(bench, peer, peer.cases(quick), pool)
        del pool
    return absent


def measure_peer(bench: Bench, peer: Peer, cases: Sequence[Case], pool: torch.Tensor) -> None:
    """Adds a row for every case: a time, or why there is none."""
    errors: dict[tuple[str, int], float | str] = {}
    for case in cases:
        shape = case.topology, case.nodes
        if shape not in errors:
            errors[shape] = peer_error(bench, peer, case)
        bench.rows.append(_row(bench, peer, case, pool, errors[shape]))


def _row(bench: Bench, peer: Peer, case: Case, pool: torch.Tensor, error: float | str) -> Row:
    if isinstance(error, str):
        return bench.row(case, None, implementation=peer.name, note=error)
    if not error <= peer.bound:
        note = f"output differs from the reference: relative error {error:.1e}, {peer.bound:.0e}"
        return bench.row(case, None, implementation=peer.name, error=error, note=note)
    try:
        us: float | None = time_peer(bench, peer, case, pool)
        note = ""
    except ValueError as refused:
        us, note = None, str(refused)
    except Exception as failed:  # a peer's own failure must not end the run
        us, note = None, f"{type(failed).__name__}: {failed}"
    return bench.row(case, us, implementation=peer.name, error=error, note=note)


def peer_error(bench: Bench, peer: Peer, case: Case) -> float | str:
    """Relative error of its output over a few sequences; a text where it could not be called."""
    pool = new_pool(bench.dims, case.state, SLOTS, bench.device, seed=1)
    layer = Layer(bench.dims, case.topology, case.nodes, BATCH, pool, stash="none", seed=1)
    slots = bench.draw_slots(BATCH, 1, SLOTS)
    slot = slots.slot[0]
    if not peer.draws_slots:  # it takes the first states of the pool
        slot.copy_(torch.arange(BATCH))
    layer.out.fill_(torch.nan)
    try:
        found = peer.calls(layer, [slot])[0]()
    except Exception as error:  # as above
        return f"{type(error).__name__}: {error}"
    states = pool[0].transpose(-1, -2) if peer.key_major else pool[0]
    truth = reference(layer, slot, states)
    return relative_error(found[:, :, truth.heads], truth.out)


def time_peer(bench: Bench, peer: Peer, case: Case, pool: torch.Tensor) -> float:
    """Microseconds of a call.

    Raises:
        ValueError: the peer must not be called on this shape; the message says why.
    """
    layer = Layer(bench.dims, case.topology, case.nodes, case.batch, pool, stash="none")
    refused = peer.refusal(layer)
    if refused:
        raise ValueError(refused)
    slots = bench.draw_slots(case.batch)
    calls = peer.calls(layer, list(slots.slot))
    before = slots.draw if peer.draws_slots else flusher(bench.device)
    return bench.clock.us(calls, before)
