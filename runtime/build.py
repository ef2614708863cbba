"""Puts an engine together: memory budget, model, executor, drafter.

Memory is divided before anything is allocated, the weights included (`engine_memory`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from trtllm_treewy.config import ModelConfig
from trtllm_treewy.llmapi import KvCacheConfig, MTPDecodingConfig
from trtllm_treewy.memory_plan import MemoryPlan
from trtllm_treewy.model import Qwen3_5ForCausalLM

from .acceptance_law import SimulatedSampler, accept_by_depth
from .buckets import Buckets
from .drafter import Drafter, NullDrafter
from .engine import Engine
from .engine_memory import EngineMemory
from .engine_settings import EngineSettings
from .executor import Executor, ExecutorLimits, ExecutorSource
from .executor_distributed import RankGroup
from .executor_torch import TorchExecutor
from .graph_capture import make_decoder
from .memory_budget import MemoryBudget
from .prefix_cache import PrefixCache
from .sampling import AcceptanceRule, SamplingDynamicDrafter, SamplingStaticDrafter
from .scheduler import BatchWait
from .tree_policy import AutoTrees, FullTrees, TreePolicy
from .tree_sampler import TreeSampler

# Tokens between the checkpoints of a long sequence, unless the user says.
DEFAULT_CHECKPOINT_INTERVAL = 1024


def build_engine(
    settings: EngineSettings,
    load: Callable[[], Qwen3_5ForCausalLM],
    *,
    source: ExecutorSource | None = None,
    make_ranks: Callable[[], RankGroup] | None = None,
    capture: Callable[[int, int], None] | None = None,
    free: int | None = None,
    batch_wait: BatchWait | None = None,
) -> tuple[Engine, dict[str, int]]:
    """An engine, and its memory in bytes by name (see `LLM.memory_report`).

    With `make_ranks` the model is divided over several ranks; memory is then each rank's.

    Args:
        settings: of the engine.
        load: gives the model with its weights; called once the memory plan holds.
        source: of the executor in place of the torch one, which loads nothing then. With
            `make_ranks`, what it says of memory holds for each rank, and nothing is made of it.
        make_ranks: starts the ranks, which make their executors in place of `load` and `source`.
        capture: called with (shapes captured, shapes in all).
        free: bytes that may be allocated, the weights included, where that is not what the device
            has left: the model may be there already.
        batch_wait: how long requests wait for others to start with them.

    Raises:
        ValueError: a limit that makes no sense, or speculation that the model cannot do.
        MemoryError: the plan does not fit; the message says what to lower.
        EngineDeadError: a rank could not be started, or could not load its share.
    """
    settings.check()
    if source is not None or make_ranks is not None:
        settings = replace(settings, graphs=None)
    ranks = make_ranks() if make_ranks is not None else None
    try:
        part = None
        if ranks is not None:
            part, free = ranks.config, ranks.free_memory
        memory = EngineMemory(settings, part)
        sizes = memory.sequence()
        budget = memory.divide(sizes, source=source, free=free)
        limits = ExecutorLimits(
            max_batch_size=budget.num_slots,
            max_seq_len=settings.max_seq_len,
            max_nodes=settings.speculation.max_nodes,
            scratch_rows=sizes.scratch_rows,
            num_blocks=budget.num_blocks,
            tokens_per_block=settings.cache.tokens_per_block,
            num_checkpoints=budget.num_checkpoints,
        )
        executor: Executor
        if ranks is not None:
            executor = ranks.start(limits, _options(settings))
        elif source is not None:
            executor = source.make(limits)
        else:
            executor = TorchExecutor(load(), limits, **_options(settings))
        engine = _engine_over(executor, settings, capture, batch_wait)
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise
    return engine, _report(sizes, settings.speculation.state_commit, budget)


def _options(settings: EngineSettings) -> dict[str, Any]:
    """What a torch executor is made with, beside its model and limits."""
    return {
        "state_dtype": settings.state_dtype,
        "kv_dtype": settings.kv_dtype,
        "state_commit": settings.speculation.state_commit,
        "deferred_history": settings.history,
        "max_path": settings.speculation.max_depth + 1,
        "stash": settings.stash,
        "stash_dtype": settings.stash_dtype,
    }


def _engine_over(
    executor: Executor,
    settings: EngineSettings,
    capture: Callable[[int, int], None] | None,
    batch_wait: BatchWait | None,
) -> Engine:
    """The engine over an executor; see `build_engine`."""
    limits, speculation = executor.limits, settings.speculation
    max_num_tokens = settings.max_num_tokens
    drafter = make_drafter(executor, speculation)
    decoder = make_decoder(executor, drafter, speculation, settings.graphs, max_num_tokens, capture)
    # Padding is for graphs and kernels; on a CPU it is work for nothing.
    padded = executor.device.type != "cpu"
    return Engine(
        executor,
        drafter,
        make_sampler(settings.config, executor.device, speculation),
        max_num_tokens,
        prefixes=make_prefix_cache(executor, settings.cache),
        # Trees from the host are pruned to what a step has tokens for; captured ones cannot be.
        policy=make_policy(limits, speculation, None if decoder is None else max_num_tokens),
        batch_wait=batch_wait,
        decoder=decoder,
        buckets=Buckets(limits.max_batch_size, limits.max_nodes) if padded else None,
    )


def make_drafter(executor: Executor, speculation: MTPDecodingConfig) -> Drafter:
    """The drafter that the settings ask for."""
    if speculation.kind == "none":
        return NullDrafter()
    if speculation.kind == "static":
        return SamplingStaticDrafter(executor, speculation.topology())
    return SamplingDynamicDrafter(
        executor,
        max_nodes=speculation.max_nodes,
        max_depth=speculation.max_depth,
        top_k=speculation.top_k,
    )


def make_sampler(
    config: ModelConfig, device: torch.device, speculation: MTPDecodingConfig
) -> TreeSampler:
    """Draws tokens by each request's settings, or by the law that stands in for the model's."""
    rule = AcceptanceRule(speculation.acceptance_rule)
    law = speculation.simulated_acceptance
    if law is None:
        return TreeSampler(config.vocab_size, device, rule)
    return SimulatedSampler(config.vocab_size, device, rule, accept=accept_by_depth(law))


def make_prefix_cache(executor: Executor, cache: KvCacheConfig) -> PrefixCache | None:
    """The prefix cache, where it is on."""
    limits = executor.limits
    if not cache.enable_block_reuse:
        return None
    block = limits.tokens_per_block
    interval = cache.checkpoint_interval
    if interval is None:
        interval = -(-DEFAULT_CHECKPOINT_INTERVAL // block) * block
    return PrefixCache(executor.pages, limits.num_checkpoints, block, interval)


def make_policy(
    limits: ExecutorLimits, speculation: MTPDecodingConfig, max_tokens: int | None
) -> TreePolicy:
    """What limits the trees of each step, to `max_tokens` nodes together where that is given."""
    if speculation.tree_policy != "auto":
        return FullTrees()
    buckets = Buckets(limits.max_batch_size, limits.max_nodes)
    return AutoTrees(buckets.nodes, buckets.batch, max_tokens=max_tokens)


def _report(sizes: MemoryPlan, policy: str, budget: MemoryBudget) -> dict[str, int]:
    return {
        "state_bytes": sizes.per_slot(policy),
        "stash_bytes": sizes.per_row(policy),
        "snapshot_bytes": sizes.snapshots,
        "kv_bytes_per_token": sizes.kv_cache_per_token + sizes.draft_kv_cache_per_token,
        "checkpoint_bytes": sizes.checkpoint,
        "weights_bytes": budget.weights,
        "total_bytes": budget.total,
        "max_batch_size": budget.num_slots,
        "kv_blocks": budget.num_blocks,
        "checkpoints": budget.num_checkpoints,
    }
