"""Sequences at once on a GPU, by model, commit policy, tree and context: computed, not run.

    python benchmarks/capacity.py
    python benchmarks/capacity.py --gpu MY=96GiB --model qwen3.5-35b-a3b --context 8192

What the weights leave of a fraction of the memory is divided by what a sequence takes, as
`trtllm-treewy plan --memory` does and the engine's own budget, with 16-bit weights and KV cache. A
model over several GPUs is counted on each of them. Logits, activations and CUDA graphs come off
besides: a few GiB, more with wide trees.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from executor import widths_of
from serving_bench.report import table

from trtllm_treewy.cli.sizes import parse_size
from trtllm_treewy.config import ModelConfig, read_json, shipped_configs
from trtllm_treewy.llmapi import STATE_COMMITS
from trtllm_treewy.memory_plan import plan
from trtllm_treewy.rank_config import shard_config
from trtllm_treewy.runtime.engine_memory import weight_bytes

# What tools say of an H200, and what the TreeWY paper says of its B200.
GPUS = ("H200=139GiB", "B200=178GiB")
COLUMNS = ("model", "GPU", "tree", "state", "context", *STATE_COMMITS, "reconstruct / snapshot")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", nargs="+", default=["qwen3.5-35b-a3b:1", "qwen3.5-397b-a17b:8"],
        help="shipped configs, with the GPUs that one is divided over behind a colon")  # fmt: skip
    add("--gpu", nargs="+", default=list(GPUS), help="NAME=SIZE of its memory")
    add("--fraction", type=float, default=0.9, help="of it that is used, the weights included")
    add("--tree", nargs="+", default=["3", "3,3,3"], help="chains' lengths or widths")
    add("--state-dtype", nargs="+", default=["float32", "bfloat16"])
    add("--context", type=int, nargs="+", default=[4096, 32768, 131072])
    args = parser.parse_args(argv)
    try:
        print(table(COLUMNS, list(rows(args))))
    except (ValueError, argparse.ArgumentTypeError) as error:
        parser.error(str(error))


def rows(args: argparse.Namespace) -> Iterator[Sequence[str]]:
    for model in args.model:
        config, ranks, label = sharded(model)
        weights = weight_bytes(config, torch.bfloat16)
        for gpu in args.gpu:
            name, _, size = gpu.partition("=")
            room = int(args.fraction * parse_size(size)) - weights
            for tree in args.tree:
                for state in args.state_dtype:
                    where = (label, f"{ranks} x {name}", tree, state)
                    for context in args.context:
                        yield (*where, f"{context:,}", *counts(config, room, tree, state, context))


def sharded(model: str) -> tuple[ModelConfig, int, str]:
    """The config of a rank, how many ranks there are, and the model's name.

    Raises:
        ValueError: no such shipped config, or it cannot be divided so.
    """
    name, _, ranks = model.partition(":")
    path = shipped_configs().get(name)
    if path is None:
        raise ValueError(f"{name}: expected one of {', '.join(shipped_configs())}")
    config = ModelConfig.from_dict(read_json(path), source=str(path))
    return shard_config(config, int(ranks or 1)), int(ranks or 1), name


def counts(config: ModelConfig, room: int, tree: str, state: str, context: int) -> list[str]:
    """Sequences by policy, and the factor between the first and snapshots."""
    if room < 0:
        return ["weights do not fit", *[""] * len(STATE_COMMITS)]
    sizes = plan(
        config, draft_tree_widths=widths_of(tree), state_dtype=state, context_length=context
    )
    fit = sizes.max_sequences(room)
    factor = f"{fit['reconstruct'] / fit['snapshot']:.1f}" if fit["snapshot"] else "–"
    return [*(str(fit[policy]) for policy in STATE_COMMITS), factor]


if __name__ == "__main__":
    main()
