"""Where the time of a decoding step goes: the torch executor on a GPU, with random weights.

    python benchmarks/executor.py qwen3.5-35b-a3b --batch 1 8 64 256 --tree none 3 7 2,2,2 3,3,3
    python benchmarks/executor.py qwen3.5-35b-a3b --tree 3 --commit reconstruct deferred \
        --state-dtype float32 bfloat16
    python benchmarks/executor.py qwen3.5-35b-a3b --batch 64 --tree 3 --eager --profile

For every commit policy, type of the states, tree and batch: the parts of a captured step (fill,
verify, accept, commit, draft) by CUDA events, each replayed on its own and all of them in a row;
then the engine itself, with acceptance drawn from a law: wall time of a step, GPU time by kind of
kernel, the share of GDN verification and commit, and how much of the time the GPU was idle, in all
and between launches. `--eager` runs the same functions uncaptured beside it; `--profile` adds the
largest kernels. At the end it says whether the goals were met.

Sequences start with `--context` tokens that are not computed: their states and cache rows are
zero, which takes as long. Each goes on from another token, as the experts that a step reads are
those of its tokens. A tree is its widths, or the length of a chain as one number.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from itertools import product, starmap
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

import step_profile
import torch

from trtllm_treewy import __version__
from trtllm_treewy.config import ModelConfig, read_json, shipped_configs
from trtllm_treewy.draft_tree import TreeTopology
from trtllm_treewy.llmapi import CudaGraphConfig, KvCacheConfig, MTPDecodingConfig
from trtllm_treewy.model.dummy import dummy_model
from trtllm_treewy.runtime.build import build_engine
from trtllm_treewy.runtime.commit_policy import POLICIES
from trtllm_treewy.runtime.device_memory import free_memory
from trtllm_treewy.runtime.engine import Engine
from trtllm_treewy.runtime.engine_memory import weight_bytes
from trtllm_treewy.runtime.engine_settings import EngineSettings
from trtllm_treewy.runtime.request import Request
from trtllm_treewy.sampling_params import SamplingParams

PARTS = ("fill", "verify", "accept", "commit", "draft")
# Engine steps under the profiler: more than those between two rewritings of a deferred state.
PROFILED_STEPS = 8
# Goals: of the step at that batch, and of the time between launches.
GDN_BATCH, GDN_MOST, IDLE_MOST = 64, 0.10, 0.02


@dataclass(frozen=True)
class Setting:
    """What a row is measured for."""

    commit: str
    state_dtype: str
    tree: str
    batch: int


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    if not torch.cuda.is_available() and args.device.startswith("cuda"):
        parser.error("this takes a GPU, and torch sees none (--device cpu tries the script out)")
    config = read_config(args.model, args.layers)
    device = torch.device(args.device)
    dtype = getattr(torch, args.dtype)
    model = dummy_model(config, dtype=dtype, device=device)
    rows: list[dict[str, Any]] = []
    for setting in starmap(Setting, product(args.commit, args.state_dtype, args.tree, args.batch)):
        row = measure(args, config, model, setting)
        rows.append(row)
        print(f"{json.dumps(row)}", flush=True)
    print_table(rows)
    for line in goals(rows):
        print(line)
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
    parser.add_argument("--commit", nargs="+", default=["reconstruct"], choices=sorted(POLICIES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--state-dtype", nargs="+", default=["float32"], choices=("float32", "bfloat16")
    )
    parser.add_argument("--eager", action="store_true", help="time uncaptured functions as well")
    parser.add_argument("--no-engine", action="store_true", help="time the parts alone")
    parser.add_argument("--profile", action="store_true", help="the largest kernels as well")
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
    args: argparse.Namespace, config: ModelConfig, model: Any, setting: Setting
) -> Engine:
    widths, batch = widths_of(setting.tree), setting.batch
    law = args.law[: len(widths)] + args.law[-1:] * (len(widths) - len(args.law))
    speculation = MTPDecodingConfig(
        draft_tree_widths=tuple(widths),
        state_commit=setting.commit,
        simulated_acceptance=tuple(law) if widths else None,
    )
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    longest = args.context + (args.steps + 8) * (len(widths) + 1)
    nodes = speculation.max_nodes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = EngineSettings(
            config=config,
            speculation=speculation,
            cache=KvCacheConfig(
                mamba_ssm_cache_dtype=setting.state_dtype,
                max_tokens=batch * (longest + 2 * nodes + 64),
                free_gpu_memory_fraction=1.0,
            ),
            dtype=dtype,
            device=device,
            max_batch_size=batch,
            max_seq_len=longest,
            max_num_tokens=max(8192, 2 * batch * nodes),
            graphs=CudaGraphConfig(batch_sizes=(batch,), max_prompt_tokens=0),
        )
        # The weights are there already, and what is planned counts them again.
        free = (free_memory(device) or 0) + weight_bytes(config, dtype)
        engine, _ = build_engine(settings, lambda: model, free=free)
    return engine


def measure(
    args: argparse.Namespace, config: ModelConfig, model: Any, setting: Setting
) -> dict[str, Any]:
    nodes = TreeTopology.from_widths(widths_of(setting.tree)).num_nodes
    row: dict[str, Any] = {**asdict(setting), "nodes": nodes, "context": args.context}
    try:
        started = time.perf_counter()
        engine = make_engine(args, config, model, setting)
        graphs = engine._executor.graphs
        row["capture_s"] = round(time.perf_counter() - started, 1)
        row["graph_MiB"] = graphs.memory_bytes >> 20
        place_sequences(engine, args.context)
        row["parts_ms"] = time_parts(args, engine, graphs.replay_part)
        if args.eager:
            row["eager_ms"] = time_parts(args, engine, graphs.run_part)
        if not args.no_engine:
            row.update(time_engine(args, engine))
            if args.device.startswith("cuda"):
                row.update(profile_engine(engine, row["wall_ms"], args.profile))
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
        if engine._device is not None and engine._device.decoder.drafts:
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
    decoder = engine._device.decoder
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


def time_engine(args: argparse.Namespace, engine: Engine) -> dict[str, float]:
    """Wall time of engine steps, and tokens a second."""
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
    return {
        "wall_ms": round(1e3 * wall / max(steps, 1), 4),
        "tokens_per_s": round(gained / wall, 1),
        "tokens_per_step": round(gained / max(steps, 1) / batch, 3),
        "graph_misses": engine.stats.graph_misses - missed,
    }


def profile_engine(engine: Engine, step_ms: float, largest: bool) -> dict[str, Any]:
    """Where the GPU's time goes in engine steps, of which one takes `step_ms` unprofiled."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            engine.step()
        torch.cuda.synchronize()
    events = step_profile.device_events(profiler)
    kinds = step_profile.kinds_ms(events, PROFILED_STEPS)
    more = {"largest": step_profile.largest_ms(events, PROFILED_STEPS)} if largest else {}
    return {
        "kinds_ms": {**kinds, **more},
        "gdn_part": step_profile.gdn_part(kinds, step_ms),
        **step_profile.idle_parts(events),
        **step_profile.per_step(events, PROFILED_STEPS),
    }


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# ------------------------------------------------------------------ what is printed


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    names = ["commit", "state", "tree", "batch"]
    header = [*names, *PARTS, "step", "wall", "tokens/s", "GDN", "idle", "between", "launches"]
    table = [header]
    for row in rows:
        cells = [row["commit"], row["state_dtype"], row["tree"], str(row["batch"])]
        cells += [row["error"]] if "error" in row else _figures(row)
        table.append(cells + [""] * (len(header) - len(cells)))
    print(
        "\nmilliseconds of a step; `step` is all parts in a row, `wall` the engine's; GDN: verify\n"
        "and commit, as a part of `wall`; idle, as a part of the time under the profiler;\n"
        "between: between launches, of graphs, copies and kernels outside of graphs"
    )
    widths = [max(len(line[i]) for line in table) for i in range(len(header))]
    for line in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _figures(row: dict[str, Any]) -> list[str]:
    parts = row["parts_ms"]
    cells = [f"{parts[name]:.3f}" if name in parts else "" for name in (*PARTS, "step")]
    for name, form in (
        ("wall_ms", ".3f"), ("tokens_per_s", ".0f"), ("gdn_part", ".1%"), ("idle_part", ".1%"),
        ("idle_between_part", ".1%"), ("launches", ".1f"),
    ):  # fmt: skip
        cells.append(f"{row[name]:{form}}" if name in row else "")
    return cells


