"""Sends a load to a target, at its times or at its concurrency, and collects the results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from .load import LoadSpec, PlannedRequest
from .target import RequestResult, Target


@dataclass(frozen=True)
class Measurement:
    """Results in the order of the load; `seconds` from the first request to the last token."""

    spec: LoadSpec
    start: float
    seconds: float
    results: list[RequestResult]


async def measure(
    target: Target,
    spec: LoadSpec,
    requests: Sequence[PlannedRequest],
    *,
    warmup: Sequence[PlannedRequest] = (),
    show_progress: bool = False,
) -> Measurement:
    """Runs `requests` once, after those of `warmup`, which are not measured."""
    from tqdm import tqdm

    for request in warmup:
        await target.run(request)
    gate = asyncio.Semaphore(spec.concurrency if spec.request_rate is None else len(requests))
    start = time.perf_counter()
    with tqdm(total=len(requests), disable=not show_progress, unit="request") as bar:

        async def run(request: PlannedRequest) -> RequestResult:
            await asyncio.sleep(max(0.0, start + request.at - time.perf_counter()))
            async with gate:
                result = await target.run(request)
            bar.update()
            return result

        tasks = [asyncio.ensure_future(run(request)) for request in requests]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
    end = max((r.arrivals[-1] for r in results if r.arrivals), default=time.perf_counter())
    return Measurement(spec, start, end - start, results)
