"""Puts an engine together: limits, memory budget, model, executor, drafter.

Memory is divided before anything is allocated, the weights included (`memory_budget`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import torch

from trtllm_treewy import triton_ops
from trtllm_treewy.config import ModelConfig
from trtllm_treewy.llmapi import CudaGraphConfig, KvCacheConfig, MTPDecodingConfig
from trtllm_treewy.memory_plan import MemoryPlan, plan
from trtllm_treewy.model import Qwen3_5ForCausalLM

from .acceptance_law import SimulatedSampler, accept_by_depth
from .buckets import Buckets
from .commit_policy import choose_stash
from .cuda_graphs import GraphSizes, make_runner
from .decode_graphs import DecodeGraphs, GraphOptions, accept_greedily, buffer_sizes
from .device_decoder import DeviceDecoder, is_chain
from .device_memory import free_memory
from .drafter import Drafter, NullDrafter
from .engine import Engine
from .executor import Executor, ExecutorLimits, ExecutorSource
from .executor_distributed import RankGroup
from .executor_torch import TorchExecutor
from .head import ROWS as HEAD_ROWS
from .memory_budget import MAX_AUTO_BATCH, Demand, MemoryBudget, divide
from .prefix_cache import PrefixCache
from .prompt_buffers import prompt_shapes
from .prompt_graphs import PromptGraphs
from .sampling import AcceptanceRule, SamplingDynamicDrafter, SamplingStaticDrafter
from .scheduler import BatchWait
from .static_drafts import draft_entries
from .tree_policy import AutoTrees, FullTrees, TreePolicy
from .tree_sampler import TreeSampler

# What may be taken of the memory that is free, unless the user says.
DEFAULT_MEMORY_FRACTION = 0.9
# Tokens between the checkpoints of a long sequence, unless the user says.
DEFAULT_CHECKPOINT_INTERVAL = 1024
# What a graph takes for each kernel that it launches, and kernels of a layer: measured roughly.
GRAPH_KERNEL_BYTES, GRAPH_LAYER_KERNELS = 8 << 10, 40
# Kernels of a layer in a prompt step, and what a token of it has in static buffers, ids and rows
# and its tile of attention, beside the hidden state.
PROMPT_LAYER_KERNELS, PROMPT_TOKEN_BYTES = 20, 64
# Host-side tables have a row for each slot.
MAX_BATCH_SIZE = 1 << 16


class StashOptions(TypedDict):
    """What commits work from: see `commit_policy.make_policy`."""

    stash: str
    stash_dtype: torch.dtype


def build_engine(
    config: ModelConfig,
    load: Callable[[], Qwen3_5ForCausalLM],
    speculation: MTPDecodingConfig,
    cache: KvCacheConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_batch_size: int | None,
    max_seq_len: int,
    max_num_tokens: int,
    source: ExecutorSource | None = None,
    make_ranks: Callable[[], RankGroup] | None = None,
    graphs: CudaGraphConfig | None = None,
    capture: Callable[[int, int], None] | None = None,
    free: int | None = None,
    batch_wait: BatchWait | None = None,
) -> tuple[Engine, dict[str, int]]:
    """An engine, and its memory in bytes by name (see `LLM.memory_report`).

    With `make_ranks` the model is divided over several ranks; memory is then each rank's.

    Args:
        config: the model's, of the whole.
        load: gives the model with its weights; called once the memory plan holds.
        speculation, cache: validated settings.
        dtype, device: activation type and place of the model that `load` gives.
        max_batch_size, max_seq_len, max_num_tokens: see `LLM`.
        source: of the executor in place of the torch one, which loads nothing then. With
            `make_ranks`, what it says of memory holds for each rank, and nothing is made of it.
        make_ranks: starts the ranks, which make their executors in place of `load` and `source`.
        graphs: which steps are captured, None for none; those of the torch executor alone can be.
        capture: called with (shapes captured, shapes in all).
        free: bytes that may be allocated, the weights included, where that is not what `device` has
            left: the model may be there already.
        batch_wait: how long requests wait for others to start with them, None for not at all.

    Raises:
        ValueError: a limit that makes no sense, or speculation that the model cannot do.
        MemoryError: the plan does not fit; the message says what to lower.
        EngineDeadError: a rank could not be started, or could not load its share.
    """
    check_speculation(speculation, config)
    check_limits(config, max_batch_size, max_seq_len, max_num_tokens)
    stash = _stash_options(speculation, cache)
    if source is not None or make_ranks is not None:
        graphs = None
    ranks = make_ranks() if make_ranks is not None else None
    try:
        part = config
        if ranks is not None:
            part, free = ranks.config, ranks.free_memory
        sizes = plan_sequence(part, speculation, cache, dtype, max_seq_len, stash["stash"])
        budget = plan_memory(
            part,
            sizes,
            speculation,
            cache,
            dtype,
            device,
            max_batch_size,
            max_num_tokens,
            source,
            vocab_size=config.vocab_size,
            free=free,
            graphs=graphs,
        )
        limits = ExecutorLimits(
            max_batch_size=budget.num_slots,
            max_seq_len=max_seq_len,
            max_nodes=speculation.max_nodes,
            scratch_rows=sizes.scratch_rows,
            num_blocks=budget.num_blocks,
            tokens_per_block=cache.tokens_per_block,
            num_checkpoints=budget.num_checkpoints,
        )
        options: dict[str, Any] = {
            "state_dtype": getattr(torch, cache.state_dtype),
            "kv_dtype": _kv_dtype(cache, dtype),
            "state_commit": speculation.state_commit,
            "deferred_history": _history(speculation),
            "max_path": speculation.max_depth + 1,
            **stash,
        }
        executor: Executor
        if ranks is not None:
            executor = ranks.start(limits, options)
        elif source is not None:
            executor = source.make(limits)
        else:
            executor = TorchExecutor(load(), limits, **options)
        engine = _engine_over(
            executor, config, speculation, cache, graphs, max_num_tokens, capture, batch_wait
        )
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise
    return engine, _report(sizes, speculation.state_commit, budget)


def _engine_over(
    executor: Executor,
    config: ModelConfig,
    speculation: MTPDecodingConfig,
    cache: KvCacheConfig,
    graphs: CudaGraphConfig | None,
    max_num_tokens: int,
    capture: Callable[[int, int], None] | None,
    batch_wait: BatchWait | None,
) -> Engine:
    """The engine over an executor; see `build_engine`."""
    limits = executor.limits
    drafter = make_drafter(executor, speculation)
    decoder = make_decoder(executor, drafter, speculation, graphs, max_num_tokens, capture)
    # Padding is for graphs and kernels; on a CPU it is work for nothing.
    padded = executor.device.type != "cpu"
    return Engine(
        executor,
        drafter,
        make_sampler(config, executor.device, speculation),
        max_num_tokens,
        prefixes=make_prefix_cache(executor, cache),
        # Trees from the host are pruned to what a step has tokens for; captured ones cannot be.
        policy=make_policy(limits, speculation, None if decoder is None else max_num_tokens),
        batch_wait=batch_wait,
        decoder=decoder,
        buckets=Buckets(limits.max_batch_size, limits.max_nodes) if padded else None,
    )


def check_speculation(speculation: MTPDecodingConfig, config: ModelConfig) -> None:
    """Raises ValueError where the settings ask for what this model cannot draft."""
    if not speculation.enabled:
        return
    if not config.mtp_num_hidden_layers:
        raise ValueError(
            "speculative_config asks for MTP drafts, but the model has no MTP module "
            "(mtp_num_hidden_layers is 0)"
        )
    # A dynamic tree considers as many candidates as there are; a fixed one must be filled.
    if speculation.kind == "static" and speculation.top_k > config.vocab_size:
        raise ValueError(
            f"speculative_config drafts {speculation.top_k} tokens below a node, the vocabulary "
            f"has {config.vocab_size}"
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


def graph_options(
    graphs: CudaGraphConfig, speculation: MTPDecodingConfig, max_batch_size: int
) -> GraphOptions | None:
    """What is captured; None where no batch size is left."""
    batch = graphs.sizes(max_batch_size)
    if not batch:
        return None
    static, auto = speculation.kind == "static", speculation.tree_policy == "auto"
    most = speculation.max_nodes
    nodes = (1, most) if static and not auto else Buckets(1, most).nodes
    law = speculation.simulated_acceptance
    return GraphOptions(
        GraphSizes(batch, tuple(sorted(set(nodes))), graphs.enable_padding),
        max_path=speculation.max_depth + 1,
        topology=speculation.topology() if static else None,
        accept=accept_greedily if law is None else accept_by_depth(law),
        # Of a chain the nodes say it all.
        report_trees=auto and static and not is_chain(speculation.topology()),
        all_nodes=auto and static,
    )


def make_decoder(
    executor: Executor,
    drafter: Drafter,
    speculation: MTPDecodingConfig,
    graphs: CudaGraphConfig | None,
    max_num_tokens: int,
    capture: Callable[[int, int], None] | None = None,
) -> DeviceDecoder | None:
    """Captures the executor's steps; what decodes by them alone, None where nothing does.

    Dynamic trees are grown on the host: their verification and commit are captured, no more.
    """
    if graphs is None or not isinstance(executor, TorchExecutor):
        return None
    batch = executor.limits.max_batch_size
    options = graph_options(graphs, speculation, batch)
    if options is None:
        warnings.warn(
            f"steps are not captured as CUDA graphs: cuda_graph_config.batch_sizes are "
            f"{list(graphs.batch_sizes or ())}, and none is left of them with max_batch_size "
            f"{batch}"
            + (f", and its own of {graphs.max_batch_size}" if graphs.max_batch_size else ""),
            stacklevel=2,
        )
        return None
    weight, config = executor.model.model.embed_tokens.weight, executor.model.config
    if config.is_moe and weight.is_cuda and not triton_ops.serves(weight):
        warnings.warn(
            f"steps are not captured as CUDA graphs: the experts in {weight.dtype} without Triton "
            "are run one by one from the host",
            stacklevel=2,
        )
        return None
    runner = make_runner(executor.device)
    made = executor.make_graphs(runner, options)
    # Prompts first: what has the most activations makes the pool that the others find.
    parts: list[PromptGraphs | DecodeGraphs] = [made]
    shapes = prompt_shapes(min(graphs.max_prompt_tokens, max_num_tokens), batch)
    if shapes:
        parts.insert(0, executor.make_prompt_graphs(runner, shapes, speculation.enabled))
    _capture_all(parts, capture)
    if speculation.kind == "dynamic":
        return None
    return DeviceDecoder(made, getattr(drafter, "cache", None))


def _capture_all(
    parts: Sequence[PromptGraphs | DecodeGraphs], progress: Callable[[int, int], None] | None
) -> None:
    """Captures all parts one after the other; `progress` is told of them as of one."""
    total, before = sum(part.num_shapes for part in parts), 0
    for part in parts:

        def tell(done: int, _: int, before: int = before) -> None:
            if progress is not None:
                progress(before + done, total)

        part.capture_all(tell)
        before += part.num_shapes


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


def check_limit(name: str, value: Any) -> None:
    """Raises ValueError unless a limit is an integer above 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}")


