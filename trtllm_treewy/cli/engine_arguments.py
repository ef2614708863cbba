"""Arguments of every command that loads a model: drafts, types, limits."""

from __future__ import annotations

import argparse
import math
from typing import Any

from ..llmapi import (
    DEFAULT_DYNAMIC_DEPTH,
    DEFAULT_DYNAMIC_TOP_K,
    STASHES,
    STATE_COMMITS,
    TREE_POLICIES,
    CudaGraphConfig,
    KvCacheConfig,
)
from .sizes import parse_size

DEFAULT_DRAFT_TREE_WIDTHS = (3, 3, 3)
# Sequences at once on the CPU, and of so few prompts no more than there are.
DEFAULT_BATCH_SIZE = 8
# As many of them as memory holds.
AUTO = "auto"
DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "dummy")

EPILOG = "TREEWY_DEBUG=1 in the environment shows an error with its traceback."


def add_engine(parser: argparse.ArgumentParser, *, device: bool = True) -> argparse._ArgumentGroup:
    """Types, place and limits of the engine; without `device` someone else decides the place."""
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="of weights and activations (default: %(default)s, the checkpoint's; with float32 on "
        "the CPU, drafts never change the tokens)",
    )
    engine.add_argument(
        "--state-dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of the recurrent state (default: %(default)s, which is float32)",
    )
    if device:
        engine.add_argument(
            "--device",
            metavar="NAME",
            help="cpu, cuda, cuda:1, ..., or that of each rank: cuda:0,cuda:2 (default: a GPU if "
            "torch finds one)",
        )
        add_tensor_parallel(
            engine, "GPUs that the model is divided over, from --device on (default: %(default)s)"
        )
    engine.add_argument(
        "--max-batch-size",
        type=batch_size,
        metavar="N",
        help=f"most prompts decoded together, or {AUTO}: as many of the longest length as memory "
        f"holds (default: {AUTO} on a GPU, {DEFAULT_BATCH_SIZE} on the CPU); generate makes room "
        "for no more than it has",
    )
    engine.add_argument(
        "--max-seq-len",
        type=positive,
        metavar="N",
        help="most tokens of prompt and output together (default: 8192, or the model's longest "
        "if that is shorter)",
    )
    engine.add_argument(
        "--batch-wait-iters",
        type=unsigned,
        default=0,
        metavar="N",
        help="most engine steps that a prompt waits, while others decode, for more to be computed "
        "with it: more throughput under load, a later first token (default: %(default)s)",
    )
    engine.add_argument(
        "--batch-wait-max-tokens-ratio",
        type=part,
        default=0.5,
        metavar="PART",
        help="from 0 to 1: prompts that have this part of a step's tokens (8192) together wait no "
        "longer (default: %(default)s)",
    )
    engine.add_argument(
        "--free-gpu-memory-fraction",
        type=share,
        metavar="PART",
        help="part of the device's free memory (on the CPU, of the machine's) that weights, "
        "states, caches and steps may take together (default: 0.9)",
    )
    engine.add_argument(
        "--memory",
        type=parse_size,
        metavar="SIZE",
        help="the same as a size, such as 60GB; the smaller of both holds (default: none)",
    )
    engine.add_argument(
        "--block-reuse",
        action=argparse.BooleanOptionalAction,
        default=KvCacheConfig.enable_block_reuse,
        help="a prompt that starts like an earlier one takes over what was computed of it "
        f"(default: {'on' if KvCacheConfig.enable_block_reuse else 'off'})",
    )
    engine.add_argument(
        "--load-format",
        choices=LOAD_FORMATS,
        default="auto",
        help="dummy makes random weights, for measurements: a config.json and a tokenizer are all "
        "that must be there (default: %(default)s, the checkpoint's)",
    )
    _add_graphs(parser)
    return engine


def _add_graphs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "CUDA graphs", "Steps that are captured, on one GPU and without TensorRT."
    )
    group.add_argument(
        "--no-cuda-graphs",
        action="store_true",
        help="capture none, and enqueue every step (default: they are captured)",
    )
    group.add_argument(
        "--cuda-graph-batch-sizes",
        type=integers,
        metavar="N,N,...",
        help="numbers of sequences that steps are captured for (default: 1, 2, 4, and wider steps "
        "from there on)",
    )
    group.add_argument(
        "--cuda-graph-max-batch-size",
        type=positive,
        metavar="N",
        help="the largest of them (default: --max-batch-size)",
    )
    group.add_argument(
        "--no-cuda-graph-padding",
        action="store_true",
        help="run batches of other sizes uncaptured (default: filled up to the next size)",
    )
    group.add_argument(
        "--cuda-graph-max-prompt-tokens",
        type=unsigned,
        metavar="N",
        help="tokens of the largest prompt step that is captured, 0 for none (default: "
        f"{CudaGraphConfig.max_prompt_tokens})",
    )


