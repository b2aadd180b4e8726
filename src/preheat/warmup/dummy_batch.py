"""Feed: an item of the plan becomes ordinary work, which then takes the path of every request's work.

Before ready all slots are free, so the feed borrows real ones. Their block tables stay empty, that is, they name the
pad block, which nobody reads: keys and values go where padding goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from preheat.core import OWN_ID, Request, SamplingParams, Schedule
from preheat.limits import Limits
from preheat.plan.buckets import StepSize
from preheat.schedule.slots import Slots

PROMPT_TOKENS = 10
"""Placeholder tokens that a sampled row pretends to have read (source: the sampler warm-up of vLLM on Gaudi)."""

GREEDY = SamplingParams(temperature=0.0)


class Row(NamedTuple):
    """A row of dummy work: ``extend`` tokens to compute after ``cached`` ones; it may still be ``decoding``."""

    cached: int
    extend: int
    decoding: bool = False


def rows_of(need: StepSize, limits: Limits) -> list[Row]:
    """Rows that make a step of exactly ``need``."""
    if need.phase == "decode":
        return [Row(length - 1, 1, decoding=True) for length in _contexts(need, limits)]
    if need.phase == "prompt":
        return [Row(0, need.longest), *(Row(0, n) for n in _shares(need.tokens - need.longest, need.rows - 1))]
    longest = limits.max_model_len
    room = (need.rows * longest - need.tokens) // max(longest - 1, 1)  # rows that may do with one token
    decoding = min((need.rows - 1) // 2, room)  # a mixed step is one: about half of its rows decode
    prompts = _shares(need.tokens - decoding, need.rows - decoding)
    return [Row(0, 1, decoding=True)] * decoding + [Row(0, count) for count in prompts]


def _contexts(need: StepSize, limits: Limits) -> list[int]:
    """The context of each decoding row, in tokens: what fills ``need.blocks``, or one row of ``need.longest``."""
    if need.longest:
        return [need.longest] + [1] * (need.rows - 1)
    blocks = _shares(need.blocks, need.rows) if need.blocks else [1] * need.rows
    return [min(count * limits.block_size, limits.max_model_len) for count in blocks]


def _shares(total: int, parts: int) -> list[int]:
    """``total`` in ``parts`` of nearly the same size, the larger ones first."""
    return [total // parts + (i < total % parts) for i in range(parts)] if parts else []


class DummyBatches:
    """Lends slots to dummy rows. ``vocab_size`` bounds their tokens."""

    def __init__(self, slots: Slots, limits: Limits, vocab_size: int) -> None:
        self._slots, self._limits = slots, limits
        self._tokens = np.arange(limits.max_model_len + limits.max_num_seqs, dtype=np.int32) % vocab_size

    @contextmanager
    def work(self, rows: Sequence[Row], params: SamplingParams = GREEDY) -> Iterator[Schedule]:
        """A step of ``rows``, the decoding ones first, every one of which samples; the slots are given back after."""
        slots = self._slots
        first, extend = np.array([(row.cached, row.extend) for row in rows], np.int32).reshape(-1, 2).T
        known = [self._tokens[number : number + row.cached + row.extend] for number, row in enumerate(rows)]
        room = self._limits.max_model_len - max((len(tokens) for tokens in known), default=0)
        requests = [self._request(number, row, known[number], params, room) for number, row in enumerate(rows)]
        taken = slots.take_alike(requests, known)
        slots.cached_len[taken] = first
        slots.num_blocks[taken] = -(-(first + extend) // slots.block_size)
        decoding = sum(row.decoding for row in rows)
        try:
            yield Schedule(taken, first, extend, np.ones(len(rows), np.int32), decoding)
        finally:
            slots.num_blocks[taken] = 0  # none was ever written to the table
            for slot in taken.tolist():
                slots.give_back(slot)

    def sampled(self, rows: int, params: SamplingParams) -> list[Row]:
        """Rows to sample from: they decode, unless ``params`` ask about a prompt, which then takes their place."""
        if params.prompt_logprobs is None:
            return [Row(PROMPT_TOKENS, 1, decoding=True)] * rows
        return [Row(0, rows + 1)] if 0 < rows < self._limits.max_model_len else []

    def _request(self, number: int, row: Row, tokens: np.ndarray, params: SamplingParams, room: int) -> Request:
        """One whose id no client's can be, and whose prompt ends where ``row`` does; all have ``room`` to go on."""
        prompt = tokens[: row.cached] if row.decoding and row.cached else tokens
        return Request(
            id=OWN_ID - number,
            prompt=prompt.tolist(),
            params=params,
            seed=number if params.seed is None else params.seed,
            max_tokens=room,
            stop_ids=params.stop_token_ids or [],
        )
