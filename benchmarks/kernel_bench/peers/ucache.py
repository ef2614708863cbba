"""Whole steps by FlashInfer's u-cache, in the way of ReplaySSM, beside those of `deferred`.

The same as `deferred.time_step`: all layers verified, then the commit, over a whole period, in
which every slot's ring is folded once. Here a fold is part of a verification, and the commit moves
cursors. The kernel and its check are those of `serving_bench/ucache.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from serving_bench import ucache

from trtllm_treewy.batch import TreeBatch
from trtllm_treewy.runtime.commit_policy import GdnInputs, StateShape

from ..bench import Bench
from ..cases import PATH, Case
from ..clock import Call
from ..commits import slots_for
from ..layer import DTYPES, Layer, new_pool


def step_cases(quick: bool) -> list[Case]:
    """Chains of as many nodes as the kernel takes."""
    return [
        Case("step_deferred", "bf16", "chain", nodes, batch, "bf16")
        for nodes in ucache.WIDTHS
        for batch in ((64,) if quick else (8, 64, 128))
    ]


def measure_steps(bench: Bench, cases: Sequence[Case]) -> dict[str, str]:
    """Adds rows, if the kernel is there and right.

    Returns:
        Why there is none, by its name.
    """
    for case in cases:
        try:
            error = ucache.check_once(torch.device(bench.device), case.nodes)
        except ucache.PeerError as unusable:
            bench.say(str(unusable))
            return {ucache.NAME: str(unusable)}
        note = ""
        us: float | None = None
        try:
            us = time_step(bench, case)
        except Exception as failed:  # a peer's own failure must not end the run
            note = f"{type(failed).__name__}: {failed}"
        bench.rows.append(bench.row(case, us, implementation=ucache.NAME, error=error, note=note))
    return {}


def time_step(bench: Bench, case: Case) -> float:
    """A step's layer, microseconds."""
    dims, slots = bench.dims, slots_for(case.batch)
    pool = new_pool(dims, case.state, slots, bench.device, layers=dims.layers)
    layer = Layer(dims, "chain", case.nodes, case.batch, pool, stash="none")
    drawn = bench.draw_slots(case.batch, 1, slots)
    shape = StateShape(
        layers=dims.layers,
        slots=slots,
        key_heads=dims.key_heads,
        value_heads=dims.value_heads,
        key_dim=dims.key_dim,
        value_dim=dims.value_dim,
        max_batch=case.batch,
        max_nodes=case.nodes,
        state_dtype=DTYPES[case.state],
        activation_dtype=torch.bfloat16,
        device=torch.device(bench.device),
    )
    policy = ucache.UCachePolicy(shape, pool)
    step = step_call(policy, layer, drawn.slot[0])
    steps = check_period(policy, step, drawn.slot[0])

    def before() -> None:
        drawn.draw()
        policy.restart(PATH)

    def period() -> None:
        for _ in range(steps):
            step()

    return bench.clock.us([period], before) / steps / dims.layers


def step_call(policy: ucache.UCachePolicy, layer: Layer, slot: torch.Tensor) -> Call:
    """One step: all layers, and a commit of `PATH` nodes of every row."""
    trees = layer.trees
    tree = TreeBatch(
        torch.zeros_like(trees.parents, dtype=torch.int64),
        trees.parents,
        trees.num_nodes,
        slot,
        torch.zeros_like(trees.num_nodes),
        0,
    )
    accepted = trees.at_depth(PATH)
    # All layers read the first one's columns: they are those that a conv leaves.
    inputs = GdnInputs(layer.q, layer.k, layer.v, layer.a, layer.b, layer.A_log, layer.dt_bias)

    def step() -> None:
        for index in range(layer.dims.layers):
            policy.verify(index, tree, inputs)
        policy.commit(tree, accepted, None)  # type: ignore[arg-type]

    return step


def check_period(policy: ucache.UCachePolicy, step: Call, slot: torch.Tensor) -> int:
    """Runs steps until the rings hold one path again; how many that takes.

    Raises:
        RuntimeError: they hold something else on the way.
    """
    policy.restart(PATH)
    steps, wanted = 0, PATH
    while not steps or wanted != PATH:
        step()
        steps += 1
        wanted = PATH if wanted > ucache.WINDOW - policy.width else wanted + PATH
        held = policy.held(slot)
        if held != [wanted] * len(held):
            raise RuntimeError(
                f"rings hold {held} entries after a step, expected {wanted} each: a period would "
                "not be timed as a whole"
            )
    return steps
