"""Where the time of a decoding step goes: the torch executor on a GPU, with random weights.

    python benchmarks/executor.py qwen3.5-35b-a3b --batch 1 8 64 256 --tree none 3 7 2,2,2 3,3,3
    python benchmarks/executor.py qwen3.5-35b-a3b --batch 64 --tree 3 --eager --profile

For every batch and tree: the parts of a captured step (fill, verify, accept, commit, draft) by CUDA
events, each replayed on its own and all of them in a row; then the engine itself, wall time of a
step and how much of it the GPU was idle, with acceptance drawn from a law. `--eager` runs the same
functions uncaptured beside it; `--profile` adds the GPU time of a step by kind of kernel.

Sequences start with `--context` tokens that are not computed: their states and cache rows are
zero, which takes as long. Each goes on from another token, as the experts that a step reads are
those of its tokens. A tree is its widths, or the length of a chain as one number.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from trtllm_treewy import __version__
from trtllm_treewy.config import ModelConfig, read_json, shipped_configs
from trtllm_treewy.draft_tree import TreeTopology
from trtllm_treewy.llmapi import CudaGraphConfig, KvCacheConfig, MTPDecodingConfig
from trtllm_treewy.model.dummy import dummy_model
from trtllm_treewy.runtime import build
from trtllm_treewy.runtime.device_memory import free_memory
from trtllm_treewy.runtime.engine import Engine
from trtllm_treewy.runtime.request import Request
from trtllm_treewy.sampling_params import SamplingParams

PARTS = ("fill", "verify", "accept", "commit", "draft")
# Kinds of kernels by parts of their names, the first that fits.
KINDS = {
    "GDN verify": ("tree_verify",),
    "GDN commit": ("update_states", "commit_inputs", "append_paths", "_history"),
    "conv": ("conv",),
    "attention": ("_attend", "_combine", "_append", "_place_heads"),
    "experts": ("_gate_up", "_down", "_route", "_count", "_sort"),
    "best tokens": ("_partial", "_merge", "greedy_accept", "reduce_kernel"),
    "norms": ("_rms", "_gated"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "gemv", "splitK"),
    "copies and the rest": ("",),
}


def main() -> None:
    parser = build_parser()
    args = parser.parse_args()
    if not torch.cuda.is_available() and args.device.startswith("cuda"):
        parser.error("this takes a GPU, and torch sees none (--device cpu tries the script out)")
    config = read_config(args.model, args.layers)
    device = torch.device(args.device)
    dtype = getattr(torch, args.dtype)
    model = dummy_model(config, dtype=dtype, device=device)
    rows: list[dict[str, Any]] = []
    for tree in args.tree:
        for batch in args.batch:
            row = measure(args, config, model, tree, batch)
            rows.append(row)
            print(f"{json.dumps(row)}", flush=True)
    print_table(rows)
    if args.output:
        args.output.write_text(json.dumps({"about": about(args, device), "rows": rows}, indent=1))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a shipped config's name, or a directory with config.json")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--tree", nargs="+", default=["none", "3", "2,2,2", "3,3,3"])
    parser.add_argument("--context", type=int, default=1024, help="tokens of each sequence")
    parser.add_argument("--layers", type=int, help="the first layers of the model alone")
    parser.add_argument("--steps", type=int, default=50, help="engine steps that are timed")
    parser.add_argument("--repeats", type=int, default=20, help="replays of each part")
    parser.add_argument(
        "--law", type=float, nargs="+", default=[0.85, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5],
        help="probability of acceptance by depth",
    )  # fmt: skip
    parser.add_argument("--policy", default="reconstruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--state-dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--eager", action="store_true", help="time uncaptured functions as well")
    parser.add_argument("--no-engine", action="store_true", help="time the parts alone")
    parser.add_argument("--profile", action="store_true", help="GPU time by kind of kernel")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, help="JSON of all rows")
    return parser


def read_config(name: str, layers: int | None) -> ModelConfig:
    """A shipped config or a directory's, cut to its first layers."""
    shipped = shipped_configs()
    path = shipped.get(name, Path(name) / "config.json")
    raw = read_json(path)
    if layers is not None:
        text = raw.get("text_config", raw)
        text["num_hidden_layers"] = layers
        text.pop("layer_types", None)
    return ModelConfig.from_dict(raw, source=str(path))


