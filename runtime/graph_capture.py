"""Which steps of an executor are captured as CUDA graphs, and their capture."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from trtllm_treewy import triton_ops
from trtllm_treewy.llmapi import CudaGraphConfig, MTPDecodingConfig

from .acceptance_law import accept_by_depth
from .buckets import Buckets
from .cuda_graphs import GraphSizes, make_runner
from .decode_graphs import DecodeGraphs, GraphOptions, accept_greedily
from .device_decoder import DeviceDecoder, is_chain
from .drafter import Drafter
from .executor import Executor
from .executor_torch import TorchExecutor
from .prompt_buffers import prompt_shapes
from .prompt_graphs import PromptGraphs


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
