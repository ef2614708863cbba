"""What a point needs before it is measured: kernels that are compiled, steps that are captured.

A kernel in Triton is compiled when it is first met with such types and sizes, which takes up to
seconds: in a prompt of a length that was not there before, for one.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trtllm_treewy import triton_ops
from trtllm_treewy.bench.load import PlannedRequest
from trtllm_treewy.runtime.engine import Engine

from .drive import drive
from .engines import MAX_NUM_TOKENS, Built
from .points import AUTO, Point

# Lengths of requests that only warm up, and how often: `auto` has more shapes to meet.
WARM_PROMPT, WARM_OUTPUT, WARM_OUTPUT_AUTO = 32, 24, 128
SHORTEST = 16


class RandomTokens:
    """Stands in for a tokenizer: prompts are random ids, which experts are routed evenly by."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size, self._seed = vocab_size, seed

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids, as many as the text has letters; what it says does not matter."""
        random = np.random.default_rng(self._seed)
        found: list[int] = random.integers(0, self._vocab_size, len(text)).tolist()
        return found


class Compiles:
    """Counts the kernels that Triton compiles, or reads from its cache on disk, from now on.

    Attributes:
        count: so far; None where this Triton does not tell.
    """

    def __init__(self) -> None:
        self.count: int | None = None
        if not triton_ops.installed():
            return
        import triton

        runtime = getattr(getattr(triton, "knobs", None), "runtime", None)
        if hasattr(runtime, "jit_post_compile_hook"):
            self.count = 0
            runtime.jit_post_compile_hook = self._note

    def _note(self, **_: object) -> None:
        self.count = (self.count or 0) + 1


def captured(engine: Engine) -> int:
    """Functions that are captured as graphs by now."""
    graphs = getattr(engine._executor, "graphs", None)
    return 0 if graphs is None else len(graphs._functions)


def warm_up(built: Built, point: Point, vocab_size: int) -> None:
    """Short requests at the point's concurrency: what compiles or is captured late, does so now."""
    limits = built.engine._executor.limits
    count = min(point.arrivals.concurrency or built.slots, built.slots)
    output = WARM_OUTPUT_AUTO if point.site.setting.tree == AUTO else WARM_OUTPUT
    output = max(1, min(output, limits.max_seq_len // 2))
    prompt = max(1, min(WARM_PROMPT, limits.max_seq_len - output))
    tokens = RandomTokens(vocab_size, 1).encode(" " * prompt, False)
    spec = replace(point.load(count, 0), request_rate=None, concurrency=count)
    drive(built.engine, [PlannedRequest(tokens, output, 0.0)] * count, spec)


def prompt_sizes(longest: int) -> list[list[int]]:
    """Prompts by the step that they are run in: of every power of two, alone and several.

    Sizes that 16 divides are compiled apart from others, by Triton, and so are steps of one prompt.
    """
    found, size = [], SHORTEST
    while size <= longest:
        found += [[size], [size - 3], [size - 3, size], [size - 1] * 3]
        size *= 2
    most = max(1, min(longest, MAX_NUM_TOKENS // 16))
    return [*found, [most] * 16, [longest]]


def warm_prompts(built: Built, point: Point, vocab_size: int) -> None:
    """Prompts of all sizes that the point's workload has, each step of them once."""
    longest, tokens = built.engine._executor.limits.max_seq_len - 2, RandomTokens(vocab_size, 2)
    for sizes in prompt_sizes(longest):
        spec = replace(point.load(1, 0), request_rate=None, concurrency=len(sizes))
        # A second token, so that the drafter learns of the prompt.
        requests = [PlannedRequest(tokens.encode(" " * n, False), 2, 0.0) for n in sizes]
        drive(built.engine, requests, spec)
