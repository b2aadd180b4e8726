"""The metrics of ``/metrics`` as objects, for ``LLM.get_metrics``; names of classes and fields are vLLM's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import Metric as Family

from preheat.metrics import Metrics


@dataclass(frozen=True)
class Metric:
    """A metric of one set of ``labels``."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """A number that only grows."""

    value: float


@dataclass(frozen=True)
class Gauge(Metric):
    """A number that goes up and down."""

    value: float


@dataclass(frozen=True)
class Vector(Metric):
    """Numbers by position, such as accepted drafts by their position in a row."""

    values: list[float]


@dataclass(frozen=True)
class Histogram(Metric):
    """A distribution; ``buckets`` is the number of values up to each bound, by the bound as text."""

    count: int
    sum: float
    buckets: dict[str, int]


def metric_values(metrics: Metrics) -> list[Metric]:
    """Return the values of all ``metrics``."""
    return [value for family in metrics.collect() for value in _values(family)]


def _values(family: Family) -> Iterator[Metric]:
    if family.type == "histogram":
        yield from _histograms(family)
    elif any("position" in sample.labels for sample in family.samples):
        yield _vector(family)
    else:
        kind = Counter if family.type == "counter" else Gauge
        yield from (kind(family.name, dict(sample.labels), sample.value) for sample in family.samples)


def _vector(family: Family) -> Vector:
    """Return the samples as one vector, by their label ``position``, summed over engines."""
    labels = {name: text for name, text in family.samples[0].labels.items() if name not in ("position", "engine")}
    values = [0.0] * (1 + max(int(sample.labels["position"]) for sample in family.samples))
    for sample in family.samples:
        values[int(sample.labels["position"])] += sample.value
    return Vector(family.name, labels, values)


def _histograms(family: Family) -> Iterator[Histogram]:
    buckets: dict[str, int] = {}
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name.endswith("_count"):
            count = int(sample.value)
        else:  # the sum is the last sample
            yield Histogram(family.name, dict(sample.labels), count, sample.value, buckets)
            buckets = {}
