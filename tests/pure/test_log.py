"""The log: an event is one line of printable characters.

No thread waits for the reader of standard error.
"""

from __future__ import annotations

import io
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.metrics import Metrics
from preheat.utils.log import TRACEBACK, BackgroundStream, LineFormatter, one_line, printable, without_controls

FORM = "%(levelname)s %(name)s: %(message)s"

# Any character, the ones that break lines, move the cursor or turn the direction more often than others.
TEXTS = st.text(
    st.one_of(
        st.characters(),
        st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp"]),
        st.sampled_from("\n\r\x1b\x7f\x85\x9b\u2028\u2029\u202e\u2066\ud800"),
    )
)


def logged(message: str, *args: object, name: str = "n", error: BaseException | None = None) -> str:
    info = None if error is None else (type(error), error, error.__traceback__)
    return LineFormatter(FORM).format(logging.LogRecord(name, logging.INFO, "", 0, message, args, info))


@given(TEXTS, TEXTS)
def test_an_event_is_one_printable_line(text, name):
    line = logged("a request for %s failed", text, name=name)
    assert line.isprintable() and len(line.splitlines()) == 1
    assert line.startswith("INFO ")
    line.encode("utf-8")  # no lone surrogate is left


def test_an_ordinary_formatter_lets_line_breaks_through():
    record = logging.LogRecord("n", logging.INFO, "", 0, "%s", ("a\nINFO n: made up",), None)
    assert len(logging.Formatter(FORM).format(record).splitlines()) == 2


@given(TEXTS)
def test_a_traceback_follows_its_event_and_looks_like_none(text):
    try:
        raise ValueError(text)
    except ValueError as error:
        first, *rest = logged("it failed", error=error).split("\n")
    assert first == "INFO n: it failed" and len(rest) >= 3
    assert all(line.startswith(TRACEBACK) and line.isprintable() for line in rest)


def test_a_traceback_that_another_formatter_made_is_made_again():
    try:
        raise ValueError("a\nINFO n: made up")
    except ValueError:
        record = logging.LogRecord("n", logging.INFO, "", 0, "it failed", (), sys.exc_info())
    logging.Formatter(FORM).format(record)
    assert "\nINFO" not in LineFormatter(FORM).format(record)


@given(TEXTS)
def test_a_line_of_json_stays_json(text):
    line = one_line(json.dumps({"path": text}, ensure_ascii=False))
    assert line.isprintable() and json.loads(line) == {"path": text}


@given(st.text(st.characters(categories=["L", "N", "P", "S"])))
def test_printable_text_is_not_changed(text):
    assert one_line(text) == printable(text) == without_controls(text) == text


@given(TEXTS)
def test_lines_for_a_terminal(text):
    assert all(line.isprintable() for line in printable(text).split("\n"))
    assert printable(text).count("\n") == text.count("\n")
    assert not set(without_controls(text)) & set("\x00\x07\r\x1b\x7f\x85\x9b")


@given(TEXTS, TEXTS)
def test_labels_of_metrics_break_no_line_of_the_page(model, adapter):
    metrics = Metrics(model)
    metrics.adapters = {"running_lora_adapters": adapter}
    page = metrics.text().decode()
    assert all(line.isprintable() for line in page.split("\n"))


# --- standard error that is not read ---


class Pipe:
    """A pipe with little room, and a stream that writes to it."""

    def __init__(self, held: int) -> None:
        self.reading, writing = os.pipe()
        self.file = os.fdopen(writing, "w", encoding="utf-8")
        self.stream = BackgroundStream(self.file, held)

    def fill(self) -> None:
        """Write until neither the pipe nor the stream takes more.

        A full stream is not enough: its thread may not have had a processor, and would fill the pipe later.
        """
        before, room = 0, True
        while room or not 9_000 < self.stream._held == before:
            before = self.stream._held
            for _ in range(1000):
                self.stream.write("x" * 99 + "\n")
            time.sleep(0.02)  # the thread fills the pipe meanwhile
            room = bool(select.select([], [self.file], [], 0)[1])

    def read_rest(self) -> bytes:
        """Read until the stream holds nothing, for ten seconds at most.

        No read waits: the stream may hold bytes in its books that it has written.
        """
        os.set_blocking(self.reading, False)
        found, end = bytearray(), time.monotonic() + 10
        while self.stream._held and time.monotonic() < end:
            try:
                found += os.read(self.reading, 1 << 16)
            except BlockingIOError:
                time.sleep(0.005)
        os.set_blocking(self.reading, True)
        return bytes(found)


@pytest.fixture
def pipe() -> Iterator[Callable[[int], Pipe]]:
    made: list[Pipe] = []

    def make(held: int) -> Pipe:
        made.append(Pipe(held))
        return made[-1]

    yield make
    for each in made:
        each.read_rest()
        os.close(each.reading)
        each.file.close()


def test_written_lines_arrive_in_order(pipe):
    it = pipe(1 << 16)
    text = "".join(f"line {number} \u00e4\n" for number in range(1000))
    for line in text.splitlines(keepends=True):
        it.stream.write(line)
        it.stream.flush()
    assert it.stream.drain(10)
    assert os.read(it.reading, 1 << 17).decode() == text


