"""The addresses where the server listens, and parts that a request may leave out."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from preheat.cli.serve import curl
from preheat.errors import SettingsError
from preheat.server.http.listener import listen, unlisten
from preheat.settings import Settings
from tests.api.conftest import ROOT, SCRIPTED, SERVE, Server, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def test_a_unix_socket(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    settings = {"model": str(folder), "uds": str(path), "log_level": "warning"}
    command = [sys.executable, "-c", SERVE, json.dumps(settings), SCRIPTED]
    with subprocess.Popen(command, cwd=ROOT) as process:
        while not path.exists():
            time.sleep(0.05)
            assert process.poll() is None
        assert _get(path, "/live").startswith(b"HTTP/1.1 200")
        with pytest.raises(SettingsError, match="Address already in use"):
            listen(Settings(uds=str(path)))
        process.terminate()
    assert process.returncode == 0 and not path.exists()


def _get(path: Path, route: str) -> bytes:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(f"GET {route} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        return b"".join(iter(lambda: client.recv(65536), b""))


def test_a_socket_that_was_left_behind_is_replaced_and_a_file_is_not(tmp_path: Path) -> None:
    settings = Settings(uds=str(tmp_path / "s"))
    listen(settings).close()
    listen(settings).close()
    unlisten(settings)
    (tmp_path / "s").write_text("a file")
    with pytest.raises(SettingsError, match=r"Cannot listen on .*no socket: name another path"):
        listen(settings)
    assert (tmp_path / "s").read_text() == "a file"


def test_the_curl_of_a_unix_socket() -> None:
    assert "curl --unix-socket '/tmp/a b' http://localhost/v1/completions" in curl(Settings(uds="/tmp/a b"))


def test_a_path_in_front(folder: Path) -> None:
    """``--root-path`` works behind a proxy that keeps the path, and behind a proxy that takes it off."""
    with serving(str(folder), root_path="/llm/", api_key=["k"]) as server:
        for prefix in ("", "/llm"):
            assert server.get(f"{prefix}/health").status == 200
            assert server.get(f"{prefix}/v1/models").status == 401
            assert server.get(f"{prefix}/v1/models", Authorization="Bearer k").status == 200
        assert server.get("/llm/openapi.json").json["servers"] == [{"url": "/llm"}]
        assert server.get("/llmx/health").status == 401
        assert server.get("/llm/llm/health").status == 401


def test_without_max_tokens_the_context_bounds_the_answer(scripted: Server) -> None:
    length = scripted.get("/v1/models").json["data"][0]["max_model_len"]

    def ask(path: str, **body: Any) -> Any:
        return scripted.post(path, body)

    prompt = [5] * (length - 3)
    assert ask(COMPLETIONS, prompt=prompt).json["usage"]["completion_tokens"] == 3
    assert ask(COMPLETIONS, prompt=prompt, max_tokens=4).error["param"] == "max_tokens"


def test_the_context_bounds_a_recommended_length(folder: Path, tmp_path: Path) -> None:
    options = {"override_generation_config": {"max_new_tokens": 10**6}}
    with serving(str(folder), **options) as server:
        answer = server.post(CHAT, {"messages": [{"role": "user", "content": "hi"}]})
        assert answer.status == 200 and answer.json["choices"][0]["finish_reason"] == "length"


def test_the_over_long_prompt_of_a_list_is_named(scripted: Server) -> None:
    length = scripted.get("/v1/models").json["data"][0]["max_model_len"]
    error = scripted.post(COMPLETIONS, {"prompt": ["a", "b", "x" * 4 * length]}).error
    assert error["param"] == "prompt[2]" and error["code"] == "context_length_exceeded"
    assert error["message"].startswith("prompt[2]: This model's maximum context length")
    assert scripted.post(COMPLETIONS, {"prompt": [[5], [10**9]]}).error["param"] == "prompt[1]"


def test_more_sequences_than_can_wait_are_a_bad_request(folder: Path) -> None:
    with serving(str(folder), max_queued_requests=3) as server:
        answer = server.post(COMPLETIONS, {"prompt": ["a", "b"], "n": 2})
        assert answer.status == 400 and "asks for 4 sequences" in answer.error["message"]
        assert server.post(COMPLETIONS, {"prompt": ["a", "b", "c"]}).status == 200
