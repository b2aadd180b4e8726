"""The command lines on the page for users of vLLM: each starts, with the bundled model, and answers."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.command_lines import pairs

SMALLER = {"--port": "0", "--max-model-len": "1k"}
"""Smaller values of options, for a shared machine and a small model."""


LINES = [ours for _, ours in pairs("from-vllm.md")]


def test_there_are_enough() -> None:
    assert len(LINES) >= 10


def with_the_bundled_model(line: str) -> list[str]:
    program, *words = shlex.split(line)
    assert program == "preheat"
    words = ["bundled" if re.fullmatch(r"[\w.-]+/[\w.-]+", word) else word for word in words]
    for option, value in SMALLER.items():
        if option in words:
            words[words.index(option) + 1] = value
    if "--port" not in words and words[0] == "serve":
        words += ["--port", "0"]
    return [sys.executable, "-m", "preheat", *words]


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("preheat serve")])
def test_a_line_serves(line: str, code_folder: Path) -> None:
    command = [*with_the_bundled_model(line), "--log-level", "warning"]
    environment = os.environ | {"PREHEAT_CACHE_DIR": str(code_folder)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stderr is not None
            said = [shown := server.stderr.readline()]
            while shown and not (found := re.search(r"curl (http://\S+?)/v1/", shown)):
                said.append(shown := server.stderr.readline())
            assert shown, "".join(said)
            assert found
            ask(found[1], line)
        finally:
            server.terminate()
    assert server.returncode == 0


def ask(url: str, line: str) -> None:
    """Ask one question by the API that the command line is about."""
    words = shlex.split(line)
    key = words[words.index("--api-key") + 1] if "--api-key" in words else "none"
    name = words[words.index("--served-model-name") + 1] if "--served-model-name" in words else "bundled"
    if "--runner" in words:
        answer = post(f"{url}/v1/embeddings", key, {"model": name, "input": "def add(a, b):"})
        assert len(answer["data"][0]["embedding"]) == 256
        return
    messages = [{"role": "user", "content": "Hi"}]
    answer = post(f"{url}/v1/chat/completions", key, {"model": name, "messages": messages, "max_tokens": 4})
    assert answer["usage"]["completion_tokens"] > 0


def post(url: str, key: str, body: dict[str, Any]) -> Any:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as answer:
        return json.load(answer)


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("preheat run-batch")])
def test_a_line_answers_a_file(line: str, tmp_path: Path, code_folder: Path) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "requests.jsonl").write_text(json.dumps(request) + "\n")
    environment = os.environ | {"PREHEAT_CACHE_DIR": str(code_folder)}
    subprocess.run(with_the_bundled_model(line), check=True, cwd=tmp_path, timeout=240, env=environment)
    (answer,) = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert json.loads(answer)["response"]["status_code"] == 200
