"""Counters of an engine, as plain attributes that a metrics layer may read after any step."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class EngineStats:
    """What an engine has done since it was made, and how full it is after its last step.

    Attributes:
        steps: engine steps.
        step_seconds: time in them.
        requests_added, requests_finished, requests_cancelled, requests_failed: counts.
        queue_seconds: time that requests waited for their first admission, summed.
        admissions: first admissions, the number that `queue_seconds` sums over.
        preemptions: requests that lost their slot to older ones.
        recomputed_tokens: tokens that were in a state that a preemption or a fault dropped.
        prefilled_tokens: tokens run in prompt chunks.
        generated_tokens: tokens of all outputs.
        prefix_queries, prefix_hits: admissions looked up in the prefix cache, and those found.
        prefix_queried_tokens, prefix_hit_tokens: tokens of both.
        trees, drafted_tokens, accepted_tokens: trees verified, their drafts, and those accepted.
        pruned_trees, pruned_tokens: trees cut to the step's token budget, and what was cut.
        accepted_lengths: `accepted_lengths[n]` trees had n drafts accepted.
        accepted_per_depth, drafted_per_depth: `[d]` trees with an accepted draft, and with any
            draft, at depth d + 1.
        graph_steps, graph_misses: steps whose decoding ran as captured graphs, and those in which
            the shape was not captured, or trees had to be pruned, so that the host took part.
        executor_faults: errors raised by an executor or a drafter in a step.
        non_finite_logits: requests that failed by them.
        running, waiting: requests with and without a slot.
        slots_used, slots_total: state slots.
        kv_blocks_used, kv_blocks_cached, kv_blocks_total: pages that are not free, those of them
            that the prefix cache keeps (running sequences may share them), and all there are.
        checkpoints_used, checkpoints_total, checkpoint_evictions: states of the prefix cache.
    """

    steps: int = 0
    step_seconds: float = 0.0
    requests_added: int = 0
    requests_finished: int = 0
    requests_cancelled: int = 0
    requests_failed: int = 0
    queue_seconds: float = 0.0
    admissions: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    trees: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    pruned_trees: int = 0
    pruned_tokens: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    accepted_per_depth: list[int] = field(default_factory=list)
    drafted_per_depth: list[int] = field(default_factory=list)
    graph_steps: int = 0
    graph_misses: int = 0
    executor_faults: int = 0
    non_finite_logits: int = 0
    running: int = 0
    waiting: int = 0
    slots_used: int = 0
    slots_total: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    kv_blocks_total: int = 0
    checkpoints_used: int = 0
    checkpoints_total: int = 0
    checkpoint_evictions: int = 0

    def record_tree(self, num_drafts: int, depth: int, num_accepted: int) -> None:
        """Counts one verified tree of `num_drafts` drafts, the deepest at `depth`."""
        self.trees += 1
        self.drafted_tokens += num_drafts
        self.accepted_tokens += num_accepted
        _count(self.accepted_lengths, num_accepted)
        for level in range(depth):
            _count(self.drafted_per_depth, level)
        for level in range(num_accepted):
            _count(self.accepted_per_depth, level)


def _count(counts: list[int], index: int) -> None:
    counts.extend([0] * (index + 1 - len(counts)))
    counts[index] += 1
