"""Latencies of a measurement as curves."""

from __future__ import annotations

from typing import Any

import numpy as np

from .runner import Measurement


def draw(measurement: Measurement, path: str) -> None:
    """Writes the shares of requests below each latency, and tokens a second over time.

    Raises:
        ValueError: nothing succeeded, or matplotlib knows no such kind of file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    done = [result for result in measurement.results if result.error is None]
    if not done:
        raise ValueError("no request succeeded, so there is nothing to plot")
    figure, (ttft, tpot, time) = pyplot.subplots(1, 3, figsize=(12, 3.5), layout="constrained")
    _shares(ttft, [1000 * result.ttft for result in done], "time to first token, ms")
    tpots = [1000 * result.tpot for result in done if result.tpot is not None]
    _shares(tpot, tpots, "time per output token, ms")
    _rate(time, measurement)
    try:
        figure.savefig(path, dpi=150)
    finally:
        pyplot.close(figure)


def _shares(axes: Any, values: list[float], label: str) -> None:
    shares = np.arange(1, len(values) + 1) / max(1, len(values))
    axes.step(sorted(values), shares, where="post")
    axes.set(xlabel=label, ylabel="share of requests", ylim=(0, 1.02))
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)


def _rate(axes: Any, measurement: Measurement) -> None:
    """Output tokens a second; a request's tokens are spread evenly over its arrivals."""
    times, weights = [], []
    for result in measurement.results:
        for arrival in result.arrivals:
            times.append(arrival - measurement.start)
            weights.append(result.output_tokens / len(result.arrivals))
    bins = min(60, max(5, len(measurement.results)))
    counts, edges = np.histogram(times, bins=bins, weights=weights)
    axes.stairs(counts / np.diff(edges), edges, fill=True, alpha=0.6)
    axes.set(xlabel="time, s", ylabel="output tokens a second")
    axes.grid(alpha=0.3)
