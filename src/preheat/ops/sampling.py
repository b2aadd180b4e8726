"""Input of the sampler for the rows of one step.

No torch here. It holds only as much as the most demanding row needs.

Order of the stages: penalties, masks, edits (logit_bias, then bans), temperature, min_p, top_k, top_p, then Gumbel-max.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import numpy as np

from preheat.core import Level
from preheat.ops.top_k_top_p import SamplingMetadata


@dataclass(slots=True)
class Penalties:
    """The rows with penalties; all arrays are [n].

    ``tokens[i]`` is the row's prompt (its first ``prompt_len[i]`` tokens) and output. ``owner`` is the request's id: a
    slot's token counts are kept from step to step and belong to one owner. Tokens after the first ``known[i]`` are
    drafts: they may be taken back and count in this row alone. ``final``: the drawn token is certainly its sequence's
    next token, so it can be counted before the host knows it. Without ``final`` the drawn token may be taken back.
    """

    rows: np.ndarray  # int64, index of the row in the step
    slots: np.ndarray  # int64
    owner: np.ndarray  # int64
    prompt_len: np.ndarray  # int64
    tokens: list[np.ndarray]  # int32 each
    repetition: np.ndarray  # float32
    frequency: np.ndarray  # float32
    presence: np.ndarray  # float32
    known: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # int64; default: all tokens are known
    final: np.ndarray = field(default_factory=lambda: np.empty(0, bool))  # default: all rows are final

    def __post_init__(self) -> None:
        if len(self.known) < len(self.rows):
            self.known = np.array([len(tokens) for tokens in self.tokens], np.int64)
        if len(self.final) < len(self.rows):
            self.final = np.ones(len(self.rows), bool)

    @property
    def drafts(self) -> list[np.ndarray]:
        """Drafts of each row, int32 each: the tokens after its known ones."""
        return [tokens[known:] for tokens, known in zip(self.tokens, self.known.tolist(), strict=True)]


@dataclass(slots=True)
class Edits:
    """Additions to single logits: ``change[i]`` to token ``ids[i]`` in row ``rows[i]``.

    Minus infinity bans the token. No (row, id) occurs twice. An id outside the vocabulary is skipped.
    """

    rows: np.ndarray  # int64 [edits]
    ids: np.ndarray  # int64 [edits]
    change: np.ndarray  # float32 [edits]

    @classmethod
    def of(cls, entries: list[tuple[int, int, float]]) -> Self | None:
        """Build edits from (row, id, change) in any order; None without an entry.

        Changes of one token are added up, so a ban beats all other changes.
        """
        if not entries:
            return None
        merged: dict[tuple[int, int], float] = {}
        for row, token, change in entries:
            merged[row, token] = merged.get((row, token), 0.0) + change
        rows, ids = np.array(list(merged), np.int64).T
        return cls(rows, ids, np.array(list(merged.values()), np.float32))


def words_of(vocab_size: int) -> int:
    """Return the number of int32 words of a row's mask.

    Bit i % 32 of word i // 32 allows token i.
    """
    return -(-vocab_size // 32)


def allowed(mask: np.ndarray, vocab: int) -> np.ndarray:
    """Unpack a mask int32 [words] to bool [vocab]: whether each token is allowed."""
    return np.unpackbits(mask.view(np.uint8), count=vocab, bitorder="little").view(bool)


@dataclass(slots=True)
class SamplingInput:
    """Sampling input of one step.

    It has ``size`` rows, each with one line of logits. A part that no row needs is None. ``logprob_ids`` maps a row to
    tokens. The row's answer has the log-probabilities of these tokens in place of the most likely tokens'.
    ``edits_follow``: the same rows may have other edits at the next step. ``masked`` are the indices of rows with a
    grammar. Their masks (:mod:`preheat.grammar.state`) come separately, because they may not be known yet.
    ``digested``: a row wants the digest of its raw logits (:mod:`preheat.ops.digest`).
    """

    size: int
    random: SamplingMetadata | None
    penalties: Penalties | None
    edits: Edits | None
    edits_follow: bool = False
    masked: np.ndarray | None = None  # int64
    logprob_ids: dict[int, list[int]] | None = None
    digested: bool = False

    @property
    def level(self) -> Level:
        if self.penalties or self.edits or self.masked is not None:
            return Level.FULL
        return Level.FILTERED if self.random else Level.GREEDY

    def logprob_ids_of(self, rows: np.ndarray) -> list[list[int]]:
        """Return the ``logprob_ids`` of each of ``rows``."""
        ids = self.logprob_ids or {}
        return [ids.get(row, []) for row in rows.tolist()]

    def later(self, steps: int) -> Self | None:
        """Return the input for the same rows ``steps`` later.

        None where more than positions may change.
        """
        if not steps:
            return self
        if self.penalties or self.edits_follow:
            return None
        if self.random is None:
            return self
        return type(self)(
            self.size, self.random.later(steps), None, None, masked=self.masked, logprob_ids=self.logprob_ids,
            digested=self.digested,
        )  # fmt: skip

    def continues(self, other: SamplingInput) -> bool:
        """Whether only positions can differ from ``other``."""
        one, two = self.random, other.random
        return one is not None and two is not None and one.rows is two.rows and not (self.edits or self.penalties)
