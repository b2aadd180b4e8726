"""The bar that is drawn while the engine starts."""

import io
import sys

import pytest

from preheat.core import Died, Progress, Ready
from preheat.engine.progress import ProgressBar
from preheat.errors import WireError
from preheat.transport import InlineTransport


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
def test_it_fills_and_goes(last, monkeypatch):
    text = draw(Terminal(), monkeypatch, last)
    assert "Warming up" in text and "10/40" in text and "2 s left" in text
    assert text.endswith("\r")
    *_, shown = text.strip("\r").split("\r")
    assert shown.strip() == ""  # nothing of it stays


def test_a_line_of_the_log_takes_its_place(monkeypatch):
    """Whatever another process writes begins at the line's start."""
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
