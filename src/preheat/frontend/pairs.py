"""Pairs of texts, as a cross-encoder reads them."""

from __future__ import annotations

from dataclasses import dataclass

from preheat.pooling.pair_template import PairTemplate


@dataclass(frozen=True)
class Pair:
    """Two texts that a model reads together.

    The tokens of the second text, and the special tokens behind them, may have another of ``types`` types. Such a token
    is written as its id plus the type times the size of the vocabulary. At most ``most_second`` tokens of the second
    text count. ``template`` is the text around the pair.
    """

    first: str
    second: str
    types: int = 1
    most_second: int | None = None
    template: PairTemplate | None = None

    @property
    def own_template(self) -> PairTemplate | None:
        """The text to put around the pair; None if there is none, or the client has put it there itself."""
        written = self.template is not None and self.first.startswith(self.template.mark)
        return None if written else self.template

    def __len__(self) -> int:
        """Return the characters of both texts."""
        return len(self.first) + len(self.second)
