"""Arguments of `trtllm-treewy bench`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from .engine_arguments import EPILOG, add_drafts, add_engine, positive, unsigned
from .program import PROGRAM


def add_bench(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """The command `bench` and what can be measured."""
    parser = add_parser(
        "bench", allow_abbrev=False, help="measure throughput and latency", epilog=EPILOG
    )
    parser.set_defaults(usage_error=parser.error)
    kinds = parser.add_subparsers(title="kinds", metavar="KIND", required=True)
    _add_serve(kinds.add_parser)


def _add_serve(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    parser = add_parser(
        "serve",
        allow_abbrev=False,
        help="throughput and latency under a load of many requests",
        usage=f"{PROGRAM} bench serve [MODEL] [--url URL] [options]",
        description="Send a load of requests, with lengths like those of conversations, to a "
        "model in this process, or with --url to a server of OpenAI's HTTP API, and measure "
        "throughput, time to first token and time per output token.",
        epilog=EPILOG,
    )
    parser.set_defaults(command="bench serve", usage_error=parser.error)
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="model directory; with --url only its tokenizer is used (default: none, with --url)",
    )
    parser.add_argument(
        "--url",
        metavar="URL",
        help="measure the server there, such as http://127.0.0.1:8000 (default: MODEL in this "
        "process)",
    )
    parser.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="what the server at --url calls the model (default: the first that it lists)",
    )
    _add_load(parser)
    _add_output(parser)
    add_drafts(parser)
    add_engine(parser)


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument(
        "--num-requests",
        type=positive,
        default=100,
        metavar="N",
        help="requests to send (default: %(default)s)",
    )
    shape = load.add_mutually_exclusive_group()
    shape.add_argument(
        "--request-rate",
        type=_rate,
        metavar="R",
        help="requests a second, at random times (Poisson) (default: a fixed concurrency)",
    )
    shape.add_argument(
        "--concurrency",
        type=positive,
        metavar="N",
        help="requests that are under way at any time (default: 8)",
    )
    load.add_argument(
        "--burstiness",
        type=_rate,
        metavar="B",
        help="with --request-rate: 1 is a Poisson process, less comes in bursts (gamma-distributed "
        "distances of this shape) (default: 1)",
    )
    load.add_argument(
        "--mean-input-len",
        type=positive,
        default=220,
        metavar="N",
        help="mean prompt length in tokens; lengths are log-normal (default: %(default)s)",
    )
    load.add_argument(
        "--mean-output-len",
        type=positive,
        default=200,
        metavar="N",
        help="mean output length in tokens; lengths are log-normal (default: %(default)s)",
    )
    load.add_argument(
        "--max-len",
        type=positive,
        metavar="N",
        help="most tokens of a prompt and its output (default: what the model takes; 4096 with "
        "--url)",
    )
    load.add_argument(
        "--prompts",
        metavar="FILE",
        help='text to cut prompts from: plain, or JSON lines with a "prompt" each (default: '
        "made-up sentences, which drafts may find easier or harder than yours)",
    )
    load.add_argument(
        "--seed",
        type=unsigned,
        default=0,
        metavar="N",
        help="of lengths, texts and times (default: %(default)s)",
    )
    load.add_argument(
        "--warmup",
        type=unsigned,
        default=2,
        metavar="N",
        help="requests before those that are measured (default: %(default)s)",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", action="store_true", help="one JSON object on stdout (default: a table)"
    )
    output.add_argument(
        "--output",
        metavar="FILE",
        help="write the JSON object, with every request, there too (default: nowhere)",
    )
    output.add_argument(
        "--plot",
        metavar="FILE",
        help="draw latencies into a .png, .svg or .pdf; needs matplotlib (default: no plot)",
    )
    output.add_argument(
        "-q",
        "--quiet",
        action="store_true",
        help="results and errors only (default: a progress bar on stderr too)",
    )


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value
