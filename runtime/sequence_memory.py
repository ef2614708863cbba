"""What a sequence takes while it runs: a slot's state, its KV blocks, its start from the cache.

Blocks are taken as a sequence grows, so that many sequences share what few of them will need; the
scheduler preempts one when there are none left.
"""

from __future__ import annotations

from .executor import Executor
from .prefix_cache import CachedPrefix, Match, PrefixCache
from .request import Request
from .stats import EngineStats


class SequenceMemory:
    """Admits and grows sequences, evicting cached prefixes first.

    Args:
        executor: owns slots and pages.
        prefixes: the prefix cache, None without one.
        stats: where hits are counted.
    """

    def __init__(
        self, executor: Executor, prefixes: PrefixCache | None, stats: EngineStats
    ) -> None:
        self._executor = executor
        self._prefixes = prefixes
        self._stats = stats
        # Token counts at which a prompt is saved, by slot.
        self._save_at: dict[int, tuple[int, ...]] = {}

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks of a sequence of `num_tokens`, provisional rows included."""
        limits = self._executor.limits
        return -(-(num_tokens + limits.scratch_rows) // limits.tokens_per_block)

    def try_admit(self, request: Request, others: int) -> CachedPrefix | bool | None:
        """Takes memory for a request's slot: all that it must compute before its next tree.

        Args:
            request: with its slot.
            others: sequences that run and may grow; a block is left for each of them.

        Returns:
            False if there is no room. Otherwise the prefix that it starts from, None for none.
        """
        if self._prefixes is None:
            room = self._fits(self.blocks_needed(request.num_to_prefill) + others)
            return self._seat(request, Match(None, 0)) if room else False
        # The token after the last computed one is known to a request that is resumed.
        tokens = request.token_ids[: request.num_to_prefill]
        match = self._prefixes.match(tokens, request.speculation)
        self._prefixes.pin(match)
        try:
            shared = len(match.prefix.blocks) - 1 if match.prefix is not None else 0
            needed = self.blocks_needed(request.num_to_prefill) - shared + others
            if self._fits(needed):
                return self._seat(request, match)
        finally:
            self._prefixes.unpin(match)
        if match.prefix is None or others:
            return False
        # Nobody else grows, and the cache itself is in the way: its copy and the sequence's do not
        # both fit.
        if not self._fits(self.blocks_needed(request.num_to_prefill)):
            return False
        return self._seat(request, Match(None, match.num_shared))

    def _seat(self, request: Request, match: Match) -> CachedPrefix | bool | None:
        slot, total = request.held_slot, request.num_to_prefill
        if not self._executor.try_allocate(slot, total, match.prefix):
            return False
        prefix = match.prefix
        request.num_computed = request.num_cached = prefix.num_tokens if prefix else 0
        if self._prefixes is not None:
            self._save_at[slot] = self._prefixes.boundaries(
                request.num_computed, total, match.num_shared
            )
            self._stats.prefix_queries += 1
            self._stats.prefix_queried_tokens += total
            self._stats.prefix_hits += prefix is not None
            self._stats.prefix_hit_tokens += request.num_computed
        return prefix

    def may_grow(self, request: Request) -> bool:
        """Whether a request with a slot may need more blocks than it holds."""
        held = len(self._executor.pages.blocks(request.held_slot))
        return held < self.blocks_needed(request.max_total_tokens)

    def try_grow(self, request: Request, ahead: int = 0) -> bool:
        """Makes room for a tree behind what is computed; False if there is none.

        Args:
            request: with its slot.
            ahead: tokens beyond, which a step that is under way may accept.
        """
        slot = request.held_slot
        num_tokens = min(request.num_computed + ahead, request.max_total_tokens)
        needed = self.blocks_needed(num_tokens)
        held = len(self._executor.pages.blocks(slot))
        if held >= needed:
            return True
        return self._fits(needed - held) and self._executor.try_extend(slot, num_tokens)

    def release(self, slot: int) -> None:
        """Forgets what was planned for `slot`."""
        self._save_at.pop(slot, None)

    def next_save(self, request: Request) -> int | None:
        """The number of computed tokens at which the request is to be saved next."""
        if self._prefixes is None:
            return None
        done = request.num_computed
        if request.prompt_done:
            return (done // self._prefixes.interval + 1) * self._prefixes.interval
        return next((n for n in self._save_at.get(request.held_slot, ()) if n > done), None)

    def is_save_point(self, request: Request) -> bool:
        """Whether the request is to be saved as it stands."""
        if self._prefixes is None or not request.num_computed:
            return False
        if request.num_computed % self._prefixes.interval == 0:
            return True
        return request.num_computed in self._save_at.get(request.held_slot, ())

    def _fits(self, num_blocks: int) -> bool:
        if self._executor.pages.free_blocks >= num_blocks:
            return True
        return self._prefixes is not None and self._prefixes.make_room(num_blocks)