def check_limits(
    config: ModelConfig, max_batch_size: int | None, max_seq_len: int, max_num_tokens: int
) -> None:
    """Raises ValueError for limits that make no sense."""
    for name, value in (
        ("max_batch_size", 1 if max_batch_size is None else max_batch_size),
        ("max_seq_len", max_seq_len),
        ("max_num_tokens", max_num_tokens),
    ):
        check_limit(name, value)
    if max_batch_size is not None and max_batch_size > MAX_BATCH_SIZE:
        raise ValueError(f"max_batch_size is {max_batch_size}, expected at most {MAX_BATCH_SIZE}")
    if max_batch_size is not None and max_num_tokens < max_batch_size:
        raise ValueError(
            f"max_num_tokens is {max_num_tokens}, expected at least max_batch_size "
            f"({max_batch_size}): every sequence has one token a step"
        )
    if max_seq_len > config.max_position_embeddings:
        raise ValueError(
            f"max_seq_len is {max_seq_len}, expected at most the model's "
            f"max_position_embeddings ({config.max_position_embeddings})"
        )


def plan_sequence(
    config: ModelConfig,
    speculation: MTPDecodingConfig,
    cache: KvCacheConfig,
    dtype: torch.dtype,
    max_seq_len: int,
    stash: str,
) -> MemoryPlan:
    """What a sequence of `max_seq_len` tokens takes."""
    draft_rows = 0
    if speculation.kind == "static":
        # The next drafts may begin before the host knows how far the last ones were accepted.
        draft_rows = speculation.max_depth + 1 + draft_entries(speculation.topology())
    if speculation.kind == "dynamic":
        # Each level but the last runs its best top_k nodes through the module.
        draft_rows = speculation.top_k * (speculation.max_depth - 1)
    return plan(
        config,
        num_nodes=speculation.max_nodes,
        state_dtype=cache.state_dtype,
        activation_dtype=_name(dtype),
        stash=stash,
        stash_dtype=speculation.stash_dtype,
        context_length=max_seq_len,
        history=_history(speculation) or 1,
        kv_dtype=_name(_kv_dtype(cache, dtype)),
        tokens_per_block=cache.tokens_per_block,
        scratch_rows=max(speculation.max_nodes, draft_rows),
    )


