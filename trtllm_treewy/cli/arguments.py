"""The command line: its parser, and the checks that argparse cannot make."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn

from ..llmapi import DEFAULT_DYNAMIC_DEPTH, DEFAULT_DYNAMIC_TOP_K, STATE_COMMITS
from .program import EXIT_USER_ERROR, PROGRAM
from .sizes import parse_size
from .streams import write_error

DEFAULT_MAX_TOKENS = 128
DEFAULT_DRAFT_TREE_WIDTHS = (3, 3, 3)
DEFAULT_CONTEXT_LENGTH = 32768
DTYPES = ("auto", "float32", "bfloat16", "float16")

EPILOG = "TREEWY_DEBUG=1 in the environment shows an error with its traceback."


class _Parser(argparse.ArgumentParser):
    """Errors in one line, as all of this command's errors are."""

    def error(self, message: str) -> NoReturn:
        write_error(f"{message} (see {self.prog} --help)")
        raise SystemExit(EXIT_USER_ERROR)


def parse(argv: list[str]) -> argparse.Namespace:
    """Checked arguments; `command` names what to run, `usage_error` refuses what comes later."""
    parser = _parser()
    prompts: list[str] = []
    if argv[:1] == ["generate"] and "--" in argv:
        # By hand, as the second run of positionals that argparse does not take has no "--" left.
        end = argv.index("--")
        argv, prompts = argv[:end], argv[end + 1 :]
    args, rest = parser.parse_known_args(_join_parents(argv))
    # argparse takes one run of positionals only; MODEL --option X PROMPT has two.
    options = [word for word in rest if word.startswith("-") and word != "-"]
    if options or (rest and not hasattr(args, "words")):
        args.usage_error(f"unrecognized arguments: {' '.join(options or rest)}")
    if rest or prompts:
        args.words += rest + prompts
    if args.command == "generate":
        _check_drafts(args)
    return args


def _check_drafts(args: argparse.Namespace) -> None:
    """Refuses what argparse cannot: a flag may be in one exclusive group only."""
    depth, top_k = args.max_draft_len is not None, args.dynamic_tree_top_k is not None
    for given, flag in ((depth, "--max-draft-len"), (top_k, "--dynamic-tree-top-k")):
        if given and args.no_speculation:
            args.usage_error(f"argument --no-speculation: not allowed with argument {flag}")
    if top_k and args.dynamic_tree is None:
        args.usage_error("argument --dynamic-tree-top-k: needs --dynamic-tree")


def _join_parents(argv: list[str]) -> list[str]:
    """`--draft-tree-parents -1,0,0` as one word, which argparse would take for two options."""
    joined: list[str] = []
    for word in argv:
        if joined and joined[-1] == "--draft-tree-parents":
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        allow_abbrev=False,
        description="Tree speculative decoding for Gated DeltaNet hybrid models.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "--version",
        action=_Version,
        nargs=0,
        default=argparse.SUPPRESS,
        help="show the version and exit",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_generate(commands.add_parser)
    _add_plan(commands.add_parser)
    _add_doctor(commands.add_parser)
    return parser


