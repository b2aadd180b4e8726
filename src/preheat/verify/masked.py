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
"""Texts with a choice behind forced tokens."""


def _begins_as_json(text: bytes) -> bool:
    """Return whether ``text``, which may have been cut, begins as an object.

    :func:`_is_json` reads a whole one.
    """
    return text.lstrip()[:1] in (b"", b"{")


def _is_json(text: bytes) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


Rule = tuple[StructuredOutputsParams, Callable[[bytes], bool], Callable[[bytes], bool]]
"""A grammar, a test of a whole text, and a test of a text's beginning."""

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
"""The temperatures of the prompts with each grammar."""


def texts_of(engine: Engine, outputs: Sequence[list[int]]) -> list[tuple[bytes, bool]]:
    """Return the text of each output, and whether it has ended."""
    backend, end = _grammars(engine).backend, end_token(engine)
    return [(backend.text([token for token in tokens if token != end]), tokens[-1] == end) for tokens in outputs]


def end_token(engine: Engine) -> int:
    """Return the token that ends a text."""
    return _grammars(engine).backend.end


def _grammars(engine: Engine) -> Grammars:
    grammars = engine.loop.grammars
    if isinstance(grammars, str):
        raise PreheatError(f"there are no grammars: {grammars}")
    return grammars
