"""The filters min_p, top_k and top_p.

They are applied to a row in this order.

Contract: the tokens kept in a row depend on that row alone. A token is judged by its *deficit* ``(best - logit) /
temperature`` in float32; its probability, up to the row's constant, is ``exp(-deficit)``. Probability mass is counted
in integers (of 2**-34 of the best token's mass, exact in float64). So a sum does not depend on its order, on the number
of rows or on the number of a row's tokens looked at. Only element-wise operations round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from preheat.ops.order import best

WINDOW = 128
"""Tokens of a row that are sorted at first.

The window is widened until it holds all kept tokens. Changes no bits.
"""

_WIDEN = 8

_MASS = np.float32(2**34)  # times 2**18 tokens still fits the 53 bits of a float64


@dataclass(slots=True)
class SamplingMetadata:
    """Settings of the rows of a step that draw at random.

    All arrays are [n]. ``rows`` are the rows' indices in the step. ``temperature`` is above 0. A filter is off at
    ``top_k`` 0, ``top_p`` 1 or ``min_p`` 0. ``seed``, ``position`` (of the token to draw, in the output) and ``choice``
    key the noise.
    """

    rows: np.ndarray  # int64
    temperature: np.ndarray  # float32
    top_p: np.ndarray  # float32
    top_k: np.ndarray  # int32
    min_p: np.ndarray  # float32
    seed: np.ndarray  # uint64
    position: np.ndarray  # int32
    choice: np.ndarray  # int32

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, index: np.ndarray | slice) -> Self:
        """Return the rows at ``index`` alone."""
        return type(self)(*(getattr(self, field.name)[index] for field in fields(self)))

    def later(self, steps: int) -> Self:
        """Return the same rows, each ``steps`` tokens further."""
        return type(self)(
            self.rows, self.temperature, self.top_p, self.top_k, self.min_p, self.seed, self.position + steps,
            self.choice,
        )  # fmt: skip

    def ordered(self, vocab: int) -> np.ndarray:
        """Return bool [n]: rows with an effective top_k or top_p.

        Such rows need their tokens in order.
        """
        ordered: np.ndarray = (self.top_p < 1) | self.cut_by_k(vocab)
        return ordered

    def cut_by_k(self, vocab: int) -> np.ndarray:
        """Return bool [n]: whether the row's top_k is smaller than the vocabulary."""
        cut: np.ndarray = (self.top_k > 0) & (self.top_k < vocab)
        return cut


@dataclass(slots=True)
class Filter:
    """The filters of one row: ``metadata`` of the row alone, and its numbers.

    ``top_k`` is 0 if it cuts nothing, ``top_p`` is 1 if it is off, ``furthest`` is the greatest deficit.
    """

    metadata: SamplingMetadata
    temperature: np.float32
    top_k: int
    top_p: float
    furthest: np.float32

    @classmethod
    def of(cls, how: SamplingMetadata, at: int, vocab: int) -> Self:
        """Return the filters of row ``at`` of ``how``."""
        row = how.take(slice(at, at + 1))
        k = int(row.top_k[0]) if row.cut_by_k(vocab)[0] else 0
        return cls(row, row.temperature[0], k, float(row.top_p[0]), furthest(row.min_p)[0])

    def kept(self, line: np.ndarray, values: np.ndarray, *, duplicates: bool) -> int | None:
        """Return how many of a row's tokens are kept, as :func:`keep_ordered` does: the first ones.

        ``values`` are the greatest logits of the ``line``, in order. None: the answer depends on other tokens.
        """
        deficit = values[0] - values
        deficit /= self.temperature
        count = width = len(values)
        if deficit[-1] > self.furthest:
            count = int(deficit.searchsorted(self.furthest, "right"))
        if 0 < self.top_k < width:
            k = self.top_k if not duplicates else int(np.count_nonzero(values >= values[self.top_k - 1]))
            count = min(count, k)
        open_end = count == width < len(line)
        if open_end and self.top_k:
            return None
        if self.top_p < 1:
            mass = _masses(deficit)[:count]
            before = mass.cumsum()
            total = before[-1] if not open_end else self._mass(line, values[0])
            before -= mass
            count = max(int(before.searchsorted(self.top_p * total)), 1)
        return None if open_end and count == width else count

    def _mass(self, line: np.ndarray, peak: np.float32) -> float:
        """Return the mass of a whole row after min_p."""
        return float(_total_mass(line[None], np.array([peak]), self.metadata)[0])


