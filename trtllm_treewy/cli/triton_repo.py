"""`trtllm-treewy triton-repo`: a model repository for Triton Inference Server."""

from __future__ import annotations

import argparse
from pathlib import Path

from .drafts import speculation_of
from .engine_arguments import graph_settings
from .loading import expect_directory
from .program import EXIT_OK
from .streams import write_err


def run(args: argparse.Namespace) -> int:
    """Writes the model; an exit code."""
    expect_directory(args.model)
    # Refused here is what the server would refuse.
    speculation_of(args, args.model)
    graph_settings(args)
    from ..runtime.triton.config_pbtxt import Instances
    from ..runtime.triton.places import check_gpus
    from ..runtime.triton.repository import write_model

    ranks = args.tensor_parallel_size
    check_gpus(args.gpus, ranks)
    target = write_model(
        Path(args.output),
        Path(args.model).resolve().name if args.name is None else args.name,
        Path(args.model),
        args,
        Instances(count=args.replicas, gpus=args.gpus, cpu=args.cpu, ranks=ranks),
        model_path=args.model_path,
        force=args.force,
    )
    if not args.quiet:
        serve = f"tritonserver --model-repository={args.output}"
        write_err(f"[wrote {target}; serve it with {serve}]\n")
    return EXIT_OK
