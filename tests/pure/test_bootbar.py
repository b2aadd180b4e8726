"""The bar that is drawn while the engine starts."""

import io
import subprocess
import sys
import time

import pytest

from preheat.core import Died, Progress, Ready
from preheat.engine import progress
from preheat.engine.progress import ProgressBar, ProgressLines
from preheat.errors import WireError
from preheat.transport import InlineTransport
from tests.waiting import until


class Terminal(io.StringIO):
    def isatty(self):
        return True


def draw(stream, monkeypatch, last):
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    bar = ProgressBar()
    for done in range(0, 41, 10):
        bar.show(Progress(done, 40, "(decode, 8)", 2.0))
        if bar._bar is not None:
            bar._bar.refresh()  # it draws at most ten times a second
    bar.show(last)
    return stream.getvalue()


@pytest.mark.parametrize("last", [Ready(1, 1, 1, 0.0), Died(WireError("PreheatError", "x"))], ids=["ready", "died"])
def test_the_bar_fills_and_disappears(last, monkeypatch):
    text = draw(Terminal(), monkeypatch, last)
    assert "Warming up" in text and "10/40" in text and "2 s left" in text
    assert text.endswith("\r")
    *_, shown = text.strip("\r").split("\r")
    assert shown.strip() == ""  # nothing of it stays


def test_a_line_of_the_log_takes_its_place(monkeypatch):
    """A line of another process begins at the line's start, in place of the bar."""
    text = draw(Terminal(), monkeypatch, Progress(40, 40, ""))
    drawn = [part for part in text.split("Warming up")[1:] if part.strip()]
    assert drawn
    assert all("\r" in part for part in drawn)
    assert text[-1] == "\r"


def test_nothing_without_a_terminal(monkeypatch):
    assert draw(io.StringIO(), monkeypatch, Ready(1, 1, 1, 0.0)) == ""


def test_the_inline_transport_tells_at_once():
    seen = []
    transport = InlineTransport(seen.append)
    transport.put(Progress(1, 2, "x"))
    assert seen == [Progress(1, 2, "x")]
    assert transport.receive() == seen


def lines_of(stream, monkeypatch, shown=True):
    """Return the output of a start to ``stream``, with one report in several times the time between lines."""
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.05)
    lined = shown and not stream.isatty()
    with ProgressLines(shown) as lines:
        time.sleep(0.2)  # time for a line that nobody wants
        assert not lined or until(stream.getvalue)
        lines.show(Progress(3, 40, "x", 2.0))
        assert not lined or until(lambda: "3 of 40" in stream.getvalue())
    told = stream.getvalue()
    time.sleep(0.2)
    assert stream.getvalue() == told  # the start is over
    return told


def test_a_file_gets_lines(monkeypatch):
    told = lines_of(io.StringIO(), monkeypatch).splitlines()
    assert told[0] == "preheat is loading the model (0 s)"
    assert told[-1] == "preheat is warming up: 3 of 40, about 2 s left (0 s)"


def test_a_terminal_has_the_bar_and_who_wants_nothing_gets_nothing(monkeypatch):
    assert lines_of(io.StringIO(), monkeypatch, shown=False) == ""
    assert "preheat is" not in lines_of(Terminal(), monkeypatch)


LIBRARY = """
from preheat import LLM
from preheat.engine import progress
progress.LINE_SECONDS = 0.02
LLM(num_threads=1, max_num_seqs=2, max_num_batched_tokens=32, skip_warmup=False)
"""


def test_a_boot_of_the_library_shows_its_progress():
    done = subprocess.run([sys.executable, "-c", LIBRARY], capture_output=True, text=True, check=True)
    assert "preheat is loading the model (" in done.stderr and "preheat is warming up: " in done.stderr
