"""An engine driven by hand: requests go in at a chosen pace, digests of their logits come out."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from preheat.core import Delta, Ready, Stats
from preheat.engine.loop import EngineSide, Loop
from preheat.errors import PreheatError
from preheat.execution.executor import Executor
from preheat.execution.input_batch import InputBatch
from preheat.settings import Settings
from preheat.transport import InlineTransport
from preheat.verify.compare import Seen
from preheat.verify.prompts import Prompt

Boot = Callable[[Settings, EngineSide], Loop]

Pace = Callable[[int], int]
"""How many more requests arrive before the next step, given the number that are running."""


def at_once(_: int) -> int:
    """All at the beginning."""
    return 1 << 30


def trickling(draw: random.Random) -> Pace:
    """None to three before each step."""
    return lambda running: draw.randrange(4)


def in_groups(sizes: Iterable[int]) -> Pace:
    """Groups of these sizes, each after the previous one has finished."""
    sizes = iter(sizes)
    return lambda running: 0 if running else next(sizes)


class Engine:
    """A booted loop with a logit watcher."""

    def __init__(self, boot: Boot, settings: Settings) -> None:
        self._transport = InlineTransport()
        self.loop = boot(settings, self._transport)
        self.ready = next(message for message in self._transport.receive() if isinstance(message, Ready))
        self._watcher = LogitWatcher(self.loop.executor)
        self.vocab_size = self.loop.executor.decoder.spec.vocab_size
        self._ids = 0

    @property
    def stats(self) -> Stats:
        return self.loop.scheduler.stats()

    def forget_prefixes(self) -> None:
        """Empty the prefix cache."""
        self.loop.scheduler.pool.forget_contents()

    def run(self, prompts: Sequence[Prompt], pace: Pace = at_once) -> list[Seen]:
        """Run ``prompts``; what was seen of each. Raises PreheatError if the engine fails a request."""
        first = self._ids + 1
        self._ids += len(prompts)
        waiting = deque(prompt.request(first + number) for number, prompt in enumerate(prompts))
        running = 0
        produced: Counter[int] = Counter()
        while waiting or running:
            for _ in range(min(pace(running), len(waiting))):
                self._transport.send(waiting.popleft())
                running += 1
            self.loop.take(0)
            self.loop.step()
            for message in self._transport.receive():
                if isinstance(message, Delta):
                    produced.update(message.ids)
                    running -= _num_finished(message)
        self.loop.scheduler.check()
        seen = self._watcher.take()
        # Logits that were computed ahead of a sequence's end do not count.
        return [
            Seen(seen[id].bits[: produced[id]], seen[id].levels[: produced[id]])
            for id in range(first, first + len(prompts))
        ]


def _num_finished(delta: Delta) -> int:
    for finish in delta.finished.values():
        if finish.reason == "error":
            raise PreheatError(f"the engine failed a request: {finish.error and finish.error.message}")
    return len(delta.finished)


class LogitWatcher:
    """Digests the logits of every step of ``executor`` from now on. Only :meth:`take` waits for the device."""

    def __init__(self, executor: Executor) -> None:
        self._backend = executor.backend
        self._seen: list[tuple[np.ndarray, np.ndarray, Tensor, Tensor]] = []
        executor.watch_logits(self._look)

    def _look(self, logits: Tensor, batch: InputBatch) -> None:
        rows, positions = batch.schedule.sampled()
        digests = self._backend.row_digests(logits)
        self._seen.append((batch.schedule.ids[rows], positions, digests, logits.amax(1)))

    def take(self) -> dict[int, Seen]:
        """Digests and greatest logits since the last call, in the order of positions, by request."""
        found: dict[int, list[tuple[int, int, float]]] = defaultdict(list)
        for owners, *columns in self._seen:
            rows = zip(*(torch.as_tensor(column).tolist() for column in columns), strict=True)
            for owner, row in zip(owners, rows, strict=True):
                found[owner].append(row)
        self._seen.clear()
        return {owner: _in_order(rows) for owner, rows in found.items()}


def _in_order(rows: list[tuple[int, int, float]]) -> Seen:
    rows.sort(key=lambda row: row[0])
    return Seen(np.array([row[1] for row in rows]).tolist(), [row[2] for row in rows])
