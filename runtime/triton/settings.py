"""The parameters in `config.pbtxt`: the flags of the command line, with underscores.

One parser reads both, so that a repository is written with the checks that it is loaded with.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from trtllm_treewy.cli.engine_arguments import (
    add_drafts,
    add_engine,
    add_tensor_parallel,
    check_engine,
    integers,
    positive,
)
from trtllm_treewy.cli.serve_arguments import add_limits

from .places import check_gpus

# Parameters that Triton's Python backend reads itself.
_TRITONS = frozenset(("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS"))


def add_settings(parser: argparse.ArgumentParser) -> None:
    """What may be set of a model, as flags."""
    answers = parser.add_argument_group("answers")
    answers.add_argument(
        "--exclude-input-in-output",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="leave the prompt out of text_output where a request does not say (default: on)",
    )
    limits = add_limits(parser)
    limits.add_argument(
        "--request-timeout",
        type=positive,
        metavar="SECONDS",
        help="end a request that has not ended by then, waiting included, with an error; for "
        "clients of whose leaving Triton does not tell (default: none, its max_tokens end it)",
    )
    add_drafts(parser)
    # Triton decides the place: an instance runs on the GPU that its instance group gives it.
    engine = add_engine(parser, device=False)
    add_tensor_parallel(
        engine,
        "GPUs that each instance is divided over, or processes on the CPU (default: %(default)s)",
    )
    engine.add_argument(
        "--python-executable",
        metavar="FILE",
        help="Python interpreter, on the machine that serves, that --tensor-parallel-size starts "
        "its processes with (default: the one whose library Triton's stub has loaded)",
    )


class _Parser(argparse.ArgumentParser):
    """Errors as exceptions, in the words of the configuration."""

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"argument (?=--)", "parameter ", message)
        raise ValueError(re.sub(r"--[a-z][a-z-]*", lambda flag: _name(flag[0]), message))


def parser() -> argparse.ArgumentParser:
    """Reads parameters that were turned into flags."""
    reader = _Parser(prog="config.pbtxt", add_help=False, allow_abbrev=False)
    reader.add_argument("--model", required=True)
    # Of the flags that place instances the one that the instance group has no place for.
    reader.add_argument("--gpus", type=integers)
    add_settings(reader)
    return reader


def parameters_of(args: argparse.Namespace) -> dict[str, str]:
    """The parameters that say what `args` says; what is as it is by default is left out."""
    given = vars(args) | ({"gpus": None} if args.tensor_parallel_size == 1 else {})
    return {
        action.dest: _text(given[action.dest])
        for action in parser()._actions
        if given[action.dest] != action.default
    }


def read_parameters(parameters: Mapping[str, Any]) -> argparse.Namespace:
    """The settings, checked, as the command line would give them.

    Args:
        parameters: of the model configuration: `{name: {"string_value": text}}`.

    Raises:
        ValueError: a parameter that is not known, or a value that is not usable.
    """
    reader = parser()
    flags = list(_flags(reader, parameters))
    args = reader.parse_args(flags)
    args.usage_error = reader.error
    args.quiet = True
    check_engine(args)
    for name in ("gpus", "python_executable"):
        if getattr(args, name) is not None and args.tensor_parallel_size == 1:
            raise ValueError(f"parameter {name} needs tensor_parallel_size above 1")
    check_gpus(args.gpus, args.tensor_parallel_size)
    return args


def _flags(reader: argparse.ArgumentParser, parameters: Mapping[str, Any]) -> Iterator[str]:
    known = {action.dest: action for action in reader._actions}
    for name, value in parameters.items():
        if name in _TRITONS:
            continue
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"unknown parameter {name}{hint}")
        text = value.get("string_value", "") if isinstance(value, Mapping) else str(value)
        if not text:
            continue  # as a template leaves what nobody filled in
        flag = f"--{name.replace('_', '-')}"
        if known[name].nargs != 0:
            yield f"{flag}={text}"
        elif text.lower() in ("true", "false"):
            given = text.lower() == "true"
            if given or flag.replace("--", "--no-", 1) in known[name].option_strings:
                yield flag if given else flag.replace("--", "--no-", 1)
        else:
            raise ValueError(f"parameter {name} must be true or false, got {text!r}")


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