def about(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """What was measured, on what, and when."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    settings = {k: v for k, v in vars(args).items() if k != "output"}
    return {
        "date": date.today().isoformat(),
        "version": __version__,
        "torch": torch.__version__,
        "device": gpu,
        "settings": settings,
    }


# ------------------------------------------------------------------ one batch and tree


def widths_of(tree: str) -> tuple[int, ...]:
    """Children by level, from none, the length of a chain, or the widths themselves."""
    if tree == "none":
        return ()
    return (1,) * int(tree) if tree.isdigit() else tuple(int(w) for w in tree.split(","))


def make_engine(
    args: argparse.Namespace, config: ModelConfig, model: Any, widths: Sequence[int], batch: int
) -> Engine:
    law = args.law[: len(widths)] + args.law[-1:] * (len(widths) - len(args.law))
    speculation = MTPDecodingConfig(
        draft_tree_widths=tuple(widths),
        state_commit=args.policy,
        simulated_acceptance=tuple(law) if widths else None,
    )
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    longest = args.context + (args.steps + 8) * (len(widths) + 1)
    nodes = speculation.max_nodes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, _ = build.build_engine(
            config,
            lambda: model,
            speculation,
            KvCacheConfig(
                mamba_ssm_cache_dtype=args.state_dtype,
                max_tokens=batch * (longest + 2 * nodes + 64),
                free_gpu_memory_fraction=1.0,
            ),
            dtype=dtype,
            device=device,
            max_batch_size=batch,
            max_seq_len=longest,
            max_num_tokens=max(8192, 2 * batch * nodes),
            graphs=CudaGraphConfig(batch_sizes=(batch,), max_prompt_tokens=0),
            # The weights are there already, and what is planned counts them again.
            free=(free_memory(device) or 0) + build.weight_bytes(config, dtype),
        )
    return engine


def measure(
    args: argparse.Namespace, config: ModelConfig, model: Any, tree: str, batch: int
) -> dict[str, Any]:
    widths = widths_of(tree)
    nodes = TreeTopology.from_widths(widths).num_nodes
    row: dict[str, Any] = {"tree": tree, "batch": batch, "nodes": nodes, "context": args.context}
    try:
        started = time.perf_counter()
        engine = make_engine(args, config, model, widths, batch)
        graphs = engine._executor.graphs
        row["capture_s"] = round(time.perf_counter() - started, 1)
        row["graph_MiB"] = graphs.memory_bytes >> 20
        place_sequences(engine, args.context)
        row["parts_ms"] = time_parts(args, engine, graphs.replay_part)
        if args.eager:
            row["eager_ms"] = time_parts(args, engine, graphs.run_part)
        if args.profile and args.device.startswith("cuda"):
            row["kinds_ms"] = profile_kinds(args, engine)
        if not args.no_engine:
            row.update(time_engine(args, engine))
    except (MemoryError, torch.OutOfMemoryError) as error:
        row["error"] = str(error).split(";")[0][:200]
    release_memory()
    return row


def release_memory() -> None:
    import gc

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def place_sequences(engine: Engine, context: int) -> None:
    """Requests that stand behind a prompt of `context` tokens, which nobody computed."""
    limits = engine._executor.limits
    for number in range(limits.max_batch_size):
        request = Request(
            number,
            (1,) * context,
            SamplingParams(max_tokens=limits.max_seq_len - context, ignore_eos=True),
        )
        engine.add(request)
    for admission in engine._scheduler.admit():
        request = admission.request
        request.num_computed = context
        # Equal sequences would share their experts, and a step would read few of the weights.
        vocab_size = engine._executor.model.config.vocab_size
        request.output_token_ids.append((2 + request.request_id) % vocab_size)
        if engine._decoder is not None and engine._decoder.drafts:
            hidden = torch.zeros(
                1,
                engine._executor.model.config.hidden_size,
                dtype=engine._executor.model.model.embed_tokens.weight.dtype,
                device=engine._executor.device,
            )
            engine._drafter.cache.resume(request.slot, context - 1)
            engine._drafter.observe(request.slot, request.output_token_ids[-1:], hidden)


def time_parts(
    args: argparse.Namespace, engine: Engine, run: Callable[..., None]
) -> dict[str, float]:
    """Median milliseconds of each part, and of all of them in a row."""
    decoder = engine._decoder
    requests = engine._scheduler.decoding
    decoder.launch(requests, None)
    decoder.results(requests)
    shape = engine._executor.graphs.fit(
        len(requests), max(decoder.nodes(request, None) for request in requests)
    )
    parts = [part for part in PARTS if part != "draft" or decoder.drafts]
    load = [(r.slot, r.context_len, decoder.nodes(r, None)) for r in requests]
    engine._executor.graphs.buffers.load_rows(shape[0], load)
    context = max(r.context_len for r in requests)

    def each(names: Sequence[str]) -> None:
        for name in names:
            run(name, shape, context)

    times = {name: timed(args, lambda name=name: each([name])) for name in parts}
    times["step"] = timed(args, lambda: each(parts))
    for request in requests:
        decoder.forget(request.slot)
        if decoder.drafts:
            hidden = torch.zeros_like(engine._executor.graphs.buffers.pending_hidden[0, :1])
            engine._drafter.cache.resume(request.slot, request.context_len - 1)
            engine._drafter.observe(request.slot, request.output_token_ids[-1:], hidden)
    return {name: round(value, 4) for name, value in times.items()}


def timed(args: argparse.Namespace, run: Callable[[], None]) -> float:
    """Median milliseconds of the GPU, or of the CPU where there is none."""
    times = []
    for number in range(args.repeats + 3):
        if torch.cuda.is_available():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            stop.synchronize()
            elapsed = start.elapsed_time(stop)
        else:
            began = time.perf_counter()
            run()
            elapsed = 1e3 * (time.perf_counter() - began)
        if number >= 3:
            times.append(elapsed)
    return statistics.median(times)


def profile_kinds(args: argparse.Namespace, engine: Engine) -> dict[str, float]:
    """GPU milliseconds of an engine step by kind of kernel, and of the largest kernels."""
    from torch.profiler import ProfilerActivity, profile

    engine.step()
    steps = 5
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    kinds = dict.fromkeys(KINDS, 0.0)
    largest: dict[str, float] = {}
    for event in profiler.key_averages():
        spent = event.self_device_time_total / 1e3 / steps
        kind = next(k for k, names in KINDS.items() if any(name in event.key for name in names))
        kinds[kind] += spent
        largest[event.key[:80]] = largest.get(event.key[:80], 0.0) + spent
    top = sorted(largest.items(), key=lambda item: -item[1])[:12]
    found = {kind: round(value, 4) for kind, value in kinds.items() if value}
    return {**found, "largest": {name: round(value, 4) for name, value in top}}  # type: ignore[dict-item]


def time_engine(args: argparse.Namespace, engine: Engine) -> dict[str, float]:
    """Wall time of engine steps, tokens a second, and the part of it that the GPU did nothing."""
    for _ in range(5):
        engine.step()
    tokens, missed = engine.stats.generated_tokens, engine.stats.graph_misses
    synchronize()
    started = time.perf_counter()
    steps = 0
    batch = engine._executor.limits.max_batch_size
    while steps < args.steps - 10 and len(engine._scheduler.running) == batch:
        engine.step()
        steps += 1
    synchronize()
    wall = time.perf_counter() - started
    gained = engine.stats.generated_tokens - tokens
    result = {
        "wall_ms": round(1e3 * wall / max(steps, 1), 4),
        "tokens_per_s": round(gained / wall, 1),
        "tokens_per_step": round(gained / max(steps, 1) / batch, 3),
        "graph_misses": engine.stats.graph_misses - missed,
    }
    if torch.cuda.is_available():
        result.update(idle_parts(engine))
    return result


def idle_parts(engine: Engine, steps: int = 5) -> dict[str, float]:
    """Parts of the time between the first and the last kernel in which none ran.

    Returns:
        `idle_part`, all of it, and `idle_between_part`, that between launches: of graphs, and of
        kernels outside of graphs. What is left lies between kernels of one graph.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    spans = sorted(
        (e.start_ns(), e.start_ns() + e.duration_ns(), e.correlation_id())
        for e in events
        if e.device_type() == torch.autograd.DeviceType.CUDA
    )
    if not spans:
        return {"idle_part": 0.0, "idle_between_part": 0.0}
    idle, between = 0, 0
    _, reached, launch = spans[0]
    for start, end, correlation in spans[1:]:
        gap = max(0, start - reached)
        idle += gap
        between += gap if correlation != launch else 0
        reached, launch = max(reached, end), correlation
    whole = reached - spans[0][0]
    return {
        "idle_part": round(idle / whole, 4),
        "idle_between_part": round(between / whole, 4),
    }


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    header = ["tree", "batch", *PARTS, "step", "wall", "tokens/s", "idle", "between"]
    table = [header]
    for row in rows:
        if "error" in row:
            table.append([row["tree"], str(row["batch"]), row["error"], *[""] * (len(header) - 3)])
            continue
        parts = row["parts_ms"]
        cells = [f"{parts[name]:.3f}" if name in parts else "" for name in (*PARTS, "step")]
        wall = f"{row['wall_ms']:.3f}" if "wall_ms" in row else ""
        speed = f"{row['tokens_per_s']:.0f}" if "tokens_per_s" in row else ""
        idle = [f"{row[n]:.1%}" if n in row else "" for n in ("idle_part", "idle_between_part")]
        table.append([row["tree"], str(row["batch"]), *cells, wall, speed, *idle])
    print(
        "\nmilliseconds of a step; `step` is all parts in a row, `wall` the engine's; between:\n"
        "idle between launches of graphs, as a part of the time"
    )
    widths = [max(len(line[i]) for line in table) for i in range(len(header))]
    for line in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


if __name__ == "__main__":
    main()
