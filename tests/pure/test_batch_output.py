"""Output of a batch: no answer is lost, and none is reported that is not written."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.cli.main import main
from preheat.errors import PreheatError, SettingsError
from preheat.server.batches import output as batch_output
from preheat.server.batches.output import Answers, answers_to

IDS = [str(number) for number in range(5)]


def answer(id: str, status: int = 200) -> bytes:
    return json.dumps({"custom_id": id, "response": {"status_code": status, "body": {}}}).encode()


def write(answers: Answers, id: str, status: int = 200) -> None:
    answers.write(answer(id, status), refused=status != 200)


def fill(answers: Answers) -> None:
    for id in IDS:
        write(answers, id)


def test_a_file_takes_its_name_when_all_is_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("before")
    with answers_to(str(out), IDS) as answers:
        for id in IDS[:-1]:
            write(answers, id)
        assert out.read_text() == "before" and not answers.whole
        write(answers, IDS[-1], 400)
    assert answers.whole and answers.report == "4 of 5 requests were answered"
    assert out.read_bytes() == b"".join(answer(id) + b"\n" for id in IDS[:-1]) + answer("4", 400) + b"\n"
    assert os.listdir(tmp_path) == ["out"]


def test_nothing_written_leaves_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError), answers_to(str(tmp_path / "out"), IDS):
            raise RuntimeError("it does not start")
        assert os.listdir(tmp_path) == []


STATES = st.tuples(st.sampled_from(IDS), st.sampled_from([200, 200, 429]))


@given(st.lists(STATES, max_size=5, unique_by=lambda state: state[0]),
       st.binary(max_size=20).filter(lambda torn: b"\n" not in torn), st.booleans())  # fmt: skip
def test_a_run_goes_on_where_another_ended(tmp_path_factory, before, torn, finished):
    """A run goes on with only the whole answers of status 200, each once.

    All other requests are asked again.
    """
    folder = tmp_path_factory.mktemp("resumed")
    text = b"".join(answer(id, status) + b"\n" for id, status in before) + torn
    (folder / ("out" if finished else "out.partial")).write_bytes(text)
    with answers_to(str(folder / "out"), IDS, resume=True) as answers:
        assert answers.kept == {id for id, status in before if status == 200}
        assert answers.answered == len(answers.kept)
        for id in IDS:
            if id not in answers.kept:
                write(answers, id)
    lines = (folder / "out").read_bytes().splitlines()
    assert answers.answered == 5 and sorted(lines) == sorted(answer(id) for id in IDS)
    assert os.listdir(folder) == ["out"]


UNKNOWN = '{"custom_id": "9", "response": {"status_code": 200}}'


@pytest.mark.parametrize("line", ["{}", "x", UNKNOWN, "[" * 10_000, "\xff"])
def test_invalid_lines_are_not_resumed(line: str, tmp_path: Path) -> None:
    partial, out = tmp_path / "out.partial", str(tmp_path / "out")
    partial.write_text(f"{answer('0').decode()}\n{line}\n", encoding="latin-1")
    before = partial.read_bytes()
    with pytest.raises(SettingsError, match=r"out\.partial, line 2"), answers_to(out, IDS, resume=True):
        pass
    assert partial.read_bytes() == before and os.listdir(tmp_path) == ["out.partial"]


def test_a_run_that_did_not_end_is_not_forgotten(tmp_path: Path) -> None:
    (tmp_path / "out.partial").write_bytes(answer("0") + b"\n")
    with pytest.raises(SettingsError, match="--resume goes on"), answers_to(str(tmp_path / "out"), IDS):
        pass


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full in the middle of an answer keeps the answers before it.

    The torn one does not count.
    """
    room = [len(answer("0")) * 2]

    def full(file: int, data: memoryview, real=os.write) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        written = real(file, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(batch_output.os, "write", full)
    with pytest.raises(PreheatError, match="No space left"), answers_to(str(tmp_path / "out"), IDS) as answers:
        fill(answers)
    assert answers.report.startswith("1 of 5 requests were answered: the answers are in ")
    monkeypatch.undo()
    with answers_to(str(tmp_path / "out"), IDS, resume=True) as answers:
        assert answers.kept == {"0"}


def test_a_device_stays_a_device_when_written() -> None:
    with pytest.raises(PreheatError, match="No space left"), answers_to("/dev/full", IDS) as answers:
        write(answers, "0")
    assert answers.report == "0 of 5 requests were answered"
    with answers_to("/dev/null", IDS) as answers:
        write(answers, "0")
    assert Path("/dev/null").is_char_device() and answers.answered == 1
    for path in ("/dev/null", None):
        with pytest.raises(SettingsError, match="--resume needs"), answers_to(path, IDS, resume=True):
            pass


REQUEST = json.dumps({"custom_id": "0", "url": "/v1/completions", "body": {"prompt": "x"}})


@pytest.mark.parametrize(
    ("out", "message"),
    [("nowhere/out", "its folder does not exist"), ("", "it is a folder"), ("in", "the file of requests itself"),
     ("link", "the file of requests itself"), ("n" * 300, "too long"), ("\0", "NUL"),
     ("fixed/out", "cannot be written")],
)  # fmt: skip
def test_an_output_that_cannot_be_is_known_before_the_boot(
    out: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_text(REQUEST)
    (tmp_path / "link").symlink_to("in")
    (tmp_path / "fixed").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode, real=os.access: "fixed" not in str(path) and real(path, mode))
    monkeypatch.setattr("preheat.server.batches.run_batch.run_server", lambda *_, **__: pytest.fail("it boots"))
    assert main(["run-batch", str(tmp_path / "in"), "-o", f"{tmp_path}/{out}"]) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert (tmp_path / "in").read_text() == REQUEST


@pytest.mark.parametrize("path", ["pipe", "", "none", "/dev/zero", "n" * 300, "a\0b"])
def test_an_input_that_cannot_be_is_an_error(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert main(["run-batch", str(tmp_path / path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be read" in line and len(line) < 500


def test_an_engine_that_takes_no_requests_ends_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    signals: list[int] = []

    def blocked(*_: object, on_blocked: Callable[[str], None], **__: object) -> int:
        on_blocked("rows differ")
        return 0

    monkeypatch.setattr("preheat.server.batches.run_batch.run_server", blocked)
    monkeypatch.setattr("preheat.server.batches.run_batch.os.kill", lambda _, number: signals.append(number))
    (tmp_path / "in").write_text(REQUEST)
    assert main(["run-batch", str(tmp_path / "in"), "-o", str(tmp_path / "out")]) == 1
    count, error = capsys.readouterr().err.splitlines()
    assert count == "0 of 1 requests were answered" and "takes no requests: rows differ" in error
    assert signals == [signal.SIGTERM] and os.listdir(tmp_path) == ["in"]