class _Version(argparse.Action):
    """Looks the version up only when asked: package metadata takes longer than all the rest."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(PROGRAM, version(PROGRAM))
        parser.exit()


def _add_generate(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    parser = add_parser(
        "generate",
        allow_abbrev=False,
        help="generate text",
        usage=f"{PROGRAM} generate MODEL [PROMPT ...] [options]",
        description="Generate text. The text goes to stdout, all else to stderr. "
        "Several prompts are decoded as one batch.",
        epilog=EPILOG,
    )
    parser.set_defaults(command="generate", usage_error=parser.error)
    parser.add_argument(
        "words",
        nargs="*",
        metavar="MODEL [PROMPT ...]",
        help='model directory, and prompts, after "--" if they begin with "-" '
        "(default: one prompt from standard input, if piped)",
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="model directory; all positionals are prompts then (default: the first positional)",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="a prompt, after the positional ones; may be repeated (default: none)",
    )
    parser.add_argument(
        "--prompt-file",
        action="append",
        default=[],
        metavar="FILE",
        help='one prompt in a file, "-" for standard input; may be repeated (default: none)',
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="apply the chat template of the checkpoint, which must have one "
        "(default: the prompt as it stands)",
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="system message, with --chat (default: none)"
    )
    parser.add_argument(
        "--max-tokens",
        type=_positive,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help="most tokens to generate for a prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end at this text; may be repeated (default: none)",
    )
    parser.add_argument(
        "--ignore-eos",
        action="store_true",
        help="go on after the end token (default: stop there)",
    )
    _add_drafts(parser)
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
    engine.add_argument(
        "--device",
        metavar="NAME",
        help="cpu, cuda, cuda:1, ... (default: a GPU if torch finds one)",
    )
    engine.add_argument(
        "--max-batch-size",
        type=_positive,
        default=8,
        metavar="N",
        help="most prompts decoded together (default: %(default)s)",
    )
    engine.add_argument(
        "--max-seq-len",
        type=_positive,
        metavar="N",
        help="most tokens of prompt and output together (default: 8192, or the model's longest "
        "if that is shorter)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="one JSON object a prompt, at the end (default: text as it comes)",
    )
    parser.add_argument(
        "-q",
        "--quiet",
        action="store_true",
        help="text and errors only (default: a summary on stderr too)",
    )


def _add_drafts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "drafts",
        "Without a flag that says how: a tree of widths 3,3,3 where the model has an MTP module, "
        "else none.",
    )
    shape = group.add_mutually_exclusive_group()
    shape.add_argument(
        "--draft-tree-widths",
        type=_integers,
        metavar="W,W,...",
        help="children per node, level by level (default: 3,3,3)",
    )
    shape.add_argument(
        "--draft-tree-parents",
        type=_integers,
        metavar="-1,P,...",
        help="parent of each node, root first (default: a tree by widths)",
    )
    shape.add_argument(
        "--dynamic-tree",
        type=_positive,
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
        type=_positive,
        metavar="N",
        help=f"a chain of N drafts, or with --dynamic-tree its depth "
        f"(default: no chain; {DEFAULT_DYNAMIC_DEPTH} with --dynamic-tree)",
    )
    group.add_argument(
        "--dynamic-tree-top-k",
        type=_positive,
        metavar="K",
        help=f"candidates below each node of a dynamic tree (default: {DEFAULT_DYNAMIC_TOP_K})",
    )
    group.add_argument(
        "--state-commit",
        choices=STATE_COMMITS,
        default="reconstruct",
        help="how accepted tokens reach the state (default: %(default)s)",
    )


def _add_plan(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    parser = add_parser(
        "plan",
        allow_abbrev=False,
        help="memory a sequence takes, by commit policy",
        description="Memory a sequence takes under each commit policy. Nothing is loaded.",
        epilog=EPILOG,
    )
    parser.set_defaults(command="plan", usage_error=parser.error)
    parser.add_argument(
        "config", metavar="CONFIG", help="model directory, config.json, or a shipped name"
    )
    tree = parser.add_mutually_exclusive_group()
    tree.add_argument(
        "--draft-tree-widths",
        type=_integers,
        default=DEFAULT_DRAFT_TREE_WIDTHS,
        metavar="W,W,...",
        help="children per node, level by level (default: 3,3,3)",
    )
    tree.add_argument(
        "--num-nodes",
        type=_positive,
        metavar="N",
        help="nodes of any other tree, root included (default: a tree by widths)",
    )
    parser.add_argument(
        "--state-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the recurrent state (default: %(default)s)",
    )
    parser.add_argument(
        "--activation-dtype",
        choices=DTYPES[1:],
        default="bfloat16",
        help="of activations and KV cache (default: %(default)s)",
    )
    parser.add_argument(
        "--stash-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of what verification keeps for the commit (default: %(default)s)",
    )
    parser.add_argument(
        "--context-length",
        type=_positive,
        metavar="TOKENS",
        help=f"tokens that the KV cache is counted at (default: {DEFAULT_CONTEXT_LENGTH}, or the "
        "model's longest if that is shorter)",
    )
    parser.add_argument(
        "--batch-size",
        type=_positive,
        default=1,
        metavar="N",
        help="sequences that run at once (default: %(default)s)",
    )
    parser.add_argument(
        "--history",
        type=_positive,
        default=16,
        metavar="TOKENS",
        help='accepted tokens that "deferred" keeps for a sequence (default: %(default)s)',
    )
    parser.add_argument(
        "--memory",
        type=parse_size,
        metavar="SIZE",
        help="memory beside the weights, such as 141GB: says how many sequences fit "
        "(default: does not say)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="bytes, as one JSON object (default: a table in MiB)",
    )


def _add_doctor(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    parser = add_parser(
        "doctor",
        allow_abbrev=False,
        help="what of CUDA, TensorRT and the libraries is found here",
        description="Says what of CUDA, TensorRT and the libraries is found on this machine.",
        epilog=EPILOG,
    )
    parser.set_defaults(command="doctor", usage_error=parser.error)
    parser.add_argument(
        "--json", action="store_true", help="as one JSON object (default: a line a finding)"
    )


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected integers separated by commas, got {text!r}"
        ) from None


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {text!r}")
    return value
