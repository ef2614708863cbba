"""The least that a case can take: bytes that must move once, and operations.

Bytes: every input read once, every output written once, whatever stays in the cache between calls
for a benchmark's sake; activations are 2 bytes. Operations count a multiplication and an addition
as two, of the algebra that has the fewest known: dense products with the state, and one term for
each pair of a node and an ancestor. They are set against the rate of a large bfloat16 product.
"""

from __future__ import annotations

from dataclasses import dataclass

from .cases import HISTORY, PATH, Case, Dims, parents_of

ELEMENT = {"bf16": 2, "fp32": 4, "none": 0, "snapshots": 0, "": 0}
ACTIVATION = 2


@dataclass(frozen=True)
class Work:
    """What a call must move and compute, over all layers that it serves."""

    bytes: float
    operations: float

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.operations + other.operations)

    def scaled(self, factor: float) -> Work:
        return Work(self.bytes * factor, self.operations * factor)


@dataclass(frozen=True)
class Rates:
    """What the machine reaches.

    Attributes:
        bandwidth: bytes a second, reading.
        operations: operations a second of a bfloat16 matrix product.
    """

    bandwidth: float
    operations: float

    def bytes_us(self, work: Work) -> float:
        return work.bytes / self.bandwidth * 1e6

    def operations_us(self, work: Work) -> float:
        return work.operations / self.operations * 1e6


def ancestor_pairs(parents: list[int]) -> int:
    """Pairs of a node and one of its proper ancestors."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return sum(depths)


def stash_bytes(dims: Dims, stash: str, nodes: int) -> int:
    """Pseudo-values and log decays of one sequence's nodes; nothing where none are kept."""
    if ELEMENT[stash] == 0:
        return 0
    return nodes * dims.value_heads * (dims.value_dim * ELEMENT[stash] + 4)


def projection_bytes(dims: Dims, nodes: int) -> int:
    """q, k, v, both gates and the output of one sequence's nodes."""
    heads = 2 * dims.key_heads * dims.key_dim + 2 * dims.value_heads * dims.value_dim
    return nodes * ACTIVATION * (heads + 2 * dims.value_heads)


def verify_work(dims: Dims, case: Case) -> Work:
    """One layer: the state read once, projections in, outputs and stash out."""
    state = dims.state_elements * ELEMENT[case.state]
    moved = state + projection_bytes(dims, case.nodes) + stash_bytes(dims, case.stash, case.nodes)
    pairs = ancestor_pairs(parents_of(case.topology, case.nodes))
    products = 4 * case.nodes * dims.state_elements
    gram = 4 * pairs * dims.key_heads * dims.key_dim
    solve = 4 * pairs * dims.value_heads * dims.value_dim
    return Work(moved, products + gram + solve).scaled(case.batch)


def path_work(dims: Dims, case: Case) -> Work:
    """What a commit reads of an accepted path of one sequence and layer, and the update."""
    if case.stash == "none":
        taps = case.nodes + dims.conv_width - 1
        moved = ACTIVATION * (taps * dims.conv_dim + 2 * case.nodes * dims.value_heads)
        operations = 2 * case.nodes * dims.state_elements
    else:
        keys = case.nodes * ACTIVATION * dims.key_heads * dims.key_dim
        moved, operations = stash_bytes(dims, case.stash, case.nodes) + keys, 0
    return Work(moved, operations + 2 * case.nodes * dims.state_elements)


def commit_work(dims: Dims, case: Case) -> Work:
    """All layers: the state read and written once, the stash of the path read."""
    state = Work(2 * dims.state_elements * ELEMENT[case.state], 0)
    return (state + path_work(dims, case)).scaled(case.batch * dims.layers)


def step_work(dims: Dims, case: Case) -> Work:
    """A step of all layers: verification, and the policy's commit of a path of `PATH` nodes.

    Deferred: on average the history of a step is read, a path is appended, and every
    HISTORY / PATH steps the history is folded into the state: written by the verification that has
    read it, or read and written by the commit ("apart"). It holds u as the stash does, and raw
    keys.
    """
    verify = verify_work(dims, case).scaled(dims.layers)
    path = Case("commit", case.state, "chain", PATH, case.batch, case.stash)
    if case.operation == "step_reconstruct":
        return verify + commit_work(dims, path)
    entry = entry_bytes(dims, case)
    period = HISTORY // PATH
    held = (1 + period) / 2 * PATH  # entries that a verification finds, on average
    append = 2 * PATH * entry
    state = dims.state_elements * ELEMENT[case.state]
    fold = 2 * state + HISTORY * entry if case.operation == "step_deferred_apart" else state
    moved = held * entry + append + fold / period
    products = (held * case.nodes * 4 + 2 * PATH) * dims.value_heads * dims.value_dim
    return verify + Work(moved, products).scaled(case.batch * dims.layers)


def entry_bytes(dims: Dims, case: Case) -> int:
    """Of an entry of a history, one sequence and layer."""
    return stash_bytes(dims, case.stash, 1) + ACTIVATION * dims.key_heads * dims.key_dim


def phase_work(dims: Dims, case: Case) -> Work:
    """A phase of a deferred period: verification of one layer, or the append of all."""
    entry = entry_bytes(dims, case)
    if case.operation.startswith("deferred_append"):
        return Work(2 * PATH * entry, 0).scaled(case.batch * dims.layers)
    folds = case.operation == "deferred_fold"
    held = HISTORY if folds else HISTORY - PATH
    moved = held * entry + (dims.state_elements * ELEMENT[case.state] if folds else 0)
    products = held * case.nodes * 4 * dims.value_heads * dims.value_dim
    products += 2 * held * dims.state_elements if folds else 0
    return verify_work(dims, case) + Work(moved, products).scaled(case.batch)


def conv_work(dims: Dims, case: Case) -> Work:
    """One layer: inputs and windows in, outputs out; a commit of all layers moves windows."""
    window = (dims.conv_width - 1) * dims.conv_dim * ACTIVATION
    if case.operation == "conv_commit":
        return Work(2 * window, 0).scaled(case.batch * dims.layers)
    windows = 2 if case.operation == "prefill_conv" else 1
    moved = 2 * case.nodes * dims.conv_dim * ACTIVATION + windows * window
    operations = 2 * case.nodes * dims.conv_dim * dims.conv_width
    return Work(moved, operations).scaled(case.batch)


def prefill_work(dims: Dims, case: Case) -> Work:
    """One layer: the state read and written once; operations of the recurrence's products."""
    state = 2 * dims.state_elements * ELEMENT[case.state]
    moved = state + projection_bytes(dims, case.nodes)
    return Work(moved, 6 * case.nodes * dims.state_elements).scaled(case.batch)


def accept_work(case: Case) -> Work:
    """Tokens and parents in, the path out."""
    return Work(case.batch * case.nodes * 20 + case.batch * (case.nodes * 8 + 16), 0)


def work_of(dims: Dims, case: Case) -> Work:
    """What a call of the case's operation must do.

    Raises:
        ValueError: the operation has no floor.
    """
    if case.operation == "tree_verify":
        return verify_work(dims, case)
    if case.operation in ("commit", "commit_inputs"):
        return commit_work(dims, case)
    if case.operation.startswith("step_"):
        return step_work(dims, case)
    if case.operation.startswith("deferred_"):
        return phase_work(dims, case)
    if case.operation in ("tree_conv", "conv_commit", "prefill_conv"):
        return conv_work(dims, case)
    if case.operation == "prefill":
        return prefill_work(dims, case)
    if case.operation == "greedy_accept":
        return accept_work(case)
    raise ValueError(f"no floor for operation {case.operation!r}")
