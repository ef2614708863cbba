"""The arguments of `trtllm-treewy build`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ..engine_config import ATTENTIONS, STANDARD
from .engine_arguments import DTYPES, add_tensor_parallel, positive
from .program import PROGRAM

STATE_DTYPES = ("float32", "bfloat16")


def add_build(
    add_parser: Callable[..., argparse.ArgumentParser],
    epilog: str,
) -> None:
    """Adds the command to the parser."""
    parser = add_parser(
        "build",
        allow_abbrev=False,
        help="build an engine from a checkpoint",
        usage=f"{PROGRAM} build MODEL --output DIR [options]",
        description="Export a checkpoint and build the networks. The output appears when it is "
        "whole; what is up to date is not built again.",
        epilog=epilog,
    )
    parser.set_defaults(command="build", usage_error=parser.error)
    parser.add_argument("model", metavar="MODEL", help="model directory")
    parser.add_argument(
        "--output", metavar="DIR", required=True, help="directory of the engine (required)"
    )
    parser.add_argument(
        "--backend",
        choices=("tensorrt", "onnx"),
        default="tensorrt",
        help="what will run it: TensorRT with the plugins, or ONNX Runtime on a CPU "
        "(default: tensorrt)",
    )
    parser.add_argument(
        "--plugins",
        metavar="FILE",
        help="libtreewy_tensorrt.so, for TensorRT (default: that of ./build.sh)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="type of weights and activations (default: auto, the checkpoint's)",
    )
    for name, what in (("state", "recurrent state"), ("stash", "pseudo-values of a draft tree")):
        parser.add_argument(
            f"--{name}-dtype",
            choices=STATE_DTYPES,
            default="float32",
            help=f"type of the {what} (default: float32)",
        )
    parser.add_argument(
        "--attention",
        choices=ATTENTIONS,
        default=STANDARD,
        help="export attention as standard operators, or as ONNX's Attention operator (opset 23), "
        "which TensorRT fuses from 10.14 on (default: standard)",
    )
    add_tensor_parallel(
        parser, "ranks that the model is divided over, each with its own networks (default: 1)"
    )
    for flag, default, what in (
        ("--max-batch-size", 8, "sequences at a time"),
        ("--max-nodes", 64, "nodes of a draft tree, at most 128"),
        ("--max-num-tokens", 2048, "prompt tokens of a step"),
    ):
        parser.add_argument(
            flag, type=positive, default=default, metavar="N", help=f"{what} (default: {default})"
        )
    parser.add_argument(
        "--max-seq-len",
        type=positive,
        metavar="N",
        help="tokens of a sequence (default: the smaller of the model's limit and 8192)",
    )
    parser.add_argument(
        "--force", action="store_true", help="build even what is up to date (default: skip it)"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print memory, disk and time, and build nothing (default: build)",
    )
    parser.add_argument(
        "--quiet", action="store_true", help="show no progress (default: on a terminal)"
    )
