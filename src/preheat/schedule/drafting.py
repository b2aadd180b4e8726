"""Drafts for the decoding rows of a step.

They fit its budget and the free blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from preheat.schedule.draft_length import DraftLength, FixedLength
from preheat.schedule.forced import forced_drafts
from preheat.schedule.next_step import NextStep
from preheat.schedule.proposer import Proposer
from preheat.schedule.running import RunningSequences
from preheat.schedule.slots import UNSEEN, Slots

Fits = Callable[[int, Callable[[int], tuple[int, int, int]]], int]
"""``fits(wanted, size)``: the most drafts within the budget.

There are at most ``wanted``; ``size(drafts)`` is the step with so many drafts.
"""


@dataclass
class Drafting:
    """The proposer of drafts and the choice of their number.

    ``planned`` gives the most drafts of a row in a step of so many rows that all decode; None: as many as the budget
    has room for. A row with a grammar that forces tokens drafts the forced tokens. Other rows with a grammar have
    drafts only of a ``proposer`` without a cache; the proposer sees no masks. With ``grammars_only`` rows without a
    grammar never have drafts.
    """

    proposer: Proposer
    length: DraftLength = field(default_factory=FixedLength)
    planned: Callable[[int], int] | None = None
    grammars_only: bool = False
    most: int = field(default=0, init=False)  # drafts that a row of the step being composed may have

    def begin(self, rows: int) -> None:
        """Choose the most drafts for the next step, with ``rows`` decoding rows."""
        limit = self.proposer.num_speculative_tokens
        if self.planned is not None:
            limit = min(limit, self.planned(rows))
        self.most = self.length.most(rows, limit) if rows and limit > 0 else 0

    def visible(self, slots: Slots, decode: np.ndarray) -> np.ndarray:
        """Return the rows of ``decode`` that may have drafts.

        Their last token must be known.
        """
        if not self.most:
            return decode
        waits = slots.tokens[decode, slots.device_len[decode] - 1] == UNSEEN
        if self.grammars_only:
            waits &= slots.has_grammar[decode]
        seen: np.ndarray = decode[~waits]
        return seen

    def add(self, step: NextStep, running: RunningSequences, fits: Fits, max_rows: int) -> None:
        """Give the decoding rows of ``step`` drafts.

        Where prompts are read too, at most ``max_rows`` rows are longer than one token.
        """
        slots, rows = running.slots, step.decode
        planned = self.planned is not None and not step.prefill
        room = len(rows) if planned else max_rows - len(step.prefill)
        if not self.most or not len(rows) or room < 1:
            return
        began = perf_counter()
        most = self._wanted(step, running)
        forced = forced_drafts(slots, rows, most)
        free = most.copy()
        free[list(forced)] = 0
        if self.proposer.writes_cache:
            self._make_room(free, step, running, None if planned else fits)
        drafts = list(self.proposer.propose(slots, rows, free))
        for place, tokens in forced.items():
            drafts[place] = tokens
        lengths = [min(len(own), count) for own, count in zip(drafts, most.tolist(), strict=True)]
        keep = self.length.keep(len(rows), lengths) if any(lengths) else 0
        for slot, own, length in zip(rows.tolist(), drafts, lengths, strict=True):
            count = min(length, keep)
            if count > 0 and not planned:
                count = fits(count, step.with_drafts)
            if count > 0 and room:
                count = min(count, self._places(running, slot))
                if running.states is not None:  # each draft needs a state slot
                    count = min(count, running.states.num_free - sum(map(len, step.drafts.values())))
                if count > 0:
                    running.grow(slot, int(slots.device_len[slot]) + count)
                    step.add_drafts(slot, own[:count])
                    room -= 1
        self.length.asked(len(rows), self.most, sum(lengths), perf_counter() - began)

    def _wanted(self, step: NextStep, running: RunningSequences) -> np.ndarray:
        """Return the most drafts that each decoding row can use, int64 [rows]."""
        slots, rows = running.slots, step.decode
        most: np.ndarray = np.minimum(self.most, slots.max_len[rows] - slots.device_len[rows] - 1).astype(np.int64)
        return most

    def _make_room(self, most: np.ndarray, step: NextStep, running: RunningSequences, fits: Fits | None) -> None:
        """Lower ``most`` to the drafts of a proposer with a cache.

        The blocks for the drafts are allocated.
        """
        slots, rows = running.slots, step.decode
        most[slots.has_grammar[rows]] = 0
        if fits is not None:
            np.minimum(most, fits(self.most, step.with_drafts), out=most)
        for place, slot in enumerate(rows.tolist()):
            most[place] = max(min(most[place], self._places(running, slot)), 0)
            if most[place]:
                running.grow(slot, int(slots.device_len[slot]) + int(most[place]))

    def _places(self, running: RunningSequences, slot: int) -> int:
        """Return how many more tokens the sequence can have with all free blocks."""
        slots = running.slots
        blocks = int(slots.num_blocks[slot]) + running.columns_free
        return int(blocks * slots.block_size - slots.device_len[slot])

    def learn(self, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """See :meth:`DraftLength.learn`."""
        self.length.learn(drafted, accepted)

    def ended(self, slots: Slots, stopped: Sequence[int]) -> None:
        """See :meth:`Proposer.ended`."""
        self.proposer.ended(slots, stopped)
