"""The command line: its parser, and the checks that argparse cannot make."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn

from .bench_arguments import add_bench
from .build_arguments import add_build
from .engine_arguments import (
    DEFAULT_DRAFT_TREE_WIDTHS,
    DTYPES,
    EPILOG,
    add_drafts,
    add_engine,
    add_tensor_parallel,
    check_engine,
    integers,
    number,
    positive,
    unsigned,
)
from .program import EXIT_USER_ERROR, PROGRAM
from .serve_arguments import add_serve
from .sizes import parse_size
from .streams import write_error
from .triton_arguments import add_triton_repo
from .trtllm_arguments import add_convert_checkpoint, add_trtllm_build

DEFAULT_MAX_TOKENS = 128
DEFAULT_CONTEXT_LENGTH = 32768


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
    if argv[:1] == ["trtllm-build"]:  # its flags are the library's
        return argparse.Namespace(command="trtllm-build", words=argv[1:])
    args, rest = parser.parse_known_args(_join_parents(argv))
    # argparse takes one run of positionals only; MODEL --option X PROMPT has two.
    options = [word for word in rest if word.startswith("-") and word != "-"]
    if options or (rest and not hasattr(args, "words")):
        args.usage_error(f"unrecognized arguments: {' '.join(options or rest)}")
    if rest or prompts:
        args.words += rest + prompts
    if hasattr(args, "no_speculation"):
        check_engine(args)
    return args


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
    add_serve(commands.add_parser)
    add_bench(commands.add_parser)
    add_build(commands.add_parser, EPILOG)
    add_triton_repo(commands.add_parser)
    add_convert_checkpoint(commands.add_parser, EPILOG)
    add_trtllm_build(commands.add_parser)
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
        type=positive,
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
    _add_sampling(parser)
    add_drafts(parser)
    add_engine(parser)
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


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "sampling",
        "Without a flag: greedy. --seed alone does not change that.",
    )
    group.add_argument(
        "--temperature",
        type=number,
        metavar="T",
        help="divide the logits by it, 0 is greedy (default: 1 with --top-p or --top-k)",
    )
    group.add_argument(
        "--top-p",
        type=number,
        metavar="P",
        help="keep the fewest tokens that have probability P together (default: all)",
    )
    group.add_argument(
        "--top-k",
        type=unsigned,
        metavar="K",
        help="keep the K most likely tokens, 0 keeps all (default: all)",
    )
    group.add_argument(
        "--seed",
        type=unsigned,
        metavar="N",
        help="one seed gives one text (default: another text at each run)",
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
        type=integers,
        default=DEFAULT_DRAFT_TREE_WIDTHS,
        metavar="W,W,...",
        help="children per node, level by level (default: 3,3,3)",
    )
    tree.add_argument(
        "--num-nodes",
        type=positive,
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
        type=positive,
        metavar="TOKENS",
        help=f"tokens that the KV cache is counted at (default: {DEFAULT_CONTEXT_LENGTH}, or the "
        "model's longest if that is shorter)",
    )
    parser.add_argument(
        "--batch-size",
        type=positive,
        default=1,
        metavar="N",
        help="sequences that run at once (default: %(default)s)",
    )
    parser.add_argument(
        "--history",
        type=positive,
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
    add_tensor_parallel(
        parser, "GPUs that the model is divided over: says what each holds (default: %(default)s)"
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
        "--trtllm",
        action="store_true",
        help="import tensorrt_llm and check every symbol that trtllm-build relies on; the exit "
        "code is 1 if one is missing or changed (default: a look at what is installed)",
    )
    parser.add_argument(
        "--json", action="store_true", help="as one JSON object (default: a line a finding)"
    )
