"""The number of drafted tokens.

It is fixed, or chosen by the cost of steps and the acceptance of earlier drafts. The choice never changes a token: the
model samples every token, however many were drafted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

StepSeconds = Callable[[int, int], float]
"""``seconds(rows, drafts)``: the time of a step of ``rows`` rows with ``drafts`` drafts each."""

DECAY = 0.92
"""The factor on the counts of a draft position after each step that drafts there."""
PRIOR, WEIGHT = 0.5, 2.0
"""The prior: an acceptance rate, and its weight in drafts.

The rate is assumed before any draft was seen.
"""
MARGIN = 1.02
"""The least gain in tokens a second of drafting.

Times are measured with an error.
"""
TRIALS = 0.01
"""The share of the time that trials may cost where no drafts pay."""
SOONEST = 160
"""The least steps between two trials, however little one costs."""
PATIENCE = 4
"""Steps for which a trial waits for something to be drafted."""


class DraftLength(Protocol):
    """Chooses the drafts of a step, before and after the proposer was asked."""

    def most(self, rows: int, limit: int) -> int:
        """Return how many drafts a step of ``rows`` rows asks for.

        There are at most ``limit``; 0: do not ask.
        """

    def keep(self, rows: int, lengths: Sequence[int]) -> int:
        """Return how many of its drafts a row may use.

        Rows have ``lengths`` drafts.
        """

    def asked(self, rows: int, most: int, found: int, seconds: float) -> None:
        """Note the result of asking for drafts.

        Up to ``most`` were asked for in each of ``rows`` rows. ``found`` drafts came back in all, in ``seconds`` of the
        host.
        """

    def learn(self, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Note that of the ``drafted`` tokens of each row ``accepted`` were accepted.

        Both int [rows].
        """


class FixedLength:
    """As many drafts as possible."""

    def most(self, rows: int, limit: int) -> int:
        return limit

    def keep(self, rows: int, lengths: Sequence[int]) -> int:
        return max(lengths, default=0)

    def asked(self, rows: int, most: int, found: int, seconds: float) -> None:
        """Ignore it: the length is fixed."""

    def learn(self, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Ignore it: the length is fixed."""


class MeasuredLength:
    """The number of drafts with the most tokens a second.

    The rate is the expected tokens over the cost of the step. Where no number of drafts pays, none is asked for, and a
    step costs a lookup until something is learnt again. At first, and when drafts are tried again, a row has few
    drafts. It gets more once that many were accepted, so wrong drafts cost little.

    ``widths`` are the padded tokens of a row. ``asking(rows)`` gives the seconds of drafting one token for ``rows``
    rows. Where it is 0, the recent seconds of drafting on the host count for the step. With ``waits`` the proposer must
    wait for the step in flight; the share of drafts that it finds then scales the expected gain.
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
        self._tried = np.full(self._choices[-1], WEIGHT)  # drafts at each position with all earlier ones accepted
        self._accepted = PRIOR * self._tried
        # (rows, limit) -> (best number, steps until the next trial); cleared whenever something is learnt
        self._known: dict[tuple[int, int], tuple[int, int]] = {}
        self._reach = 0  # the most drafts of a row that were accepted
        self._since = 0  # steps without drafts
        self._trying = False
        self._spent: dict[int, float] = {}  # seconds of drafting on the host, by bit length of the number of rows
        self._found = 1.0  # the share of drafts that are found

    @property
    def shares(self) -> np.ndarray:
        """The share of rows with all first drafts accepted.

        It is expected for the first 1, 2, ... drafts, float64 [most].
        """
        each: np.ndarray = self._accepted / self._tried
        return each.cumprod()

    def most(self, rows: int, limit: int) -> int:
        """Return the number that pays best if all rows have ``limit`` drafts.

        With fewer drafts no more would pay.
        """
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
        """Keep all drafts of a draft model, since they are paid for.

        Choose again once a lookup's result is known.
        """
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
        """Return the steps until the next trial.

        A trial with rejected drafts then costs no more than the share ``TRIALS``.
        """
        least = self._choices[1]
        more = (self._seconds(rows, least) + least * asking) / self._seconds(rows, 0) - 1
        return max(SOONEST, math.ceil(more / TRIALS))

    def _tried_again(self, least: int, after: int) -> int:
        """Return 0, but ``least`` drafts after ``after`` steps.

        The acceptance of drafts may have changed.
        """
        self._since += 1
        if self._since < after:
            return 0
        if self._since >= after + PATIENCE:
            self._rest()
            return 0
        if not self._trying:  # old observations count no more than the prior
            much = np.maximum(self._tried / WEIGHT, 1.0)
            self._tried, self._accepted = self._tried / much, self._accepted / much
            self._reach, self._trying = 0, True
        return least

    def _rest(self) -> None:
        """End a trial: the next one comes later."""
        self._trying, self._since = False, 0
