"""Marks: tokens that a parser looks for, each written as one character.

No text has such a character. So a mark is told from the same letters spelled by other tokens, and the client sees no
mark that is a special token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from preheat.frontend.tokenizer import Tokenizer

_FIRST = 0xD800
"""Lone surrogates stand for marks: no decoder makes a lone surrogate."""


@dataclass(frozen=True)
class Mark:
    """The token ``id`` with its ``text``, written as ``char``.

    ``shown`` is the text that the client sees where the token is no mark.
    """

    id: int
    text: str
    char: str
    shown: str


def marks_of(tokenizer: Tokenizer, texts: Iterable[str], skip_special_tokens: bool) -> tuple[Mark, ...]:
    """Return the marks of the ``texts`` that are tokens."""
    found = [(text, id) for text in dict.fromkeys(texts) if (id := tokenizer.token_id(text)) is not None]
    return tuple(
        Mark(id, text, chr(_FIRST + place), "" if skip_special_tokens and id in tokenizer.special_ids else text)
        for place, (text, id) in enumerate(found)
    )


def mark_chars(marks: Sequence[Mark]) -> dict[int, str]:
    """Return the characters that stand for marks, by token id."""
    return {mark.id: mark.char for mark in marks}


def mark_texts(marks: Sequence[Mark]) -> dict[str, str]:
    """Return the texts of marks by the characters that stand for them."""
    return {mark.char: mark.text for mark in marks}
