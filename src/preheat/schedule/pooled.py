"""Pools of hidden states: what an engine makes of the states of a text's tokens.

Contract. Tokens are added one after the other, in the order of the text and in float32, so that a pool does not depend
on how a prompt is cut into chunks. A pool of one token is its own state, for every kind but the square root's.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from preheat.core import POOLS


class Pooled:
    """The mean: the sum [hidden] of the states of ``count`` tokens, divided by their number."""

    def __init__(self, first: np.ndarray) -> None:
        self.total, self.count = np.zeros_like(first), 0

    def add(self, states: np.ndarray) -> None:
        """Add the hidden states of the next tokens, fp32 [tokens, hidden].

        numpy adds whole rows, the first row first: only sums along a row are cut into parts.
        """
        if self.count:
            states = np.concatenate((self.total[None], states))
            self.count -= 1
        self.total = np.add.reduce(states, axis=0, initial=np.float32(0.0))
        self.count += len(states)

    def take(self, total: np.ndarray, count: int) -> None:
        """Take the sum of all states of the text, of ``count`` tokens, as :meth:`add` makes it."""
        self.total, self.count = total, count

    def result(self) -> bytes:
        """Return the pool as bytes of fp32."""
        return (self.total / np.float32(self.count)).tobytes()


class ByToken(Pooled):
    """Base of pools that take one token after the other."""

    def add(self, states: np.ndarray) -> None:
        for state in states:
            self.count += 1
            self.join(state)

    @abstractmethod
    def join(self, state: np.ndarray) -> None:
        """Add the state of token number ``count``, counted from 1."""


class _Greatest(ByToken):
    """The greatest number of all tokens, in each place."""

    def join(self, state: np.ndarray) -> None:
        self.total = state.copy() if self.count == 1 else np.maximum(self.total, state)

    def result(self) -> bytes:
        return self.total.tobytes()


class _Weighted(ByToken):
    """The mean by weights: token n has the weight n. A product is rounded, then added."""

    def join(self, state: np.ndarray) -> None:
        self.total += state * np.float32(self.count)

    def result(self) -> bytes:
        return (self.total / np.float32(self.count * (self.count + 1) // 2)).tobytes()


class _Root(Pooled):
    """The sum, divided by the square root of the number of tokens."""

    def result(self) -> bytes:
        return (self.total / np.float32(math.sqrt(self.count))).tobytes()


class _All(ByToken):
    """The states of all tokens, one behind the other."""

    def __init__(self, first: np.ndarray) -> None:
        super().__init__(first)
        self._states: list[bytes] = []

    def join(self, state: np.ndarray) -> None:
        self._states.append(state.tobytes())

    def result(self) -> bytes:
        return b"".join(self._states)


_KINDS: Mapping[str, type[Pooled]] = MappingProxyType(
    dict(zip(POOLS, (Pooled, _Greatest, _Weighted, _Root, _All), strict=True))
)


SUMMED = tuple(place for place, kind in enumerate(POOLS) if _KINDS[kind].add is Pooled.add)
"""The places in :data:`POOLS` of pools that follow from the sum of a text's states."""


def pool_of(kind: int | None, first: np.ndarray) -> Pooled:
    """Return an empty pool, by its place in :data:`POOLS`; None: of a single token. ``first`` is the first state."""
    return _KINDS[POOLS[kind or 0]](first)
