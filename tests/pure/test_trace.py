"""The trace: whole JSON after every event, in the form that Perfetto reads."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading

import pytest

from preheat.utils.trace import Trace, open_trace, untraced


class Work:
    """Work to trace."""

    def run(self, number):
        if number < 0:
            raise ValueError(number)
        return number * 2


def events(path):
    """Return the events of a trace, after a check of their fields.

    Chrome's format asks for fields of each kind of event.
    """
    found = json.loads(path.read_text())
    for event in found:
        assert {"name", "ph", "pid", "tid"} <= event.keys()
        assert event["ph"] in ("M", "X")
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
    return [event for event in found if event["ph"] == "X"]


def test_spans_nest_and_carry_their_arguments(tmp_path):
    trace = open_trace(True, tmp_path)
    with trace.span("outer"), trace.span("inner", rows=4):
        pass
    inner, outer = events(trace.path)
    assert (inner["name"], inner["args"]) == ("inner", {"rows": 4})
    assert (outer["name"], outer["args"]) == ("outer", {})
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_the_file_is_whole_after_every_event(tmp_path):
    trace = open_trace(True, tmp_path)
    assert events(trace.path) == []
    for count in range(1, 5):
        with trace.span("s", text='"]'):
            pass
        assert len(events(trace.path)) == count


def test_a_traced_call_behaves_as_before(tmp_path):
    trace, work = open_trace(True, tmp_path), Work()
    call = trace.calls({"run": lambda args, result: {"in": args[0], "out": result}})
    assert [call("run", work.run, 3), call("other", work.run, number=0)] == [6, 0]
    with pytest.raises(ValueError, match="-1"):
        call("run", work.run, -1)
    assert [(e["name"], e["args"]) for e in events(trace.path)] == [
        ("run", {"in": 3, "out": 6}),
        ("other", {}),
        ("run", {"error": "ValueError"}),
    ]


def test_an_error_in_a_span_is_shown_and_goes_on(tmp_path):
    trace = open_trace(True, tmp_path)
    with pytest.raises(KeyError), trace.span("s"):
        raise KeyError
    assert events(trace.path)[0]["args"] == {"error": "KeyError"}


def test_several_traces_of_one_process_have_files_of_their_own(tmp_path):
    paths = [open_trace(True, tmp_path).path for _ in range(3)]
    assert len({*paths}) == 3
    assert all(events(path) == [] for path in paths)


def test_threads_do_not_tear_each_others_events(tmp_path):
    trace = open_trace(True, tmp_path)

    def work():
        for _ in range(100):
            with trace.span("s"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = events(trace.path)
    assert len(found) == 400
    assert len({event["tid"] for event in found}) == 4


def test_the_trace_of_a_killed_process_can_be_read(tmp_path):
    code = (
        "import os, pathlib, preheat.utils.trace\n"
        "trace = preheat.utils.trace.open_trace(True, pathlib.Path.cwd())\n"
        "with trace.span('done'): pass\n"
        "with trace.span('begun'): os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False)
    assert done.returncode == -signal.SIGKILL
    (path,) = tmp_path.iterdir()
    assert [event["name"] for event in events(path)] == ["done"]


def test_no_trace_touches_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trace = open_trace(False)
    call = trace.calls({"run": lambda args, result: 1 / 0})
    with trace.span("s"):
        assert call("run", Work().run, 3) == 6
    assert type(trace) is Trace
    assert call is untraced
    assert list(tmp_path.iterdir()) == []
