"""The paths of ``preheat verify`` with interrupted answers.

Blocks run out in the middle of most of them. The output of a resumed sequence must count as before, in its penalties
and in its grammar. Runs that are wrong in the same way would agree, so tokens and texts are compared with rules.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Self

from msgspec.structs import replace

from preheat.core import SamplingParams, StructuredOutputsParams
from preheat.verify.compare import Divergence, PathResult
from preheat.verify.drive import Engine
from preheat.verify.prompts import Prompt
from preheat.verify.served_path import by_contract

MOST = 24
"""Tokens of an answer."""

LIKED, BIAS = 3, 100.0
"""The number of tokens in every answer, and their bias.

With the bias on their logits, penalties alone decide the next token.
"""

PENALTIES = (
    SamplingParams(temperature=0.0, frequency_penalty=2.0),
    SamplingParams(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.5),
    SamplingParams(temperature=0.5, frequency_penalty=2.0),
)

DIGITS, LETTERS = "0123456789", "abcdef"
COUNTING = StructuredOutputsParams(regex="".join(f"{digit}[{LETTERS}]" for digit in DIGITS) * 20)
"""A text that shows its position at every second character."""


@dataclass(frozen=True)
class Crowd:
    """``count`` prompts of ``length`` tokens, with blocks for half of their ``outputs``."""

    count: int
    length: int
    outputs: int

    @classmethod
    def of(cls, engine: Engine, outputs: int) -> Self | None:
        """Return as many prompts as the engine takes at once.

        Returns None if it has blocks for all of their answers.
        """
        limits, usable = engine.loop.scheduler.limits, engine.loop.scheduler.pool.num_usable
        size, count, outputs = limits.block_size, min(limits.max_num_seqs, usable), min(outputs, MOST)
        room = limits.max_model_len - outputs
        length = min(usable // count * size - min(outputs, size) // 2, room)
        lacking = count * -(-(length + outputs) // size) > usable
        return cls(count, length, outputs) if outputs > 1 and length > 0 and lacking else None

    def prompts(self, engine: Engine, params: list[SamplingParams]) -> list[Prompt]:
        """Return random prompts, with each of ``params`` in turn.

        Answers end one after the other, so that a resumed sequence takes the slot of another one.
        """
        draw = random.Random(31)
        return [
            Prompt(
                [draw.randrange(engine.vocab_size) for _ in range(self.length)],
                replace(params[number % len(params)], seed=number, max_tokens=self._length(number)),
            )
            for number in range(self.count)
        ]

    def _length(self, number: int) -> int:
        """Return the tokens of an answer.

        The last sequences are interrupted and have the longest answers.
        """
        return max(self.outputs - (self.count - 1 - number) % 4, 1)


def penalties_interrupted(engine: Engine, outputs: int) -> PathResult | None:
    """Compare each token with the contract, given all earlier draws.

    Returns None with blocks for all answers.
    """
    crowd = Crowd.of(engine, outputs)
    if crowd is None:
        return None
    liked = random.Random(32).sample(range(engine.vocab_size), LIKED)
    bias = dict.fromkeys(liked, BIAS)
    asked = crowd.prompts(engine, [replace(each, logit_bias=bias, ignore_eos=True) for each in PENALTIES])
    before = engine.stats.preemptions
    result = by_contract("penalties, interrupted", engine, [asked])
    return _noted(result, engine, before)


def grammars_interrupted(engine: Engine, outputs: int) -> PathResult | None:
    """Check that each text counts on.

    Returns None with blocks for all answers, or without grammars.
    """
    crowd, grammars = Crowd.of(engine, outputs), engine.loop.grammars
    if crowd is None or isinstance(grammars, str):
        return None
    end = grammars.backend.end
    params = [
        SamplingParams(temperature=temperature, structured_outputs=COUNTING, stop_token_ids=[end])
        for temperature in (0.0, 1.0)
    ]
    before = engine.stats.preemptions
    engine.run(crowd.prompts(engine, params))
    wrong = list[Divergence]()
    for number, answer in enumerate(engine.answers):
        text = grammars.backend.text([token for token in answer.tokens if token != end])
        place = _first_wrong(text.decode(errors="replace"))
        if place >= 0:
            wrong.append(Divergence(1, number, place, 0.0))
    result = PathResult("grammars, interrupted", crowd.count, 1, crowd.count).with_wrong(wrong)
    return _noted(result, engine, before)


def _first_wrong(text: str) -> int:
    """Return the first character of ``text`` that :data:`COUNTING` forbids there.

    Returns -1 if there is none.
    """
    for place, character in enumerate(text):
        allowed = LETTERS if place % 2 else DIGITS[place // 2 % len(DIGITS)]
        if character not in allowed:
            return place
    return -1


def _noted(result: PathResult, engine: Engine, before: int) -> PathResult:
    result.note = f"{engine.stats.preemptions - before:,} preemptions"
    return result
