"""`trtllm-treewy serve`: a model over OpenAI's HTTP API."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

from .drafts import speculation_of
from .extras import expect_packages
from .loading import expect_directory, loaded_llm
from .program import EXIT_INTERRUPTED, EXIT_OK
from .serve_arguments import API_KEY_VARIABLE
from .streams import write_err


def run(args: argparse.Namespace) -> int:
    """Serves until it is told to end; an exit code."""
    expect_packages("serve", "serve", "starlette", "uvicorn", "prometheus_client")
    expect_directory(args.model)
    key = _api_key()
    name = args.served_model_name or Path(args.model).resolve().name
    from ..serve import server

    # Before the model is loaded: an address that is taken shows at once.
    with server.listen(args.host, args.port) as sock:
        if key is None and not server.is_loopback(sock):
            write_err(
                f"[warning: {args.host} can be reached from outside, and {API_KEY_VARIABLE} is "
                "not set: everyone is served]\n"
            )
        speculation = speculation_of(args, args.model)
        with loaded_llm(args, args.model, speculation) as llm:
            from ..serve.service import ServerSettings, Service

            settings = ServerSettings(
                model_name=name,
                api_key=key,
                max_queue=args.max_queue,
                max_body_bytes=args.max_body_size,
                max_prompt_tokens=args.max_prompt_tokens,
                shutdown_seconds=args.shutdown_timeout,
            )

            def tell() -> None:
                if not args.quiet:
                    most = llm._engine._executor.limits.max_batch_size
                    write_err(f"[requests that run at once: {most}]\n")
                    write_err(f"[serving {name} on {server.url_of(sock)}]\n")

            received = server.serve(
                Service(llm, settings), sock, access_log=args.access_log, on_ready=tell
            )
    return EXIT_INTERRUPTED if received == signal.SIGINT else EXIT_OK


def _api_key() -> str | None:
    key = os.environ.get(API_KEY_VARIABLE)
    if key is not None and not key.strip():
        raise ValueError(f"{API_KEY_VARIABLE} is set but empty; unset it, or give it a key")
    return None if key is None else key.strip()
