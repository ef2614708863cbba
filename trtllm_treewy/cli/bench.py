"""`trtllm-treewy bench serve`: the result goes to stdout, all else to stderr."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .drafts import speculation_of
from .extras import expect_packages
from .loading import expect_directory, loaded_llm
from .program import EXIT_OK, EXIT_REQUEST_FAILED
from .serve_arguments import API_KEY_VARIABLE

if TYPE_CHECKING:
    from ..bench.load import LoadSpec
    from ..bench.runner import Measurement
    from ..bench.target import Target

DEFAULT_CONCURRENCY = 8
DEFAULT_MAX_LEN = 4096


def run(args: argparse.Namespace) -> int:
    """Measures and prints; an exit code, 1 where a request failed."""
    if args.model is None and args.url is None:
        args.usage_error("no MODEL and no --url given")
    if args.burstiness is not None and args.request_rate is None:
        args.usage_error("--burstiness needs --request-rate")
    if args.plot is not None:
        expect_packages("--plot", "bench", "matplotlib")
    for file in (args.output, args.plot):
        if file is not None and not Path(file).resolve().parent.is_dir():
            raise ValueError(f"the directory of {file} does not exist")
    from ..bench import load, report

    text = load.made_up_text(args.seed) if args.prompts is None else load.read_text(args.prompts)
    measurement = _measure_url(args, text) if args.url else _measure_model(args, text)
    summary = report.summarise(measurement)
    _write(args, measurement, summary)
    print(json.dumps(summary, indent=2) if args.json else report.table(summary))
    return EXIT_REQUEST_FAILED if summary["failed"] else EXIT_OK


def _measure_model(args: argparse.Namespace, text: str) -> Measurement:
    expect_directory(args.model)
    speculation = speculation_of(args, args.model)
    with loaded_llm(args, args.model, speculation) as llm:
        from ..bench.target import EngineTarget

        spec = _spec(args, llm._engine._executor.limits.max_seq_len)
        return asyncio.run(
            _measure(args, EngineTarget(llm, spec.num_requests), spec, text, llm.tokenizer)
        )


def _measure_url(args: argparse.Namespace, text: str) -> Measurement:
    expect_packages("--url", "bench", "httpx")
    tokenizer = None
    if args.model is not None:
        expect_directory(args.model)
        from ..tokenizer import load_tokenizer

        tokenizer = load_tokenizer(Path(args.model))
    from ..bench.target import HttpTarget

    async def connect_and_measure() -> Measurement:
        key = os.environ.get(API_KEY_VARIABLE) or None
        target = HttpTarget(args.url, args.served_model_name, key)
        try:
            await target.connect()
            return await _measure(args, target, _spec(args, DEFAULT_MAX_LEN), text, tokenizer)
        finally:
            await target.close()

    return asyncio.run(connect_and_measure())


async def _measure(
    args: argparse.Namespace, target: Target, spec: LoadSpec, text: str, tokenizer: Any
) -> Measurement:
    from ..bench import load, runner

    requests = load.plan_load(spec, text, tokenizer)
    # Other prompts than those that are measured, which a prefix cache would know from here.
    other = replace(spec, num_requests=max(1, args.warmup), seed=spec.seed + 1)
    warmup = load.plan_load(other, text, tokenizer)[: args.warmup]
    try:
        return await runner.measure(
            target,
            spec,
            requests,
            warmup=warmup,
            show_progress=not args.quiet and sys.stderr.isatty(),
        )
    finally:
        await target.close()


def _spec(args: argparse.Namespace, longest: int) -> LoadSpec:
    from ..bench.load import LoadSpec

    return LoadSpec(
        num_requests=args.num_requests,
        mean_input_len=args.mean_input_len,
        mean_output_len=args.mean_output_len,
        max_len=args.max_len or longest,
        request_rate=args.request_rate,
        concurrency=args.concurrency or DEFAULT_CONCURRENCY,
        seed=args.seed,
        burstiness=args.burstiness or 1.0,
    )


def _write(args: argparse.Namespace, measurement: Measurement, summary: dict[str, Any]) -> None:
    if args.output is not None:
        requests = [result.to_dict(measurement.start) for result in measurement.results]
        text = json.dumps(summary | {"requests": requests}, indent=2)
        Path(args.output).write_text(text + "\n", encoding="utf-8")
    if args.plot is not None:
        from ..bench import plot

        plot.draw(measurement, args.plot)
