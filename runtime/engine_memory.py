"""What an engine takes of the memory, before any of it is taken: the plan of its settings."""

from __future__ import annotations

from dataclasses import replace

import torch

from trtllm_treewy.config import ModelConfig
from trtllm_treewy.llmapi import CudaGraphConfig, KvCacheConfig
from trtllm_treewy.memory_plan import MemoryPlan, plan
from trtllm_treewy.model import Qwen3_5ForCausalLM

from .decode_graphs import buffer_sizes
from .device_memory import free_memory
from .engine_settings import EngineSettings
from .executor import ExecutorLimits, ExecutorSource
from .graph_capture import graph_options
from .head import ROWS as HEAD_ROWS
from .memory_budget import Demand, MemoryBudget, divide
from .prompt_buffers import prompt_shapes
from .static_drafts import draft_entries

# What may be taken of the memory that is free, unless the user says.
DEFAULT_MEMORY_FRACTION = 0.9
# What a graph takes for each kernel that it launches, and kernels of a layer: measured roughly.
GRAPH_KERNEL_BYTES, GRAPH_LAYER_KERNELS = 8 << 10, 40
# Kernels of a layer in a prompt step, and what a token of it has in static buffers, ids and rows
# and its tile of attention, beside the hidden state.
PROMPT_LAYER_KERNELS, PROMPT_TOKEN_BYTES = 20, 64


class EngineMemory:
    """Sizes and division of an engine's memory; nothing is allocated.

    Args:
        settings: of the engine.
        part: one rank's share of the model, where it is divided; memory is that rank's then.
    """

    def __init__(self, settings: EngineSettings, part: ModelConfig | None = None) -> None:
        self._settings, self._config = settings, part or settings.config

    def sequence(self) -> MemoryPlan:
        """What a sequence of the longest length takes."""
        settings, speculation = self._settings, self._settings.speculation
        draft_rows = 0
        if speculation.kind == "static":
            # The next drafts may begin before the host knows how far the last ones were accepted.
            draft_rows = speculation.max_depth + 1 + draft_entries(speculation.topology())
        if speculation.kind == "dynamic":
            # Each level but the last runs its best top_k nodes through the module.
            draft_rows = speculation.top_k * (speculation.max_depth - 1)
        return plan(
            self._config,
            num_nodes=speculation.max_nodes,
            state_dtype=settings.cache.state_dtype,
            activation_dtype=_name(settings.dtype),
            stash=settings.stash,
            stash_dtype=speculation.stash_dtype,
            context_length=settings.max_seq_len,
            history=settings.history or 1,
            kv_dtype=_name(settings.kv_dtype),
            tokens_per_block=settings.cache.tokens_per_block,
            scratch_rows=max(speculation.max_nodes, draft_rows),
        )

    def divide(
        self, sizes: MemoryPlan, *, source: ExecutorSource | None = None, free: int | None = None
    ) -> MemoryBudget:
        """The memory that may be used, divided.

        Args:
            sizes: of a sequence; see `sequence`.
            source: of the executor, whose weights and steps are counted in place of the torch
                executor's; None for that one.
            free: bytes that can be allocated, where that is not what the device has.

        Raises:
            MemoryError: it is too little; the message says what to lower, and by how much.
        """
        settings, cache = self._settings, self._settings.cache
        demand = Demand(
            plan=sizes,
            policy=settings.speculation.state_commit,
            weights=0,
            max_batch_size=settings.max_batch_size,
            max_auto_batch=settings.largest_auto_batch,
            kv_tokens=cache.max_tokens,
            prefix_cache=cache.enable_block_reuse,
            checkpoints=cache.max_checkpoints,
        )
        demand = self._with_torch(demand) if source is None else self._with_source(demand, source)
        available, where = _available(cache, settings.device, free)
        return divide(demand, available, where)

    def _with_source(self, demand: Demand, source: ExecutorSource) -> Demand:
        """With what an executor says that it takes."""
        settings = self._settings
        most = min(demand.max_auto_batch, source.max_batch_size)
        largest = ExecutorLimits(
            max_batch_size=settings.max_batch_size or most,
            max_seq_len=demand.plan.context_length,
            max_nodes=settings.speculation.max_nodes,
            scratch_rows=demand.plan.scratch_rows,
            num_blocks=0,
            tokens_per_block=settings.cache.tokens_per_block,
        )
        return replace(
            demand,
            weights=source.weights(largest),
            graphs=source.steps(largest),
            max_auto_batch=most,
        )

    def _with_torch(self, demand: Demand) -> Demand:
        """With the torch executor's weights, and on a GPU what its steps have at once."""
        settings = self._settings
        demand = replace(demand, weights=weight_bytes(self._config, settings.dtype))
        if settings.device.type != "cuda":
            return demand
        steps = step_bytes(self._config, settings.dtype, settings.max_num_tokens)
        logits = 4 * settings.speculation.max_nodes * settings.config.vocab_size
        fixed, per_row = 0, 0
        if settings.graphs is not None:
            fixed, per_row = self._graphs(settings.graphs)
        return replace(demand, graphs=steps + fixed, graphs_per_row=logits + per_row)

    def _graphs(self, graphs: CudaGraphConfig) -> tuple[int, int]:
        """Estimate of what captured steps take: whatever the batch, and for each sequence.

        The graphs themselves, their static buffers, the logits that they have at once, and their
        activations: those lie in a pool of the graphs' own, which no prompt beside them can use.
        """
        config, dtype = self._config, self._settings.dtype
        speculation, batch = self._settings.speculation, self._settings.largest_batch
        options = graph_options(graphs, speculation, batch)
        if options is None:
            return 0, 0
        layers = len(config.layer_types) + speculation.max_depth * config.mtp_num_hidden_layers
        shapes = len(options.sizes.batch) * len(options.sizes.nodes)
        fixed = shapes * layers * GRAPH_LAYER_KERNELS * GRAPH_KERNEL_BYTES
        fixed += 3 * HEAD_ROWS * config.vocab_size * 4
        fixed += self._prompt_graphs(graphs)
        buffers = buffer_sizes(batch, config.hidden_size, options)
        per_row = -(-buffers.bytes(dtype.itemsize) // batch)
        return fixed, per_row + step_bytes(config, dtype, max(options.sizes.nodes))

    def _prompt_graphs(self, graphs: CudaGraphConfig) -> int:
        """Estimate of what captured prompt steps take: graphs, activations, static buffers."""
        settings, config, dtype = self._settings, self._config, self._settings.dtype
        most = min(graphs.max_prompt_tokens, settings.max_num_tokens)
        shapes = prompt_shapes(most, settings.largest_batch)
        if not shapes:
            return 0
        tokens = shapes[-1].tokens
        kernels = len(shapes) * len(config.layer_types) * PROMPT_LAYER_KERNELS
        buffers = tokens * (config.hidden_size * dtype.itemsize + PROMPT_TOKEN_BYTES)
        return kernels * GRAPH_KERNEL_BYTES + buffers + step_bytes(config, dtype, tokens)


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the model's parameters; gate parameters stay float32."""
    with torch.device("meta"):
        parameters = dict(Qwen3_5ForCausalLM(config).named_parameters())
    return sum(
        p.numel() * (4 if name.endswith((".A_log", ".dt_bias")) else dtype.itemsize)
        for name, p in parameters.items()
    )


def step_bytes(config: ModelConfig, dtype: torch.dtype, max_num_tokens: int) -> int:
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
