"""Dummy batches: rows of dummy requests that make a step of a given size.

Before ready all slots are free, so dummy rows borrow real ones. Their block tables stay empty, so their keys and values
go to the pad block, which is never read.
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
"""Prompt tokens of a sampled row (source: the sampler warm-up of vLLM on Gaudi)."""

GREEDY = SamplingParams(temperature=0.0)


class DummyRow(NamedTuple):
    """A row of a dummy batch: ``extend`` tokens to compute after ``cached`` ones.

    A ``decoding`` row has one token to compute. The last ``sampled`` of its tokens are sampled. ``drafted`` marks the
    rows with drafts; they come last.
    """

    cached: int
    extend: int
    decoding: bool = False
    sampled: int = 1
    drafted: bool = False


def rows_of(size: StepSize, limits: Limits) -> list[DummyRow]:
    """Return rows that make a step of exactly ``size``."""
    if size.phase == "decode":
        return [DummyRow(length - 1, 1, decoding=True) for length in _contexts(size, limits)]
    if size.phase == "prompt":
        others = _shares(size.tokens - size.longest, size.rows - 1)
        return [DummyRow(0, count) for count in (size.longest, *others)]
    if size.phase == "verify":
        shares = reversed(_shares(size.tokens, size.rows))
        return [DummyRow(1, count, count == 1, count, drafted=count > 1) for count in shares]
    longest = limits.max_model_len
    room = (size.rows * longest - size.tokens) // max(longest - 1, 1)  # rows that can have a single token
    decoding = min((size.rows - 1) // 2, room)  # about half of a mixed step's rows decode
    prompts = _shares(size.tokens - decoding, size.rows - decoding)
    return [DummyRow(0, 1, decoding=True)] * decoding + [DummyRow(0, count) for count in prompts]


def _contexts(size: StepSize, limits: Limits) -> list[int]:
    """Return each decoding row's context in tokens.

    One row has ``size.longest``, or all rows together have ``size.blocks`` blocks.
    """
    if size.longest:
        return [size.longest] + [1] * (size.rows - 1)
    blocks = _shares(size.blocks, size.rows) if size.blocks else [1] * size.rows
    return [min(count * limits.block_size, limits.max_model_len) for count in blocks]


def _shares(total: int, parts: int) -> list[int]:
    """Return ``total`` split into ``parts`` of nearly the same size, the larger ones first."""
    return [total // parts + (i < total % parts) for i in range(parts)] if parts else []


class DummyBatches:
    """Lends slots to dummy rows with tokens below ``vocab_size``."""

    def __init__(self, slots: Slots, limits: Limits, vocab_size: int) -> None:
        self._slots, self._limits = slots, limits
        self._tokens = np.arange(limits.max_model_len + limits.max_num_seqs, dtype=np.int32) % vocab_size

    @contextmanager
    def work(
        self, rows: Sequence[DummyRow], params: SamplingParams = GREEDY, *, adapter_slots: int = 0
    ) -> Iterator[Schedule]:
        """Yield a step of ``rows`` in borrowed slots, and give the slots back.

        ``rows`` are the decoding ones first, then in order of ``sampled``. They use the adapters of
        ``adapter_slots`` slots in turn.
        """
        slots = self._slots
        first, extend = np.array([(row.cached, row.extend) for row in rows], np.int32).reshape(-1, 2).T
        known = [self._tokens[number : number + row.cached + row.extend] for number, row in enumerate(rows)]
        room = self._limits.max_model_len - max((len(tokens) for tokens in known), default=0)
        requests = [self._request(number, row, known[number], params, room) for number, row in enumerate(rows)]
        taken = slots.take_alike(requests, known)
        slots.cached_len[taken] = first
        if adapter_slots:
            slots.adapter[taken] = np.arange(len(taken)) % adapter_slots
        slots.num_blocks[taken] = -(-(first + extend) // slots.block_size)
        decoding = sum(row.decoding for row in rows)
        try:
            sampled, drafted = np.array([row.sampled for row in rows], np.int32), sum(row.drafted for row in rows)
            yield Schedule(taken, first, extend, sampled, decoding, num_drafted=drafted)
        finally:
            slots.num_blocks[taken] = 0  # none was ever written to the table
            for slot in taken.tolist():
                slots.give_back(slot)

    def sampled(self, rows: int, params: SamplingParams) -> list[DummyRow]:
        """Return the rows from which ``rows`` positions are sampled.

        They decode, with drafts if there are more positions than rows of a step. If ``params`` ask for prompt logprobs,
        there is one prompt instead.
        """
        limits = self._limits
        if limits.pools and (params.prompt_logprobs is not None or rows > limits.max_rows):
            return self._texts(rows) if params.prompt_logprobs is not None else []
        if params.prompt_logprobs is not None:
            return (
                [DummyRow(0, rows + 1)] if 0 < rows < min(limits.max_model_len, limits.max_num_batched_tokens) else []
            )
        if rows <= limits.max_rows:
            return [DummyRow(PROMPT_TOKENS, 1, decoding=True)] * rows
        cached = min(PROMPT_TOKENS, limits.max_model_len - limits.num_speculative_tokens - 1)
        shares = reversed(_shares(rows, limits.max_rows))
        return [DummyRow(cached, count, count == 1, count) for count in shares]

    def _texts(self, tokens: int) -> list[DummyRow]:
        """Return whole texts of ``tokens`` tokens together."""
        longest = self._limits.max_model_len - self._limits.spare
        return [DummyRow(0, count, count == 1) for count in reversed(_shares(tokens, -(-tokens // longest)))]

    def _request(self, number: int, row: DummyRow, tokens: np.ndarray, params: SamplingParams, room: int) -> Request:
        """Return a request with an id no client has.

        ``row`` is its last step and ``room`` tokens may follow.
        """
        prompt = tokens[: row.cached] if (row.decoding or row.sampled > 1) and row.cached else tokens
        return Request(
            id=OWN_ID - number,
            prompt=prompt.tolist(),
            params=params,
            seed=number if params.seed is None else params.seed,
            max_tokens=room,
            stop_ids=params.stop_token_ids or [],
        )