@dataclass(slots=True)
class KeptTokens:
    """Tokens still possible: ``ids[i]`` of row ``rows[i]`` and its deficit.

    Rows ascend. Each row has at least one token.
    """

    rows: np.ndarray  # int64 [n]
    ids: np.ndarray  # int64 [n]
    deficit: np.ndarray  # float32 [n]


def deficits(logits: np.ndarray, peak: np.ndarray, temperature: np.ndarray) -> np.ndarray:
    """Return each logit's distance from its row's ``peak``, divided by the temperature.

    ``logits`` are [rows, any], ``peak`` and ``temperature`` [rows].
    """
    deficit: np.ndarray = peak[:, None] - logits
    deficit /= temperature[:, None]
    return deficit


def furthest(min_p: np.ndarray) -> np.ndarray:
    """Return the greatest deficit that passes ``min_p``, float32 like ``min_p``.

    Where ``min_p`` is off (0), only impossible tokens exceed the deficit.
    """
    with np.errstate(divide="ignore"):
        cut: np.ndarray = np.minimum(-np.log(min_p), np.finfo(np.float32).max)
    return cut


def keep_ordered(
    logits: np.ndarray, peak: np.ndarray, how: SamplingMetadata, duplicates: bool
) -> Iterator[tuple[np.ndarray, KeptTokens]]:
    """Yield the kept tokens of rows with top_k or top_p.

    Rows come in groups. A group is its rows, int64 [m], and their kept tokens, with rows numbered 0 to m - 1; each row
    is in one group. ``logits`` are float32 [rows, vocab], ``peak`` [rows] its maxima, ``how`` one entry a row.
    ``top_k`` keeps exactly k tokens; with ``duplicates`` also every token equal to the k-th.
    """
    pending, width = np.arange(len(logits)), min(WINDOW, logits.shape[1])
    while len(pending):
        keep, ids, deficit, settled = _keep_first(logits, peak, how, width, duplicates)
        if settled.all():
            yield pending, KeptTokens(np.nonzero(keep)[0], ids[keep], deficit[keep])
            return
        if settled.any():
            keep, ids, deficit = keep[settled], ids[settled], deficit[settled]
            yield pending[settled], KeptTokens(np.nonzero(keep)[0], ids[keep], deficit[keep])
        left = np.flatnonzero(~settled)
        logits, peak, how, pending = logits[left], peak[left], how.take(left), pending[left]
        width = min(width * _WIDEN, logits.shape[1])


def _keep_first(
    logits: np.ndarray, peak: np.ndarray, how: SamplingMetadata, width: int, duplicates: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Judge each row's first ``width`` tokens in order.

    Return keep, id and deficit, each [rows, width]. The last result, [rows], says whether the row is settled: no token
    outside the window can be kept.
    """
    vocab = logits.shape[1]
    values, ids = best(logits, width)
    deficit = deficits(values, peak, how.temperature)
    keep = deficit <= furthest(how.min_p)[:, None]
    has_k = how.cut_by_k(vocab)
    k = np.where(has_k, np.minimum(how.top_k, width), width)
    within = np.arange(width) < k[:, None]
    if duplicates:
        within |= values >= np.take_along_axis(values, k[:, None] - 1, axis=-1)
    keep &= within
    mass = _masses(deficit) * keep
    before = np.cumsum(mass, axis=-1)
    total = before[:, -1].copy()
    before -= mass
    open_end = keep[:, -1] & (width < vocab)
    nucleus = how.top_p < 1
    outside = np.flatnonzero(nucleus & ~has_k & open_end)
    if len(outside):
        total[outside] = _total_mass(logits[outside], peak[outside], how.take(outside))
    limit = np.where(nucleus, how.top_p.astype(np.float64) * total, np.inf)
    keep &= before < limit[:, None]
    keep[:, 0] = True  # top_p may be so small that its product with the total is 0
    return keep, ids, deficit, ~(open_end & (keep[:, -1] | has_k))


def _masses(deficit: np.ndarray) -> np.ndarray:
    """Return exp(-deficit) in integers of 2**-34, as float64."""
    mass = np.exp(-deficit)
    mass *= _MASS
    whole: np.ndarray = np.rint(mass, out=mass).astype(np.float64)
    return whole


def _total_mass(logits: np.ndarray, peak: np.ndarray, how: SamplingMetadata) -> np.ndarray:
    """Return the mass of each whole row after min_p, float64 [rows]."""
    deficit = deficits(logits, peak, how.temperature)
    mass = _masses(deficit)
    mass *= deficit <= furthest(how.min_p)[:, None]
    total: np.ndarray = mass.sum(axis=-1)
    return total
