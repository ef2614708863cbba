"""Divides the memory there is, before any of it is taken: weights, slots, KV blocks, checkpoints.

Sizes come from `trtllm_treewy.memory_plan` alone, so that what `trtllm-treewy plan` promises is
what an engine admits.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_treewy.memory_plan import MemoryPlan

# Most sequences at once where the number is left to the memory.
MAX_AUTO_BATCH = 1024
# Checkpoints for each slot, where their number is left to the memory.
CHECKPOINTS_PER_SLOT = 2
MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Demand:
    """What is asked for.

    Attributes:
        plan: sizes of one sequence; its context length is the longest sequence.
        policy: commit policy.
        weights: bytes of the model.
        graphs: bytes that steps need besides, whatever the batch.
        graphs_per_row: and for each sequence.
        max_batch_size: sequences at once, None for as many as fit, at most `max_auto_batch`.
        kv_tokens: tokens of the KV cache, None for as many as fit and can be used.
        prefix_cache: whether there are checkpoints.
        checkpoints: how many, None for as many as memory allows, two for each slot at most.
    """

    plan: MemoryPlan
    policy: str
    weights: int
    graphs: int = 0
    graphs_per_row: int = 0
    max_batch_size: int | None = None
    max_auto_batch: int = MAX_AUTO_BATCH
    kv_tokens: int | None = None
    prefix_cache: bool = False
    checkpoints: int | None = None


@dataclass(frozen=True)
class MemoryBudget:
    """The answer: numbers of everything, and what each takes in bytes.

    Attributes:
        available: bytes that may be used; None where there is no telling.
        weights, graphs, slots, stash, kv_cache, checkpoints: bytes of each.
        num_slots, num_blocks, num_checkpoints: how many there are.
    """

    available: int | None
    weights: int
    graphs: int
    slots: int
    stash: int
    kv_cache: int
    checkpoints: int
    num_slots: int
    num_blocks: int
    num_checkpoints: int

    @property
    def total(self) -> int:
        """All that will be allocated."""
        parts = (self.weights, self.graphs, self.slots, self.stash, self.kv_cache)
        return sum(parts) + self.checkpoints


def divide(demand: Demand, available: int | None, where: str) -> MemoryBudget:
    """The budget of `demand` within `available` bytes.

    Every slot gets its state and stash. The KV cache gets what is left, up to `max_seq_len` for
    every slot, and at least one sequence of that length or the tokens that were asked for.

    Args:
        demand: what is asked for.
        available: bytes; None for no limit.
        where: names the memory in messages.

    Raises:
        MemoryError: not even the least fits; the message says what to lower, and by how much.
    """
    batch = demand.max_batch_size
    if batch is None:
        batch = _auto_batch(demand, available)
    least = _budget(demand, available, batch, _least_blocks(demand), _least_checkpoints(demand))
    if available is None:
        return _budget(demand, None, batch, _most_blocks(demand, batch), _most_saved(demand, batch))
    missing = least.total - available
    if missing > 0:
        raise MemoryError(_message(demand, least, available, missing, where))
    room = available - least.total
    saved = least.num_checkpoints
    if demand.prefix_cache and demand.checkpoints is None:
        # A quarter of what is left: rows of the KV cache are needed to get to a checkpoint.
        more = room // 4 // max(1, demand.plan.checkpoint)
        saved = min(_most_saved(demand, batch), saved + more)
        room -= (saved - least.num_checkpoints) * demand.plan.checkpoint
    block = demand.plan.kv_block
    blocks = least.num_blocks + (room // block if block else _most_blocks(demand, batch))
    blocks = max(least.num_blocks, min(blocks, _most_blocks(demand, batch)))
    return _budget(demand, available, batch, blocks, saved)


def _auto_batch(demand: Demand, available: int | None) -> int:
    """As many sequences of the longest length as fit, at least one."""
    if available is None:
        return demand.max_auto_batch
    plan = demand.plan
    each = plan.held(demand.policy) + demand.graphs_per_row
    fixed = demand.weights + demand.graphs + plan.kv_block
    if demand.kv_tokens is None:
        each += plan.blocks(plan.context_length) * plan.kv_block
    else:
        fixed += _least_blocks(demand) * plan.kv_block
    if demand.prefix_cache:
        if demand.checkpoints is None:
            each += CHECKPOINTS_PER_SLOT * plan.checkpoint
        else:
            fixed += demand.checkpoints * plan.checkpoint
    return max(1, min(demand.max_auto_batch, (available - fixed) // max(1, each)))


def _budget(
    demand: Demand, available: int | None, batch: int, blocks: int, checkpoints: int
) -> MemoryBudget:
    plan = demand.plan
    return MemoryBudget(
        available=available,
        weights=demand.weights,
        graphs=demand.graphs + batch * demand.graphs_per_row,
        slots=batch * plan.per_slot(demand.policy),
        stash=batch * plan.per_row(demand.policy),
        kv_cache=(blocks + 1) * plan.kv_block,  # one more takes the writes of padding
        checkpoints=checkpoints * plan.checkpoint,
        num_slots=batch,
        num_blocks=blocks,
        num_checkpoints=checkpoints,
    )


def _least_blocks(demand: Demand) -> int:
    plan = demand.plan
    if demand.kv_tokens is not None:
        return -(-demand.kv_tokens // plan.tokens_per_block)
    return plan.blocks(plan.context_length)


def _most_blocks(demand: Demand, batch: int) -> int:
    if demand.kv_tokens is not None:
        return _least_blocks(demand)
    return batch * demand.plan.blocks(demand.plan.context_length)


def _least_checkpoints(demand: Demand) -> int:
    if not demand.prefix_cache:
        return 0
    return 1 if demand.checkpoints is None else demand.checkpoints


def _most_saved(demand: Demand, batch: int) -> int:
    if not demand.prefix_cache or demand.checkpoints is not None:
        return _least_checkpoints(demand)
    return CHECKPOINTS_PER_SLOT * batch


def _message(demand: Demand, least: MemoryBudget, available: int, missing: int, where: str) -> str:
    plan = demand.plan
    parts = [
        f"weights ({format_bytes(least.weights)})",
        f"states of max_batch_size={least.num_slots} sequences "
        f"({format_bytes(least.slots + least.stash)})",
        f"{least.num_blocks * plan.tokens_per_block} tokens of KV cache "
        f"({format_bytes(least.kv_cache)})",
    ]
    if least.num_checkpoints:
        parts.append(
            f"{least.num_checkpoints} checkpoints of the prefix cache "
            f"({format_bytes(least.checkpoints)})"
        )
    if least.graphs:
        parts.append(f"logits and activations of a step ({format_bytes(least.graphs)})")
    return (
        f"{', '.join(parts[:-1])} and {parts[-1]} exceed the {format_bytes(available)} that may "
        f"be used {where} by {format_bytes(missing)}; {_advice(demand, least, missing)}"
    )


def _advice(demand: Demand, least: MemoryBudget, missing: int) -> str:
    """What to lower, and by how much, so that `missing` bytes are saved."""
    plan, ways = demand.plan, []
    fewer = -(-missing // max(1, plan.held(demand.policy) + demand.graphs_per_row))
    if fewer < least.num_slots:
        ways.append(f"max_batch_size by {fewer}")
    if least.num_checkpoints > 1:
        fewer_saved = -(-missing // max(1, plan.checkpoint))
        if fewer_saved < least.num_checkpoints:
            ways.append(f"kv_cache_config.max_checkpoints by {fewer_saved}")
    fewer_blocks = -(-missing // max(1, plan.kv_block))
    if fewer_blocks < least.num_blocks:
        tokens = fewer_blocks * plan.tokens_per_block
        ways.append(f"the KV tokens (max_seq_len, kv_cache_config.max_tokens) by {tokens}")
    if not ways:
        return "no smaller batch or sequence fits beside the weights; take a smaller dtype or model"
    return f"lower {', or '.join(ways)}"


def format_bytes(amount: int) -> str:
    """MiB or GiB, for people."""
    return f"{amount / GIB:.2f} GiB" if amount >= GIB else f"{amount / MIB:.1f} MiB"
