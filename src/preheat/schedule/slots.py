"""Slots: the arrays of the running sequences.

They hold everything that a step needs to know about a sequence, indexed by its slot. A step is a list of slots, so
packing a batch is a few numpy gathers; their cost hardly grows with the rows.

Lengths have mini-sglang's names. ``cached_len`` tokens have their keys and values in the cache, and ``device_len``
tokens are known. ``extend_len = device_len - cached_len`` tokens are to be computed.
``remain_len = max_len - device_len`` tokens may be generated. Lengths are ahead by the steps in flight: a token that
the device is about to sample counts as known. It is ``UNSEEN`` until the step's results are processed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import numpy as np

from preheat.core import Request, SamplingParams
from preheat.schedule.grammar import GrammarState
from preheat.schedule.turns import places_of

NO_LOGPROBS = -1
UNSEEN = -1
FEW_STOP_IDS = 4
NO_ID = -1
NO_ADAPTER = -1

Index = int | slice | np.ndarray


class _Field(NamedTuple):
    dtype: type[np.generic]
    of: Callable[[Request], float]


def _field(dtype: type[np.generic], of: Callable[[Request], float]) -> np.ndarray:
    return cast("np.ndarray", _Field(dtype, of))  # stands for the array that SamplingFields makes of it


def _param(dtype: type[np.generic], of: Callable[[SamplingParams], float | None]) -> np.ndarray:
    return _field(dtype, lambda request: NO_LOGPROBS if (value := of(request.params)) is None else value)


def _has_penalty(params: SamplingParams) -> bool:
    return params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1


class SamplingFields:
    """The sampling parameters of each slot's request.

    Each field is one array [slots] of the given type. ``needs_*`` let a step find the rows with special sampling in one
    reduction. Free slots have default values, or the values of their last request.
    """

    temperature = _param(np.float32, lambda params: params.temperature)
    top_p = _param(np.float32, lambda params: params.top_p)
    top_k = _param(np.int32, lambda params: max(params.top_k, 0))  # 0 is off
    min_p = _param(np.float32, lambda params: params.min_p)
    presence_penalty = _param(np.float32, lambda params: params.presence_penalty)
    frequency_penalty = _param(np.float32, lambda params: params.frequency_penalty)
    repetition_penalty = _param(np.float32, lambda params: params.repetition_penalty)
    choice = _field(np.int32, lambda request: request.choice)
    logprobs = _param(np.int32, lambda params: params.logprobs)  # NO_LOGPROBS: none are wanted
    prompt_logprobs = _param(np.int32, lambda params: params.prompt_logprobs)
    needs_penalty = _param(np.bool_, _has_penalty)
    has_receipt = _param(np.bool_, lambda params: params.receipt)
    has_logit_bias = _param(np.bool_, lambda params: bool(params.logit_bias))
    has_logprob_ids = _param(np.bool_, lambda params: bool(params.logprob_token_ids))
    has_grammar = _param(np.bool_, lambda params: bool(params.masked))
    bans_stop_ids = _field(np.bool_, lambda request: bool(request.params.min_tokens and request.stop_ids))

    def __init__(self, num_slots: int) -> None:
        nothing = Request(0, [], SamplingParams(temperature=0.0), seed=0, max_tokens=1)
        for name, (dtype, of) in FIELDS.items():
            setattr(self, name, np.full(num_slots, of(nothing), dtype))

    def describe(self, slots: Index, request: Request) -> None:
        """Fill in the fields of one slot, or of several.

        The requests of several slots differ in nothing here.
        """
        for name, field in FIELDS.items():
            getattr(self, name)[slots] = field.of(request)


FIELDS: dict[str, _Field] = {name: field for name, field in vars(SamplingFields).items() if isinstance(field, _Field)}


class Slots(SamplingFields):
    """The arrays of ``num_slots`` sequences of at most ``max_len`` tokens in blocks of ``block_size``.

    ``tokens`` are prompt and output. ``tables`` [slots, groups, columns] list the physical blocks of sequences for each
    of ``groups`` groups of layers; ``block_table`` are the first group's. Entries that are unused, or given back, are
    0, the pad block: a group has blocks in the columns from ``live_from`` to ``num_blocks`` - 1. Only
    :meth:`set_blocks` and :meth:`move_blocks` write tables, and count ``table_writes``: rows of any copy of the tables
    with the same ``table_version`` are equal.
    """

    def __init__(self, num_slots: int, max_len: int, block_size: int, groups: int = 1) -> None:
        super().__init__(num_slots)
        n = num_slots
        self.num_slots, self.max_model_len, self.block_size = num_slots, max_len, block_size
        self.max_blocks = -(-max_len // block_size)
        self.tokens = np.zeros((n, max_len), np.int32)
        self._blocks = np.zeros((n, groups, self.max_blocks), np.int32)
        self.tables = self._blocks.view()
        self.tables.flags.writeable = False
        self.block_table = self.tables[:, 0]
        self.table_version = np.zeros(n, np.int64)  # 0: the row was never written
        self.table_writes = 0
        self.num_blocks = np.zeros(n, np.int32)
        self.live_from = np.zeros((n, groups), np.int32)
        self.cached_len = np.zeros(n, np.int32)
        self.device_len = np.zeros(n, np.int32)
        self.prompt_len = np.zeros(n, np.int32)
        self.max_len = np.zeros(n, np.int32)  # prompt_len + max_tokens
        self.image_end = np.zeros(n, np.int32)  # the end of the prompt's last image
        self.shift = np.zeros(n, np.int32)  # behind it: a token's place less its position, see schedule.turns
        self.places: dict[int, np.ndarray] = {}  # before it, by slot: slots without places of their own are left out
        self.adapter = np.full(n, NO_ADAPTER, np.int32)  # the adapter slot
        self.min_len = np.zeros(n, np.int32)  # prompt_len + min_tokens: no stop id before
        self.seed = np.zeros(n, np.uint64)
        self.stop_ids = np.full((FEW_STOP_IDS, n), NO_ID, np.int32)
        self.has_many_stop_ids = np.zeros(n, bool)  # they do not fit stop_ids: see many_stop_ids
        self.many_stop_ids: dict[int, frozenset[int]] = {}
        self.grammars: dict[int, GrammarState] = {}  # by slot; slots without a grammar are left out
        self.request: list[Request | None] = [None] * n
        self.tenure = np.zeros(n, np.int64)  # how often the slot was taken
        self._free = list(range(n))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, request: Request, tokens: np.ndarray) -> int:
        """Give ``request`` the lowest free slot.

        ``tokens`` is its prompt plus its output so far.
        """
        slot = self._take(request, tokens)
        self.prompt_len[slot] = len(request.prompt)
        self.device_len[slot] = len(tokens)
        self.seed[slot] = request.seed
        self._describe(slot, request)
        return slot

    def take_alike(self, requests: Sequence[Request], tokens: Sequence[np.ndarray]) -> np.ndarray:
        """Take slots for ``requests`` as :meth:`take`, and return them.

        The requests differ only in id, prompt and seed. Slots are int64.
        """
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
        self.tenure[slot] += 1
        self.tokens[slot, : len(tokens)] = tokens
        return slot

    def _describe(self, slot: int | np.ndarray, request: Request) -> None:
        """Set everything that follows from the request's parameters and ``prompt_len``."""
        self.num_blocks[slot] = self.cached_len[slot] = self.live_from[slot] = 0
        self.adapter[slot] = NO_ADAPTER
        self.max_len[slot] = self.prompt_len[slot] + request.max_tokens
        self.image_end[slot] = request.segments[-1].end if request.segments else 0
        self._place(slot, request)
        # A grammar's masks keep to min_tokens themselves, because a text that is complete must end.
        own = 0 if request.params.masked else request.params.min_tokens
        self.min_len[slot] = self.prompt_len[slot] + own
        self.describe(slot, request)
        self._take_stop_ids(slot, request.stop_ids)

    def _place(self, slot: int | np.ndarray, request: Request) -> None:
        """Keep the places of the prompt's tokens."""
        places = places_of(request.segments)
        self.shift[slot] = 0 if places is None else places.shift
        if places is None and not self.places:
            return
        for each in np.atleast_1d(slot).tolist():
            self.places.pop(each, None)
            if places is not None:
                self.places[each] = places.within

    def set_blocks(
        self, slots: Index, columns: Index, blocks: int | list[int] | np.ndarray, group: int | slice = 0
    ) -> None:
        """Write ``blocks`` into these entries of the block table of ``group``."""
        self._blocks[slots, group, columns] = blocks
        self.table_writes += 1
        self.table_version[slots] = self.table_writes

    def move_blocks(self, slots: Index, moved: np.ndarray) -> None:
        """Replace each block of ``slots``, in all groups, by its entry of ``moved`` [blocks]."""
        self._blocks[slots] = moved[self._blocks[slots]]
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
        """Free ``slot``; the caller releases its blocks."""
        self.request[slot] = None
        if self.num_blocks[slot]:
            self.set_blocks(slot, slice(self.num_blocks[slot]), 0, slice(None))
            self.num_blocks[slot] = self.live_from[slot] = 0
        self.many_stop_ids.pop(slot, None)
        self.grammars.pop(slot, None)
        heapq.heappush(self._free, slot)
