"""Arguments of `trtllm-treewy triton-repo`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from .engine_arguments import EPILOG, integers, positive
from .program import PROGRAM


def add_triton_repo(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """The command `triton-repo`."""
    # Those of the settings are shared with what reads them in the server.
    from ..runtime.triton.settings import add_settings

    parser = add_parser(
        "triton-repo",
        allow_abbrev=False,
        help="write a model repository for Triton Inference Server",
        usage=f"{PROGRAM} triton-repo MODEL --output DIR [options]",
        description="Write a model into a model repository that Triton Inference Server serves. "
        "The options below become parameters in its config.pbtxt, where they can be changed.",
        epilog=EPILOG,
    )
    parser.set_defaults(command="triton-repo", usage_error=parser.error)
    parser.add_argument(
        "model", metavar="MODEL", help="directory of a checkpoint, or of an engine that build made"
    )
    repository = parser.add_argument_group("repository")
    repository.add_argument(
        "--output", metavar="DIR", required=True, help="the model repository (default: none)"
    )
    repository.add_argument(
        "--name", help="what clients call the model (default: the name of its directory)"
    )
    repository.add_argument(
        "--model-path",
        metavar="PATH",
        help="where the server finds the model: an absolute path there, or one relative to the "
        "version's folder (default: it is copied into the repository)",
    )
    repository.add_argument(
        "--force", action="store_true", help="replace a model of that name (default: refuse)"
    )
    repository.add_argument(
        "-q", "--quiet", action="store_true", help="errors only (default: says what it wrote)"
    )
    _add_instances(parser)
    add_settings(parser)


def _add_instances(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("instances", "Each instance is an engine of its own.")
    group.add_argument(
        "--replicas",
        type=positive,
        default=1,
        metavar="N",
        help="instances on each device, or on each set of devices (default: %(default)s)",
    )
    place = group.add_mutually_exclusive_group()
    place.add_argument(
        "--gpus",
        type=integers,
        metavar="N,N,...",
        help="numbers of the GPUs; with --tensor-parallel-size N an instance on the first N, on "
        "the next N, and so on (default: every GPU that Triton finds, or else the CPU; with "
        "--tensor-parallel-size the first N)",
    )
    place.add_argument(
        "--cpu", action="store_true", help="run on the CPU (default: where there is no GPU)"
    )
