"""HTTP as clients see it: shapes, refusals, keys, headers and limits."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from preheat.core import SAMPLING_FIELDS, SamplingParams
from preheat.server.anthropic.messages_schema import MessagesRequest
from preheat.server.openai.responses_schema import ResponsesRequest
from preheat.server.openai.schema import ChatRequest, CompletionRequest
from tests.api.conftest import ROOT, Server, serving
from tests.api.scripted import HANG

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def events(answer_body: bytes) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in answer_body.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_stream_never_splits_a_character(scripted: Server) -> None:
    text = "x🦜漢ñ👩‍👩‍👧"
    answer = scripted.post(COMPLETIONS, {"prompt": text, "max_tokens": 60, "stream": True, "add_special_tokens": False})
    shown = [event["choices"][0]["text"] for event in events(answer.body)]
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "".join(shown).startswith("🦜漢ñ👩‍👩‍👧x🦜") and not any("\ufffd" in part for part in shown[:-1])


def test_names(scripted: Server) -> None:
    names = [model["id"] for model in scripted.get("/v1/models").json["data"]]
    assert names == ["tiny", "alias"]
    for name, expected in [("alias", "alias"), ("tiny", "tiny"), (None, "tiny")]:
        assert scripted.post(COMPLETIONS, {"prompt": "hi", "model": name}).json["model"] == expected


def test_tokenizer_routes(scripted: Server) -> None:
    told = scripted.post("/tokenize", {"prompt": "return a", "return_token_strs": True}).json
    assert told["count"] == len(told["tokens"]) and told["tokens"][0] == 0 and told["max_model_len"] == 4096
    assert "".join(told["token_strs"]) == "<s>return\u0120a"  # as in the vocabulary
    assert scripted.post("/detokenize", {"tokens": told["tokens"]}).json == {"prompt": "<s>return a"}
    chat = scripted.post("/tokenize", {"messages": MESSAGES, "return_token_strs": True}).json
    assert "".join(chat["token_strs"]) == "<|im_start|>user:\u0120hi\u010a>"
    assert scripted.post("/detokenize", {"tokens": [10**6]}).error["param"] == "tokens"
    assert scripted.post("/tokenize", {"prompt": "x", "messages": MESSAGES}).status == 400


def calling(arguments: str) -> dict[str, Any]:
    """Return a conversation with a tool call that has these arguments."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}, *MESSAGES]}


