"""Graph drivers: a program runs as a graph if it has one.

Otherwise its body is called. CUDA's graph is a fake.
"""

from __future__ import annotations

import pytest
import torch

from preheat.backends.cpu.backend import Calls
from preheat.backends.cuda.device.graph import CudaGraphs


class PaperGraph:
    """Records whether it is captured and how often it runs."""

    made: list[PaperGraph] = []

    def __init__(self) -> None:
        self.said: list[str] = []
        self.made.append(self)

    def capture_begin(self, pool, capture_error_mode):
        assert capture_error_mode == "thread_local"  # other threads may go on using the device
        self.pool = pool
        self.said.append("begin")

    def capture_end(self):
        self.said.append("end")

    def replay(self):
        self.said.append("replay")


@pytest.fixture(autouse=True)
def paper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PaperGraph)
    monkeypatch.setattr(PaperGraph, "made", [])


def test_a_captured_program_runs_as_a_graph():
    ran: list[int] = []
    programs = CudaGraphs[int, int](lambda key: ran.append(key) or len(ran), pool="pool")
    assert programs.run(7) == 1
    assert ran == [7]
    assert 7 not in programs
    programs.capture(7)
    assert 7 in programs
    assert ran == [7, 7]  # recorded
    assert programs.run(7) == 2  # the body's result at capture
    assert programs.run(8) == 3
    assert ran == [7, 7, 8]
    assert programs.run(7, eager=True) == 4
    assert ran == [7, 7, 8, 7]
    [graph] = PaperGraph.made
    assert graph.said == ["begin", "end", "replay"]
    assert graph.pool == "pool"
    programs.forget(8)
    assert 7 in programs
    programs.forget(7)
    assert 7 not in programs
    programs.run(7)
    assert ran[-1] == 7
    assert graph.said[-1] == "replay"


def test_a_capture_that_fails_is_ended_and_forgotten():
    def broken(key):
        raise RuntimeError("no room")

    programs = CudaGraphs[int, None](broken)
    with pytest.raises(RuntimeError, match="no room"):
        programs.capture(7)
    assert PaperGraph.made[0].said == ["begin", "end"]
    assert 7 not in programs


def test_without_graphs_a_program_is_called():
    ran: list[int] = []
    programs = Calls[int, int](lambda key: ran.append(key) or 2 * key)
    programs.capture(7)
    assert 7 not in programs
    assert ran == []
    assert [programs.run(7), programs.run(8, eager=True)] == [14, 16]
    programs.forget(7)
    assert ran == [7, 8]
