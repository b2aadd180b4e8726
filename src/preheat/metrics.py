"""Counters, gauges and histograms for ``/metrics``, under vLLM's names with our prefix; and the set-up of logging.

The hot path only adds to plain numbers; Prometheus' own objects are built when /metrics is read.
"""

from __future__ import annotations

import logging
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "preheat:"
FINISH_REASONS = ("stop", "length", "abort", "error")
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
_REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


class Histogram:
    """Counts of values up to each bound, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Prometheus' form: (upper bound, number of values up to it)."""
        reached, buckets = 0, []
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            reached += count
            buckets.append((bound, float(reached)))
        return buckets


class Metrics(Collector):
    """Everything that a frontend counts, for the model ``model_name``. Times are in seconds.

    ``items`` of the warm-up by outcome, ``cold`` events by source, ``misses``, ``warmup_seconds`` and ``digest`` are
    those of the engine's last record.
    """

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.running = self.waiting = 0
        self.cache_usage = 0.0
        self.prefix_queries = self.prefix_hits = self.preemptions = self.blocks_moved = 0
        self.prompt_tokens = self.generation_tokens = 0
        self.items: Mapping[str, int] = {}
        self.cold: Mapping[str, int] = {}
        self.misses = 0
        self.warmup_seconds = 0.0
        self.digest: Mapping[str, int] = {}
        self.finished: Counter[str] = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self.first_token = Histogram(_REQUEST_SECONDS)
        self.inter_token = Histogram(_TOKEN_SECONDS)
        self.request = Histogram(_REQUEST_SECONDS)
        self.queue = Histogram(_REQUEST_SECONDS)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """The page that ``/metrics`` serves, in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", "Sequences that have begun to run.", self.running)
        yield self._gauge("num_requests_waiting", "Sequences that wait for their first step.", self.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the KV cache's blocks in use; 1 is all.", self.cache_usage)
        yield self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", self.prefix_queries)
        yield self._counter("prefix_cache_hits", "Tokens found in the prefix cache.", self.prefix_hits)
        yield self._counter("num_preemptions", "Sequences set back to make room.", self.preemptions)
        yield self._counter("kv_cache_blocks_moved", "Blocks that compaction moved.", self.blocks_moved)
        yield self._counter("prompt_tokens", "Tokens of prompts read.", self.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", self.generation_tokens)
        yield self._counter("request_success", "Sequences that ended, by reason.", self.finished, "finished_reason")
        yield self._gauge("warmup_seconds", "How long the warm-up took.", self.warmup_seconds)
        yield self._gauge("warmup_items", "Items of the plan, by what became of them.", self.items, "outcome")
        yield self._gauge("numeric_info", "1 for the digest of the logits of the check at boot.", self.digest, "digest")
        yield self._counter("cold_events", "What was built or first run after ready, by source.", self.cold, "source")
        yield self._counter("plan_misses", "Steps beyond the planned buckets, run in a fallback.", self.misses)
        yield self._histogram("time_to_first_token_seconds", "From arrival to the first token.", self.first_token)
        yield self._histogram("inter_token_latency_seconds", "Between tokens of a sequence.", self.inter_token)
        yield self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", self.request)
        yield self._histogram("request_queue_time_seconds", "From arrival to the first step.", self.queue)

    def _gauge(self, name: str, text: str, value: float | Mapping[str, float], *label: str) -> Metric:
        return self._filled(GaugeMetricFamily(PREFIX + name, text, labels=["model_name", *label]), value)

    def _counter(self, name: str, text: str, value: float | Mapping[str, float], *label: str) -> Metric:
        return self._filled(CounterMetricFamily(PREFIX + name, text, labels=["model_name", *label]), value)

    def _filled(
        self, family: GaugeMetricFamily | CounterMetricFamily, value: float | Mapping[str, float]
    ) -> GaugeMetricFamily | CounterMetricFamily:
        """``family`` with one figure, or with one for each value of its label."""
        if isinstance(value, Mapping):
            for key, figure in value.items():
                family.add_metric([self.model_name, key], figure)
        else:
            family.add_metric([self.model_name], value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self.model_name], histogram.buckets(), histogram.total)
        return family


PARTS = {"defrag": "preheat.schedule.defrag"}
"""Parts that can explain themselves in the log, and their loggers."""


def explain(parts: Collection[str]) -> None:
    """Let these of the :data:`PARTS` log everything, and no others."""
    for part, name in PARTS.items():
        logging.getLogger(name).setLevel(logging.DEBUG if part in parts else logging.NOTSET)


def set_up_logging(level: str) -> None:
    """Log to standard error from ``level`` up; one line each, with time and process."""
    logging.basicConfig(
        level=level.upper(),
        format="%(levelname)s %(asctime)s [%(process)d] %(name)s: %(message)s",
        datefmt="%m-%d %H:%M:%S",
        stream=sys.stderr,
    )
