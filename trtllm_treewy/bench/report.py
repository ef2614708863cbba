"""Numbers of a measurement: a dict for JSON, a table for people."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from ..outputs import AcceptanceStats
from .runner import Measurement

PERCENTILES = (50, 90, 99)
_ROWS = (("ttft", "time to first token"), ("tpot", "time per output token"), ("latency", "latency"))


def summarise(measurement: Measurement) -> dict[str, Any]:
    """Throughput, percentiles of latencies in seconds, acceptance; failed requests are counted."""
    done = [result for result in measurement.results if result.error is None]
    seconds = max(measurement.seconds, 1e-9)
    prompt = sum(result.prompt_tokens for result in done)
    output = sum(result.output_tokens for result in done)
    stats = [result.stats for result in done if result.stats is not None]
    return {
        "load": asdict(measurement.spec),
        "seconds": round(measurement.seconds, 6),
        "completed": len(done),
        "failed": len(measurement.results) - len(done),
        "errors": sorted({result.error for result in measurement.results if result.error}),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_second": round(len(done) / seconds, 4),
        "output_tokens_per_second": round(output / seconds, 4),
        "total_tokens_per_second": round((prompt + output) / seconds, 4),
        "ttft": spread([result.ttft for result in done]),
        "tpot": spread([result.tpot for result in done if result.tpot is not None]),
        "latency": spread([result.latency for result in done]),
        "speculation": sum(stats, AcceptanceStats()).to_dict() if stats else None,
    }


def spread(values: list[float]) -> dict[str, float] | None:
    """Mean and percentiles; None where there are no values."""
    if not values:
        return None
    found = {"mean": float(np.mean(values))}
    for percentile in PERCENTILES:
        found[f"p{percentile}"] = float(np.percentile(values, percentile))
    return {name: round(value, 6) for name, value in found.items()}


def table(summary: dict[str, Any]) -> str:
    """The same, to be read; times in milliseconds."""
    load = summary["load"]
    how = f"{load['concurrency']} at a time"
    if load["request_rate"] is not None:
        process = "Poisson" if load["burstiness"] == 1 else f"burstiness {load['burstiness']:g}"
        how = f"{load['request_rate']:g} a second ({process})"
    lines = [
        f"{summary['completed']} requests, {how}, in {summary['seconds']:.1f} s; "
        f"{summary['failed']} failed",
        f"tokens: {summary['prompt_tokens']} in, {summary['output_tokens']} out",
        f"throughput: {summary['output_tokens_per_second']:.1f} output tokens/s, "
        f"{summary['total_tokens_per_second']:.1f} tokens/s, "
        f"{summary['requests_per_second']:.2f} requests/s",
    ]
    if summary["speculation"] is not None:
        length = summary["speculation"]["acceptance_length"]
        lines.append(f"acceptance length: {length:.2f} tokens a step")
    names = ("mean", *(f"p{percentile}" for percentile in PERCENTILES))
    lines += ["", f"{'ms':22}" + "".join(f"{name:>10}" for name in names)]
    for key, title in _ROWS:
        found = summary[key]
        cells = [f"{1000 * found[name]:10.2f}" if found else f"{'-':>10}" for name in names]
        lines.append(f"{title:22}" + "".join(cells))
    lines += [f"failed: {error}" for error in summary["errors"]]
    return "\n".join(lines)
