"""Threads of compiled functions without work: they sleep, and nothing wakes them before the next job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install llvmlite")

from preheat.backends.cpu.llvm import team
from preheat.backends.cpu.llvm.kinds import Product
from tests.cpu.test_llvm import Alone, loaded

HOW = Product(64, 128, "float32")
THREADS = 3
SECONDS = 20.0


def counted(monkeypatch) -> tuple[Alone, list[int]]:
    """Return a product with threads, and a list that grows whenever a thread begins to look for work."""
    code, begun = loaded(HOW), list[int]()
    right = code.work

    def work(frame: int, thread: int, spins: int, seen: int) -> int:
        begun.append(thread)
        return int(right(frame, thread, spins, seen))

    monkeypatch.setattr(code, "work", work)
    return Alone(code, HOW, torch.randn(128, 64), threads=THREADS), begun


def soon(holds: Callable[[], bool]) -> bool:
    """Return whether a condition holds within some seconds."""
    end = time.monotonic() + SECONDS
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


def asleep(alone: Alone) -> bool:
    """Return whether all other threads fall asleep."""
    return soon(lambda: alone.team._shared.asleep == THREADS - 1)


def wake_ups(alone: Alone, begun: list[int]) -> int:
    """Return how often idle threads wake up within 0.3 seconds."""
    assert asleep(alone)
    before = len(begun)
    time.sleep(0.3)
    return len(begun) - before


def test_idle_threads_sleep_and_work_again(monkeypatch):
    alone, begun = counted(monkeypatch)
    x = torch.randn(8, 64)
    first = alone(x)
    for _ in range(3):
        assert wake_ups(alone, begun) == 0
        before = len(begun)
        assert torch.equal(alone(x), first)
        assert soon(lambda: len(begun) == before + THREADS - 1), "each thread looks for work once a job"  # noqa: B023


class Impatient(threading.Event):
    """An event whose waiters look again and again."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(0.01)


def test_threads_that_wake_up_without_work_are_seen(monkeypatch):
    monkeypatch.setattr(team.threading, "Event", Impatient)
    alone, begun = counted(monkeypatch)
    assert wake_ups(alone, begun) > 0
