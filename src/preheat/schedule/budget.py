"""The budget of a step: how many tokens its rows may have, counted with padding."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from preheat.limits import Limits
from preheat.schedule.padded import Padded


class Budget:
    """The budget of steps within ``limits``, at the cost ``padded``.

    A step with decoding rows has at most ``mixed_tokens`` tokens, unless the budget ``hurries``. ``chunked``: a prompt
    may be read in several steps.
    """

    hurries = False  # clients of moved requests have waited longest

    def __init__(self, limits: Limits, padded: Padded, mixed_tokens: int | None, *, chunked: bool) -> None:
        self._limits, self.padded, self.chunked = limits, padded, chunked
        self._mixed_tokens = mixed_tokens if chunked else None

    def of(self, decoding: int) -> int:
        """Return the most tokens of a step with ``decoding`` rows.

        Always enough for one more row.
        """
        most = self._limits.max_num_batched_tokens
        if self._mixed_tokens is None or self.hurries or not decoding:
            return most
        return min(most, max(self._mixed_tokens, 2 * decoding, self.padded(decoding + 1, decoding + 2, 2)))

    def most(self, wanted: int, budget: int, size: Callable[[int], tuple[int, int, int]]) -> int:
        """Return the most tokens within ``budget``, up to ``wanted``.

        ``size(tokens)`` is the step's size, counted with padding.
        """
        if not wanted or self.padded(*size(wanted)) <= budget:
            return wanted
        fits, too_many = 0, wanted
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self.padded(*size(middle)) <= budget:
                fits = middle
            else:
                too_many = middle
        return fits

    def fits_alone(self, tokens: int) -> bool:
        """Return whether a step may have one row of ``tokens`` tokens, and no other."""
        return self.padded(1, tokens, tokens) <= self._limits.max_num_batched_tokens

    @property
    def max_prompt_len(self) -> int:
        """The longest prompt that can be read."""
        possible = range(1, self._limits.max_model_len)
        return len(possible) if self.chunked else bisect_left(possible, True, key=lambda n: not self.fits_alone(n))
