"""The rules of structured outputs, by other means than the grammars': for ``preheat verify``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from preheat.core import StructuredOutputsParams
from preheat.errors import PreheatError
from preheat.grammar.service import Grammars
from preheat.verify.drive import Engine

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
"""Of the prompts with each grammar."""


def texts_of(engine: Engine, outputs: Sequence[list[int]]) -> list[tuple[bytes, bool]]:
    """The text of each output, and whether it has ended."""
    backend, end = _grammars(engine).backend, end_token(engine)
    return [(backend.text([token for token in tokens if token != end]), tokens[-1] == end) for tokens in outputs]


def end_token(engine: Engine) -> int:
    """The token that ends a text."""
    return _grammars(engine).backend.end


def _grammars(engine: Engine) -> Grammars:
    grammars = engine.loop.grammars
    if isinstance(grammars, str):
        raise PreheatError(f"there are no grammars: {grammars}")
    return grammars
