"""Encode texts of any length in bounded time and memory.

A text is measured first, and refused if it is too long. An encoder takes about 200 bytes of memory for each token until
it is done. So no text is encoded as a whole if it has more than about twice the useful number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from preheat.errors import ContextTooLong
from preheat.frontend.tokenizer import Tokenizer

MOST_COUNTED = 2**18
"""Tokens that a text may have where it need not fit the model: where tokens are counted, listed or cut."""

_PIECE = 1 << 16
"""Characters that are encoded together to measure a text."""

_USUAL = 8
"""Characters per allowed token above which a text is measured first. Most texts have 3 to 5 per token."""

TOGETHER = 1 << 19
"""Characters of texts that are encoded together: a bound on the memory of encoders, and enough for many threads."""

_SLACK = 2
"""Bound of the ratio between the tokens of a text's pieces and the tokens of the text."""


class EncodedText(NamedTuple):
    """A prompt's token ids and its text."""

    ids: Sequence[int]
    text: str


@dataclass(frozen=True)
class TextBound:
    """The bound ``most`` on a text's tokens.

    ``refuse(size)`` raises an error for a longer text; ``size`` is the text's size in words.
    """

    most: int
    refuse: Callable[[str], object]

    def check(self, tokenizer: Tokenizer, text: str) -> None:
        """Refuse ``text`` if it has more characters than any ``most`` tokens can stand for."""
        if len(text) <= self.most:
            return  # spares the look at the vocabulary
        longest = tokenizer.chars_per_token
        if longest and len(text) > self.most * longest:
            self.refuse(f"{len(text)} characters, at least {-(-len(text) // longest)} tokens")

    def encode(self, tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of ``text``. Refuse a text that is too long, mostly before it is encoded as a whole."""
        self.check(tokenizer, text)
        if self.measures(text):
            self._measure(tokenizer, text)

        def check_count(tokens: int) -> None:
            if tokens > self.most:
                self.refuse(f"{tokens} tokens")

        return tokenizer.encode(text, add_special_tokens, check_count)

    def measures(self, text: str) -> bool:
        """Return whether ``text`` is so long that it is measured before it is encoded."""
        return len(text) > _USUAL * self.most + _PIECE

    def _measure(self, tokenizer: Tokenizer, text: str) -> None:
        """Refuse ``text`` as soon as its pieces, one after another, have far too many tokens."""
        tokens = 0
        for start in range(0, len(text), _PIECE):
            tokens += tokenizer.count(text[start : start + _PIECE])
            if tokens >= _SLACK * (self.most + 1):
                self.refuse(f"{len(text)} characters, more than {self.most} tokens")


def in_groups(sizes: Iterable[int], most: int) -> list[list[int]]:
    """Return the places of texts of ``sizes`` characters in groups, in order.

    A group has at most ``most`` characters, or a single text.
    """
    groups, left = list[list[int]](), 0
    for place, size in enumerate(sizes):
        if not groups or size > left:
            groups.append([])
            left = most
        groups[-1].append(place)
        left -= size
    return groups


def counted(max_model_len: int) -> TextBound:
    """Return the bound of a text that need not fit the model.

    Such a text is only counted, listed or cut. The bound raises ContextTooLong.
    """
    most = max(max_model_len, MOST_COUNTED)

    def refuse(size: str) -> None:
        raise ContextTooLong(
            f"The text has {size}, but at most {most} tokens are counted or cut: shorten or split it", param="prompt"
        )

    return TextBound(most, refuse)
