"""Which sizes an engine is built for: the ranges of the networks' dynamic dimensions."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_treewy.binding_names import DRAFT, PREFILL, bindings
from trtllm_treewy.config import ModelConfig

from .onnx_trees import MAX_NODES

# Rows of a KV block that pools are planned with; a pool of other blocks fits as well.
TOKENS_PER_BLOCK = 32
Shape = tuple[int, ...]


@dataclass(frozen=True)
class BuildLimits:
    """The largest that the engines take.

    Attributes:
        max_batch_size: sequences.
        max_seq_len: tokens of a sequence.
        max_nodes: nodes of a tree, at most 128.
        max_num_tokens: prompt tokens of a step.

    Raises:
        ValueError: a limit below 1, or trees that the plugins do not take.
    """

    max_batch_size: int = 8
    max_seq_len: int = 8192
    max_nodes: int = 64
    max_num_tokens: int = 2048

    def __post_init__(self) -> None:
        for name, value in self.__dict__.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        if self.max_nodes > MAX_NODES:
            raise ValueError(f"max_nodes must be at most {MAX_NODES}, got {self.max_nodes}")
        if self.max_num_tokens < self.max_batch_size:
            raise ValueError(
                f"max_num_tokens must be at least max_batch_size ({self.max_batch_size}), got "
                f"{self.max_num_tokens}"
            )

    @property
    def max_rows(self) -> int:
        """Rows of the KV pools of all sequences, with the sink."""
        blocks = -(-(self.max_seq_len + MAX_NODES) // TOKENS_PER_BLOCK)
        return (blocks * self.max_batch_size + 1) * TOKENS_PER_BLOCK


@dataclass(frozen=True)
class Profile:
    """Smallest, usual and largest shape of each input of a network."""

    shapes: dict[str, tuple[Shape, Shape, Shape]]


def make_profile(network: str, config: ModelConfig, limits: BuildLimits) -> Profile:
    """The profile of one network; inputs of fixed shape are left out."""
    ranges = _ranges(network, limits)
    shapes: dict[str, tuple[Shape, Shape, Shape]] = {}
    for x in bindings(network, config).inputs:
        if not any(isinstance(size, str) for size in x.shape):
            continue
        low, usual, high = (tuple(_size(size, ranges, end) for size in x.shape) for end in range(3))
        shapes[x.name] = low, usual, high
    return Profile(shapes)


def _ranges(network: str, limits: BuildLimits) -> dict[str, Shape]:
    tokens, batch = limits.max_num_tokens, limits.max_batch_size
    usual = min(tokens, 512)
    context = 1, min(limits.max_seq_len, 1024), limits.max_seq_len + MAX_NODES
    ranges: dict[str, Shape] = {
        "B": (1, batch, batch),
        "N": (1, limits.max_nodes, limits.max_nodes),
        "S": context,
        "slots": (1, batch, batch),
        "rows": (1, limits.max_rows, limits.max_rows),
    }
    if network == PREFILL:
        ranges["B"] = 1, 1, batch
        ranges["T"] = ranges["M"] = 1, usual, tokens
    if network == DRAFT:
        # Verified entries come in as many as a prompt's chunk has; logits are of draft nodes.
        ranges["W"] = 1, min(limits.max_nodes, tokens), max(tokens, MAX_NODES)
        ranges["Q"] = 1, min(limits.max_nodes, tokens), MAX_NODES
    return ranges


def _size(size: int | str, ranges: dict[str, Shape], end: int) -> int:
    """A dimension at one end of its range; names may be sums, such as B+1."""
    if isinstance(size, int):
        return size
    parts = size.split("+")
    return sum(ranges[part][end] if part in ranges else int(part) for part in parts)
