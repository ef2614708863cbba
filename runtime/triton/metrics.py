"""The engine's metrics among Triton's own: the same names and values as those of our server.

Triton has metrics that count up and metrics that are set; the buckets, sum and count of a
histogram are metrics that count up, so queries over them work as they do elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtllm_treewy.runtime.metrics import Metrics


class MetricsMirror:
    """Brings Triton's metrics up to date with those of an engine.

    Args:
        metrics: what the engine's observer counts.
        family: `pb_utils.MetricFamily`.
        labels: of every metric: the model, its version, and the instance, each of which counts
            for itself.
    """

    def __init__(self, metrics: Metrics, family: Any, labels: Mapping[str, str]) -> None:
        self._metrics, self._family, self._labels = metrics, family, dict(labels)
        self._families: dict[str, Any] = {}
        self._mirrored: dict[tuple[str, frozenset[tuple[str, str]]], tuple[Any, float]] = {}

    def update(self) -> None:
        """Tells Triton of what has changed since the last time."""
        for family in self._metrics.registry.collect():
            counts = family.type != "gauge"
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    self._mirror(
                        sample.name, family.documentation, counts, sample.labels, sample.value
                    )

    def _mirror(
        self, name: str, text: str, counts: bool, labels: Mapping[str, str], value: float
    ) -> None:
        key = name, frozenset(labels.items())
        metric, before = self._mirrored.get(key, (None, 0.0))
        if metric is None:
            kind = self._family.COUNTER if counts else self._family.GAUGE
            if name not in self._families:
                self._families[name] = self._family(name=name, description=text, kind=kind)
            metric = self._families[name].Metric(labels={**self._labels, **labels})
        elif value == before:
            return
        if counts:
            metric.increment(value - before)
        else:
            metric.set(value)
        self._mirrored[key] = metric, value

    def close(self) -> None:
        """Takes them out of Triton's metrics; a family goes after all that is in it."""
        self._mirrored.clear()
        self._families.clear()