def plan_memory(
    config: ModelConfig,
    sizes: MemoryPlan,
    speculation: MTPDecodingConfig,
    cache: KvCacheConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_batch_size: int | None,
    max_num_tokens: int,
    source: ExecutorSource | None = None,
    *,
    vocab_size: int | None = None,
    free: int | None = None,
    graphs: CudaGraphConfig | None = None,
) -> MemoryBudget:
    """The memory that may be used, divided; nothing is allocated.

    With `source` weights and steps are what it says, and not the torch executor's.

    Args:
        config: the model's, or of one rank's share where it is divided.
        sizes: of its sequences.
        speculation, cache, dtype, device, max_batch_size, max_num_tokens: see `build_engine`.
        source: see `build_engine`.
        vocab_size: of the whole model, where that is not the config's.
        free: bytes that can be allocated, where that is not what `device` has.

    Raises:
        MemoryError: it is too little; the message says what to lower, and by how much.
    """
    steps = _step_bytes(config, dtype, max_num_tokens) if device.type == "cuda" else 0
    logits = 0
    if device.type == "cuda":
        logits = 4 * speculation.max_nodes * (vocab_size or config.vocab_size)
    # Every sequence has a token in each step.
    weights, most = weight_bytes(config, dtype), min(MAX_AUTO_BATCH, max_num_tokens)
    if source is not None:
        most = min(most, source.max_batch_size)
        largest = ExecutorLimits(
            max_batch_size=max_batch_size or most,
            max_seq_len=sizes.context_length,
            max_nodes=speculation.max_nodes,
            scratch_rows=sizes.scratch_rows,
            num_blocks=0,
            tokens_per_block=cache.tokens_per_block,
        )
        weights, steps, logits = source.weights(largest), source.steps(largest), 0
    fixed, per_row = 0, 0
    if graphs is not None and device.type == "cuda":
        fixed, per_row = _graph_bytes(
            config, dtype, speculation, graphs, max_batch_size, max_num_tokens
        )
    demand = Demand(
        plan=sizes,
        policy=speculation.state_commit,
        weights=weights,
        graphs=steps + fixed,
        graphs_per_row=logits + per_row,
        max_batch_size=max_batch_size,
        max_auto_batch=most,
        kv_tokens=cache.max_tokens,
        prefix_cache=cache.enable_block_reuse,
        checkpoints=cache.max_checkpoints,
    )
    available, where = _available(cache, device, free)
    return divide(demand, available, where)


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the model's parameters; gate parameters stay float32."""
    with torch.device("meta"):
        parameters = dict(Qwen3_5ForCausalLM(config).named_parameters())
    return sum(
        p.numel() * (4 if name.endswith((".A_log", ".dt_bias")) else dtype.itemsize)
        for name, p in parameters.items()
    )


