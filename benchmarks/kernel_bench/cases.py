"""What is measured: the layer's sizes, a case, and the cases of every mode."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

STATES = ("bf16", "fp32")
PATH = 4  # accepted nodes of a commit
HISTORY = 32  # entries of a history of the deferred commit
PROMPT = 512  # tokens

NODES = (1, 2, 4, 8, 15, 16, 24, 32, 40, 64, 96, 128)
BATCHES = (1, 8, 32, 64, 128, 256)
QUICK_NODES = (4, 15, 16, 40, 64)
QUICK_BATCHES = (1, 8, 64, 256)


@dataclass(frozen=True)
class Dims:
    """Sizes of a Gated DeltaNet layer; the default is that of Qwen3.5-35B-A3B."""

    key_heads: int = 16
    value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    layers: int = 30
    conv_width: int = 4

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: q, k and v side by side."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_elements(self) -> int:
        """Elements of a layer's state of one sequence."""
        return self.value_heads * self.value_dim * self.key_dim


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        operation: as `results.OPERATIONS`.
        state: type of the state, "bf16" or "fp32"; "" where the operation has none.
        topology: "chain" or "tree", see `parents_of`; "" where there is none.
        nodes: of a tree; accepted nodes of a commit; tokens of a prompt.
        batch: sequences.
        stash: what verification leaves for the commit: pseudo-values "fp32" or "bf16", "none"
            (a commit computes them from the inputs), "snapshots" (states of all nodes).
        tile: how blocks are cut; "auto" is the library's choice.
    """

    operation: str
    state: str
    topology: str
    nodes: int
    batch: int
    stash: str = "fp32"
    tile: str = "auto"


def parents_of(topology: str, nodes: int) -> list[int]:
    """A chain, or a tree filled level by level; the root is node 0 and has parent -1.

    Nodes have two children where that fills the last level (7, 15, 31 nodes and so on), else three:
    15 nodes are widths (2, 2, 2), 40 nodes are (3, 3, 3).
    """
    if topology == "chain":
        return [node - 1 for node in range(nodes)]
    children = 2 if nodes >= 7 and (nodes & (nodes + 1)) == 0 else 3
    return [(node - 1) // children if node else -1 for node in range(nodes)]


def verify_cases(quick: bool) -> list[Case]:
    """Verification with float32 pseudo-values; a tree of a chain's shape is left out."""
    found = []
    for state in STATES:
        for nodes in QUICK_NODES if quick else NODES:
            for batch in QUICK_BATCHES if quick else BATCHES:
                for topology in ("chain", "tree"):
                    if topology == "chain" or nodes > 3:
                        found.append(Case("tree_verify", state, topology, nodes, batch))
    return found


def stash_cases(quick: bool) -> list[Case]:
    """Verification that leaves bfloat16 pseudo-values, or none."""
    found = []
    for state, stash in (("bf16", "bf16"), ("bf16", "none"), ("fp32", "none")):
        for nodes in (16,) if quick else (4, 16, 40, 64):
            for batch in QUICK_BATCHES if quick else BATCHES:
                found.append(Case("tree_verify", state, "tree", nodes, batch, stash))
    return found


def tile_cases(cases: Iterable[Case], tiles: Sequence[str]) -> list[Case]:
    """Every way to cut blocks, for the cases that leave it to the library."""
    return [
        replace(case, tile=tile)
        for case in cases
        for tile in tiles
        if case.topology != "chain" or case.operation != "tree_verify"
    ]


def commit_cases(quick: bool) -> list[Case]:
    """Commits of all layers: the state from each kind of stash, and the conv windows."""
    found = []
    batches = (1, 64) if quick else (1, 8, 32, 64, 128)
    for state in STATES:
        for stash in ("fp32", "bf16", "none"):
            if (state, stash) != ("fp32", "bf16"):
                operation = "commit_inputs" if stash == "none" else "commit"
                found += [Case(operation, state, "chain", PATH, b, stash) for b in batches]
    found += [Case("conv_commit", "", "chain", PATH, batch, "") for batch in batches]
    return found


def step_cases(quick: bool) -> list[Case]:
    """Whole steps, verification and commit, by policy; chains as in peers that commit too."""
    return [
        Case(operation, state, topology, nodes, batch, stash)
        for topology, nodes in (("tree", 16), ("chain", 4), ("chain", 8))
        for state, stash in (("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "fp32"))
        for batch in ((64,) if quick else (8, 64, 128))
        for operation in ("step_reconstruct", "step_deferred", "step_deferred_apart")
    ]


def phase_cases(quick: bool) -> list[Case]:
    """The phases of a deferred period, alone."""
    operations = ("deferred_verify", "deferred_fold", "deferred_append", "deferred_append_folded")
    return [
        Case(operation, state, "tree", 16, batch, stash)
        for state, stash in (("bf16", "bf16"), ("fp32", "fp32"))
        for batch in ((64,) if quick else (1, 8, 64, 128))
        for operation in operations
    ]


def other_cases(quick: bool) -> list[Case]:
    """Convolution, prompts and acceptance."""
    batches = (1, 64) if quick else BATCHES
    found = [Case("tree_conv", "", "tree", 16, batch, "") for batch in batches]
    found += [Case("greedy_accept", "", "tree", 40, batch, "") for batch in batches]
    for batch in (1, 8):
        found += [Case("prefill", state, "", PROMPT, batch, "") for state in STATES]
        found.append(Case("prefill_conv", "", "", PROMPT, batch, ""))
    return found


def header_tiles(header: str, enumeration: str) -> dict[str, int]:
    """Names and values of a C enumeration of tiles, without the prefix and without AUTO.

    Args:
        header: text of `treewy.h`.
        enumeration: name of the enumeration, such as "treewy_verify_tile".

    Returns:
        For instance {"rows_64": 1}; empty where the header has no such enumeration.
    """
    body = re.search(rf"enum {enumeration} \{{(.*?)\}}", header, re.S)
    if body is None:
        return {}
    prefix = enumeration.upper().removesuffix("_TILE")
    names = re.findall(rf"{prefix}_(\w+) = (\d+)", body.group(1))
    return {name.lower(): int(value) for name, value in names if name != "AUTO"}


def read_header() -> str:
    """Text of the C header of this checkout."""
    root = Path(__file__).resolve().parents[2]
    return (root / "plugins" / "include" / "treewy.h").read_text()
