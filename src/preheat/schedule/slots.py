"""Row slots: everything the step needs to know of a running sequence, in arrays indexed by its slot.

A step is a list of slots, so packing a batch is a handful of numpy gathers and its cost hardly grows with the rows.
Lengths use mini-sglang's words: ``cached_len`` tokens have their keys and values in the cache, ``device_len`` tokens
are known (prompt and output), ``extend_len = device_len - cached_len`` are to be computed and
``remain_len = max_len - device_len`` may still be generated.

All of them run ahead of the host by what is in flight: a token that the device is about to draw counts as known, and
is ``UNSEEN`` until its step is settled.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from preheat.core import Request

NO_LOGPROBS = -1
UNSEEN = -1
FEW_STOP_IDS = 4
NO_ID = -1

Index = int | slice | np.ndarray


class Slots:
    """The arrays, for ``num_slots`` sequences of at most ``max_len`` tokens in blocks of ``block_size``.

    Row r of ``block_table`` lists the physical block of each logical block of the sequence; unused entries are 0,
    the pad block. It is written by :meth:`set_blocks` alone, ``table_writes`` times so far: rows of one
    ``table_version``, whatever copy of the table they are in, are equal. ``tokens`` holds prompt and output.
    ``needs_*`` flags let a step ask in one reduction what its rows need of the sampler.
    """

    def __init__(self, num_slots: int, max_len: int, block_size: int) -> None:
        n = num_slots
        self.num_slots, self.max_model_len, self.block_size = num_slots, max_len, block_size
        self.max_blocks = -(-max_len // block_size)
        self.tokens = np.zeros((n, max_len), np.int32)
        self._blocks = np.zeros((n, self.max_blocks), np.int32)
        self.block_table = self._blocks.view()
        self.block_table.flags.writeable = False
        self.table_version = np.zeros(n, np.int64)  # 0 is a row that was never written
        self.table_writes = 0
        self.num_blocks = np.zeros(n, np.int32)
        self.cached_len = np.zeros(n, np.int32)
        self.device_len = np.zeros(n, np.int32)
        self.prompt_len = np.zeros(n, np.int32)
        self.max_len = np.zeros(n, np.int32)  # prompt_len + max_tokens
        self.min_len = np.zeros(n, np.int32)  # prompt_len + min_tokens: no stop id before
        self.temperature = np.zeros(n, np.float32)
        self.top_p = np.ones(n, np.float32)
        self.top_k = np.zeros(n, np.int32)  # 0 is off
        self.min_p = np.zeros(n, np.float32)
        self.presence_penalty = np.zeros(n, np.float32)
        self.frequency_penalty = np.zeros(n, np.float32)
        self.repetition_penalty = np.ones(n, np.float32)
        self.seed = np.zeros(n, np.uint64)
        self.choice = np.zeros(n, np.int32)
        self.logprobs = np.full(n, NO_LOGPROBS, np.int32)
        self.prompt_logprobs = np.full(n, NO_LOGPROBS, np.int32)
        self.needs_filter = np.zeros(n, bool)  # top_k, top_p or min_p
        self.needs_penalty = np.zeros(n, bool)
        self.needs_edit = np.zeros(n, bool)  # logit_bias, or stop ids banned until min_tokens
        self.stop_ids = np.full((FEW_STOP_IDS, n), NO_ID, np.int32)
        self.has_many_stop_ids = np.zeros(n, bool)  # what a column of stop_ids cannot hold is in the dictionary
        self.many_stop_ids: dict[int, frozenset[int]] = {}
        self.request: list[Request | None] = [None] * n
        self._free = list(range(n))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, request: Request, tokens: np.ndarray) -> int:
        """Give ``request`` the lowest free slot; ``tokens`` is its prompt plus what it generated so far."""
        slot = self._take(request, tokens)
        self.prompt_len[slot] = len(request.prompt)
        self.device_len[slot] = len(tokens)
        self.seed[slot] = request.seed
        self._describe(slot, request)
        return slot

    def take_alike(self, requests: Sequence[Request], tokens: Sequence[np.ndarray]) -> np.ndarray:
        """As :meth:`take`, for ``requests`` that differ in nothing but id, prompt and seed: their slots, int64."""
        pairs = zip(requests, tokens, strict=True)
        slots = np.array([self._take(request, known) for request, known in pairs], np.int64)
        if len(slots):
            self.prompt_len[slots] = [len(request.prompt) for request in requests]
            self.device_len[slots] = [len(known) for known in tokens]
            self.seed[slots] = np.array([request.seed for request in requests], np.uint64)
            self._describe(slots, requests[0])
        return slots

    def _take(self, request: Request, tokens: np.ndarray) -> int:
        slot = heapq.heappop(self._free)
        self.request[slot] = request
        self.tokens[slot, : len(tokens)] = tokens
        return slot

    def _describe(self, slot: int | np.ndarray, request: Request) -> None:
        """All that follows from what the request asks for and the length of its prompt, which is known."""
        params, prompt_len = request.params, self.prompt_len[slot]
        self.num_blocks[slot] = self.cached_len[slot] = 0
        self.max_len[slot] = prompt_len + request.max_tokens
        self.min_len[slot] = prompt_len + params.min_tokens
        self.temperature[slot] = params.temperature
        self.top_p[slot] = params.top_p
        self.top_k[slot] = max(params.top_k, 0)
        self.min_p[slot] = params.min_p
        self.presence_penalty[slot] = params.presence_penalty
        self.frequency_penalty[slot] = params.frequency_penalty
        self.repetition_penalty[slot] = params.repetition_penalty
        self.choice[slot] = request.choice
        self.logprobs[slot] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.prompt_logprobs[slot] = NO_LOGPROBS if params.prompt_logprobs is None else params.prompt_logprobs
        filtered = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        self.needs_filter[slot] = filtered and not params.greedy
        self.needs_penalty[slot] = (
            params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
        )
        self.needs_edit[slot] = bool(params.logit_bias) or (params.min_tokens > 0 and bool(request.stop_ids))
        self._take_stop_ids(slot, request.stop_ids)

    def set_blocks(self, slots: Index, columns: Index, blocks: int | list[int] | np.ndarray) -> None:
        """Write ``blocks`` into these entries of the block table, whose rows are ``slots``."""
        self._blocks[slots, columns] = blocks
        self.table_writes += 1
        self.table_version[slots] = self.table_writes

    def _take_stop_ids(self, slot: int | np.ndarray, stop_ids: list[int]) -> None:
        few = len(stop_ids) <= FEW_STOP_IDS and all(0 <= stop_id < 2**31 for stop_id in stop_ids)
        self.has_many_stop_ids[slot] = not few
        self.stop_ids[:, slot] = NO_ID
        if few:
            for row, stop_id in enumerate(stop_ids):
                self.stop_ids[row, slot] = stop_id
        else:
            self.many_stop_ids |= dict.fromkeys(np.atleast_1d(slot).tolist(), frozenset(stop_ids))

    def give_back(self, slot: int) -> None:
        """Free ``slot``; its blocks are the caller's to release."""
        self.request[slot] = None
        if self.num_blocks[slot]:
            self.set_blocks(slot, slice(self.num_blocks[slot]), 0)
            self.num_blocks[slot] = 0
        self.many_stop_ids.pop(slot, None)
        heapq.heappush(self._free, slot)
