"""A PROJECTION of decoding steps to other GPUs and models, from one profiled step. Nothing is run.

    python benchmarks/projection.py
    python benchmarks/projection.py --gpu B200=8.0 --model qwen3.5-397b-a17b:8

Of the profiled step (`executor.py --profile`) the kinds of kernels whose bytes are known, experts
and GDN states, are taken as the bytes over the bandwidth, and the part of it that they reached is
kept. The other GPU is thought to sustain as much of its nominal bandwidth as was measured here.
All other time is a range: unchanged (as if it were all latency) to scaled by the bandwidth. For
another model it grows with the layers. Communication between GPUs is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from capacity import sharded
from executor import widths_of
from serving_bench.report import table

from trtllm_treewy.config import ModelConfig
from trtllm_treewy.draft_tree import TreeTopology
from trtllm_treewy.memory_plan import plan
from trtllm_treewy.model import Qwen3_5ForCausalLM

# The H200: nominal, and read bandwidth measured by benchmarks/kernels.py, TB/s.
NOMINAL, MEASURED = 4.8, 4.33
PROFILE = Path(__file__).resolve().parent / "results" / "executor-profile-h200-2026-11-30.json"
PROFILED_MODEL = "qwen3.5-35b-a3b:1"
COLUMNS = ("model", "GPU", "experts", "GDN", "the rest", "step, ms", "tokens/s")


@dataclass(frozen=True)
class Traffic:
    """Bytes that a step must move: weights of the experts it meets, and recurrent states."""

    experts: float
    states: float

    def floor_ms(self, bandwidth: float) -> tuple[float, float]:
        """Milliseconds of both at `bandwidth` TB/s."""
        return self.experts / bandwidth / 1e9, self.states / bandwidth / 1e9


def traffic(config: ModelConfig, batch: int, widths: tuple[int, ...], state_dtype: str) -> Traffic:
    """What one step of `batch` sequences moves.

    Experts are met evenly: n tokens meet 1 - (1 - top / all)^n of a layer's. The MTP module runs
    once over the accepted tokens (as many as the batch, at least) and once for each level but the
    last. Verification reads each state, the commit reads and writes it; the stash is written and
    read.
    """
    tree = TreeTopology.from_widths(widths)
    with torch.device("meta"):
        parameters = dict(Qwen3_5ForCausalLM(config).named_parameters())
    weights = {n: 2 * p.numel() for n, p in parameters.items() if ".mlp.experts." in n}
    own = sum(size for name, size in weights.items() if not name.startswith("mtp"))
    drafter = sum(weights.values()) - own

    def met(tokens: int) -> float:
        return 1 - (1 - config.num_experts_per_tok / config.num_experts) ** tokens

    level, drafted = batch, drafter * met(batch) if widths else 0.0
    for width in widths[:-1]:
        level *= width
        drafted += drafter * met(level)
    sizes = plan(config, draft_tree_widths=widths, state_dtype=state_dtype)
    return Traffic(
        own * met(batch * tree.num_nodes) + drafted, batch * (3 * sizes.state + 2 * sizes.stash)
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--profile", type=Path, default=PROFILE, help="a run of executor.py --profile")
    add("--gpu", nargs="+", default=["H200=4.8", "B200=8.0"], help="NAME=nominal TB/s")
    add("--model", nargs="+", default=[PROFILED_MODEL, "qwen3.5-397b-a17b:8"],
        help="shipped configs, with the GPUs that one is divided over behind a colon")  # fmt: skip
    add("--tokens", type=float, default=2.92, help="that a sequence gains in a step")
    args = parser.parse_args(argv)
    row = json.loads(args.profile.read_text(encoding="utf-8"))["rows"][0]
    base = reached(row)
    print(describe(row, base))
    cells = [
        project(row, base, model, *gpu.partition("=")[::2], args.tokens)
        for model in args.model
        for gpu in args.gpu
    ]
    print("\nPROJECTION, not measured; per GPU, without communication:\n")
    print(table(COLUMNS, cells))


@dataclass(frozen=True)
class Reached:
    """Of the profiled step: floors and times in ms, and the rest of it."""

    floors: tuple[float, float]
    experts: float
    states: float
    rest: float
    layers: int


def reached(row: dict[str, Any]) -> Reached:
    """What the profiled step reached; counting and sorting of the experts' rows is in the rest."""
    config, _, _ = sharded(PROFILED_MODEL)
    kinds = row["kinds_ms"]
    floors = traffic(config, row["batch"], widths_of(row["tree"]), "float32").floor_ms(MEASURED)
    experts = sum(kinds["largest"][name] for name in ("_gate_up", "_down"))
    states = kinds["GDN verify"] + kinds["GDN commit"]
    whole = sum(value for name, value in kinds.items() if name != "largest")
    return Reached(floors, experts, states, whole - experts - states, len(config.layer_types))


def describe(row: dict[str, Any], base: Reached) -> str:
    whole = base.experts + base.states + base.rest
    return (
        f"Profiled: {row['tree']} at batch {row['batch']}, {whole:.1f} ms of kernels. Products of "
        f"the experts {base.experts:.2f} ms, floor {base.floors[0]:.2f} "
        f"({base.floors[0] / base.experts:.0%} of the bandwidth); GDN verify and commit "
        f"{base.states:.2f} ms, floor {base.floors[1]:.2f} ({base.floors[1] / base.states:.0%}), "
        f"{base.states / whole:.1%} of the step; the rest {base.rest:.2f} ms."
    )


def project(
    row: dict[str, Any], base: Reached, model: str, gpu: str, nominal: str, tokens: float
) -> tuple[str, ...]:
    """A row of the table: model, GPU, ms by part, step and tokens a second as ranges."""
    config, ranks, name = sharded(model)
    bandwidth = MEASURED / NOMINAL * float(nominal)
    moved = traffic(config, row["batch"], widths_of(row["tree"]), "float32").floor_ms(bandwidth)
    experts = moved[0] * base.experts / base.floors[0]
    states = moved[1] * base.states / base.floors[1]
    most = base.rest * len(config.layer_types) / base.layers
    steps = [experts + states + rest for rest in (most * MEASURED / bandwidth, most)]
    speeds = [1e3 * row["batch"] * tokens / step for step in reversed(steps)]
    return (
        name, f"{ranks} x {gpu}", f"{experts:.1f}", f"{states:.1f}",
        _range(most * MEASURED / bandwidth, most, ".1f"), _range(*steps, ".1f"),
        _range(*speeds, ".0f"),
    )  # fmt: skip


def _range(low: float, high: float, form: str) -> str:
    least, most = f"{low:{form}}", f"{high:{form}}"
    return least if least == most else f"{least} to {most}"


if __name__ == "__main__":
    main()
