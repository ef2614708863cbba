"""`trtllm-treewy plan`: memory by commit policy, from a config alone."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import DEFAULT_CONTEXT_LENGTH
from .program import EXIT_OK
from .sizes import format_size

if TYPE_CHECKING:
    from ..config import ModelConfig


def run(args: argparse.Namespace) -> int:
    """Prints the plan; an exit code."""
    from .. import memory_plan
    from ..rank_config import shard_config

    ranks = args.tensor_parallel_size
    config = shard_config(_model_config(args.config), ranks)
    plan = memory_plan.plan(
        config,
        draft_tree_widths=args.draft_tree_widths,
        num_nodes=args.num_nodes,
        state_dtype=args.state_dtype,
        activation_dtype=args.activation_dtype,
        stash_dtype=args.stash_dtype,
        context_length=args.context_length
        or min(DEFAULT_CONTEXT_LENGTH, config.max_position_embeddings),
        batch_size=args.batch_size,
        history=args.history,
    )
    fits = None if args.memory is None else plan.max_sequences(args.memory)
    weights = _weight_bytes(config, args.activation_dtype) if ranks > 1 else 0
    if args.json:
        extra: dict[str, Any] = {}
        if ranks > 1:
            extra = {"tensor_parallel_size": ranks, "weights_bytes": weights}
        if fits is not None:
            extra |= {"memory_bytes": args.memory, "max_sequences": fits}
        print(json.dumps(plan.to_dict() | extra, indent=2))
        return EXIT_OK
    if ranks > 1:
        print(f"On each of {ranks} GPUs, beside {format_size(weights)} of weights:")
    print(plan.table())
    if fits is not None:
        counts = ", ".join(f"{policy} {count}" for policy, count in fits.items())
        room = format_size(args.memory) + (" of each GPU" if ranks > 1 else "")
        print(f"Sequences that fit into {room} beside the weights: {counts}")
    return EXIT_OK


def _weight_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of the weights that `config` describes."""
    import torch

    from ..runtime.engine_memory import weight_bytes

    return weight_bytes(config, getattr(torch, dtype))


def _model_config(name: str) -> ModelConfig:
    """Config of a directory, of a config.json, or of a model that this package ships by name."""
    from ..config import ModelConfig, read_json, shipped_configs

    path = Path(name)
    if path.is_dir():
        return ModelConfig.from_pretrained(path)
    if path.is_file():
        return ModelConfig.from_dict(read_json(path), source=name)
    shipped = shipped_configs()
    file = shipped.get(name.lower().removesuffix(".json"))
    if file is None:
        raise ValueError(
            f"config {name!r} is neither a model directory, nor a config.json, nor one of the "
            f"shipped configs: {', '.join(sorted(shipped))}"
        )
    return ModelConfig.from_dict(read_json(file), source=file.name)
