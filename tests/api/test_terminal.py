"""Commands that are clients of a server, and the batch command with its own server.

The engine repeats its prompt.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from preheat.cli.main import main
from preheat.errors import PreheatError, SettingsError
from preheat.extras import client
from preheat.server.batches.lines import read_lines
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


def test_the_client_reports_a_servers_refusal(scripted: Server) -> None:
    with pytest.raises(PreheatError, match=r"404.*not served here"):
        list(client.Client(f"{scripted.url}/v1", "other").complete("x", 1))
    with pytest.raises(PreheatError, match="cannot be reached"):
        client.Client("http://127.0.0.1:9/v1")
    with pytest.raises(SettingsError, match="http://"):
        client.Client("localhost:8000")


def line(id: str, url: str = "/v1/completions", **body: object) -> str:
    return json.dumps({"custom_id": id, "method": "POST", "url": url, "body": body})


BATCH = """
import functools, sys
from preheat.cli import main
from preheat.server.batches import run_batch

run_batch.run_batch = functools.partial(run_batch.run_batch, entry=sys.argv.pop(1))
sys.exit(main())
"""


def batch(folder: Path, *words: str, engine: str = SCRIPTED, **how: Any) -> subprocess.Popen[str]:
    """Start ``preheat run-batch`` with another engine, one that does not read the checkpoint's weights."""
    flags = ["--model", str(folder), "--log-level", "warning", "--api-key", "secret"]
    return subprocess.Popen(
        [sys.executable, "-c", BATCH, engine, "run-batch", *words, *flags], text=True, cwd=ROOT,
        stderr=subprocess.PIPE, env={"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}, **how,
    )  # fmt: skip


def ids(path: Path) -> list[str]:
    return [json.loads(text)["custom_id"] for text in path.read_text().splitlines()]


def test_a_batch_is_answered_in_order(folder: Path, tmp_path: Path) -> None:
    lines = [line(str(n), prompt=[5 + n, 6, 7], max_tokens=40 - n, return_token_ids=True) for n in range(30)]
    lines += [line("bad", prompt="x", max_tokens=-1), line("talk", "/v1/chat/completions", max_tokens=2, messages=[
        {"role": "user", "content": "hi"}])]  # fmt: skip
    out = tmp_path / "out"
    out.write_text("of yesterday")
    done = batch(folder, "-", "-o", str(out), stdin=subprocess.PIPE)
    _, said = done.communicate("\n".join(lines))
    answers = [json.loads(text) for text in out.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [*map(str, range(30)), "bad", "talk"]
    assert [answer["response"]["status_code"] for answer in answers] == [200] * 30 + [400, 200]
    assert done.returncode == 1 and said == "31 of 32 requests were answered\n"  # one was refused
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    for number, answer in enumerate(answers[:30]):
        (choice,) = answer["response"]["body"]["choices"]
        assert len(choice["token_ids"]) == 40 - number and choice["token_ids"][:3] == [6, 7, 5 + number]


def test_a_batch_that_is_stopped_goes_on(folder: Path, tmp_path: Path) -> None:
    """Every request reported as answered is on the disk.

    That holds after two signals too. Such a request is not asked for again.
    """
    asked, out, partial = tmp_path / "in", tmp_path / "out", tmp_path / "out.partial"
    asked.write_text("\n".join(line(str(n), prompt=[5, 6], max_tokens=30 + 40 * n) for n in range(100)))
    out.write_text("of yesterday")
    begun = batch(folder, str(asked), "-o", str(out), "--max-model-len", "8192")
    while not (partial.exists() and partial.stat().st_size):
        assert begun.poll() is None
        time.sleep(0.01)
    begun.terminate()
    time.sleep(0.05)
    begun.terminate()
    _, said = begun.communicate(timeout=30)
    kept = ids(partial)
    assert begun.returncode == 1 and 0 < len(kept) < 100 and out.read_text() == "of yesterday"
    assert f"{len(kept)} of 100 requests were answered: the answers are in {partial}" in said
    with partial.open("a") as file:
        file.write('{"custom_id": "7", "resp')  # the disk was full
    for words, status in (((), 2), (("--resume",), 0)):
        again = batch(folder, str(asked), "-o", str(out), "--max-model-len", "8192", *words)
        _, said = again.communicate(timeout=60)
        assert again.returncode == status, said
    assert said == "100 of 100 requests were answered\n"
    assert ids(out) == [str(n) for n in range(100)] and not partial.exists()


def test_lines_that_are_no_requests_are_named() -> None:
    for text, message in (
        ("{", "input, line 2"), (line("1"), "custom_id '1' occurs twice"),
        (line("2", "/v1/audio"), "/v1/audio is not one of"), (line("2", stream=True), "no streams"),
    ):  # fmt: skip
        with pytest.raises(SettingsError, match=message):
            read_lines([line("1"), text], "input")
    with pytest.raises(SettingsError, match="no requests"):
        read_lines(["\n"], "input")
    assert main(["run-batch"]) == 2