REFUSED = [
    (b"{", None, "JSON"),
    (b"\xff", None, "JSON"),
    (b'{"prompt": "\\ud800"}', None, "send both halves"),
    (b'{"prompt": "\\udfff and more text"}', None, "send both halves"),
    (b"[" * 100_000, None, ""),
    (b'{"prompt": ' + b"[" * 50_000, None, "nested too deeply: at most 256"),
    (b'{"prompt": "x", "guided_json": %b1%b}' % (b'{"items":' * 700, b"}" * 700), None, "nested too deeply"),
    (calling('{"a":' * 300 + "1" + "}" * 300), "messages[0].tool_calls[0]", "nested too deeply"),
    (b"null", None, "object"),
    (b"", None, "The body is empty"),
    ({}, "prompt", "Missing required parameter: prompt"),
    ({"prompt": 5}, "prompt", "Expected"),
    ({"prompt": []}, "prompt", "1 to 2048"),
    ({"prompt": ["x"] * 2049}, "prompt", "1 to 2048"),
    ({"prompt": [1, "x"]}, "prompt", "not both"),
    ({"prompt": ["x", ""], "add_special_tokens": False}, "prompt[1]", "empty"),
    ({"prompt": [999999]}, "prompt", "999999"),
    ({"prompt": "x", "max_tokens": "3"}, "max_tokens", "Expected"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens", "max_tokens"),
    ({"prompt": "x", "max_tokens": 10**30}, "max_tokens", ""),
    ({"prompt": "x", "temperature": -1}, "temperature", "temperature"),
    ({"prompt": "x", "n": 129}, "n", "between 1 and 128"),
    ({"prompt": "x", "seed": 2**64}, "seed", "seed"),
    ({"prompt": "x", "n": 3, "best_of": 2}, "best_of", "at least n"),
    ({"prompt": "x", "best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
    ({"prompt": "x", "priority": 1}, "priority", "--scheduling-policy"),
    ({"prompt": "x", "suffix": "y"}, "suffix", "not supported: leave it out"),
    ({"prompt": "x", "logprobs": 21}, "logprobs", "at most 20"),
    ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
    ({"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs", "at most 20"),
    ({"prompt": "x", "stop": ["a", ""]}, "stop", "empty"),
    ({"prompt": "x", "stop": [1]}, "stop[0]", "Expected"),
    ({"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias", ""),
    ({"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias", "100"),
    ({"prompt": "x", "service_tier": "flex"}, "service_tier", "not supported"),
    ({"prompt": "x", "guided_json": 3}, "guided_json", "Expected"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"prompt": "x", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "streamed"),
    ({"prompt": "x" * 5000}, "prompt", "maximum context length"),
    ({"messages": []}, "messages", "empty"),
    ({"messages": "x"}, "messages", "Expected"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "Missing"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages", "sees no images"),
    ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages", "'file'"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages", "add the field text"),
    (calling("[1]"), "messages[0].tool_calls[0]", "are a list: send a JSON object"),
    (calling('{"a": NaN}'), "messages[0].tool_calls[0]", "NaN is no finite number"),
    (calling('{"a": -1e999}'), "messages[0].tool_calls[0]", "-1e999 is no finite number"),
    ({"messages": MESSAGES, "tools": [{}]}, "tools[0].type", "Missing required parameter"),
    ({"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name",
     "give the function a name"),
    ({"messages": MESSAGES, "tool_choice": "any"}, "tool_choice", "'any' is not one of auto, none, required"),
    ({"messages": MESSAGES, "tool_choice": {"type": "x"}}, "tool_choice.type", "not one of allowed_tools, function"),
    ({"messages": [{"role": "user", "content": [{"type": "refusal"}]}]}, "messages", "add the field refusal"),
    ({"prompt": "x", "max_tokens": 1.5}, "max_tokens", "got `float`"),
    ({"prompt": "x", "guided_choice": [""]}, "guided_choice", "guided_choice must not hold an empty text"),
    ({"messages": MESSAGES, "functions": [{}]}, "functions", "not supported"),
    ({"messages": MESSAGES, "modalities": ["audio"]}, "modalities", "not supported"),
    ({"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template", "--chat-template"),
    ({"messages": MESSAGES, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "cannot be set"),
    ({"messages": MESSAGES, "top_logprobs": 1}, "top_logprobs", "needs logprobs"),
    ({"messages": MESSAGES, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "max_tokens and max"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages", "maximum context length"),
    ({"messages": MESSAGES, "max_completion_tokens": 4096}, "max_completion_tokens", "reduce max_completion_tokens."),
    ({"messages": MESSAGES, "max_tokens": 4096}, "max_tokens", "or reduce max_tokens."),
    ({"prompt": "x", "n": 2, "best_of": 200}, "best_of", "best_of must be between"),
    ({"prompt": "x", "echo": True, "logprobs": 21}, "logprobs", "logprobs is 21"),
]  # fmt: skip


BODIES: dict[str, tuple[type, dict[str, Any], str]] = {
    COMPLETIONS: (CompletionRequest, {"prompt": "x"}, ""),
    CHAT: (ChatRequest, {"messages": MESSAGES, "logprobs": True, "max_completion_tokens": 1}, ""),
    "/v1/responses": (
        ResponsesRequest,
        {"input": "x", "include": ["message.output_text.logprobs"], "max_output_tokens": 1},
        "",
    ),
    "/v1/messages": (MessagesRequest, {"messages": MESSAGES, "max_tokens": 1}, ""),
    "/inference/v1/generate": (SamplingParams, {"token_ids": [5]}, "sampling_params"),
}
"""Of each endpoint: the kind that lists its fields of numbers, a body, and the field that has the fields."""


@pytest.mark.parametrize("path", BODIES)
def test_an_error_names_the_field_that_the_client_sent(scripted: Server, path: str) -> None:
    """A number out of its range is refused by the name that the endpoint has for it, not by the engine's."""
    kind, body, within = BODIES[path]
    refused = set()
    for name, hint in get_type_hints(kind).items():
        if not {int, float} & {hint, *get_args(hint)} or (within and name not in SAMPLING_FIELDS):
            continue
        for number in (10**9 * 3, -(10**9) * 3):
            given = {name: number}
            answer = scripted.post(path, body | ({within: {"max_tokens": 1} | given} if within else given))
            if answer.status == 400:
                refused.add(name)
                said = answer.json["error"]["message"]
                assert name in re.findall(r"\w+", said) or "maximum context length" in said, (name, said)
                if path != "/v1/messages":  # Anthropic's errors have no param
                    assert answer.error["param"] == f"{within}.{name}".lstrip("."), (name, said)
    assert refused & {"max_tokens", "max_completion_tokens", "max_output_tokens"} and "temperature" in refused


@pytest.mark.parametrize(("body", "param", "message"), REFUSED, ids=[str(body)[:60] for body, _, _ in REFUSED])
def test_refusals_have_a_shape_and_a_reason(scripted: Server, body: object, param: str | None, message: str) -> None:
    path = CHAT if isinstance(body, dict) and "messages" in body else COMPLETIONS
    answer = scripted.post(path, body)
    assert answer.status == 400 and answer.error["type"] == "invalid_request_error"
    assert answer.error["param"] == param and message in answer.error["message"]
    assert scripted.metric("num_requests_running") == scripted.metric("num_requests_waiting") == 0


def test_no_op_values_pass(scripted: Server) -> None:
    body = {"prompt": "hi", "best_of": 1, "suffix": "", "store": False, "service_tier": "default", "user": "u",
            "logit_bias": {}, "stop": [], "priority": 0, "length_penalty": 1.0, "metadata": {"a": 1},
            "temperature": None, "stream_options": None, "bad_words": [], "top_k": -1}  # fmt: skip
    assert scripted.post(COMPLETIONS, body).json["choices"][0]["text"]


def test_an_integer_may_be_written_as_a_float(scripted: Server) -> None:
    """Gson writes each number so."""
    answer = scripted.post(COMPLETIONS, {"prompt": [[6.0, 7.0]], "max_tokens": 2.0, "seed": -1.0, "min_p": 0.0})
    assert answer.status == 200 and answer.json["usage"]["completion_tokens"] == 2
    body = {"token_ids": [6.0, 7.0], "sampling_params": {"max_tokens": 2.0, "temperature": 0}}
    answer = scripted.post("/inference/v1/generate", body)
    assert answer.status == 200 and answer.json["usage"]["completion_tokens"] == 2


def test_texts_of_a_message_have_several_types(scripted: Server) -> None:
    """A refusal of the model goes back as its text."""

    def tokens(*talk: dict[str, Any]) -> list[int]:
        answer = scripted.post("/tokenize", {"messages": [*MESSAGES, *talk]})
        assert answer.status == 200
        return list(answer.json["tokens"])

    said = tokens({"role": "assistant", "content": "No."})
    for part in ({"type": "refusal", "refusal": "No."}, {"type": "output_text", "text": "No."}):
        assert tokens({"role": "assistant", "content": [part]}) == said
    assert tokens({"role": "assistant", "content": None, "refusal": "No."}) == said
    both = tokens({"role": "assistant", "content": "No.\nNo."})
    for content in ("No.", [{"type": "text", "text": "No."}]):
        assert tokens({"role": "assistant", "content": content, "refusal": "No."}) == both


def test_other_paths_and_methods(scripted: Server) -> None:
    assert scripted.get("/nowhere").status == 404 and scripted.get("/nowhere").error["param"] is None
    assert scripted.get(COMPLETIONS).status == 405 and scripted.get(COMPLETIONS).headers["allow"] == "POST"
    assert scripted.post(COMPLETIONS, {"prompt": "x", "model": "gpt"}).error["code"] == "model_not_found"
    assert scripted.get("/version").json.keys() == {"version"} and scripted.get("/health").json["status"] == "ok"


def test_request_ids(scripted: Server) -> None:
    answer = scripted.post(COMPLETIONS, {"prompt": "x"}, **{"X-Request-Id": "my-id.1"})
    assert answer.headers["x-request-id"] == "my-id.1" and answer.json["id"] == "cmpl-my-id.1"
    for bad in ("a b", "x" * 200, ""):
        drawn = scripted.get("/health", **{"X-Request-Id": bad}).headers["x-request-id"]
        assert len(drawn) == 32 and drawn != bad


def test_a_failed_request_says_so(scripted: Server) -> None:
    for stream in (False, True):
        answer = scripted.post(COMPLETIONS, {"prompt": [4, 5], "stream": stream})
        assert answer.status == 500 and answer.error["message"] == "the step failed"
    assert scripted.post(COMPLETIONS, {"prompt": "x"}).status == 200


def test_bodies_are_bounded(scripted: Server) -> None:
    large = b'{"prompt": "' + b"x" * 2**20 + b'"}'
    assert scripted.post(COMPLETIONS, large).status == 413
    with socket.create_connection(("127.0.0.1", scripted.port)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(9):
            client.sendall(b"%x\r\n" % 2**17 + b"x" * 2**17 + b"\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("header", ["Content-Encoding", "Transfer-Encoding"])
def test_compressed_bodies_are_refused_by_name(scripted: Server, header: str) -> None:
    length, value = (
        ("Transfer-Encoding: chunked\r\n", "gzip") if header == "Content-Encoding" else ("", "gzip, chunked")
    )
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{length}{header}: {value}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", scripted.port)) as client, client.makefile("rb") as answers:
        client.sendall(f"{head}0\r\n\r\n".encode())
        answer = answers.read()
    assert answer.startswith(b"HTTP/1.1 415") and b"send it as it is" in answer and header.encode() in answer
    assert scripted.post(COMPLETIONS, {"prompt": "x"}, **{"Content-Encoding": "identity"}).status == 200


def test_slow_bodies_end(scripted: Server) -> None:
    with socket.create_connection(("127.0.0.1", scripted.port)) as client:
        client.settimeout(60)
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        started = time.monotonic()
        assert client.recv(100).startswith(b"HTTP/1.1 408") and time.monotonic() - started > 0.5


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x00", b"GET / HTTP/9.9\r\n\r\n", b"POST / HTTP/1.1\r\n" + b"x" * 10_000]
)
def test_malformed_http(scripted: Server, garbage: bytes) -> None:
    with socket.create_connection(("127.0.0.1", scripted.port)) as client:
        client.settimeout(2)
        client.sendall(garbage + b"\r\n\r\n")
        try:
            assert client.recv(100).startswith(b"HTTP/1.1 400")
        except OSError:
            pass  # the connection is closed or waits; the server must live either way
    assert scripted.get("/health").status == 200


def test_browsers_may_call(scripted: Server) -> None:
    answer = scripted.post(COMPLETIONS, {"prompt": "x"}, Origin="http://a.example")
    assert answer.headers["access-control-allow-origin"] == "*"


def test_keys_origins_and_limits(folder: Path) -> None:
    options = {"api_key": ["one", "two"], "allowed_origins": ["http://a.example"], "max_queued_requests": 3}
    with serving(str(folder), **options) as server:
        for headers in ({}, {"Authorization": "Bearer three"}, {"Authorization": "one"}, {"Authorization": "Bearer é"}):
            answer = server.post(COMPLETIONS, {"prompt": "x"}, **headers)
            assert answer.status == 401 and answer.error["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        for key in ("Bearer one", "bearer two"):
            assert server.post(COMPLETIONS, {"prompt": "x"}, Authorization=key).status == 200
        assert server.get("/v1/models").status == 401
        assert all(server.get(path).status == 200 for path in ("/health", "/ready", "/metrics", "/version"))
        answer = server.get("/health", Origin="http://b.example")
        assert "access-control-allow-origin" not in answer.headers
        preflight = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}
        assert server.post(COMPLETIONS, b"", "OPTIONS", **preflight).status == 200
        with waiting(server, {"prompt": [HANG], "n": 2}, b"Authorization: Bearer one"):
            full = server.post(COMPLETIONS, {"prompt": "x", "n": 2}, Authorization="Bearer one")
            assert full.status == 429 and full.error["code"] == "queue_full" and full.headers["retry-after"] == "1"


@contextlib.contextmanager
def waiting(server: Server, body: dict[str, Any], header: bytes) -> Iterator[None]:
    """Run a client with ``n`` sequences that wait for an answer meanwhile."""
    data = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n%b\r\nContent-Length: %d\r\n\r\n" % (header, len(data))
        client.sendall(head + data)
        while server.metric("num_requests_waiting") < body["n"]:
            time.sleep(0.02)
        yield


def test_metrics(scripted: Server) -> None:
    before = scripted.metric("generation_tokens_total"), scripted.metric("prompt_tokens_total")
    usage = scripted.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 7, "n": 2}).json["usage"]
    after = scripted.metric("generation_tokens_total"), scripted.metric("prompt_tokens_total")
    assert (after[0] - before[0], after[1] - before[1]) == (14, usage["prompt_tokens"])
    assert scripted.metric("request_success_total", finished_reason="length") >= 2
    page = scripted.get("/metrics").body.decode()
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        assert f"# TYPE preheat:{name} histogram" in page


def test_every_family_of_the_page_is_described_and_the_dashboard_asks_for_no_other(scripted: Server) -> None:
    assert scripted.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 3, "n": 2}).status == 200
    page = scripted.get("/metrics").body.decode()
    families = set(re.findall(r"^# TYPE preheat:(\w+) ", page, re.MULTILINE))
    described = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "metrics.md").read_text().split("| --- | --- | --- |")[1]))
    assert {name.removesuffix("_total") for name in families} <= {name.removesuffix("_total") for name in described}
    dashboard = (ROOT / "examples" / "grafana" / "preheat.json").read_text()
    asked = set(re.findall(r"\$\{prefix\}:(\w+)", dashboard))
    assert len(asked) > 20
    assert {name for name in asked if f"preheat:{name}{{" not in page} <= {"cold_events_total"}  # there may be none


def test_times_and_lengths_of_a_request(scripted: Server) -> None:
    names = ["request_prefill_time_seconds", "request_decode_time_seconds", "request_generation_tokens"]
    before = [scripted.metric(f"{name}_count") for name in names]
    length, ended = scripted.metric("request_generation_tokens_sum"), scripted.metric("request_params_n_sum")
    assert scripted.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 7, "n": 2}).status == 200
    assert [scripted.metric(f"{name}_count") for name in names] == [count + 2 for count in before]
    assert scripted.metric("request_generation_tokens_sum") == length + 14
    assert scripted.metric("request_params_n_sum") == ended + 2
    parts = sum(scripted.metric(f"request_{part}_time_seconds_sum") for part in ("prefill", "decode"))
    assert parts == pytest.approx(scripted.metric("request_inference_time_seconds_sum"))
    assert scripted.metric("cache_config_info", enable_prefix_caching="True") == 1


def test_vllm_names_and_the_access_log(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    options = {"metrics_prefix": "vllm", "access_log": "json", "log_level": "info", "api_key": ["one"]}
    with serving(str(folder), log=log, **options) as server:
        key = {"Authorization": "Bearer one", "X-Request-Id": "mine"}
        assert server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2}, **key).status == 200
        assert server.post(COMPLETIONS, {"prompt": "x"}).status == 401
        assert server.get("/nowhere", **key).status == 404
        page = server.get("/metrics").body.decode()
    assert "vllm:num_requests_running{" in page and "preheat:" not in page
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="200"} 1.0' in page
    assert 'http_requests_total{handler="none",method="POST",status="401"} 1.0' in page
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    (mine,) = (line for line in lines if line["request_id"] == "mine" and line["path"] == COMPLETIONS)
    assert (mine["status"], mine["method"], mine["seconds"] > 0) == (200, "POST", True)
    assert [line["status"] for line in lines if line["path"] == "/nowhere"] == [404]


def test_tls(folder: Path, tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate,
               "-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    with serving(str(folder), wait=False, ssl_keyfile=str(key), ssl_certfile=str(certificate)) as server:
        context = ssl.create_default_context(cafile=certificate)
        for _ in range(200):
            try:
                url = server.url.replace("http", "https") + "/health"
                assert urllib.request.urlopen(url, timeout=5, context=context).status == 200
                return
            except OSError:
                time.sleep(0.05)
    raise AssertionError("no answer over TLS")


def test_the_http_process_is_light() -> None:
    code = (
        "import sys, preheat.server.app; print([m for m in ('torch', 'transformers', 'fastapi') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          env={"PYTHONPATH": str(ROOT / "src")})  # fmt: skip
    assert done.stdout.strip() == "[]", done.stderr


def test_the_best_of_several(scripted: Server) -> None:
    """All sequences have equal logprobs here, so the first are the best.

    The tokens of all are counted.
    """
    body = {"prompt": ["hi", "you"], "best_of": 3, "n": 2, "max_tokens": 4, "temperature": 1}
    answer = scripted.post(COMPLETIONS, body).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 24
    assert scripted.post(COMPLETIONS, body | {"logprobs": 1}).json["choices"][0]["logprobs"]["tokens"]


def test_endpoints_that_are_not_here_say_why(scripted: Server) -> None:
    for path, why in (("/v1/audio/transcriptions", "hears"), ("/v1/images/x", "draws"), ("/v1/nothing", "")):
        answer = scripted.post(path, {})
        assert answer.status == 404 and why in answer.error["message"]
