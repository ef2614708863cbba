"""`trtllm-treewy build`: a checkpoint to an engine's directory."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import ModelConfig
from ..engine_config import rank_folder
from .extras import expect_packages
from .program import EXIT_OK
from .sizes import format_size
from .streams import write_err

if TYPE_CHECKING:
    from ..export.build_engine import BuildPlan
    from ..export.tensorrt_builder import NetworkBuilder


def run(args: argparse.Namespace) -> int:
    """Builds, or prints the plan; an exit code."""
    expect_packages("build", "export", "onnx")
    from ..export.build_engine import BuildOptions, build_engine_directory, plan_build
    from ..export.profiles import BuildLimits

    options = BuildOptions(
        dtype=args.dtype,
        state_dtype=args.state_dtype,
        stash_dtype=args.stash_dtype,
        attention=args.attention,
        tensor_parallel_size=args.tensor_parallel_size,
        limits=BuildLimits(
            max_batch_size=args.max_batch_size,
            max_seq_len=args.max_seq_len or _default_length(args.model),
            max_nodes=args.max_nodes,
            max_num_tokens=args.max_num_tokens,
        ),
    )
    builder = _builder(args)
    if args.dry_run:
        print(describe(plan_build(args.model, args.output, options, builder)))
        return EXIT_OK
    show = None if args.quiet or not sys.stderr.isatty() else Bars()
    try:
        built = build_engine_directory(
            args.model, args.output, options, builder, force=args.force, progress=show
        )
    finally:
        if show is not None:
            show.close()
    what = "built" if built else "is up to date (--force builds it again)"
    write_err(f"{args.output} {what}\n")
    return EXIT_OK


def _default_length(model: str) -> int:
    return min(8192, ModelConfig.from_pretrained(model).max_position_embeddings)


def _builder(args: argparse.Namespace) -> NetworkBuilder | None:
    if args.backend == "onnx":
        return None
    import torch

    from ..engine_config import gpu_identity
    from ..export.tensorrt_builder import TensorRTBuilder
    from ..tensorrt_package import find_plugins

    if not torch.cuda.is_available():
        raise ValueError(
            "a TensorRT engine is built on the GPU that it is for, and torch finds none here; "
            "--backend onnx builds for ONNX Runtime on a CPU"
        )
    plugins = find_plugins() if args.plugins is None else Path(args.plugins)
    try:
        return TensorRTBuilder(plugins, gpu=gpu_identity(torch.device("cuda")))
    except ImportError:
        raise ValueError(
            "--backend tensorrt needs the package tensorrt, 10.14 to 11: pip install tensorrt"
        ) from None


def describe(plan: BuildPlan) -> str:
    """The plan as text: memory, disk and time."""
    stages = ", ".join(f"{stage} {seconds:g} s" for stage, seconds in plan.seconds.items())
    time = f"{stages} (the last build)" if stages else "not known before a build"
    ranks = plan.tensor_parallel_size
    lines = [f"{plan.kind} engine of {plan.checkpoint} in {plan.output}, {plan.dtype}"]
    if ranks > 1:
        lines += [*describe_ranks(plan), "of each rank:"]
    lines += [
        f"weights            {format_size(plan.weight_bytes)}"
        + (" in each network that has them" if plan.kind == "tensorrt" else ""),
        f"states, all slots  {format_size(plan.state_bytes)}",
        f"KV cache, all full {format_size(plan.kv_bytes)}",
    ]
    if plan.expert_bytes:
        lines.append(f"experts of a step  {format_size(plan.expert_bytes)} of scratch")
    lines += [
        f"disk while built   {format_size(plan.disk_bytes)}" + (" in all" if ranks > 1 else ""),
        f"time               {time}",
    ]
    if plan.up_to_date:
        lines.append("the engine that is there is up to date: nothing would be done")
    return "\n".join(lines)


def describe_ranks(plan: BuildPlan) -> Iterator[str]:
    """A line for each rank: where its networks go, and what it has of the model."""
    part, ranks = plan.part, plan.tensor_parallel_size
    whole = ModelConfig.from_pretrained(plan.checkpoint)
    # KV heads that are fewer than ranks are repeated.
    copies = max(1, ranks // whole.num_key_value_heads)
    for rank in range(ranks):
        shares = (
            ("attention heads", part.num_attention_heads, rank),
            ("KV heads", part.num_key_value_heads, rank // copies),
            ("GDN value heads", part.linear_num_value_heads, rank),
            ("tokens", part.vocab_size, rank),
        )
        said = ", ".join(
            f"{what} {n * place} to {n * (place + 1) - 1}" for what, n, place in shares
        )
        yield f"rank {rank} in {rank_folder(rank, ranks)}/: {said}"


class Bars:
    """A progress bar for each stage."""

    def __init__(self) -> None:
        self._bars: dict[str, Any] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        from tqdm import tqdm

        if stage not in self._bars:
            self._bars[stage] = tqdm(total=total, desc=stage, file=sys.stderr, leave=False)
        bar = self._bars[stage]
        bar.update(done - bar.n)
        if done >= total:
            self._bars.pop(stage).close()

    def close(self) -> None:
        for bar in self._bars.values():
            bar.close()
