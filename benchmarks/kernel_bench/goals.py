"""The speeds that the project holds itself to, and how far a run is: a pure function of its rows.

A goal over several cases is judged by its worst. A goal of which some cases were not run, as in the
quick mode, is judged by those that were.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .cases import STATES, Dims
from .floors import Rates, Work, stash_bytes
from .recorded import peer_us
from .results import Results, Row

# Of peers' steps; the same as `serving_bench.ucache.NAME`, which takes torch.
UCACHE = "flashinfer-ucache"


@dataclass(frozen=True)
class Goal:
    """One line of the table.

    Attributes:
        name: what is asked.
        target: the bound, in words.
        measured: the worst value and where, or why there is none.
        met: None where nothing was measured.
    """

    name: str
    target: str
    measured: str
    met: bool | None


@dataclass(frozen=True)
class Value:
    """A measured value of a goal, and where: smaller is better."""

    value: float
    where: str


def at_most(name: str, bound: float, values: Iterable[Value], unit: str = "x") -> Goal:
    """A goal whose every value must not pass a bound."""
    found = list(values)
    target = f"at most {bound:g}{unit}"
    if not found:
        return Goal(name, target, "not measured", None)
    worst = max(found, key=lambda v: v.value)
    where = f" ({worst.where})" if worst.where else ""
    return Goal(name, target, f"{worst.value:.2f}{unit}{where}", worst.value <= bound)


def at_least(name: str, bound: float, values: Iterable[Value]) -> Goal:
    """A goal whose every value must reach a bound."""
    found = list(values)
    target = f"at least {bound:g}x"
    if not found:
        return Goal(name, target, "not measured", None)
    worst = min(found, key=lambda v: v.value)
    return Goal(name, target, f"{worst.value:.2f}x ({worst.where})", worst.value >= bound)


def goals(results: Results, dims: Dims | None = None) -> list[Goal]:
    """All goals of kernels, for a run."""
    return [
        *_floor_goals(results),
        *_flashinfer_goals(results, dims or Dims()),
        *_growth_goals(results),
        *_tree_peer_goals(results),
        *_small_batch_goals(results),
        *_shape_goals(results),
        *_commit_goals(results),
    ]


def _ratios(rows: Iterable[Row]) -> Iterator[Value]:
    for row in rows:
        if row.ratio is not None:
            case = row.case
            yield Value(row.ratio, f"{case.topology} of {case.nodes}, batch {case.batch}")


def _floor_goals(results: Results) -> Iterator[Goal]:
    for state in STATES:
        rows = results.find(operation="tree_verify", state=state, stash="fp32")
        small = [row for row in rows if row.case.nodes <= 16 and row.case.batch >= 64]
        name = f"{state} state, up to 16 nodes, batch 64 and more: time over the floor"
        yield at_most(name, 1.2, _ratios(small))


def _ours(results: Results, state: str, nodes: int, batch: int, stash: str) -> float | None:
    return results.us(
        operation="tree_verify", state=state, topology="tree", nodes=nodes, batch=batch, stash=stash
    )


def _best_stash(results: Results, batch: int) -> tuple[float, str] | None:
    """Of pseudo-values in float32 and bfloat16 with a bfloat16 state, the faster."""
    times = [(_ours(results, "bf16", 16, batch, stash), stash) for stash in ("fp32", "bf16")]
    return min(((us, stash) for us, stash in times if us is not None), default=None)


def _flashinfer_goals(results: Results, dims: Dims) -> Iterator[Goal]:
    """16 nodes, bfloat16 state: against a chain that keeps nothing for its commit."""
    rates = Rates(results.read_bandwidth, 1.0)
    small, large, inputs = [], [], []
    for batch in (1, 8, 32, 64, 128, 256):
        peer = peer_us(results, "flashinfer", "chain", 16, batch)
        if peer is None:
            continue
        where = f"batch {batch}{_source(peer)}"
        best, none = _best_stash(results, batch), _ours(results, "bf16", 16, batch, "none")
        if best is not None and batch <= 64:
            small.append(Value(best[0] / peer[0], f"{where}, u {best[1]}"))
        elif best is not None:
            stash = rates.bytes_us(Work(batch * stash_bytes(dims, best[1], 16), 0))
            large.append(Value(best[0] / (peer[0] + stash), f"{where}, u {best[1]}"))
        if none is not None and batch > 64:
            inputs.append(Value(none / peer[0], where))
    start = "bf16 state, 16 nodes"
    yield at_most(f"{start}, up to batch 64: time over FlashInfer's chain", 1.0, small)
    name = f"{start}, batch 128 and 256: time over FlashInfer's chain and the stash's bytes"
    yield at_most(name, 1.0, large)
    name = f"{start}, batch 128 and 256, input stash: time over FlashInfer's chain"
    yield at_most(name, 1.0, inputs)


def _source(peer: tuple[float, bool]) -> str:
    return "" if peer[1] else ", peer of another run"


def _growth_goals(results: Results) -> Iterator[Goal]:
    base = _ours(results, "bf16", 16, 64, "fp32")
    for nodes, bound in ((40, 1.5), (64, 2.0)):
        us = _ours(results, "bf16", nodes, 64, "fp32")
        values = [Value(us / base, "")] if us is not None and base is not None else []
        yield at_most(f"bf16 state, batch 64: {nodes} nodes over 16 nodes", bound, values)


def _tree_peer_goals(results: Results) -> Iterator[Goal]:
    wanted = (("edge-llm", 15, 7.0), ("edge-llm", 40, 9.0), ("sglang", 40, 40.0))
    for implementation, nodes, bound in wanted:
        name = {"edge-llm": "TensorRT Edge-LLM", "sglang": "SGLang"}[implementation]
        us = _ours(results, "fp32", nodes, 64, "fp32")
        peer = peer_us(results, implementation, "tree", nodes, 64)
        values = []
        if us is not None and peer is not None:
            values = [Value(peer[0] / us, f"{peer[0]:.0f} us{_source(peer)}")]
        yield at_least(f"fp32 state, batch 64, {nodes} nodes: faster than {name}", bound, values)


def _small_batch_goals(results: Results) -> Iterator[Goal]:
    values = []
    for nodes in (4, 15, 40, 64):
        us, peer = _ours(results, "fp32", nodes, 1, "fp32"), None
        peer = peer_us(results, "edge-llm", "tree", nodes, 1)
        if us is not None and peer is not None:
            values.append(Value(us / peer[0], f"{nodes} nodes{_source(peer)}"))
    yield at_most("fp32 state, batch 1: time over TensorRT Edge-LLM's", 0.25, values)
    found = [(_ours(results, state, 16, 1, "fp32"), state) for state in STATES]
    times = [Value(us, f"{state} state") for us, state in found if us is not None]
    yield at_most("batch 1, 16 nodes", 5.0, times, " us")


def _shape_goals(results: Results) -> Iterator[Goal]:
    spreads = []
    for row in results.find(operation="tree_verify", topology="tree", stash="fp32"):
        case = row.case
        chain = results.us(
            operation="tree_verify",
            topology="chain",
            state=case.state,
            nodes=case.nodes,
            batch=case.batch,
            stash=case.stash,
        )
        if chain is not None and row.us is not None:
            where = f"{case.state}, {case.nodes} nodes, batch {case.batch}"
            spreads.append(Value(abs(row.us / chain - 1) * 100, where))
    yield at_most("tree and chain of as many nodes: difference", 3.0, spreads, "%")


def _commit_goals(results: Results) -> Iterator[Goal]:
    values = [
        Value(row.ratio, f"{row.case.state}, batch {row.case.batch}")
        for row in results.find(operation="commit", stash="fp32")
        if row.ratio is not None
    ]
    yield at_most("commit of 4 nodes, all layers: time over the floor", 1.2, values)
    shares = []
    for row in results.find(operation="step_deferred", nodes=16, batch=64):
        case = row.case
        alike = {"state": case.state, "stash": case.stash, "nodes": 16, "batch": 64}
        whole = results.us(operation="step_reconstruct", **alike)
        if whole is not None and row.us is not None:
            shares.append(Value(row.us / whole, f"{case.state} state, u {case.stash}"))
    yield at_most("batch 64, 16 nodes: deferred over reconstruct", 0.7, shares)
    shares = []
    for row in results.find(implementation=UCACHE, operation="step_deferred"):
        ours = results.us(**vars(row.case))  # pseudo-values in bfloat16, as theirs
        if ours is not None and row.us is not None:
            where = f"{row.case.nodes} nodes, batch {row.case.batch}"
            shares.append(Value(ours / row.us, where))
    yield at_most("chains, bf16, u bf16: a deferred step over FlashInfer's u-cache", 1.0, shares)
