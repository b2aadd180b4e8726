"""A small model that drafts.

It reads the target's tokens, and draws with the target's noise. It is a packer and an executor like the target's, over
the same slots, with a cache of its own in the same block ids. A token is drawn with the parameters, the seed and the
position that the target will draw it with. Noise is keyed by token (:mod:`preheat.ops.philox`). So draft and target
draw the same token more often than two independent draws would. While their distributions are alike, the same token
wins. The drafts do not change the tokens that the target draws.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from preheat.core import Schedule, unmarked
from preheat.execution.executor import Executor
from preheat.execution.input_batch import InputBatch, Packer
from preheat.execution.launched import LaunchedStep
from preheat.schedule.slots import UNSEEN, Slots


class DraftModel:
    """A proposer that drafts with a model.

    It runs one step for the first token of each row, and one step for each further token. The first step also reads the
    new tokens of the row's sequence. A prompt longer than a step is read in several steps, one for each call. Unless it
    ``waits``, a step is launched while the one before it runs: it reads the token that the device drew last for the
    row.
    """

    writes_cache = True

    def __init__(self, num_speculative_tokens: int, packer: Packer, executor: Executor) -> None:
        self.num_speculative_tokens, self.packer, self.executor = num_speculative_tokens, packer, executor
        slots = packer.slots
        self._limits, self._ahead = packer.plan.limits, packer.ahead
        self._tenure = np.full(slots.num_slots, -1, np.int64)
        self._computed = np.zeros(slots.num_slots, np.int64)  # tokens with keys and values in the cache
        self._known = np.zeros(slots.num_slots, np.int64)  # of these, tokens that were no drafts
        self._drafted = np.zeros((slots.num_slots, num_speculative_tokens), np.int32)  # the others
        self._ran: list[InputBatch] = []
        self._in_flight: deque[tuple[LaunchedStep, Schedule]] = deque()
        self.waits = not executor.backend.facts.asynchronous
        executor.goes_on = False  # steps follow each other before the results of the first are read

    def take_steps(self) -> list[InputBatch]:
        """Return the steps since the last call."""
        ran, self._ran = self._ran, []
        return ran

    def propose(self, slots: Slots, rows: np.ndarray, most: np.ndarray) -> Sequence[np.ndarray]:
        """See :class:`preheat.schedule.proposer.Proposer`.

        Drafts are written into the slots, after all known tokens.
        """
        self._ran.clear()
        self._in_flight.clear()  # left by a call that failed
        wanted = dict(zip(rows.tolist(), most.tolist(), strict=True))
        drafts: dict[int, list[int]] = {slot: [] for slot in wanted}
        self._take_back(slots, rows)
        going, done = self._read(slots, [slot for slot in wanted if wanted[slot] > 0], drafts), 1
        while going := [slot for slot in going if wanted[slot] > done]:
            chosen, ones = np.array(going, np.int64), np.ones(len(going), np.int32)
            first = (self._readable(slots, chosen) + (done - 1)).astype(np.int32)
            self._run(slots, Schedule(chosen, first, ones, ones, len(going)), drafts)
            done += 1
        self._finish(slots, drafts)
        return [np.array(drafts[slot], np.int32) for slot in wanted]

    def ended(self, slots: Slots, stopped: Sequence[int]) -> None:
        """Do nothing: a slot that is taken again has another tenure."""

    def _readable(self, slots: Slots, rows: np.ndarray) -> np.ndarray:
        """Return the positions of each row with a known token, int32 [rows]."""
        readable: np.ndarray = slots.device_len[rows] - self._ahead
        return readable

    def _take_back(self, slots: Slots, rows: np.ndarray) -> None:
        """Forget cached tokens of other sequences, and of rejected drafts."""
        fresh = rows[self._tenure[rows] != slots.tenure[rows]]
        self._tenure[fresh], self._computed[fresh], self._known[fresh] = slots.tenure[fresh], 0, 0
        for slot in rows[self._computed[rows] > self._known[rows]].tolist():
            begin, end = int(self._known[slot]), int(min(self._computed[slot], slots.device_len[slot]))
            same = slots.tokens[slot, begin:end] == self._drafted[slot, : end - begin]
            self._computed[slot] = begin + int(same.cumprod().sum())

    def _read(self, slots: Slots, rows: list[int], drafts: dict[int, list[int]]) -> list[int]:
        """Run a step over the new tokens of these rows.

        It reads as many as fit. Return the rows that were read to the end; they have their first draft.
        """
        budget = self._limits.max_num_batched_tokens
        extend: dict[int, int] = {}
        asked = np.array(rows, np.int64)
        lacking = dict(zip(rows, (self._readable(slots, asked) - self._computed[asked]).tolist(), strict=True))
        for slot in sorted(rows, key=lambda slot: lacking[slot]):
            count = min(lacking[slot], budget)
            if count:
                extend[slot] = count
                budget -= count
        if not extend:
            return []
        chosen, counts = np.array(list(extend), np.int64), np.array(list(extend.values()), np.int32)
        first = self._computed[chosen].astype(np.int32)
        whole = first + counts == self._readable(slots, chosen)
        schedule = Schedule(chosen, first, counts, whole.astype(np.int32), int(((counts == 1) & whole).sum()))
        self._run(slots, schedule, drafts)
        self._known[chosen] = self._computed[chosen]
        done: list[int] = chosen[whole].tolist()
        return done

    def _run(self, slots: Slots, schedule: Schedule, drafts: dict[int, list[int]]) -> None:
        """Launch a step, and mark the tokens that it will draw.

        A mark takes the place of the token in the row's slot.
        """
        batch = self.packer.pack(schedule)
        self._in_flight.append((self.executor.launch(batch), schedule))
        self._ran.append(batch)
        self._computed[schedule.slots] = schedule.ends
        rows, ends = (each[schedule.samples] for each in (schedule.slots, schedule.ends))
        slots.tokens[rows, ends + self._ahead] = UNSEEN
        waits = self.waits or slots.needs_penalty[schedule.slots].any()
        self._finish(slots, drafts, leave=0 if waits else 1)

    def _finish(self, slots: Slots, drafts: dict[int, list[int]], leave: int = 0) -> None:
        """Wait for all steps in flight but ``leave``; write their tokens.

        The last ``leave`` steps stay in flight.
        """
        while len(self._in_flight) > leave:
            launched, schedule = self._in_flight.popleft()
            rows, ends = (each[schedule.samples].tolist() for each in (schedule.slots, schedule.ends))
            tokens = unmarked(launched.result().tokens)  # not finite: a guess like any other
            for slot, end, token in zip(rows, ends, tokens.tolist(), strict=True):
                self._drafted[slot, len(drafts[slot])] = token
                drafts[slot].append(token)
                slots.tokens[slot, end + self._ahead] = token
