"""`trtllm-treewy convert-checkpoint` and `trtllm-treewy trtllm-build`."""

from __future__ import annotations

import argparse
import sys

from .program import EXIT_OK
from .streams import write_err


def convert(args: argparse.Namespace) -> int:
    """Converts a checkpoint; an exit code."""
    from ..export.trtllm.convert import convert_checkpoint
    from .build import Bars

    bars = None if args.quiet or not sys.stderr.isatty() else Bars()
    try:
        convert_checkpoint(
            args.model,
            args.output,
            ranks=args.tp_size,
            dtype=args.dtype,
            max_position_embeddings=args.max_position_embeddings,
            progress=None if bars is None else lambda *at: bars("convert", *at),
        )
    finally:
        if bars is not None:
            bars.close()
    write_err(f"{args.output} converted\n")
    return EXIT_OK


def build(args: argparse.Namespace) -> int:
    """Runs TensorRT-LLM's command with ours in it; an exit code."""
    from ..export.trtllm_build import run

    run(args.words)
    return EXIT_OK
