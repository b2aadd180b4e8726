"""An engine driven by hand: requests go in at a chosen pace, digests of their logits come out."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from preheat.core import Delta, Ready, Stats, TokenLogprobs
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


class Answer(NamedTuple):
    """What a request was told, and how many of its tokens the prefix cache had."""

    tokens: list[int]
    prompt_logprobs: list[TokenLogprobs | None]
    cached: int
    logprobs: list[TokenLogprobs]
    pooled: bytes = b""


class Engine:
    """A booted loop with a logit watcher; ``answers`` are those of the last run, in the order of its prompts."""

    def __init__(self, boot: Boot, settings: Settings) -> None:
        self._transport = InlineTransport()
        self.loop = boot(settings, self._transport)
        self.ready = next(message for message in self._transport.receive() if isinstance(message, Ready))
        self._watcher = LogitWatcher(self.loop.executor)
        self.vocab_size = self.loop.executor.decoder.spec.vocab_size
        self.pools = self.loop.executor.decoder.spec.head is None
        self.answers: list[Answer] = []
        self._ids = 0

    @property
    def stats(self) -> Stats:
        return self.loop.scheduler.stats()

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, and forget what is encoded."""
        self.loop.scheduler.pool.forget_contents()
        if self.loop.scheduler.images is not None:
            self.loop.scheduler.images.forget()

    def run(self, prompts: Sequence[Prompt], pace: Pace = at_once) -> list[Seen]:
        """Run ``prompts``; what was seen of each. Raises PreheatError if the engine fails a request."""
        first = self._ids + 1
        self._ids += len(prompts)
        waiting = deque(prompt.request(first + number) for number, prompt in enumerate(prompts))
        running = 0
        deltas: list[Delta] = []
        while waiting or running:
            for _ in range(min(pace(running), len(waiting))):
                self._transport.send(waiting.popleft())
                running += 1
            self.loop.take(0)
            self.loop.step()
            for message in self._transport.receive():
                if isinstance(message, Delta):
                    deltas.append(message)
                    running -= _num_finished(message)
        self.loop.scheduler.check()
        self.answers = _answers(deltas, range(first, first + len(prompts)))
        seen = self._watcher.take(first)
        if self.pools:
            return [Seen([answer.pooled], [float(np.frombuffer(answer.pooled, "f4").max())]) for answer in self.answers]
        # Logits that were computed ahead of a sequence's end do not count.
        counts = enumerate((len(answer.tokens) for answer in self.answers), first)
        return [Seen(seen[id].bits[:count], seen[id].levels[:count]) for id, count in counts]

    @contextmanager
    def keeping_logits(self) -> Iterator[dict[int, list[Tensor]]]:
        """The logits of the next run, fp32 [vocab] on the host at each position, by the prompt's number."""
        kept: dict[int, list[Tensor]] = {}
        self._watcher.kept = kept
        try:
            yield kept
        finally:
            self._watcher.kept = None


def _answers(deltas: Sequence[Delta], ids: Iterable[int]) -> list[Answer]:
    found = {id: Answer([], [], 0, []) for id in ids}
    for delta in deltas:
        for place, (id, token) in enumerate(zip(delta.ids, delta.tokens, strict=True)):
            found[id].tokens.append(token)
            if place in delta.logprobs:
                found[id].logprobs.append(delta.logprobs[place])
        for id, entries in delta.prompt_logprobs.items():
            found[id].prompt_logprobs.extend(entries)
        for id, cached in delta.started.items():
            found[id] = found[id]._replace(cached=cached)
        for id, pooled in delta.pooled.items():
            found[id] = found[id]._replace(pooled=pooled)
    return list(found.values())


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
        self._copies: list[tuple[np.ndarray, np.ndarray, Tensor]] = []
        self.kept: dict[int, list[Tensor]] | None = None
        executor.watch_logits(self._look)

    def _look(self, logits: Tensor, batch: InputBatch) -> None:
        rows, positions = batch.schedule.sampled()
        digests = self._backend.row_digests(logits)
        self._seen.append((batch.schedule.ids[rows], positions, digests, logits.amax(1)))
        if self.kept is not None:
            self._copies.append((batch.schedule.ids[rows], positions, logits.clone()))

    def take(self, first: int) -> dict[int, Seen]:
        """Digests and greatest logits since the last call, in the order of positions, by request. Copies go to
        ``kept``, by the number of the request from ``first`` on.
        """
        if self.kept is not None:
            copies = [(int(owner) - first, int(at), line) for owners, positions, lines in self._copies
                    for owner, at, line in zip(owners, positions, lines.cpu(), strict=True)]  # fmt: skip
            last = {(number, at): line for number, at, line in copies}
            for number, at in sorted(last):
                self.kept.setdefault(number, []).append(last[number, at])
            self._copies.clear()
        found: dict[int, list[tuple[int, int, float]]] = defaultdict(list)
        for owners, *columns in self._seen:
            rows = zip(*(torch.as_tensor(column).tolist() for column in columns), strict=True)
            for owner, row in zip(owners, rows, strict=True):
                found[owner].append(row)
        self._seen.clear()
        return {owner: _in_order(rows) for owner, rows in found.items()}


def _in_order(rows: list[tuple[int, int, float]]) -> Seen:
    """What was seen last of each position: one behind a draft that was rejected is seen again."""
    last = sorted({position: (bits, level) for position, bits, level in rows}.items())
    return Seen(np.array([bits for _, (bits, _) in last]).tolist(), [level for _, (_, level) in last])