def goals(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Each goal that these rows say something of, and whether it was met."""
    lines = []
    for row in rows:
        name = f"{row['commit']}, {row['state_dtype']}, tree {row['tree']}, batch {row['batch']}"
        if "gdn_part" in row and row["batch"] == GDN_BATCH:
            lines.append(_goal(f"GDN of a step, {name}", row["gdn_part"], GDN_MOST))
        if "idle_between_part" in row:
            lines.append(
                _goal(f"idle between launches, {name}", row["idle_between_part"], IDLE_MOST)
            )
    speeds = {
        (r["commit"], r["state_dtype"], r["tree"], r["batch"]): r["tokens_per_s"]
        for r in rows
        if "tokens_per_s" in r
    }
    for (commit, *rest), speed in speeds.items():
        other = speeds.get(("reconstruct", *rest))
        if commit == "deferred" and other:
            state, tree, batch = rest
            met = "met" if speed >= other else "missed"
            lines.append(
                f"deferred at least as fast as reconstruct, {state}, tree {tree}, batch {batch}: "
                f"{speed / other:.3f}x, {met}"
            )
    return lines


def _goal(name: str, found: float, most: float) -> str:
    return f"{name}: {found:.1%} of at most {most:.0%}, {'met' if found <= most else 'missed'}"


if __name__ == "__main__":
    main()
