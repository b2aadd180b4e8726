"""A trace of each request (``--otlp-traces-endpoint``), sent by OTLP.

A trace is one span, with vLLM's name and attributes. It is made when its request has ended, from times that are noted
anyway. A thread of OpenTelemetry sends many spans at once. OpenTelemetry is imported only to make
:class:`RequestTraces`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from preheat.errors import SettingsError
from preheat.frontend.request_state import RequestState

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

PROTOCOLS = ("grpc", "http/protobuf")

PARENT_HEADERS = ("traceparent", "tracestate")
"""The headers of a client that name the parent span of a request (W3C Trace Context)."""


class RequestTraces:
    """Sender of the spans of requests to ``model``.

    They go to ``endpoint`` by ``protocol``, one of :data:`PROTOCOLS`. OpenTelemetry's own variables (``OTEL_*``) decide
    the rest: headers, sampling, the service's name. Raises SettingsError for another protocol, and if OpenTelemetry is
    not installed.
    """

    def __init__(self, endpoint: str, protocol: str, model: str) -> None:
        try:
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, Status, StatusCode
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            exporter = _exporter(endpoint, protocol)
        except ImportError as error:
            raise SettingsError(
                f"otlp_traces_endpoint needs OpenTelemetry ({error}): pip install 'preheat[otel]'",
                param="otlp_traces_endpoint",
            ) from None
        self._provider = TracerProvider()  # sends the remaining spans when the process ends
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("preheat")
        self._parents = TraceContextTextMapPropagator()
        self._kind, self._model = SpanKind.SERVER, model
        self._failed = partial(Status, StatusCode.ERROR)

    def ended(self, state: RequestState) -> None:
        """Record that ``state`` ends now, as a span."""
        now, end = time.monotonic(), time.time_ns()
        span = self._tracer.start_span(
            "llm_request",
            context=self._parents.extract(state.trace_headers),
            kind=self._kind,
            start_time=end - int((now - state.arrived_at) * 1e9),
        )
        if span.is_recording():
            span.set_attributes(dict(_attributes(state, now)) | {"gen_ai.response.model": self._model})
            if state.error is not None:
                span.set_status(self._failed(state.error.message))
        span.end(end)


def _exporter(endpoint: str, protocol: str) -> SpanExporter:
    if protocol not in PROTOCOLS:
        raise SettingsError(
            f"otlp_traces_protocol: {protocol!r} is not one of {', '.join(PROTOCOLS)}", param="otlp_traces_protocol"
        )
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=endpoint)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpanExporter

    return GrpcSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))  # as in vLLM


def parent_of(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the ``headers`` that name a parent span."""
    return {name: headers[name] for name in PARENT_HEADERS if name in headers}


def _attributes(state: RequestState, now: float) -> Iterator[tuple[str, Any]]:
    """Yield the span's attributes, with vLLM's names; times are in seconds.

    Times of several choices go from the first choice to the last.
    """
    params, choices = state.params, state.choices
    yield "gen_ai.request.id", state.request_id
    yield "gen_ai.request.n", params.n
    yield "gen_ai.request.max_tokens", state.max_tokens
    yield "gen_ai.request.temperature", params.temperature
    yield "gen_ai.request.top_p", params.top_p
    yield "gen_ai.usage.prompt_tokens", len(state.prompt_ids)
    yield "gen_ai.usage.completion_tokens", sum(len(choice.token_ids) for choice in choices)
    yield "gen_ai.response.finish_reasons", [str(choice.finish_reason) for choice in choices]
    yield "gen_ai.latency.e2e", now - state.arrived_at
    times = [choice.times for choice in choices if choice.times.started]
    if not times:
        return
    started = min(each.started for each in times)
    yield "gen_ai.latency.time_in_queue", started - state.arrived_at
    if state.first_token_at:
        first, last = state.first_token_at, max(each.last for each in times)
        yield "gen_ai.latency.time_to_first_token", first - state.arrived_at
        yield "gen_ai.latency.time_in_model_prefill", first - started
        yield "gen_ai.latency.time_in_model_decode", last - first
        yield "gen_ai.latency.time_in_model_inference", last - started
