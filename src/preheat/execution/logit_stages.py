"""The host part of sampling: requests of running rows become a SamplingInput.

See :class:`~preheat.ops.sampling.SamplingInput`. A logit stage is one way for a request to change its logits before a
token is drawn. To add one, add a class to :data:`STAGES`: it selects its rows and makes their edits. Every backend has
its own kernel that applies edits; the kernel does not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from preheat.core import Request
from preheat.ops.sampling import Edits, Penalties, SamplingInput
from preheat.ops.top_k_top_p import SamplingMetadata
from preheat.schedule.slots import Slots

Edit = tuple[int, float]
"""A token id, and an addition to its logit.

Minus infinity bans the token.
"""


class LogitStage(Protocol):
    """A maker of edits; ``name`` is the sampling field or feature."""

    name: str

    def needed(self, slots: Slots, rows: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Return bool [n]: whether slots have edits now or later.

        ``rows`` [n] are the slots. The slots are about to draw the tokens at ``position`` [n]. While any row has edits,
        the stages are asked at every step. Once no row has any, they are asked again only after the step's rows change.
        """

    def edits(self, request: Request, length: int, min_length: int) -> Iterable[Edit]:
        """Return the edits for the next token of a sequence.

        The sequence has ``length`` tokens and must reach ``min_length``.
        """


class LogitBias:
    """``logit_bias``: additions to the logits of the tokens that it names."""

    name = "logit_bias"

    def needed(self, slots: Slots, rows: np.ndarray, position: np.ndarray) -> np.ndarray:
        needed: np.ndarray = slots.has_logit_bias[rows]
        return needed

    def edits(self, request: Request, length: int, min_length: int) -> Iterable[Edit]:
        return (request.params.logit_bias or {}).items()


class MinTokens:
    """``min_tokens``: until then no stop id can be drawn."""

    name = "min_tokens"

    def needed(self, slots: Slots, rows: np.ndarray, position: np.ndarray) -> np.ndarray:
        needed: np.ndarray = slots.bans_stop_ids[rows] & (position < slots.min_len[rows])
        return needed

    def edits(self, request: Request, length: int, min_length: int) -> Iterable[Edit]:
        return [(token, -np.inf) for token in request.stop_ids] if length < min_length else ()


STAGES: tuple[LogitStage, ...] = (LogitBias(), MinTokens())


def sampling_input(
    slots: Slots, rows: np.ndarray, position: np.ndarray | None = None, stages: Sequence[LogitStage] = STAGES
) -> SamplingInput:
    """Return the sampling input of the slots ``rows`` (integers [size]).

    It has the order of the step's logits. Each row draws its sequence's token at ``position`` (integers [size]), by
    default the one after all known tokens, always final. In a booked step lengths have already moved: drafts, and
    tokens drawn after them, are beyond these lengths.
    """
    booked, position = position, slots.device_len[rows] if position is None else position
    random = (slots.temperature[rows] > 0).nonzero()[0]
    penalised = slots.needs_penalty[rows].nonzero()[0]
    masked = slots.has_grammar[rows].nonzero()[0]
    penalties = _penalties(slots, rows[penalised], penalised, position[penalised]) if len(penalised) else None
    if penalties is not None and booked is not None:
        penalties.final = _final(slots, rows, booked)[penalised]
    asking = slots.has_logprob_ids[rows].nonzero()[0].tolist()
    needs = [(stage, needed) for stage in stages if (needed := stage.needed(slots, rows, position)).any()]
    return SamplingInput(
        size=len(rows),
        random=_metadata(slots, rows[random], random, position[random]) if len(random) else None,
        penalties=penalties,
        edits=_edits(slots, rows, position, needs),
        edits_follow=bool(needs),
        masked=masked if len(masked) else None,
        logprob_ids={row: _request(slots, int(rows[row])).params.logprob_token_ids or [] for row in asking} or None,
        digested=bool(slots.has_receipt[rows].any()),
    )


def _edits(
    slots: Slots, rows: np.ndarray, position: np.ndarray, needs: Sequence[tuple[LogitStage, np.ndarray]]
) -> Edits | None:
    found: list[tuple[int, int, float]] = []
    for stage, needed in needs:
        for row in needed.nonzero()[0].tolist():
            slot = int(rows[row])
            edits = stage.edits(_request(slots, slot), int(position[row]), int(slots.min_len[slot]))
            found += [(row, token, change) for token, change in edits]
    return Edits.of(found)


def _penalties(slots: Slots, chosen: np.ndarray, rows: np.ndarray, position: np.ndarray) -> Penalties:
    """Return the penalties of the slots ``chosen``.

    Tokens are known up to the first position that a sequence draws, and no further than its length: a draft model draws
    beyond that.
    """
    first = np.full(slots.num_slots, slots.max_model_len, np.int64)
    np.minimum.at(first, chosen, np.minimum(position, slots.device_len[chosen]))
    return Penalties(
        rows=rows,
        slots=chosen.astype(np.int64),
        owner=np.array([_request(slots, slot).id for slot in chosen.tolist()], np.int64),
        prompt_len=slots.prompt_len[chosen].astype(np.int64),
        tokens=[slots.tokens[slot, :end] for slot, end in zip(chosen, position, strict=True)],
        known=first[chosen],
        repetition=slots.repetition_penalty[chosen],
        frequency=slots.frequency_penalty[chosen],
        presence=slots.presence_penalty[chosen],
    )


def _final(slots: Slots, rows: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Return bool [n]: whether a row's new token is final.

    A final token cannot be taken back. This holds for sequences without drafts in the step if their length already
    counts the drawn token.
    """
    last = np.zeros(slots.num_slots, np.int64)
    np.maximum.at(last, rows, position)
    final: np.ndarray = last[rows] < slots.device_len[rows]
    return final


def _metadata(slots: Slots, chosen: np.ndarray, rows: np.ndarray, position: np.ndarray) -> SamplingMetadata:
    return SamplingMetadata(
        rows=rows,
        temperature=slots.temperature[chosen],
        top_p=slots.top_p[chosen],
        top_k=slots.top_k[chosen],
        min_p=slots.min_p[chosen],
        seed=slots.seed[chosen],
        position=position - slots.prompt_len[chosen],
        choice=slots.choice[chosen],
    )


def _request(slots: Slots, slot: int) -> Request:
    request = slots.request[slot]
    if request is None:
        raise ValueError(f"slot {slot} is free; only running sequences can be sampled")
    return request
