"""The paths of ``preheat verify`` for engines with adapters: alone and together with others and with none, cold and
from the prefix cache, in chunks, and in places that others had before. Other engines take none.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from preheat.core import SamplingParams
from preheat.lora.random import random_adapter
from preheat.verify.compare import PathResult, Seen, compare
from preheat.verify.drive import Engine, in_groups
from preheat.verify.prompts import Prompt

COUNT, LONGEST = 12, 120
"""Prompts, and tokens of the longest."""

BASE_EVERY = 3
"""One prompt in this many has no adapter."""


@dataclass
class AdapterPaths:
    """``prompts`` name adapters in turn: those that the settings name, or one more random one than there are places.
    Empty: there are no adapters.
    """

    prompts: list[Prompt]
    _first: list[Seen] = field(default_factory=list, init=False)

    @classmethod
    def of(cls, engine: Engine, outputs: int) -> AdapterPaths:
        """Prompts that fit the limits of ``engine``, each continued by ``outputs`` tokens."""
        names = names_of(engine)
        if not names:
            return cls([])
        draw, longest = random.Random(6), max(min(LONGEST, engine.ready.max_model_len - outputs), 1)
        shared = [draw.randrange(engine.vocab_size) for _ in range(longest)]
        found = []
        for number in range(COUNT):
            tokens = shared[: longest // 2] + shared[: max(longest * number // COUNT // 2, 1)][::-1]
            params = SamplingParams(temperature=float(number % 2), seed=number, max_tokens=outputs, ignore_eos=True)
            name = names[(number + number // BASE_EVERY) % len(names)] if number % BASE_EVERY else ""
            found.append(Prompt(tokens[:longest], params, lora_name=name))
        return cls(found)

    def as_asked(self, engine: Engine) -> Iterator[PathResult]:
        """The paths of the engine as asked. What is compared with is computed one by one, each without the others'
        blocks.
        """
        if not self.prompts:
            return
        for prompt in self.prompts:
            engine.forget_prefixes()
            self._first += engine.run([prompt])
        engine.forget_prefixes()
        yield compare("adapters, together", self._first, [engine.run(self.prompts)])
        hits = engine.stats.prefix_hits
        backwards = engine.run(self.prompts[::-1], in_groups([1] * len(self.prompts)))[::-1]
        note = f"{engine.stats.prefix_hits - hits:,} tokens from the prefix cache"
        yield compare("adapters, prefix cache", self._first, [backwards], note)

    def tight(self, engine: Engine) -> Iterator[PathResult]:
        """The same with small steps and few blocks."""
        if not self.prompts:
            return
        names_of(engine)
        before = engine.stats.preemptions
        seen = engine.run(self.prompts)
        note = f"{engine.stats.preemptions - before:,} preemptions"
        yield compare("adapters, chunks, few blocks", self._first, [seen], note)


def names_of(engine: Engine) -> list[str]:
    """The adapters that ``engine`` serves; random ones from now on if there are none."""
    adapters, seats = engine.loop.adapters, engine.loop.executor.adapters
    if isinstance(adapters, str) or seats is None:
        return []
    if not adapters.names:
        for number in range(seats.places + 1):
            made = random_adapter(seats, number)
            adapters.serve(made.name, "", made)
    return adapters.names
