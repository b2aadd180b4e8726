"""The metrics of ``/metrics``, under vLLM's names with our prefix, and the set-up of logging.

The hot path only adds to plain numbers; Prometheus' objects are built when /metrics is read.
"""

from __future__ import annotations

import logging
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from preheat.core import FinishReason, Stats

PREFIX = "preheat:"
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
_REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


class Histogram:
    """Numbers of values in each bucket, and the sum of all values."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, number of values up to it), as Prometheus wants it."""
        reached, buckets = 0, []
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            reached += count
            buckets.append((bound, float(reached)))
        return buckets


class Metrics(Collector):
    """The counts of a frontend for ``model_name``; times in seconds.

    ``items`` (by outcome), ``cold`` (by source), ``misses``, ``warmup_seconds`` and ``digest`` come from the
    engine's last record.
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
        self.finished: Counter[str] = Counter(dict.fromkeys(get_args(FinishReason), 0))
        self.first_token = Histogram(_REQUEST_SECONDS)
        self.inter_token = Histogram(_TOKEN_SECONDS)
        self.request = Histogram(_REQUEST_SECONDS)
        self.queue = Histogram(_REQUEST_SECONDS)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def update(self, stats: Stats) -> None:
        """Take over the engine's own counters and gauges."""
        self.cache_usage = stats.blocks_used / max(stats.blocks_total, 1)
        self.prefix_queries, self.prefix_hits = stats.prefix_queries, stats.prefix_hits
        self.preemptions, self.blocks_moved = stats.preemptions, stats.blocks_moved

    def text(self) -> bytes:
        """The page of ``/metrics``, in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        gauge, counter = partial(self._family, GaugeMetricFamily), partial(self._family, CounterMetricFamily)
        yield gauge("num_requests_running", "Sequences that are running.", self.running)
        yield gauge("num_requests_waiting", "Sequences waiting for their first step.", self.waiting)
        yield gauge("kv_cache_usage_perc", "Share of KV cache blocks in use; 1 means all.", self.cache_usage)
        yield counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", self.prefix_queries)
        yield counter("prefix_cache_hits", "Tokens found in the prefix cache.", self.prefix_hits)
        yield counter("num_preemptions", "Sequences preempted to free blocks.", self.preemptions)
        yield counter("kv_cache_blocks_moved", "Blocks moved by compaction.", self.blocks_moved)
        yield counter("prompt_tokens", "Prompt tokens of accepted requests.", self.prompt_tokens)
        yield counter("generation_tokens", "Tokens generated.", self.generation_tokens)
        yield counter("request_success", "Finished sequences, by reason.", self.finished, "finished_reason")
        yield gauge("warmup_seconds", "Duration of the warm-up.", self.warmup_seconds)
        yield gauge("warmup_items", "Items of the warm-up plan, by outcome.", self.items, "outcome")
        yield gauge(
            "numeric_info",
            "Always 1; the label is the digest of the logits of the check at boot.",
            self.digest,
            "digest",
        )
        yield counter("cold_events", "Compilations and other cold events after ready, by source.", self.cold, "source")
        yield counter("plan_misses", "Steps that no planned bucket fits, run in a fallback.", self.misses)
        yield self._histogram("time_to_first_token_seconds", "From arrival to the first token.", self.first_token)
        yield self._histogram("inter_token_latency_seconds", "Between two tokens of a sequence.", self.inter_token)
        yield self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", self.request)
        yield self._histogram("request_queue_time_seconds", "From arrival to the first step.", self.queue)

    def _family(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        value: float | Mapping[str, float],
        *label: str,
    ) -> Metric:
        """A metric with one number, or with one for each value of its label."""
        family = kind(PREFIX + name, text, labels=["model_name", *label])
        if isinstance(value, Mapping):
            for key, number in value.items():
                family.add_metric([self.model_name, key], number)
        else:
            family.add_metric([self.model_name], value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self.model_name], histogram.buckets(), histogram.total)
        return family


PARTS = {"defrag": "preheat.schedule.defrag"}
"""Parts that have a debug log, and their loggers."""


def explain(parts: Collection[str]) -> None:
    """Turn on the debug log of these of the :data:`PARTS`, and of no others."""
    for part, name in PARTS.items():
        logging.getLogger(name).setLevel(logging.DEBUG if part in parts else logging.NOTSET)


def set_up_logging(level: str) -> None:
    """Log to standard error, from ``level`` up."""
    logging.basicConfig(
        level=level.upper(),
        format="%(levelname)s %(asctime)s [%(process)d] %(name)s: %(message)s",
        datefmt="%m-%d %H:%M:%S",
        stream=sys.stderr,
    )
