"""The metrics of ``/metrics``, under vLLM's names behind a prefix (``--metrics-prefix``).

The hot path only adds to plain numbers; Prometheus' objects are built when /metrics is read.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from preheat.core import FinishReason, SamplingParams, Stats
from preheat.figures import AnswerCacheFigures, EngineFigures, Histogram, LogFigures, Times
from preheat.utils.log import one_line

_TOKEN_SECONDS = (
    0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10,
)  # fmt: skip
"""Bounds in seconds. vLLM's begin at 0.01, above a whole step of a small model."""
_REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_COUNTS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_STEP_TOKENS = tuple(2**power for power in range(15))
_CHOICES = (1, 2, 5, 10, 20)


_Row = tuple[str, str, Callable[[Any], float]]
"""A counter's name, its text, and its value from an engine's statistics."""

_COUNTERS: tuple[_Row, ...] = (
    ("prefix_cache_queries", "Tokens looked up in the prefix cache.", attrgetter("prefix_queries")),
    ("prefix_cache_hits", "Tokens found in the prefix cache.", attrgetter("prefix_hits")),
    ("num_preemptions", "Sequences preempted to free blocks.", attrgetter("preemptions")),
    (
        "corrupted_requests",
        "Requests that ended because their numbers are not finite.",
        attrgetter("corrupted_requests"),
    ),
    ("kv_cache_blocks_moved", "Blocks moved by compaction.", attrgetter("blocks_moved")),
)
_EXTERNAL: tuple[_Row, ...] = (
    (
        "external_prefix_cache_queries",
        "Tokens looked up on the host, because the prefix cache did not have them.",
        attrgetter("external_queries"),
    ),
    ("external_prefix_cache_hits", "Tokens found on the host.", attrgetter("external_hits")),
)
_DRAFTS: tuple[_Row, ...] = (
    ("spec_decode_num_drafts", "Rows with draft tokens.", attrgetter("drafts")),
    ("spec_decode_num_draft_tokens", "Draft tokens.", attrgetter("draft_tokens")),
    ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", attrgetter("accepted_tokens")),
)
_AUDIT: tuple[_Row, ...] = (
    ("audit_passes", "Passes over weights, tables and published blocks.", attrgetter("passes")),
    ("audit_slices", "Slices of memory that were compared with their digests.", attrgetter("slices")),
    ("audit_checks", "Checks of the boot that ran again.", attrgetter("checks")),
    ("audit_faults", "Slices or checks that differed.", attrgetter("faults")),
    ("audit_seconds", "Time of the audit between steps.", attrgetter("seconds")),
)
_KV_TRANSFER: tuple[_Row, ...] = (
    ("kv_transfer_pulls", "Pulls of a request's blocks from another engine.", attrgetter("pulls")),
    ("kv_transfer_received_blocks", "Blocks that came from other engines.", attrgetter("received_blocks")),
    ("kv_transfer_received_bytes", "Bytes of these blocks.", attrgetter("received_bytes")),
    ("kv_transfer_pull_seconds", "Time that requests waited for blocks.", attrgetter("pull_seconds")),
    ("kv_transfer_sent_blocks", "Blocks copied to the host for other engines.", attrgetter("sent_blocks")),
    ("kv_transfer_sent_bytes", "Bytes of these blocks.", attrgetter("sent_bytes")),
    ("kv_transfer_refused_peers", "Engines that got no blocks, because they differ.", attrgetter("refused_peers")),
)
_GRAMMARS: tuple[_Row, ...] = (
    ("grammars_compiled", "Grammars of structured outputs that were compiled.", attrgetter("compiled")),
    ("grammars_reused", "Requests with a grammar that was already compiled.", attrgetter("reused")),
    ("grammars_refused", "Requests with a grammar that could not be compiled.", attrgetter("refused")),
    ("grammar_compile_seconds", "Time spent compiling grammars.", attrgetter("compile_seconds")),
    ("grammar_masks", "Masks of grammars computed.", attrgetter("masks")),
    ("grammar_mask_seconds", "Time spent computing masks of grammars.", attrgetter("mask_seconds")),
    ("grammar_wait_seconds", "Time that steps waited for masks of grammars.", attrgetter("wait_seconds")),
)


