"""Layout of a step's sampling settings, as one stretch of 32-bit words.

The stretch travels with the step's other input. It holds a header (the number of rows and of edits), one record a row
(:data:`preheat.backends.cuda.sampling.shared.ROW`), the edits (logit_bias and banned stop ids), and the drafts before
each row with penalties. Words behind the last draft or edit need not be copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from preheat.backends.cuda.sampling.shared import EDIT, HEADER, ROW
from preheat.configs.speculation import MAX_TOKENS
from preheat.core import MAX_LOGIT_BIAS, MAX_STOP_IDS
from preheat.ops.sampling import Edits, Penalties, SamplingInput
from preheat.ops.top_k_top_p import SamplingMetadata, furthest

EDITS_PER_ROW = MAX_LOGIT_BIAS + MAX_STOP_IDS
"""Edits of a row for all logit biases and banned ids allowed in a request."""


@dataclass(frozen=True, slots=True)
class SamplerLayout:
    """The layout for at most ``max_rows`` rows of ``vocab_size`` logits.

    Padding rows belong to slot ``pad_slot``. Before a row are at most ``max_drafts`` drafts.
    """

    max_rows: int
    vocab_size: int
    pad_slot: int
    max_drafts: int = MAX_TOKENS

    @property
    def max_edits(self) -> int:
        return self.max_rows * EDITS_PER_ROW

    @property
    def words(self) -> int:
        """The size of the stretch, in int32."""
        return self._edits_at + self.max_edits * EDIT + self.max_rows * self.max_drafts

    @property
    def _edits_at(self) -> int:
        return HEADER + self.max_rows * (ROW.itemsize // 4)

    def pack(self, host: np.ndarray, step: SamplingInput, slots: np.ndarray) -> int:
        """Fill ``host`` int32 [words] for ``step``; return the number of words in use.

        The rows are the sequences in ``slots`` [step.size]. Raises ValueError if there are more edits than room.
        """
        words = host[HEADER : self._edits_at].reshape(-1, len(_NOTHING))
        words[:] = _NOTHING
        words[:, 0] = self.pad_slot
        words[: step.size, 0] = slots
        records = words.view(ROW)[:, 0]
        if random := step.random:
            rows = random.rows
            for name in ("temperature", "seed", "position", "choice", "top_p"):
                records[name][rows] = getattr(random, name)
            if random.top_k.any():
                records["top_k"][rows] = np.where(random.cut_by_k(self.vocab_size), random.top_k, 0)
            if random.min_p.any():
                records["furthest"][rows] = furthest(random.min_p)
        if penalties := step.penalties:
            for name in ("repetition", "frequency", "presence"):
                records[name][penalties.rows] = getattr(penalties, name)
            records["final"][penalties.rows] = penalties.final
        if step.masked is not None:
            records["masked"][step.masked] = 1
        count = self._pack_edits(host[self._edits_at :], step.edits) if step.edits else 0
        host[:HEADER] = step.size, count, 0, 0
        used = self._edits_at + count * EDIT
        return self._pack_drafts(host, records, used, step.penalties) if step.penalties else used

    def advance(self, host: np.ndarray, random: SamplingMetadata) -> None:
        """Update ``host`` to the positions in ``random``; the rows are the same."""
        records = host[HEADER : self._edits_at].view(ROW)
        records["position"][random.rows] = random.position

    def _pack_drafts(self, host: np.ndarray, records: np.ndarray, at: int, penalties: Penalties) -> int:
        """Write the drafts before each row from the word ``at`` on; return the word after the last."""
        for row, drafts in zip(penalties.rows.tolist(), penalties.drafts, strict=True):
            if len(drafts):
                records[row]["drafts"], records[row]["drafted"] = at, len(drafts)
                host[at : at + len(drafts)] = drafts
                at += len(drafts)
        return at

    def _pack_edits(self, host: np.ndarray, edits: Edits) -> int:
        """Write all edits; return their number."""
        count = len(edits.rows)
        if count > self.max_edits:
            raise ValueError(f"a step has {count} biases and banned ids; {self.max_edits} fit")
        entries = host[: count * EDIT].reshape(count, EDIT)
        entries[:, 0] = edits.rows
        entries[:, 1] = np.clip(edits.ids, -1, self.vocab_size)  # an id outside of the vocabulary stays outside
        entries[:, 2] = edits.change.view(np.int32)
        return count


def _nothing() -> np.ndarray:
    """Return the record, int32, of a row without any settings."""
    record = np.zeros(1, ROW)
    record["top_p"] = record["repetition"] = 1
    record["furthest"] = np.finfo(np.float32).max
    return record.view(np.int32)


_NOTHING = _nothing()
