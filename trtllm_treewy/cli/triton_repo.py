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
    if args.gpus is not None and min(args.gpus) < 0:
        raise ValueError(f"--gpus has {min(args.gpus)}, expected numbers of GPUs, from 0 on")
    # Refused here is what the server would refuse.
    speculation_of(args, args.model)
    graph_settings(args)
    from ..runtime.triton.config_pbtxt import Instances
    from ..runtime.triton.repository import write_model

    target = write_model(
        Path(args.output),
        Path(args.model).resolve().name if args.name is None else args.name,
        Path(args.model),
        args,
        Instances(count=args.replicas, gpus=args.gpus, cpu=args.cpu),
        model_path=args.model_path,
        force=args.force,
    )
    if not args.quiet:
        serve = f"tritonserver --model-repository={args.output}"
        write_err(f"[wrote {target}; serve it with {serve}]\n")
    return EXIT_OK
