"""The paths of ``preheat verify`` for structured outputs: each request alone, then among others, with preemptions too.

What comes out is compared with the rule itself, which is said here by other means than the grammar's.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from preheat.core import SamplingParams, StructuredOutputsParams
from preheat.errors import PreheatError
from preheat.grammar.service import Grammars
from preheat.verify.compare import Divergence, PathResult, Seen, compare
from preheat.verify.drive import Engine, in_groups
from preheat.verify.prompts import Prompt

CHOICES = [*(f"yes, in {days} days" for days in range(2, 9)), "no"]
"""With a choice behind what is forced."""


def _begins_as_json(text: bytes) -> bool:
    """Whether ``text``, which may have been cut, begins as an object. A whole one is read by :func:`_is_json`."""
    return text.lstrip()[:1] in (b"", b"{")


def _is_json(text: bytes) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


Rule = tuple[StructuredOutputsParams, Callable[[bytes], bool], Callable[[bytes], bool]]
"""A grammar; whether a whole text has it; whether the beginning of one may be its."""

RULES: tuple[Rule, ...] = (
    (
        StructuredOutputsParams(regex="[a-f ]{2,40}"),
        lambda text: re.fullmatch(b"[a-f ]{2,40}", text) is not None,
        lambda text: re.fullmatch(b"[a-f ]{0,40}", text) is not None,
    ),
    (
        StructuredOutputsParams(choice=CHOICES),
        lambda text: text.decode() in CHOICES,
        lambda text: any(choice.encode().startswith(text) for choice in CHOICES),
    ),
    (StructuredOutputsParams(json_object=True), _is_json, _begins_as_json),
)
TEMPERATURES = (0.0, 1.0, 1.5)


@dataclass
class MaskedPrompts:
    """Prompts with grammars, as many without, and what was seen of each alone."""

    masked: list[Prompt]
    plain: list[Prompt]
    first: list[Seen]

    @classmethod
    def of(cls, engine: Engine, outputs: int, length: int) -> Self:
        """Run each alone."""
        draw, end, masked, plain = random.Random(9), _grammars(engine).backend.end, list[Prompt](), list[Prompt]()
        length = max(min(length, engine.ready.max_model_len - outputs), 1)
        for params, *_ in RULES:
            for temperature in TEMPERATURES:
                tokens = [draw.randrange(engine.vocab_size) for _ in range(length)]
                free = SamplingParams(temperature=temperature, seed=len(masked), max_tokens=outputs, ignore_eos=True)
                held = SamplingParams(
                    temperature=temperature, seed=len(masked), max_tokens=outputs, stop_token_ids=[end],
                    structured_outputs=params,
                )  # fmt: skip
                masked.append(Prompt(tokens, held))
                plain.append(Prompt(tokens, free))
        alone = in_groups([1] * len(masked) * 2)
        return cls(masked, plain, engine.run([*masked, *plain], alone))

    def beside_others(self, engine: Engine) -> PathResult:
        """All in one batch, those without grammars among them."""
        return self._compared("grammars", engine)

    def few_blocks(self, engine: Engine) -> PathResult:
        """The same with small steps and few blocks."""
        before = engine.stats.preemptions
        result = self._compared("grammars, few blocks", engine)
        result.note = f"{engine.stats.preemptions - before:,} preemptions"
        return result

    def without_drafts(self, engine: Engine) -> PathResult:
        """The same where nothing drafts what grammars force."""
        return self._compared("grammars without speculation", engine)

    def _compared(self, name: str, engine: Engine) -> PathResult:
        seen = engine.run([*self.masked, *self.plain])
        result = compare(name, self.first, [seen], f"{len(self.masked)} with grammars")
        texts = _texts(engine, [answer.tokens for answer in engine.answers[: len(self.masked)]])
        for number, (text, whole) in enumerate(texts):
            _, is_whole, may_begin = RULES[number // len(TEMPERATURES)]
            if result.first is None and not (is_whole if whole else may_begin)(text):
                result.first, result.identical = Divergence(1, number, 0, 0.0), result.identical - 1
        return result


def _texts(engine: Engine, outputs: Sequence[list[int]]) -> list[tuple[bytes, bool]]:
    """The text of each output, and whether it has ended."""
    backend = _grammars(engine).backend
    end = backend.end
    return [(backend.text([token for token in tokens if token != end]), tokens[-1] == end) for tokens in outputs]


def _grammars(engine: Engine) -> Grammars:
    grammars = engine.loop.grammars
    if isinstance(grammars, str):
        raise PreheatError(f"there are no grammars: {grammars}")
    return grammars
