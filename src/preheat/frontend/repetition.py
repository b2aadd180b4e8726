"""Detection of texts that repeat themselves (``repetition_detection``), token by token."""

from __future__ import annotations

import numpy as np

from preheat.core import RepetitionDetectionParams

REPEATED = "repetition_detected"
"""The ``stop_reason`` of a text that ended by repetition, as in vLLM."""

_NO_TOKEN = -1


class RepetitionChecker:
    """Detector of repetition in the tokens of one text.

    Each token costs the same, however often a pattern must repeat. A pattern of k tokens has come c times exactly if
    each of the last k * (c - 1) tokens equals the token k places before it. So one number for each k is enough: the
    length of the current run of such tokens.
    """

    def __init__(self, params: RepetitionDetectionParams) -> None:
        sizes = np.arange(max(params.min_pattern_size, 1), params.max_pattern_size + 1)
        self._least, self._most = max(params.min_pattern_size, 1), params.max_pattern_size
        self._needed, self._runs = sizes * (params.min_count - 1), np.zeros(len(sizes), np.int64)
        self._tokens = np.full(4 * self._most, _NO_TOKEN, np.int64)
        self._end = self._most

    def push(self, token: int) -> bool:
        """Return whether the text repeats itself up to ``token``, its next token."""
        if self._end == len(self._tokens):
            self._tokens[: self._most] = self._tokens[-self._most :]
            self._end = self._most
        before = self._tokens[self._end - self._most : self._end - self._least + 1][::-1]
        self._runs += 1
        self._runs *= before == token
        self._tokens[self._end] = token
        self._end += 1
        return bool((self._runs >= self._needed).any())


def checker_of(params: RepetitionDetectionParams | None) -> RepetitionChecker | None:
    """Return a checker for repetition; None if ``params`` ask for none."""
    return RepetitionChecker(params) if params is not None and params.max_pattern_size else None
