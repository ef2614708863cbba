"""Shape buckets: the few batch and tree sizes that steps are padded to.

A step of a known shape can be replayed as a CUDA graph, and kernels meet few shapes. Padded rows
have slot -1, padded nodes lie beyond `num_nodes`: both are inert.
"""

from __future__ import annotations

from bisect import bisect_left

NODE_STEPS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def bucket_sizes(largest: int, steps: tuple[int, ...]) -> tuple[int, ...]:
    """The steps below `largest`, and `largest` itself."""
    return (*(size for size in steps if size < largest), largest)


def batch_steps(largest: int) -> tuple[int, ...]:
    """1, 2, 4, and the multiples of 8."""
    return (1, 2, 4, *range(8, largest, 8))


def context_bucket(rows: int, largest: int) -> int:
    """The next power of two, or three quarters of it, from 64 on, that holds so many rows."""
    size = 64
    while size < rows:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return min(size, largest)


class Buckets:
    """Padded shapes for at most `max_batch` rows and `max_nodes` nodes a row.

    Attributes:
        batch, nodes: the sizes, ascending.
    """

    def __init__(self, max_batch: int, max_nodes: int) -> None:
        self.batch = bucket_sizes(max_batch, batch_steps(max_batch))
        self.nodes = bucket_sizes(max_nodes, NODE_STEPS)

    def pad(self, rows: int, nodes: int) -> tuple[int, int]:
        """The smallest shape that holds `rows` trees of up to `nodes` nodes.

        Raises:
            ValueError: more than the largest shape holds.
        """
        if not (0 <= rows <= self.batch[-1] and 0 <= nodes <= self.nodes[-1]):
            raise ValueError(
                f"{rows} rows of {nodes} nodes exceed the largest shape of {self.batch[-1]} rows "
                f"and {self.nodes[-1]} nodes"
            )
        return (
            self.batch[bisect_left(self.batch, rows)],
            self.nodes[bisect_left(self.nodes, nodes)],
        )