PULL_FAILURES = ("missing", "refused", "lost", "corrupt")
"""Reasons for the early end of a pull of blocks."""

FAULTS = ("died", "silent", "stalled", "drained", "memory_fault", "overloaded")
"""Reasons why the requests of an engine move, and why it starts again."""


class Metrics(Collector):
    """The counts of a frontend for ``model_name``; times are in seconds.

    - ``prefix`` begins the names of the families.
    - ``engines`` have figures of their own, with their number as label ``engine``, as in vLLM. Requests are counted for
      all engines together.
    - ``loads`` returns the numbers of running and waiting requests of each engine, if there are several.
    - ``digest`` and ``cache_config`` (settings and limits, by name) are common to all engines.
    - ``adapters`` are the labels with running and waiting adapters; empty if there can be none.
    """

    def __init__(self, model_name: str, prefix: str = "preheat", engines: int = 1) -> None:
        self.model_name, self.prefix = one_line(model_name), prefix
        self.running = self.waiting = 0
        self.engines = [EngineFigures() for _ in range(engines)]
        self.loads: Callable[[], Sequence[tuple[int, int]]] | None = None
        self.sleeping: int | None = None  # the level of the engine's sleep
        self.prompt_tokens = self.generation_tokens = self.cached_tokens = 0
        self.digest: Mapping[str, int] = {}
        self.cache_config: Mapping[str, object] = {}
        self.adapters: Mapping[str, str] = {}
        self.answer_cache: AnswerCacheFigures | None = None  # None: it is off
        self.receipt_log: LogFigures | None = None
        self.finished: Counter[str] = Counter(dict.fromkeys(get_args(FinishReason), 0))
        self.http: Counter[tuple[str, str, str]] = Counter()  # by handler, method and status
        self.ignored: Counter[str] = Counter()  # by field
        self.moves = Counter(dict.fromkeys(FAULTS, 0))  # of sequences to other engines, by reason
        self.restarts = Counter(dict.fromkeys(FAULTS, 0))  # of engines, by reason
        self.first_token = Histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _REQUEST_SECONDS
        )
        self.inter_token = Histogram("inter_token_latency_seconds", "Between two tokens of a sequence.", _TOKEN_SECONDS)
        self.token = Histogram(
            "request_time_per_output_token_seconds", "A sequence's mean time between two tokens.", _TOKEN_SECONDS
        )
        self.request = Histogram("e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_SECONDS)
        self.queue = Histogram("request_queue_time_seconds", "From arrival to the first step.", _REQUEST_SECONDS)
        self.prefill = Histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", _REQUEST_SECONDS
        )
        self.decode = Histogram("request_decode_time_seconds", "From the first token to the last.", _REQUEST_SECONDS)
        self.inference = Histogram(
            "request_inference_time_seconds", "From the first step to the last token.", _REQUEST_SECONDS
        )
        self.step_tokens = Histogram("iteration_tokens_total", "Tokens computed by a step.", _STEP_TOKENS)
        self.prompt_length = Histogram("request_prompt_tokens", "Tokens of a request's prompt.", _COUNTS)
        self.output_length = Histogram("request_generation_tokens", "Tokens generated for a sequence.", _COUNTS)
        self.params_n = Histogram("request_params_n", "Sequences that a request asks for.", _CHOICES)
        self.params_max_tokens = Histogram(
            "request_params_max_tokens", "The maximum number of tokens that a request asks for.", _COUNTS
        )
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def update(self, stats: Stats) -> None:
        """Store the engine's own counters and gauges, after a step."""
        engine = self.engines[stats.engine]
        before, engine.stats = engine.stats, stats
        engine.grammars = stats.grammars or engine.grammars  # sent only when they changed
        engine.audit = stats.audit or engine.audit
        tokens = stats.prompt_tokens + stats.generation_tokens - before.prompt_tokens - before.generation_tokens
        if tokens > 0:  # an engine that has started again counts from 0
            self.step_tokens.observe(tokens)

    def arrived(self, prompt_tokens: int, params: SamplingParams, sequences: int) -> None:
        """Count a request that begins to wait, as ``sequences`` in the engine."""
        self.waiting += sequences
        self.prompt_tokens += prompt_tokens
        self.prompt_length.observe(prompt_tokens)
        self.params_n.observe(params.n)
        if params.max_tokens is not None:
            self.params_max_tokens.observe(params.max_tokens)

    def ended(self, reason: str, times: Times, tokens: int) -> None:
        """Count a sequence of ``tokens`` tokens that has ended.

        Called just before its client is told.
        """
        self.finished[reason] += 1
        self.request.observe(time.monotonic() - times.arrived)
        self.output_length.observe(tokens)
        if times.started:
            self.running -= 1
        else:
            self.waiting -= 1
        if times.last:
            self.prefill.observe(times.first - times.started)
            self.decode.observe(times.last - times.first)
            self.inference.observe(times.last - times.started)
        if tokens > 1:
            self.token.observe((times.last - times.first) / (tokens - 1))

    def text(self) -> bytes:
        """Return the page of ``/metrics``, in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        gauge, counter = partial(self._family, GaugeMetricFamily), partial(self._family, CounterMetricFamily)
        yield from self._of_engines()
        yield counter("prompt_tokens", "Prompt tokens of accepted requests.", self.prompt_tokens)
        yield counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", self.cached_tokens)
        yield counter("generation_tokens", "Tokens generated.", self.generation_tokens)
        if (log := self.receipt_log) is not None:
            yield counter("receipts_written", "Receipts written to the log.", log.written)
            yield counter("receipts_lost", "Receipts that the log lacks, as the disk was full or slow.", log.lost)
        if (kept := self.answer_cache) is not None:
            yield counter("answer_cache_hits", "Requests answered from the answer cache.", kept.hits)
            yield counter("answer_cache_misses", "Requests whose answers the answer cache lacked.", kept.misses)
            yield counter("answer_cache_checked", "Kept answers that were computed again.", kept.checked)
            yield counter("answer_cache_different", "Kept answers that differed when computed again.", kept.different)
            yield gauge("answer_cache_bytes", "Bytes of kept answers.", kept.bytes)
        yield counter("request_moves", "Moves of sequences away from engines, by reason.", self.moves, "reason")
        yield counter("engine_restarts", "Engines that were started again, by reason.", self.restarts, "reason")
        yield counter("request_success", "Finished sequences, by reason.", self.finished, "finished_reason")
        ignored = "Requests with an ignored field, by the field."
        yield counter("request_fields_ignored", ignored, self.ignored, "field")
        yield self._cache_config()
        if self.adapters:
            yield self._adapters()
        yield gauge(
            "engine_sleep_state",
            "1 for the engine's current state, 0 for the others.",
            self._sleep_state(),
            "sleep_state",
        )
        digest = "Always 1; the label is the digest of the logits of the check at boot."
        yield gauge("numeric_info", digest, self.digest, "digest")
        for value in vars(self).values():
            if isinstance(value, Histogram):
                yield self._histogram(value)
        answers = CounterMetricFamily("http_requests", "Answers.", labels=["handler", "method", "status"])
        for labels, count in self.http.items():
            answers.add_metric(labels, count)
        yield answers

    def _of_engines(self) -> Iterator[Metric]:
        gauge, counter = partial(self._by_engine, GaugeMetricFamily), partial(self._by_engine, CounterMetricFamily)
        stats, grammars = [each.stats for each in self.engines], [each.grammars for each in self.engines]
        loads = [(self.running, self.waiting)] if self.loads is None else self.loads()
        yield gauge("num_requests_running", "Sequences that are running.", [running for running, _ in loads])
        yield gauge(
            "num_requests_waiting", "Sequences waiting for their first step.", [waiting for _, waiting in loads]
        )
        by_reason = [{"capacity": waiting} for _, waiting in loads]
        yield gauge(
            "num_requests_waiting_by_reason",
            "Sequences waiting for their first step, by the reason for waiting.",
            by_reason,
            "reason",
        )
        used = [each.blocks_used / max(each.blocks_total, 1) for each in stats]
        yield gauge("kv_cache_usage_perc", "Share of KV cache blocks in use; 1 means all.", used)
        for name, text, of in _COUNTERS:
            yield counter(name, text, [of(each) for each in stats])
        if any(each.external_queries for each in stats):
            for name, text, of in _EXTERNAL:
                yield counter(name, text, [of(each) for each in stats])
        if any(each.accepted_per_pos for each in stats):
            for name, text, of in _DRAFTS:
                yield counter(name, text, [of(each) for each in stats])
            name = "spec_decode_num_accepted_tokens_per_pos"
            places = [{str(place): count for place, count in enumerate(each.accepted_per_pos)} for each in stats]
            yield counter(name, "Draft tokens accepted, by position among a row's drafts.", places, "position")
        if audits := [each.audit for each in self.engines if each.audit is not None]:
            for name, text, of in _AUDIT:
                yield counter(name, text, [of(each) for each in audits])
        if transfers := [each.kv_transfer for each in stats if each.kv_transfer is not None]:
            for name, text, of in _KV_TRANSFER:
                yield counter(name, text, [of(each) for each in transfers])
            failures = [{reason: each.failures.get(reason, 0) for reason in PULL_FAILURES} for each in transfers]
            yield counter("kv_transfer_failures", "Pulls that ended early, by reason.", failures, "reason")
        for name, text, of in _GRAMMARS:
            yield counter(name, text, [of(each) for each in grammars])
        slowest = [each.slowest_mask for each in grammars]
        yield gauge("grammar_slowest_mask_seconds", "Longest time that the masks of one step took.", slowest)
        yield gauge("warmup_seconds", "Duration of the warm-up.", [each.warmup_seconds for each in self.engines])
        items, cold = [each.items for each in self.engines], [each.cold for each in self.engines]
        yield gauge("warmup_items", "Items of the warm-up plan, by outcome.", items, "outcome")
        yield counter("cold_events", "Compilations and other cold events after ready, by source.", cold, "source")
        misses = [each.misses for each in self.engines]
        yield counter("plan_misses", "Steps without a fitting planned bucket, run in a fallback.", misses)

    def _sleep_state(self) -> dict[str, int]:
        asleep = {"weights_offloaded": 1, "discard_all": 2}
        return {"awake": int(self.sleeping is None)} | {name: int(self.sleeping == at) for name, at in asleep.items()}

    def _cache_config(self) -> Metric:
        names = list(self.cache_config)
        text = "Always 1; the labels are the settings and limits of the KV cache."
        family = GaugeMetricFamily(f"{self.prefix}:cache_config_info", text, labels=["model_name", *names])
        if names:
            family.add_metric([self.model_name, *map(str, self.cache_config.values())], 1)
        return family

    def _adapters(self) -> Metric:
        text = "Time of this scrape, in seconds since 1970; the labels are the running and the waiting adapters."
        family = GaugeMetricFamily(f"{self.prefix}:lora_requests_info", text, labels=list(self.adapters))
        family.add_metric(list(map(one_line, self.adapters.values())), time.time())
        return family

    def _family(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        value: float | Mapping[str, float],
        *label: str,
    ) -> Metric:
        """Return a metric with one number, or one for each label value."""
        family = kind(f"{self.prefix}:{name}", text, labels=["model_name", *label])
        if isinstance(value, Mapping):
            for key, number in value.items():
                family.add_metric([self.model_name, key], number)
        else:
            family.add_metric([self.model_name], value)
        return family

    def _by_engine(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        values: Sequence[float | Mapping[str, float]],
        *label: str,
    ) -> Metric:
        """Return a metric with one of ``values`` for each engine, as in :meth:`_family`."""
        family = kind(f"{self.prefix}:{name}", text, labels=["model_name", "engine", *label])
        for engine, value in enumerate(values):
            if isinstance(value, Mapping):
                for key, number in value.items():
                    family.add_metric([self.model_name, str(engine), key], number)
            else:
                family.add_metric([self.model_name, str(engine)], value)
        return family

    def _histogram(self, values: Histogram) -> Metric:
        family = HistogramMetricFamily(f"{self.prefix}:{values.name}", values.text, labels=["model_name"])
        family.add_metric([self.model_name], values.buckets(), values.total)
        return family


PARTS = {"defrag": "preheat.schedule.defrag"}
"""Parts with a debug log, and their loggers."""


def explain(parts: Collection[str]) -> None:
    """Turn on the debug logs of ``parts``, and turn off all others.

    The parts are named in :data:`PARTS`.
    """
    for part, name in PARTS.items():
        logging.getLogger(name).setLevel(logging.DEBUG if part in parts else logging.NOTSET)
