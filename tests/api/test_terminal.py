"""The commands that are clients of a server, and the batch that runs one itself. The engine repeats its prompt."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from preheat import client
from preheat.cli import main
from preheat.errors import PreheatError, SettingsError
from preheat.server.run_batch import read_lines
from tests.api.conftest import ROOT, SCRIPTED, Server


def test_chat(talker: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", f"{talker.url}/v1", "--quick", "Hello, you", "--system-prompt", "Be"]) == 0
    assert capsys.readouterr().out == "Hello, you\n"
    told, texts = [], iter(["One", "", "Two"])

    def ask(_: str) -> str:
        try:
            return next(texts)
        except StopIteration:
            raise EOFError from None

    client.chat(client.Client(f"{talker.url}/v1"), None, None, ask, told.append)
    assert "".join(told) == "One\nTwo\n"


def test_complete(scripted: Server, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["complete", "--url", f"{scripted.url}/v1", "--model-name", "alias", "-q", "abc", "--max-tokens", "3"]
    assert main(words) == 0
    assert capsys.readouterr().out == "abc\n"


def test_what_a_server_refuses_is_said(scripted: Server) -> None:
    with pytest.raises(PreheatError, match=r"404.*not served here"):
        list(client.Client(f"{scripted.url}/v1", "other").complete("x", 1))
    with pytest.raises(PreheatError, match="cannot be reached"):
        client.Client("http://127.0.0.1:9/v1")
    with pytest.raises(SettingsError, match="http://"):
        client.Client("localhost:8000")


BATCH = """
import json, sys
from preheat.server.run_batch import read_lines, run_batch
from preheat.settings import Settings

model, entry = sys.argv[1:]
lines = read_lines(sys.stdin, "input")
settings = Settings.load({"model": model, "log_level": "warning", "api_key": ["secret"]})
sys.exit(run_batch(settings, lines, lambda answer: print(json.dumps(answer)), entry))
"""


def line(id: str, url: str = "/v1/completions", **body: object) -> str:
    return json.dumps({"custom_id": id, "method": "POST", "url": url, "body": body})


def test_a_batch_is_answered_in_order(folder: Path) -> None:
    lines = [line(str(n), prompt=[5 + n, 6, 7], max_tokens=40 - n, return_token_ids=True) for n in range(30)]
    lines += [line("bad", prompt="x", max_tokens=-1), line("talk", "/v1/chat/completions", max_tokens=2, messages=[
        {"role": "user", "content": "hi"}])]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", BATCH, str(folder), SCRIPTED], input="\n".join(lines), text=True, check=False,
        capture_output=True, cwd=ROOT, env={"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"},
    )  # fmt: skip
    answers = [json.loads(text) for text in done.stdout.splitlines()]
    assert [answer["custom_id"] for answer in answers] == [*map(str, range(30)), "bad", "talk"]
    assert [answer["response"]["status_code"] for answer in answers] == [200] * 30 + [400, 200]
    assert done.returncode == 1  # one failed
    for number, answer in enumerate(answers[:30]):
        (choice,) = answer["response"]["body"]["choices"]
        assert len(choice["token_ids"]) == 40 - number and choice["token_ids"][:3] == [6, 7, 5 + number]


def test_lines_that_are_no_requests_are_named() -> None:
    for text, message in (
        ("{", "input, line 2"), (line("1"), "custom_id '1' occurs twice"),
        (line("2", "/v1/embeddings"), "/v1/embeddings is not one of"), (line("2", stream=True), "no streams"),
    ):  # fmt: skip
        with pytest.raises(SettingsError, match=message):
            read_lines([line("1"), text], "input")
    with pytest.raises(SettingsError, match="no requests"):
        read_lines(["\n"], "input")
    assert main(["run-batch"]) == 2
