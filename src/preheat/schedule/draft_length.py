"""How many tokens are drafted: as many as asked for, or as many as pay by what steps cost and drafts have brought.

The choice never changes a token: every token is one that the model samples, however many were drafted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

StepSeconds = Callable[[int, int], float]
"""``seconds(rows, drafts)``: what a step of so many rows costs, each with so many drafts."""

DECAY = 0.92
"""What is left of what was seen of a place among the drafts after another step that had one there."""
PRIOR, WEIGHT = 0.5, 2.0
"""The share of drafts that are taken to be accepted before any was seen, and how many drafts that counts for."""
MARGIN = 1.02
"""How many times the tokens a second a step with drafts must promise: times are measured with an error."""
TRIALS = 0.01
"""The share of the time that trials may cost where nothing pays."""
SOONEST = 160
"""Steps between two trials at least, however little one costs."""
PATIENCE = 4
"""Steps for which a trial waits for something to be drafted."""


class DraftLength(Protocol):
    """Chooses the drafts of a step, before and after it is known what the proposer has to say."""

    def most(self, rows: int, limit: int) -> int:
        """How many drafts, at most ``limit``, the proposer is asked for in a step of ``rows`` rows; 0: it is not."""

    def keep(self, rows: int, lengths: Sequence[int]) -> int:
        """How many of its drafts a row may use, where rows have ``lengths`` drafts."""

    def asked(self, rows: int, most: int, found: int, seconds: float) -> None:
        """For ``rows`` rows up to ``most`` drafts each were asked for; so many were ``found`` in all, in ``seconds`` of
        the host.
        """

    def learn(self, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Of the ``drafted`` tokens of each row so many were ``accepted``; both int [rows]."""


class FixedLength:
    """As many as possible."""

    def most(self, rows: int, limit: int) -> int:
        return limit

    def keep(self, rows: int, lengths: Sequence[int]) -> int:
        return max(lengths, default=0)

    def asked(self, rows: int, most: int, found: int, seconds: float) -> None:
        """Nothing depends on it."""

    def learn(self, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Nothing depends on it."""


class MeasuredLength:
    """The number of drafts with the most tokens a second: what is expected to be accepted, over what the step costs.

    Where nothing pays, not even with drafts in every row, nothing is asked for, and until something is learnt again a
    step costs a lookup. At first, and when drafts are tried again, a row has few of them, and more once so many were
    accepted: what is never right has cost little by then. ``widths`` are the numbers of tokens that rows are padded to.
    ``asking`` are the seconds of drafting a token for so many rows; with ``waits``, asking costs more than that: the
    step in flight is waited for. Where drafting has no such price, what it has taken the host lately is that of a step;
    and if that waits, too, what a step may bring is less by the share of drafts that are not found.
    """

    def __init__(
        self,
        widths: Sequence[int],
        seconds: StepSeconds,
        asking: Callable[[int], float] = lambda rows: 0.0,
        *,
        waits: bool = False,
    ) -> None:
        self._choices = (0, *(width - 1 for width in widths))
        self._seconds, self._asking, self._waits = seconds, asking, waits
        self._tried = np.full(self._choices[-1], WEIGHT)  # drafts at each place, those before it accepted
        self._accepted = PRIOR * self._tried
        # of rows and limit, until something is learnt: the best, and the steps after which less is tried
        self._known: dict[tuple[int, int], tuple[int, int]] = {}
        self._reach = 0  # the most drafts of a row that were accepted
        self._since = 0  # steps without drafts
        self._trying = False
        self._spent: dict[int, float] = {}  # seconds of drafting on the host, by the bits of the number of rows
        self._found = 1.0  # the share of drafts that are found

    @property
    def shares(self) -> np.ndarray:
        """The share of rows whose first 1, 2, ... drafts are all expected to be accepted, float64 [most]."""
        each: np.ndarray = self._accepted / self._tried
        return each.cumprod()

    def most(self, rows: int, limit: int) -> int:
        """What pays best if all rows have as many drafts as they may; if some have fewer, no more than that pays."""
        if (rows, limit) not in self._known:
            asking, spent = self._asking(rows), self._spent.get(rows.bit_length(), 0.0)
            best = self._best(rows, [limit] * rows, asking, spent, self._found)
            self._known[rows, limit] = best, self._trial_after(rows, asking)
        best, trial_after = self._known[rows, limit]
        if best:
            self._since, self._trying = 0, False
            return best
        return self._tried_again(min(self._choices[1], limit), trial_after)

    def keep(self, rows: int, lengths: Sequence[int]) -> int:
        """What a draft model has drafted costs nothing more; a lookup is only now known to have found something."""
        if self._trying or self._waits or self._asking(rows):
            return max(lengths)
        return self._best(rows, lengths, 0.0)

    def asked(self, rows: int, most: int, found: int, seconds: float) -> None:
        if self._asking(rows):
            return
        before = self._spent.get(rows.bit_length(), seconds)
        self._spent[rows.bit_length()] = DECAY * before + (1 - DECAY) * seconds
        if self._waits:
            self._found = DECAY * self._found + (1 - DECAY) * found / (rows * most)
        self._known.clear()

    def learn(self, drafted: np.ndarray, accepted: np.ndarray) -> None:
        places = np.arange(len(self._tried))[:, None]
        tried = ((places < drafted) & (places <= accepted)).sum(1)
        kept = np.where(tried, DECAY, 1.0)
        self._tried = self._tried * kept + tried
        self._accepted = self._accepted * kept + (places < accepted).sum(1)
        self._reach = max(self._reach, int(accepted.max(initial=0)))
        self._known.clear()
        if self._trying:
            self._rest()

    def _best(self, rows: int, lengths: Sequence[int], asking: float, spent: float = 0.0, found: float = 1.0) -> int:
        limit, shares, counts = max(lengths, default=0), self.shares, np.array(lengths)
        best, best_pace, gain = 0, MARGIN * rows / self._seconds(rows, 0), 0.0
        for before, count in zip(self._choices, self._choices[1:], strict=False):
            if before >= limit or before > self._reach:
                break
            gain += sum(float(shares[place]) * int((counts > place).sum()) for place in range(before, count))
            pace = (rows + found * gain) / (self._seconds(rows, count) + spent + asking * min(count, limit))
            if pace > best_pace:
                best, best_pace = count, pace
        return min(best, limit)

    def _trial_after(self, rows: int, asking: float) -> int:
        """Steps that pay for one with drafts that are all rejected."""
        least = self._choices[1]
        more = (self._seconds(rows, least) + least * asking) / self._seconds(rows, 0) - 1
        return max(SOONEST, math.ceil(more / TRIALS))

    def _tried_again(self, least: int, after: int) -> int:
        """Where nothing pays: nothing, or, ``after`` so many steps, the ``least``, as what is accepted may change."""
        self._since += 1
        if self._since < after:
            return 0
        if self._since >= after + PATIENCE:
            self._rest()
            return 0
        if not self._trying:  # what was seen long ago counts no more than what is taken to be so before any was
            much = np.maximum(self._tried / WEIGHT, 1.0)
            self._tried, self._accepted = self._tried / much, self._accepted / much
            self._reach, self._trying = 0, True
        return least

    def _rest(self) -> None:
        """A trial is over: the next one comes later."""
        self._trying, self._since = False, 0