def _graph_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    speculation: MTPDecodingConfig,
    graphs: CudaGraphConfig,
    max_batch_size: int | None,
    max_num_tokens: int,
) -> tuple[int, int]:
    """Estimate of what captured steps take: whatever the batch, and for each sequence.

    The graphs themselves, their static buffers, the logits that they have at once, and their
    activations: those lie in a pool of the graphs' own, which no prompt beside them can use.
    """
    batch = max_batch_size or MAX_AUTO_BATCH
    options = graph_options(graphs, speculation, batch)
    if options is None:
        return 0, 0
    layers = len(config.layer_types) + speculation.max_depth * config.mtp_num_hidden_layers
    shapes = len(options.sizes.batch) * len(options.sizes.nodes)
    fixed = shapes * layers * GRAPH_LAYER_KERNELS * GRAPH_KERNEL_BYTES
    fixed += 3 * HEAD_ROWS * config.vocab_size * 4
    fixed += _prompt_graph_bytes(config, dtype, graphs, batch, max_num_tokens)
    buffers = buffer_sizes(batch, config.hidden_size, options)
    per_row = -(-buffers.bytes(dtype.itemsize) // batch)
    return fixed, per_row + _step_bytes(config, dtype, max(options.sizes.nodes))


def _prompt_graph_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    graphs: CudaGraphConfig,
    max_batch_size: int,
    max_num_tokens: int,
) -> int:
    """Estimate of what captured prompt steps take: graphs, activations, and static buffers."""
    shapes = prompt_shapes(min(graphs.max_prompt_tokens, max_num_tokens), max_batch_size)
    if not shapes:
        return 0
    tokens = shapes[-1].tokens
    kernels = len(shapes) * len(config.layer_types) * PROMPT_LAYER_KERNELS
    buffers = tokens * (config.hidden_size * dtype.itemsize + PROMPT_TOKEN_BYTES)
    return kernels * GRAPH_KERNEL_BYTES + buffers + _step_bytes(config, dtype, tokens)


