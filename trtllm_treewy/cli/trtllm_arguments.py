"""The arguments of `convert-checkpoint`, and the place of `trtllm-build` among the commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from .engine_arguments import DTYPES, positive
from .program import PROGRAM


def add_convert_checkpoint(add_parser: Callable[..., argparse.ArgumentParser], epilog: str) -> None:
    """Adds the command to the parser."""
    parser = add_parser(
        "convert-checkpoint",
        allow_abbrev=False,
        help="make a TensorRT-LLM checkpoint, for trtllm-build",
        usage=f"{PROGRAM} convert-checkpoint HF_DIR --output CKPT_DIR [options]",
        description="Convert a Hugging Face checkpoint to a TensorRT-LLM one. The output appears "
        "when it is whole; an earlier conversion in its place is replaced.",
        epilog=epilog,
    )
    parser.set_defaults(command="convert-checkpoint", usage_error=parser.error)
    parser.add_argument("model", metavar="HF_DIR", help="model directory")
    parser.add_argument(
        "--output", metavar="CKPT_DIR", required=True, help="directory to make (required)"
    )
    parser.add_argument(
        "--tp-size",
        type=positive,
        default=1,
        metavar="N",
        help="GPUs that share the model (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="type of weights and activations (default: auto, the checkpoint's)",
    )
    parser.add_argument(
        "--max-position-embeddings",
        type=positive,
        metavar="N",
        help="positions whose rotary tables the engine will hold: sequences are no longer "
        "(default: the model's)",
    )
    parser.add_argument(
        "--quiet", action="store_true", help="show no progress (default: on a terminal)"
    )


def add_trtllm_build(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds the command to the list of commands; its words are not read here."""
    add_parser(
        "trtllm-build",
        allow_abbrev=False,
        add_help=False,
        help="TensorRT-LLM's trtllm-build with --treewy_plugin and --treewy_max_nodes",
    )
