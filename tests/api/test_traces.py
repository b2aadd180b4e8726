"""Traces of requests, as real receivers of OTLP get them, over HTTP and over gRPC."""

from __future__ import annotations

import http.server
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from preheat.errors import SettingsError
from preheat.settings import Settings
from preheat.startup import boot_front
from tests.api.conftest import Server, serving
from tests.api.scripted import FAIL

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
LATENCIES = ("time_in_queue", "time_to_first_token", "time_in_model_prefill", "time_in_model_decode")


class Spans(queue.Queue[Span]):
    """Spans that have come, in order."""

    def take(self, request: ExportTraceServiceRequest) -> bytes:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.put(span)
        return ExportTraceServiceResponse().SerializeToString()

    def next(self) -> Span:
        return self.get(timeout=30)


@pytest.fixture(scope="module")
def spans() -> Spans:
    """Return the spans.

    Each test takes all the spans that it has caused.
    """
    return Spans()


@pytest.fixture(scope="module")
def collector(spans: Spans) -> Iterator[str]:
    """Yield the endpoint of a receiver over HTTP."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["content-type"] == "application/x-protobuf"
            body = self.rfile.read(int(self.headers["content-length"]))
            answer = spans.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Write no log."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def server(collector: str, folder: Path) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # milliseconds
        environment.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        with serving(str(folder), otlp_traces_endpoint=collector, served_model_name="small") as running:
            yield running


def values(span: Span) -> dict[str, object]:
    """Return the attributes by name."""
    found: dict[str, object] = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


def test_spans_over_http(server: Server, spans: Spans) -> None:
    body = {"prompt": "abc", "max_tokens": 5, "n": 2, "temperature": 0.5, "top_p": 0.75, "ignore_eos": True}
    answer = server.post("/v1/completions", body, **{"x-request-id": "mine"})
    assert answer.status == 200
    span, usage = spans.next(), answer.json["usage"]
    assert (span.name, span.kind, span.parent_span_id) == ("llm_request", Span.SPAN_KIND_SERVER, b"")
    assert span.status.code == Status.STATUS_CODE_UNSET
    found = values(span)
    latency = {name: found.pop(f"gen_ai.latency.{name}") for name in (*LATENCIES, "time_in_model_inference", "e2e")}
    assert found == {
        "gen_ai.request.id": "mine",
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.response.model": "small",
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],
        "gen_ai.usage.completion_tokens": usage["completion_tokens"],
    }
    assert usage["completion_tokens"] == 10
    assert all(value >= 0 for value in latency.values())
    assert latency["time_in_queue"] + latency["time_in_model_prefill"] == pytest.approx(latency["time_to_first_token"])
    parts = latency["time_in_model_prefill"] + latency["time_in_model_decode"]
    assert parts == pytest.approx(latency["time_in_model_inference"])
    assert latency["time_in_queue"] + parts <= latency["e2e"]
    seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert seconds == pytest.approx(latency["e2e"], abs=1e-3)


def test_a_failed_request(server: Server, spans: Spans) -> None:
    assert server.post("/v1/completions", {"prompt": [FAIL, 5], "max_tokens": 3}).status == 500
    span = spans.next()
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert span.status.message
    assert values(span)["gen_ai.response.finish_reasons"] == ["error"]


def test_a_clients_span_is_the_parent(server: Server, spans: Spans) -> None:
    """A client's span is the parent, at both endpoints.

    Unsampled and refused requests send no span.
    """
    state = {"tracestate": "vendor=one"}
    prompt = {"prompt": "abc", "max_tokens": 1}
    assert server.post("/v1/completions", prompt, traceparent=f"00-{TRACE}-{PARENT}-00").status == 200
    assert server.post("/v1/completions", {"prompt": "abc", "max_tokens": -5}).status == 400
    server.post("/v1/completions", prompt, traceparent=f"00-{TRACE}-{PARENT}-01", **state)
    first = spans.next()
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "stream": True}
    server.post("/v1/chat/completions", chat, traceparent=f"00-{TRACE}-{PARENT}-01", **state)
    for span in (first, spans.next()):
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        assert span.trace_state == "vendor=one"
    server.post("/v1/completions", prompt, traceparent="nonsense")
    assert spans.next().parent_span_id == b""


def test_spans_over_grpc(folder: Path, spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over gRPC, vLLM's default, spans that wait when the server stops are sent then."""

    class Service(TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:
            spans.take(request)
            return ExportTraceServiceResponse()

    for name in ("OTEL_BSP_SCHEDULE_DELAY", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)
    with ThreadPoolExecutor(1) as threads:
        receiver = grpc.server(threads)
        add_TraceServiceServicer_to_server(Service(), receiver)
        port = receiver.add_insecure_port("127.0.0.1:0")
        receiver.start()
        with serving(str(folder), otlp_traces_endpoint=f"http://127.0.0.1:{port}") as server:
            assert server.post("/v1/completions", {"prompt": "abc", "max_tokens": 3}).status == 200
            server.process.terminate()
            assert server.process.wait(30) == 0
        assert values(spans.next())["gen_ai.usage.completion_tokens"] == 3
        receiver.stop(None).wait()


def test_a_missing_package_is_named_at_boot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    settings = Settings.load({"model": str(folder), "otlp_traces_endpoint": "http://127.0.0.1:4317"})
    with pytest.raises(SettingsError, match=r"needs OpenTelemetry .*: pip install 'preheat\[otel\]'"):
        boot_front(settings, print)


def test_a_protocol_that_is_not_spoken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong protocol matters only where spans are sent, as the variable may be there for other programs."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    assert boot_front(Settings.load({"model": str(folder)}), print).traces is None
    with pytest.raises(SettingsError, match="'http/json' is not one of grpc, http/protobuf"):
        boot_front(Settings.load({"model": str(folder), "otlp_traces_endpoint": "http://127.0.0.1:4318"}), print)


def test_detailed_traces_are_refused() -> None:
    with pytest.raises(SettingsError, match="model is not supported yet: a step computes many requests"):
        Settings.load({"collect_detailed_traces": "model"})


@pytest.mark.parametrize("endpoint", [None, "http://127.0.0.1:4317"])
def test_opentelemetry_is_imported_only_when_asked_for(endpoint: str | None) -> None:
    code = (
        "import sys\nfrom preheat.settings import Settings\nfrom preheat.startup import boot_front\n"
        f"boot_front(Settings.load({{'otlp_traces_endpoint': {endpoint!r}}}), print)\n"
        "sys.exit('opentelemetry' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == (endpoint is not None)
