"""The answer cache: whole answers in memory and on disk, given again to an equal request.

A key covers the contract and the engine's request: tokens, parameters, seed, choice and salt. Greedy and seeded
requests have one answer, so the kept one is the answer. A request without a seed has a new one each time and is not
kept. One hit in ``check_every`` is computed live and compared, so a wrong answer is found and counted.

Requests with an adapter are not kept, because a name may get another adapter. Neither are requests with images,
embeddings, prompt logprobs or ``repetition_detection``.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from preheat.core import Delta, Finish, Request, TokenLogprobs
from preheat.figures import AnswerCacheFigures
from preheat.frontend.answer_folder import AnswerFolder
from preheat.frontend.receipt import packed, unpacked
from preheat.frontend.request_state import Choice, RequestState
from preheat.utils.contract import Contract

logger = logging.getLogger(__name__)

KEY_BYTES = 16
AT_ONCE = 256
"""Tokens of a kept answer that become text at once."""

MOST_VALUES = 1 << 18
"""Tokens and alternatives of the longest answer that is kept. The event loop encodes and decodes it in about 10 ms."""

OVERHEAD = 200
"""Bytes of an entry beside its contents: key, dictionary and object."""

_encode = msgspec.msgpack.Encoder().encode


class Kept(msgspec.Struct, array_like=True):
    """What the engine said of one choice: everything from which the frontend makes text and log-probabilities."""

    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    end: Finish
    digests: list[int]


_decoder = msgspec.msgpack.Decoder(Kept)


class Pending:
    """A choice that runs; ``expected`` is the kept answer if the choice checks it."""

    __slots__ = ("end", "expected", "key")

    def __init__(self, key: bytes, expected: bytes | None) -> None:
        self.key, self.expected = key, expected
        self.end: Finish | None = None


class AnswerCache:
    """Answers of at most ``size`` bytes; the least recently used ones go first. ``folder`` keeps them on disk too."""

    def __init__(
        self, size: int, check_every: int, figures: AnswerCacheFigures, folder: AnswerFolder | None = None
    ) -> None:
        self._size, self._check_every, self.figures, self._folder = size, check_every, figures, folder
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()
        self._pending: dict[int, Pending] = {}

    def begin(self, state: RequestState, requests: Sequence[Request], contract: Contract) -> Iterator[Delta] | None:
        """Return the kept answers of ``requests``, the choices of ``state``.

        Returns None if the engine has to answer. Its answer is then kept, or compared with the kept one.
        """
        if not _has_one_answer(state):
            return None
        keys = [_key(request, contract) for request in requests]
        found = [self._find(key) for key in keys]
        kept = [entry for entry in found if entry is not None]
        checks = len(kept) == len(keys) and (self.figures.hits + self.figures.checked + 1) % self._check_every == 0
        if len(kept) == len(keys) and not checks:
            self.figures.hits += 1
            for key in keys:
                if key in self._entries:  # one that is on disk only may be too large for memory
                    self._entries.move_to_end(key)
            return _deltas(requests, kept)
        self.figures.checked += checks
        self.figures.misses += not checks
        for request, key, entry in zip(requests, keys, found, strict=True):
            self._pending[request.id] = Pending(key, entry if checks else None)
        return None

    def see(self, delta: Delta) -> None:
        """Note what a step says of running choices, before their frontend ends them."""
        if not self._pending:
            return
        for id, end in delta.finished.items():
            if pending := self._pending.get(id):
                pending.end = end

    def end(self, choice: Choice) -> None:
        """Keep the answer of a choice that has ended, or compare it with the kept one."""
        pending = self._pending.pop(choice.id, None)
        if pending is None or choice.finish_reason in (None, "abort", "error"):
            return
        if len(choice.token_ids) * (1 + (choice.state.params.logprobs or 0)) > MOST_VALUES:
            return
        # Without an end of the engine's a stop string has ended the text, and ends it again at the same token.
        end = pending.end or Finish("length")
        digests = [] if choice.proof is None else [*unpacked(choice.proof.digests_of(choice.token_ids))]
        entry = _encode(Kept(choice.token_ids, choice.logprobs, end, digests))
        if pending.expected is not None and pending.expected != entry:
            self.figures.different += 1
            logger.error("A kept answer differs from the live one; the engine, or the memory of the cache, is faulty")
        self._keep(pending.key, entry)
        if self._folder is not None:
            self._folder.put(pending.key, entry)

    def forget(self) -> None:
        """Forget all answers: some may be wrong."""
        self._entries.clear()
        self.figures.bytes = 0
        if self._folder is not None:
            self._folder.clear()

    def _find(self, key: bytes) -> bytes | None:
        """Return the kept answer in memory, or from the folder."""
        entry = self._entries.get(key)
        if entry is None and self._folder is not None and (entry := self._folder.get(key)) is not None:
            self._keep(key, entry)
        return entry

    def _keep(self, key: bytes, entry: bytes) -> None:
        if old := self._entries.pop(key, None):
            self.figures.bytes -= len(old) + OVERHEAD
        if len(entry) + OVERHEAD > self._size:
            return
        self._entries[key] = entry
        self.figures.bytes += len(entry) + OVERHEAD
        while self.figures.bytes > self._size:
            self.figures.bytes -= len(self._entries.popitem(last=False)[1]) + OVERHEAD


def _has_one_answer(state: RequestState) -> bool:
    """Return whether every run of ``state`` gives the same answer, and an entry can hold it."""
    params = state.params
    special = state.segments or state.lora_name or params.repetition_detection or params.prompt_logprobs is not None
    return not special and (params.greedy or params.seed is not None)


def _key(request: Request, contract: Contract) -> bytes:
    """Return the key of a request's answer. A greedy request draws nothing, so its seed does not count."""
    seed = 0 if request.params.greedy else request.seed
    same = msgspec.structs.replace(request, id=0, priority=0, data_parallel_rank=None, source=None, seed=seed)
    if request.params.greedy and request.params.seed is not None:
        same.params = msgspec.structs.replace(request.params, seed=None)
    return hashlib.blake2b(contract.id.encode() + _encode(same), digest_size=KEY_BYTES).digest()


def _deltas(requests: Iterable[Request], kept: Iterable[bytes]) -> Iterator[Delta]:
    """Yield kept answers as steps of at most :data:`AT_ONCE` tokens, so that other clients are served in between."""
    for request, entry in zip(requests, kept, strict=True):
        each, started = _decoder.decode(entry), {request.id: 0}
        for first in range(0, len(each.tokens), AT_ONCE):
            part = slice(first, first + AT_ONCE)
            tokens, last = each.tokens[part], first + AT_ONCE >= len(each.tokens)
            yield Delta(
                ids=[request.id] * len(tokens),
                tokens=tokens,
                finished={request.id: each.end} if last else {},
                logprobs=dict(enumerate((each.logprobs or [])[part])),
                digests=packed(each.digests[part]),
                started=started,
            )
            started = {}
