"""Which steps are captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .fields import check_bool, check_int, construct, int_tuple, settings_of

OWNER = "CudaGraphConfig"


@dataclass(frozen=True, kw_only=True)
class CudaGraphConfig:
    """Which steps are captured as CUDA graphs; it has no effect where there is no GPU.

    A decoding step is captured for a number of sequences and a number of nodes, and replayed over
    any trees of that shape. Those of the drafter's own trees are captured when the engine starts,
    others when they are first met. Steps that are not captured run all the same, and are counted.

    Prompt steps are captured when the engine starts, for a few numbers of tokens and of sequences,
    and padded to them. Those of more than `max_prompt_tokens` keep a GPU busy uncaptured.

    Attributes:
        batch_sizes: numbers of sequences; by default 1, 2, 4 and then ever wider steps.
        max_batch_size: the largest of them, at most the engine's `max_batch_size`, which it is
            where this is 0.
        enable_padding: fill smaller batches up to the next size, instead of running them
            uncaptured.
        max_prompt_tokens: tokens of the largest prompt step that is captured, at most the engine's
            `max_num_tokens`; 0 captures none.

    Raises:
        ValueError: a value out of range.
    """

    batch_sizes: tuple[int, ...] | None = None
    max_batch_size: int = 0
    enable_padding: bool = True
    max_prompt_tokens: int = 2048

    def __post_init__(self) -> None:
        """Checks everything."""
        check_int(OWNER, "max_batch_size", self.max_batch_size, 0)
        check_int(OWNER, "max_prompt_tokens", self.max_prompt_tokens, 0)
        check_bool(OWNER, "enable_padding", self.enable_padding)
        if self.batch_sizes is None:
            return
        sizes = int_tuple(OWNER, "batch_sizes", self.batch_sizes)
        if not sizes:
            raise ValueError(
                f"{OWNER}: batch_sizes is empty; leave it out, or set cuda_graph_config=None"
            )
        for size in sizes:
            check_int(OWNER, "each of batch_sizes", size, 1)
        object.__setattr__(self, "batch_sizes", tuple(sorted(set(sizes))))

    def sizes(self, max_batch_size: int) -> tuple[int, ...]:
        """The batch sizes for an engine of so many sequences, ascending; may be empty."""
        most = min(self.max_batch_size or max_batch_size, max_batch_size)
        if self.batch_sizes is not None:
            return tuple(size for size in self.batch_sizes if size <= most)
        steps = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32)]
        steps += range(256, most, 64)
        return (*(size for size in steps if size < most), most)


def cuda_graph_config_from(
    obj: CudaGraphConfig | Mapping[str, Any] | None,
) -> CudaGraphConfig | None:
    """What `LLM(cuda_graph_config=...)` accepts, as the class; None means no graphs.

    Raises:
        ValueError: an unknown key or a bad value.
    """
    if obj is None or isinstance(obj, CudaGraphConfig):
        return obj
    return construct(
        CudaGraphConfig, "cuda_graph_config", settings_of(obj, "cuda_graph_config", CudaGraphConfig)
    )
