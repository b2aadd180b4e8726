"""Threads of compiled functions without work: they sleep, and nothing wakes them before the next job."""

from __future__ import annotations

import threading
import time

import pytest
import torch

pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install llvmlite")

from preheat.backends.cpu.llvm import team
from preheat.backends.cpu.llvm.kinds import Product
from tests.cpu.test_llvm import Alone, loaded
from tests.waiting import until

HOW = Product(64, 128, "float32")
THREADS = 3


def counted(monkeypatch) -> tuple[Alone, list[int]]:
    """Return a product with threads, and a list that grows whenever a thread begins to look for work."""
    code, begun = loaded(HOW), list[int]()
    right = code.work

    def work(frame: int, thread: int, spins: int, seen: int) -> int:
        begun.append(thread)
        return int(right(frame, thread, spins, seen))

    monkeypatch.setattr(code, "work", work)
    return Alone(code, HOW, torch.randn(128, 64), threads=THREADS), begun


def asleep(alone: Alone) -> bool:
    """Return whether all other threads fall asleep."""
    return until(lambda: len(alone.team._shared.asleep) == THREADS - 1)


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
        assert until(lambda: len(begun) == before + THREADS - 1), "each thread looks for work once a job"  # noqa: B023


class Impatient:
    """A lock whose waiters look again and again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.locked, self.release = self._lock.locked, self._lock.release

    def acquire(self) -> bool:
        return self._lock.acquire(timeout=0.01)


def test_threads_that_wake_up_without_work_are_seen(monkeypatch):
    monkeypatch.setattr(team, "Lock", Impatient)
    alone, begun = counted(monkeypatch)
    assert wake_ups(alone, begun) > 0


def test_a_thread_that_falls_asleep_late_takes_no_wake_up_of_another():
    """The second thread falls asleep after a wake-up, while the first one is between its last look and its sleep."""
    shared = team._Shared(loaded(HOW), THREADS)
    frame = shared.frame

    class Late:
        def __getitem__(self, word: int) -> int:
            shared.frame, seen = frame, int(frame[word])
            frame[word] += 1
            shared.wake()
            shared.sleep(2, seen)
            return seen

    shared.frame = Late()
    first = threading.Thread(target=shared.sleep, args=(1, 0), daemon=True)
    first.start()
    assert until(lambda: not first.is_alive())
