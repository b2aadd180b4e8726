"""Texts longer than the model's window: an engine that pools reads their chunks, and the frontend adds these up."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from preheat.core import POOLS, Ready, SamplingParams
from preheat.errors import ContextTooLong, InvalidRequest
from preheat.frontend.encoding import TextBound, counted


@dataclass(frozen=True)
class LongTexts:
    """The rule of texts in chunks: a text has at most ``most`` tokens, and a chunk has as many as a prompt can have."""

    most: int

    def serves(self, params: SamplingParams) -> bool:
        """Return whether a text is read in chunks: not where each token has a vector."""
        return params.prompt_logprobs != POOLS.index("ALL")

    def check(self, tokens: int, size: str = "") -> None:
        """Raise ContextTooLong if a text has too many ``tokens``. ``size`` says their number in words."""
        if tokens > self.most:
            raise ContextTooLong(
                f"This model's maximum embedding input length is {self.most} tokens. However, your text has "
                f"{size or f'{tokens} tokens'}. Shorten the text, or raise max_embed_len in --pooler-config.",
                param="prompt",
            )

    def bound(self, params: SamplingParams) -> TextBound:
        """Return the bound on the tokens of a text; a text to be cut may be longer."""
        if params.truncate_prompt_tokens is not None:
            return counted(self.most)
        return TextBound(self.most, lambda size: self.check(self.most + 1, size))

    def kept(self, params: SamplingParams) -> int:
        """Return the number of tokens that ``truncate_prompt_tokens`` keeps; a negative value keeps all that fit."""
        asked = params.truncate_prompt_tokens
        if asked is None:
            return sys.maxsize
        if asked > self.most:
            raise InvalidRequest(
                f"truncate_prompt_tokens is {asked}, but the maximum embedding input length is {self.most}: lower it",
                param="truncate_prompt_tokens",
            )
        return asked if asked > 0 else self.most

    def chunks(self, ids: list[int], limits: Ready) -> list[list[int]]:
        """Return the chunks of a text: all but the last are full. A text that fits is no chunk: the list is empty."""
        self.check(len(ids))
        full = limits.places - 1
        return [ids[start : start + full] for start in range(0, len(ids), full)] if 0 < full < len(ids) else []


def weighted_mean(vectors: Sequence[np.ndarray], weights: Sequence[int]) -> np.ndarray:
    """Return the mean of fp32 ``vectors``, each with its weight.

    Contract: products and sums are float64, added in the order of the chunks. The sum is divided by the sum of the
    weights, and rounded to fp32 once.
    """
    total = np.zeros(len(vectors[0]), np.float64)
    for vector, weight in zip(vectors, weights, strict=True):
        total += vector.astype(np.float64) * weight
    return (total / sum(weights)).astype(np.float32)