def test_writers_never_wait_and_dropped_lines_are_counted(pipe):
    it = pipe(10_000)
    writer = threading.Thread(target=it.fill, daemon=True)
    writer.start()
    writer.join(60)
    assert not writer.is_alive()
    assert 9_000 < it.stream._held <= 10_000
    for _ in range(41):
        it.stream.write("lost" * 50 + "\n")
    assert not it.stream.drain(0.05)  # a deadline, not more
    read = it.read_rest()
    it.stream.write("back\n")
    assert it.stream.drain(10)
    lines = (read + os.read(it.reading, 1 << 16)).decode().splitlines()
    told = [line for line in lines if "lines were dropped here: standard error was not read" in line]
    assert set(lines) == {"x" * 99, "back", *told} and lines[-1] == "back"
    assert sum(int(line.split()[1]) for line in told) > 1000 + 41


def test_a_reader_that_is_gone_is_no_error(pipe):
    it = pipe(10_000)
    reading = os.dup(it.reading)
    os.dup2(os.open(os.devnull, os.O_RDONLY), it.reading)
    os.close(reading)
    for _ in range(1000):
        it.stream.write("nobody reads this\n")
    assert it.stream.drain(10)


def test_a_full_disk_is_no_error():
    with open("/dev/full", "w", encoding="utf-8") as file:
        stream = BackgroundStream(file)
        stream.write("there is no room\n")
        assert stream.drain(10) and stream._dropped == 1


def test_text_that_cannot_be_encoded_is_written(pipe):
    it = pipe(10_000)
    it.stream.write("a \ud800 b\n")
    assert it.stream.drain(10)
    assert os.read(it.reading, 100) == b"a \\ud800 b\n"


def test_the_stream_stands_in_for_standard_error(pipe):
    it = pipe(10_000)
    assert it.stream.fileno() == it.file.fileno() and not it.stream.isatty() and it.stream.encoding == "utf-8"
    assert isinstance(it.stream, io.TextIOBase) and it.stream.writable()


# --- processes ---

NOISY = """
import logging, sys, threading
from preheat.settings import Settings
from preheat.utils.log import leave, set_up_logging

set_up_logging(Settings(model="m"))
for number in range(40_000):
    logging.info("line %d", number)
print("done", flush=True)
{end}
"""


def noisy(end: str, **files) -> tuple[int, str]:
    """Run a process that logs 2 MB. Return its status and its standard output."""
    with subprocess.Popen(
        [sys.executable, "-c", NOISY.replace("{end}", end)], stdout=subprocess.PIPE, text=True, **files
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        return process.wait(60), said


@pytest.mark.parametrize(("end", "status"), [("", 0), ("leave(7)", 7), ("raise SystemExit(3)", 3)])
def test_a_process_ends_though_nobody_reads_its_log(end, status):
    reading, writing = os.pipe()
    try:
        found, said = noisy(end, stderr=writing)
    finally:
        os.close(reading)
        os.close(writing)
    assert (found, said) == (status, "done\n")


def test_the_last_lines_are_written_before_the_end():
    command = (
        "import logging\nfrom preheat.settings import Settings\nfrom preheat.utils.log import leave, set_up_logging\n"
        "set_up_logging(Settings(model='m'))\n"
    )
    for end in ("", "leave(0)", "1 / 0"):
        code = f"{command}logging.info('last words')\n{end}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "last words" in done.stderr and ("ZeroDivisionError" in done.stderr) == (end == "1 / 0")


UNCAUGHT = """
import threading, warnings
from preheat.settings import Settings
from preheat.utils.log import set_up_logging

set_up_logging(Settings(model="m"))
text = "a\\nINFO made up\\x1b[2J"
thread = threading.Thread(target=lambda: [][text])
thread.start()
thread.join()
warnings.warn(text)
raise ValueError(text)
"""


def test_uncaught_errors_and_warnings_are_events_too():
    done = subprocess.run([sys.executable, "-c", UNCAUGHT], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    events = [line for line in lines if not line.startswith(TRACEBACK)]
    assert [line.split()[0] for line in events] == ["CRITICAL", "WARNING", "CRITICAL"]
    assert all(line.isprintable() for line in lines) and sum("made up" in line for line in lines) == 2


def preheat(words: str, redirect: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", f'exec "$0" -m preheat {words} {redirect}', sys.executable]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_output_that_cannot_be_written_is_an_error_of_one_line():
    done = preheat("buckets --min 2 --step 4 --max 64", ">/dev/full")
    assert done.returncode == 1
    assert done.stderr == "preheat: error: No space left on device\n"


@pytest.mark.parametrize("redirect", ["2>&-", "2>/dev/full", ">&- 2>&-", "<&- >&- 2>&-"])
def test_the_status_is_the_same_without_standard_error(redirect):
    done = preheat("buckets --nothing-of-the-kind", redirect)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_an_error_line_has_no_controls():
    done = preheat("plan --model \"$(printf 'a\\033[2J\\302\\205b')\"", "")
    assert done.returncode != 0 and done.stderr.count("\n") == 1 and done.stderr[:-1].isprintable()


LEAVE = """
import os, sys, threading, time
import preheat.__main__ as command

command._leave_from_a_thread()
import signal
signal.signal(signal.SIGINT, command._leave)
print("up", flush=True)
for _ in range(100_000):
    print("x" * 99)  # nobody reads it
"""


def test_an_interrupt_ends_a_command_with_unread_output():
    with subprocess.Popen([sys.executable, "-c", LEAVE], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        time.sleep(0.3)  # the pipe is full, or will be
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
