"""An engine driven by hand: requests go in at a chosen pace, what is seen of their logits comes out."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from preheat.core import Delta, Ready, Stats
from preheat.engine.loop import EngineSide, Loop
from preheat.errors import PreheatError
from preheat.execution.executor import Executor
from preheat.settings import Settings
from preheat.transport import InlineTransport
from preheat.verify.compare import Seen
from preheat.verify.prompts import Prompt
from preheat.verify.watch import LogitWatcher

Boot = Callable[[Settings, EngineSide], Loop]

Pace = Callable[[int], int]
"""From the requests that are running, how many more arrive before the next step."""


def at_once(_: int) -> int:
    """All at the beginning."""
    return 1 << 30


def trickling(draw: random.Random) -> Pace:
    """None to three before each step."""
    return lambda running: draw.randrange(4)


def in_groups(sizes: Iterable[int]) -> Pace:
    """Groups of these sizes, each when the one before has gone."""
    sizes = iter(sizes)
    return lambda running: 0 if running else next(sizes)


class Engine:
    """A booted loop and its watch."""

    def __init__(self, boot: Boot, settings: Settings) -> None:
        self._transport = InlineTransport()
        self.loop = boot(settings, self._transport)
        self.ready = next(message for message in self._transport.receive() if isinstance(message, Ready))
        executor = self.loop.executor
        assert isinstance(executor, Executor)
        self._watch = LogitWatcher(executor)
        self.vocab_size = executor.decoder.spec.vocab_size
        self._ids = 0

    @property
    def stats(self) -> Stats:
        return self.loop.scheduler.stats()

    def forget_prefixes(self) -> None:
        """Nothing that the cache holds is found any more."""
        self.loop.scheduler.pool.forget_contents()

    def run(self, prompts: Sequence[Prompt], pace: Pace = at_once) -> list[Seen]:
        """What is seen of each of the ``prompts``. Raises PreheatError where the engine fails one."""
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
                    running -= _ended(message)
        self.loop.scheduler.check()
        seen = self._watch.take()
        return [_cut(seen[id], produced[id]) for id in range(first, first + len(prompts))]


def _ended(delta: Delta) -> int:
    """How many sequences ended."""
    for finish in delta.finished.values():
        if finish.reason == "error":
            raise PreheatError(f"the engine failed a request: {finish.error and finish.error.message}")
    return len(delta.finished)


def _cut(seen: Seen, count: int) -> Seen:
    """Without what was computed ahead of a sequence's end."""
    return Seen(seen.bits[:count], seen.levels[:count])
