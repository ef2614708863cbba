"""Arguments of `trtllm-treewy serve`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from .engine_arguments import EPILOG, add_drafts, add_engine, positive
from .sizes import parse_size

DEFAULT_PORT = 8000
API_KEY_VARIABLE = "TREEWY_API_KEY"


def add_serve(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """The command `serve`."""
    parser = add_parser(
        "serve",
        allow_abbrev=False,
        help="serve a model over OpenAI's HTTP API",
        description="Serve a model over OpenAI's HTTP API: /v1/completions, "
        "/v1/chat/completions, /v1/models, and /health and /metrics. SIGTERM or Ctrl-C ends it, "
        "after the running requests have finished.",
        epilog=f"{API_KEY_VARIABLE} in the environment is the key that clients must show; without "
        f"it everyone who can connect is served. {EPILOG}",
    )
    parser.set_defaults(command="serve", usage_error=parser.error)
    parser.add_argument("model", metavar="MODEL", help="model directory")
    _add_network(parser)
    _add_limits(parser)
    add_drafts(parser)
    add_engine(parser)
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="errors only (default: says what it does)"
    )


def _add_network(parser: argparse.ArgumentParser) -> None:
    network = parser.add_argument_group("network")
    network.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on (default: %(default)s, which only this machine can reach)",
    )
    network.add_argument(
        "--port",
        type=_port,
        default=DEFAULT_PORT,
        metavar="N",
        help="port to listen on, 0 for any free one (default: %(default)s)",
    )
    network.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="what clients call the model (default: the name of its directory)",
    )
    network.add_argument(
        "--access-log", action="store_true", help="a line for each request (default: none)"
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    limits = add_limits(parser)
    limits.add_argument(
        "--max-body-size",
        type=parse_size,
        default=4 << 20,
        metavar="SIZE",
        help="longest body of a request, such as 512KiB; longer ones get 413 (default: 4MiB)",
    )
    limits.add_argument(
        "--shutdown-timeout",
        type=positive,
        default=30,
        metavar="SECONDS",
        help="time that running requests get to finish at the end (default: %(default)s)",
    )


def add_limits(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Limits of every server of an engine, whatever its protocol."""
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-queue",
        type=positive,
        default=256,
        metavar="N",
        help="requests that may wait beyond those that run; more are refused (default: "
        "%(default)s)",
    )
    limits.add_argument(
        "--max-prompt-tokens",
        type=positive,
        metavar="N",
        help="longest prompt; longer ones are refused (default: what --max-seq-len leaves)",
    )
    return limits


def _port(text: str) -> int:
    value = int(text) if text.isdecimal() else -1
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"expected a port in [0, 65535], got {text!r}")
    return value