def graph_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What `LLM` is told of CUDA graphs: nothing where no flag says anything.

    Raises:
        ValueError: a batch size is not one.
    """
    if args.no_cuda_graphs:
        return {"cuda_graph_config": None}
    tokens = args.cuda_graph_max_prompt_tokens
    given = CudaGraphConfig(
        batch_sizes=args.cuda_graph_batch_sizes,
        max_batch_size=args.cuda_graph_max_batch_size or 0,
        enable_padding=not args.no_cuda_graph_padding,
        **({} if tokens is None else {"max_prompt_tokens": tokens}),
    )
    return {} if given == CudaGraphConfig() else {"cuda_graph_config": given}


def add_tensor_parallel(parser: argparse._ActionsContainer, says: str) -> None:
    """The number of devices that a model is divided over."""
    parser.add_argument(
        "--tensor-parallel-size", "--tp", type=positive, default=1, metavar="N", help=says
    )


def add_drafts(parser: argparse.ArgumentParser) -> None:
    """The shape of the drafts, and how they are committed."""
    group = parser.add_argument_group(
        "drafts",
        "Without a flag that says how: a tree of widths 3,3,3 where the model has an MTP module, "
        "else none.",
    )
    shape = group.add_mutually_exclusive_group()
    shape.add_argument(
        "--draft-tree-widths",
        type=integers,
        metavar="W,W,...",
        help="children per node, level by level (default: 3,3,3)",
    )
    shape.add_argument(
        "--draft-tree-parents",
        type=integers,
        metavar="-1,P,...",
        help="parent of each node, root first (default: a tree by widths)",
    )
    shape.add_argument(
        "--dynamic-tree",
        type=positive,
        metavar="N",
        help="the best N draft tokens, anew at each step (default: the same tree at each step)",
    )
    shape.add_argument(
        "--no-speculation",
        action="store_true",
        help="decode without drafts (default: with drafts, where the model has an MTP module)",
    )
    group.add_argument(
        "--max-draft-len",
        type=positive,
        metavar="N",
        help=f"a chain of N drafts, or with --dynamic-tree its depth "
        f"(default: no chain; {DEFAULT_DYNAMIC_DEPTH} with --dynamic-tree)",
    )
    group.add_argument(
        "--dynamic-tree-top-k",
        type=positive,
        metavar="K",
        help=f"candidates below each node of a dynamic tree (default: {DEFAULT_DYNAMIC_TOP_K})",
    )
    group.add_argument(
        "--tree-policy",
        choices=TREE_POLICIES,
        help="the same tree at each step, the best drafts of each, or as many of either as bring "
        "the most tokens a second (default: what the shape says)",
    )
    group.add_argument(
        "--acceptance-rule",
        choices=("match", "rejection"),
        default="match",
        help="how sampling accepts drafts: match, where drafts do not change the text of a seed, "
        "or rejection, which accepts more (default: %(default)s)",
    )
    group.add_argument(
        "--state-commit",
        choices=STATE_COMMITS,
        default="reconstruct",
        help="how accepted tokens reach the state (default: %(default)s)",
    )
    group.add_argument(
        "--stash",
        choices=STASHES,
        default="auto",
        help="what verification keeps for --state-commit reconstruct (default: %(default)s, the "
        "faster one)",
    )


def check_engine(args: argparse.Namespace) -> None:
    """Refuses what argparse cannot: a flag may be in one exclusive group only."""
    check_drafts(args)
    for given, flag in (
        (args.cuda_graph_batch_sizes is not None, "--cuda-graph-batch-sizes"),
        (args.cuda_graph_max_batch_size is not None, "--cuda-graph-max-batch-size"),
        (args.no_cuda_graph_padding, "--no-cuda-graph-padding"),
        (args.cuda_graph_max_prompt_tokens is not None, "--cuda-graph-max-prompt-tokens"),
    ):
        if given and args.no_cuda_graphs:
            args.usage_error(f"argument --no-cuda-graphs: not allowed with argument {flag}")


def check_drafts(args: argparse.Namespace) -> None:
    """The flags of drafts that are not allowed together."""
    top_k, policy = args.dynamic_tree_top_k is not None, args.tree_policy
    for given, flag in (
        (args.max_draft_len is not None, "--max-draft-len"),
        (top_k, "--dynamic-tree-top-k"),
        (policy is not None, "--tree-policy"),
    ):
        if given and args.no_speculation:
            args.usage_error(f"argument --no-speculation: not allowed with argument {flag}")
    for given, flag in (
        (args.draft_tree_widths is not None, "--draft-tree-widths"),
        (args.draft_tree_parents is not None, "--draft-tree-parents"),
    ):
        if given and policy == "dynamic":
            args.usage_error(f"argument --tree-policy dynamic: not allowed with argument {flag}")
    if policy == "static" and args.dynamic_tree is not None:
        args.usage_error("argument --tree-policy static: not allowed with argument --dynamic-tree")
    if top_k and args.dynamic_tree is None and policy not in ("dynamic", "auto"):
        args.usage_error("argument --dynamic-tree-top-k: needs --dynamic-tree")
    if args.stash == "inputs" and args.state_commit != "reconstruct":
        args.usage_error("argument --stash inputs: needs --state-commit reconstruct")


def integers(text: str) -> tuple[int, ...]:
    """Integers separated by commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected integers separated by commas, got {text!r}"
        ) from None


def number(text: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}")
    return value


def part(text: str) -> float:
    """A number from 0 to 1."""
    value = number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text!r}")
    return value


def share(text: str) -> float:
    """A part that is not nothing."""
    value = part(text)
    if not value:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def unsigned(text: str) -> int:
    """An integer of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected an integer >= 0, got {text!r}")
    return int(text)


def batch_size(text: str) -> int | str:
    """An integer of at least 1, or `AUTO`."""
    value = int(text) if text.isdecimal() else 0
    if value < 1 and text != AUTO:
        raise argparse.ArgumentTypeError(f"expected an integer >= 1 or {AUTO}, got {text!r}")
    return value or AUTO


def positive(text: str) -> int:
    """An integer of at least 1."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {text!r}")
    return value
