"""What the sampler must know of a step's rows: only as much as the most demanding row needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from preheat.core import Request
from preheat.ops.top_k_top_p import SamplingMetadata
from preheat.plan.programs import Level
from preheat.schedule.slots import Slots


@dataclass(slots=True)
class PenaltyRows:
    """The rows with penalties. All are [n] long.

    ``tokens[i]`` is the row's prompt (its first ``prompt_len[i]`` tokens) and output; ``owner`` is the request's id, by
    which kept counts are known to be its own.
    """

    rows: np.ndarray  # int64, places in the step
    slots: np.ndarray  # int64
    owner: np.ndarray  # int64
    prompt_len: np.ndarray  # int64
    tokens: list[np.ndarray]  # int32 each
    repetition: np.ndarray  # float32
    frequency: np.ndarray  # float32
    presence: np.ndarray  # float32

    @classmethod
    def build(cls, slots: Slots, chosen: np.ndarray, rows: np.ndarray, position: np.ndarray) -> Self:
        """For the slots ``chosen``, at places ``rows`` of the step, which draw the tokens at ``position`` [n]."""
        return cls(
            rows=rows,
            slots=chosen.astype(np.int64),
            owner=np.array([_request(slots, slot).id for slot in chosen.tolist()], np.int64),
            prompt_len=slots.prompt_len[chosen].astype(np.int64),
            tokens=[slots.tokens[slot, :end] for slot, end in zip(chosen, position, strict=True)],
            repetition=slots.repetition_penalty[chosen],
            frequency=slots.frequency_penalty[chosen],
            presence=slots.presence_penalty[chosen],
        )


@dataclass(slots=True)
class LogitEdits:
    """``bias`` to add to the logit of ``bias_id`` in ``bias_row``, and stop ids that may not be drawn yet."""

    bias_row: np.ndarray  # int64 [biases]
    bias_id: np.ndarray  # int64 [biases]
    bias: np.ndarray  # float32 [biases]
    ban_row: np.ndarray  # int64 [bans]
    ban_id: np.ndarray  # int64 [bans]

    @classmethod
    def build(cls, slots: Slots, chosen: np.ndarray, rows: np.ndarray, position: np.ndarray) -> Self | None:
        """For the slots ``chosen``, at places ``rows`` of the step, which draw the tokens at ``position`` [n].

        None if there is nothing (any more) to edit.
        """
        biases: list[tuple[int, int, float]] = []
        bans: list[tuple[int, int]] = []
        for row, slot, end in zip(rows.tolist(), chosen.tolist(), position.tolist(), strict=True):
            request = _request(slots, slot)
            biases += [(row, token, bias) for token, bias in (request.params.logit_bias or {}).items()]
            if end < slots.min_len[slot]:
                bans += [(row, token) for token in request.stop_ids]
        if not biases and not bans:
            return None
        where = np.array([entry[:2] for entry in biases], np.int64).reshape(-1, 2)
        banned = np.array(bans, np.int64).reshape(-1, 2)
        bias = np.array([entry[2] for entry in biases], np.float32)
        return cls(where[:, 0], where[:, 1], bias, banned[:, 0], banned[:, 1])


@dataclass(slots=True)
class SamplingBatch:
    """One step's sampling: ``size`` rows, each with one line of logits. A part that no row needs is None."""

    size: int
    random: SamplingMetadata | None
    penalties: PenaltyRows | None
    edits: LogitEdits | None

    @property
    def level(self) -> Level:
        if self.penalties or self.edits:
            return Level.FULL
        return Level.FILTERED if self.random else Level.GREEDY

    def later(self, steps: int) -> Self | None:
        """The sampling of the same rows, so many ``steps`` later; None where more than positions may change."""
        if not steps:
            return self
        if self.penalties or self.edits:
            return None
        if self.random is None:
            return self
        return type(self)(self.size, self.random.later(steps), None, None)

    def continues(self, other: SamplingBatch) -> bool:
        """Whether nothing but positions can differ from ``other``."""
        one, two = self.random, other.random
        return one is not None and two is not None and one.rows is two.rows and not (self.edits or self.penalties)

    @classmethod
    def build(cls, slots: Slots, rows: np.ndarray, position: np.ndarray | None = None) -> Self:
        """For the slots ``rows`` (integers [size]), in the order of the step's logits.

        Each draws its sequence's token at ``position`` (integers [size]), by default the one after all that are known.
        """
        position = slots.device_len[rows] if position is None else position
        random = (slots.temperature[rows] > 0).nonzero()[0]
        penalised = slots.needs_penalty[rows].nonzero()[0]
        edited = slots.needs_edit[rows].nonzero()[0]
        return cls(
            size=len(rows),
            random=_random_rows(slots, rows[random], random, position[random]) if len(random) else None,
            penalties=PenaltyRows.build(slots, rows[penalised], penalised, position[penalised])
            if len(penalised)
            else None,
            edits=LogitEdits.build(slots, rows[edited], edited, position[edited]) if len(edited) else None,
        )


def _request(slots: Slots, slot: int) -> Request:
    request = slots.request[slot]
    if request is None:
        raise ValueError(f"slot {slot} is free; only running sequences can be sampled")
    return request


def _random_rows(slots: Slots, chosen: np.ndarray, rows: np.ndarray, position: np.ndarray) -> SamplingMetadata:
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
