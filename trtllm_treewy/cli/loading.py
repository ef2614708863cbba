"""The `LLM` of `generate`: what comes before torch is imported, and while weights are loaded."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..llmapi import KvCacheConfig, MTPDecodingConfig
from .engine_arguments import AUTO, DEFAULT_BATCH_SIZE, graph_settings
from .program import EXIT_INTERRUPTED
from .streams import write_err

if TYPE_CHECKING:
    from ..llm import LLM


def expect_directory(model: str) -> None:
    """Raises ValueError where `model` is no directory."""
    if not Path(model).is_dir():
        raise ValueError(f"model directory {model!r} does not exist (nothing is downloaded)")


@contextmanager
def loaded_llm(
    args: argparse.Namespace,
    model: str,
    speculation: MTPDecodingConfig,
    num_prompts: int | None = None,
) -> Iterator[LLM]:
    """The model with its engine, closed at the end; for `num_prompts`, or any number of them."""
    cache = KvCacheConfig(
        mamba_ssm_cache_dtype=args.state_dtype,
        enable_block_reuse=args.block_reuse,
        free_gpu_memory_fraction=args.free_gpu_memory_fraction,
        memory_bytes=args.memory,
    )
    graphs = graph_settings(args)
    show = not args.quiet and sys.stderr.isatty()
    if show:
        write_err("loading torch ...\r")
    _let_threads_sleep(args.device)
    with _interrupt_exits():
        from ..llm import LLM

        llm = LLM(
            model,
            dtype=args.dtype,
            speculative_config=speculation,
            kv_cache_config=cache,
            **_batch_size(args, model, num_prompts),
            max_seq_len=args.max_seq_len,
            batch_wait_timeout_iters=args.batch_wait_iters,
            batch_wait_max_tokens_ratio=args.batch_wait_max_tokens_ratio,
            device=args.device,
            load_format=args.load_format,
            tensor_parallel_size=args.tensor_parallel_size,
            progress=_show_progress if show else None,
            **graphs,
        )
    if show:
        write_err("\033[K")
    with llm:
        yield llm


def _batch_size(args: argparse.Namespace, model: str, num_prompts: int | None) -> dict[str, Any]:
    """What `LLM` is told of sequences at once: never more than there are prompts.

    So few that memory is hardly a question are not counted at their longest, as auto does.
    """
    from ..runtime.memory_budget import MAX_AUTO_BATCH

    given = args.max_batch_size
    if given is None:
        given = AUTO if _on_gpu(args.device, model) else DEFAULT_BATCH_SIZE
    if num_prompts is None:
        return {"max_batch_size": None if given == AUTO else given}
    if given == AUTO and num_prompts > DEFAULT_BATCH_SIZE:
        return {"max_batch_size": None, "max_auto_batch_size": min(num_prompts, MAX_AUTO_BATCH)}
    return {"max_batch_size": num_prompts if given == AUTO else min(num_prompts, given)}


def _on_gpu(device: str | None, model: str) -> bool:
    """Whether `LLM` will run the model on a GPU."""
    if device is not None:
        return not device.startswith("cpu")
    import torch

    from ..model_directory import ModelDirectory

    return torch.cuda.is_available() and not ModelDirectory.read(Path(model)).for_cpu


def _let_threads_sleep(device: str | None) -> None:
    """Makes OpenMP's threads sleep while they wait; to be called before torch is imported.

    A step on the CPU is many small parallel regions. Threads that spin between them take the cores
    from those that work: on a busy machine that made a run of 1.4 s one of 46.4 s. Whoever has set
    either variable has decided; a GPU does not use these threads.
    """
    if device is not None and not device.startswith("cpu"):
        return
    if "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ:
        return
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")


@contextmanager
def _interrupt_exits() -> Iterator[None]:
    """Ctrl-C ends the process at once while there is nothing to clean up.

    Modules that catch everything while they are imported would swallow a KeyboardInterrupt.
    """

    def leave(*_: object) -> None:
        with suppress(OSError):
            os.write(2, b"\ninterrupted\n")
        os._exit(EXIT_INTERRUPTED)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # whoever embeds us, or ignores the signal, has decided otherwise
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _show_progress(done: int, total: int) -> None:
    write_err(f"\rloading weights {100 * done // max(total, 1):3d}%\033[K\r")