def _step_bytes(config: ModelConfig, dtype: torch.dtype, max_num_tokens: int) -> int:
    """Estimate of the activations that a step of so many tokens has at once, in one layer."""
    inner = config.intermediate_size or (
        config.num_experts_per_tok * config.moe_intermediate_size
        + config.shared_expert_intermediate_size
    )
    wide = 4 * config.hidden_size + 3 * inner + 3 * config.conv_dim + 2 * config.value_dim
    return max_num_tokens * wide * dtype.itemsize


def _available(
    cache: KvCacheConfig, device: torch.device, free: int | None
) -> tuple[int | None, str]:
    """Bytes that may be used, and how that came about."""
    free = free_memory(device) if free is None else free
    fraction = cache.free_gpu_memory_fraction or DEFAULT_MEMORY_FRACTION
    share = None if free is None else int(free * fraction)
    where = f"on {device} ({fraction:.0%} of what is free)"
    given = cache.memory_bytes
    if given is not None and (share is None or given <= share):
        return given, f"on {device} (kv_cache_config.memory_bytes)"
    return share, where


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


def _history(speculation: MTPDecodingConfig) -> int | None:
    """Tokens of a slot's history, at least the longest path of a tree; None where not deferred."""
    if speculation.state_commit != "deferred":
        return None
    return max(speculation.deferred_history, speculation.max_depth + 1)


def _stash_options(speculation: MTPDecodingConfig, cache: KvCacheConfig) -> StashOptions:
    """What commits work from, decided once, before anything is allocated."""
    state_dtype = getattr(torch, cache.state_dtype)
    stash_dtype = getattr(torch, speculation.stash_dtype)
    if stash_dtype == torch.bfloat16 and state_dtype != torch.bfloat16:
        raise ValueError(
            "speculative_config.stash_dtype='bfloat16' needs a bfloat16 state "
            f"(kv_cache_config.mamba_ssm_cache_dtype), which is {cache.state_dtype}"
        )
    return {"stash": choose_stash(speculation.stash), "stash_dtype": stash_dtype}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kv_dtype(cache: KvCacheConfig, dtype: torch.dtype) -> torch.dtype:
    return dtype if cache.dtype == "auto" else getattr(torch, cache.dtype)
