"""What a step brought a request: its tokens and states, and who else is told of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from .decision import NOT_FINITE
from .drafter import Drafter
from .executor import Executor
from .prefix_cache import PrefixCache
from .request import Request
from .sequence_memory import SequenceMemory
from .stats import EngineStats


class Progress:
    """Enters a step's outcome into the request, the drafter, the prefix cache and the statistics.

    Args:
        executor: has the states that are saved.
        drafter: is told verified tokens and their hidden states.
        memory: knows where a sequence is to be saved.
        prefixes: the prefix cache, None without one.
        stats: counts.
        clock: seconds.
    """

    def __init__(
        self,
        executor: Executor,
        drafter: Drafter,
        memory: SequenceMemory,
        prefixes: PrefixCache | None,
        stats: EngineStats,
        clock: Callable[[], float],
    ) -> None:
        self._executor, self._drafter = executor, drafter
        self._memory, self._prefixes = memory, prefixes
        self._stats, self._clock = stats, clock

    def append(self, request: Request, tokens: Sequence[int]) -> int:
        """Tokens of the output, up to the one that ends it; how many were taken."""
        taken = request.append(tokens)
        self._stats.generated_tokens += taken
        if request.first_token_at is None:
            request.first_token_at = self._clock()
        return taken

    def accept(
        self,
        request: Request,
        path: Sequence[int],
        tokens: Sequence[int],
        num_nodes: int,
        depth: int,
    ) -> None:
        """A verified tree: it is in the state up to the end of `path`, with `tokens` behind.

        Args:
            request: whose tree it was.
            path: accepted nodes, the root first.
            tokens: after each of them, the bonus last.
            num_nodes, depth: of the tree, the root at depth 0.
        """
        request.num_computed += len(path)
        taken = self.append(request, tokens)
        request.stats.record(num_nodes - 1, taken - 1)
        self._stats.record_tree(num_nodes - 1, depth, taken - 1)

    def observe(self, request: Request, tokens: Sequence[int], hidden: Tensor) -> None:
        """Tells the drafter of verified tokens, each with the hidden state [hidden] before it."""
        if request.speculation:
            self._drafter.observe(request.held_slot, tokens, hidden)

    def settle(self, requests: Sequence[Request]) -> None:
        """Enters what the drafter was told of all of these into its cache, in one pass."""
        drafting = [r.held_slot for r in requests if r.speculation and not r.finished]
        self._drafter.settle(*drafting)

    def save(self, request: Request, hidden: Tensor) -> None:
        """Gives the state to the prefix cache, where it is to be saved; `hidden` is its last."""
        if self._prefixes is None or not self._memory.is_save_point(request):
            return
        slot, count = request.held_slot, request.num_computed
        if request.speculation:
            self._drafter.settle(slot)  # its rows are part of what is kept
        self._prefixes.insert(
            request.token_ids[:count],
            self._executor.pages.blocks(slot),
            request.speculation,
            lambda checkpoint: self._executor.save_checkpoint(slot, checkpoint, hidden),
        )

    def fail(self, request: Request, reason: str) -> None:
        """Ends a request whose logits allowed no choice."""
        request.fail(reason)
        self._stats.non_finite_logits += reason == NOT_FINITE
