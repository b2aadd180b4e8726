"""An engine driven by hand.

Requests go in at a chosen pace, digests of their logits come out.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from preheat.core import Cancel, Delta, FromEngine, Ready, Request, Stats, ToEngine, TokenLogprobs
from preheat.engine.loop import EngineSide, Loop
from preheat.errors import PreheatError
from preheat.execution.executor import Executor
from preheat.execution.input_batch import InputBatch
from preheat.frontend.frontend import Frontend
from preheat.frontend.journal import Journal
from preheat.frontend.options import FrontendOptions
from preheat.frontend.request_state import Choice, RequestState
from preheat.frontend.tokenizer import ModelFiles, NoTokenizer
from preheat.model.files import find_model, read_config
from preheat.pooling.pooling import Pooling, pooling_of
from preheat.settings import Settings
from preheat.transport import InlineTransport
from preheat.verify.check_runner import CheckRunner
from preheat.verify.compare import Seen
from preheat.verify.prompts import Prompt

Boot = Callable[[Settings, EngineSide], Loop]

Prompts = Callable[["Engine"], list[Prompt]]
"""Makes prompts that fit the model and the limits of an engine."""

OWN_IDS = 1 << 40
"""The first id of requests that no frontend made: a frontend counts from one."""

_TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

Pace = Callable[[int], int]
"""The number of requests that arrive before the next step, given the number that are running."""


def at_once(_: int) -> int:
    """Let all requests arrive at the beginning."""
    return 1 << 30


def trickling(draw: random.Random) -> Pace:
    """Return a pace of 0 to 3 requests before each step."""
    return lambda running: draw.randrange(4)


def in_groups(sizes: Iterable[int]) -> Pace:
    """Return a pace of groups of ``sizes``, each after the previous one has finished."""
    sizes = iter(sizes)
    return lambda running: 0 if running else next(sizes)


class Asks(Protocol):
    """A request to come, such as :class:`preheat.verify.prompts.Prompt`."""

    def request(self, id: int) -> Request:
        """Return the request with this ``id``."""


class Answer(NamedTuple):
    """The answer to a request.

    ``cached`` is the number of its prompt's tokens that the prefix cache had.
    """

    tokens: list[int]
    prompt_logprobs: list[TokenLogprobs | None]
    cached: int
    logprobs: list[TokenLogprobs]
    pooled: bytes = b""


class Engine:
    """A booted loop with a logit watcher.

    ``answers`` are the last run's, in the order of its prompts.
    """

    def __init__(self, boot: Boot, settings: Settings) -> None:
        self._transport, self._settings = InlineTransport(), settings
        self.loop = boot(settings, self._transport)
        self.ready = next(message for message in self._transport.receive() if isinstance(message, Ready))
        self._watcher = LogitWatcher(self.loop.executor)
        self.vocab_size = self.loop.executor.decoder.spec.vocab_size
        self.encodes = self.loop.executor.decoder.spec.encodes
        self.pools = self.loop.executor.decoder.spec.head is None
        self.answers: list[Answer] = []
        self._ids, self._seen, self._journal = OWN_IDS, dict[int, Seen](), Journal()

    @cached_property
    def pooling(self) -> Pooling | None:
        """How texts are pooled, None if the engine generates."""
        folder = find_model(self._settings, with_weights=False)
        return pooling_of(self._settings, folder, read_config(folder, self._settings.hf_overrides))

    @cached_property
    def frontend(self) -> Frontend:
        """A frontend of this engine that handles token ids."""
        folder = find_model(self._settings, with_weights=False)
        tokenizer = NoTokenizer(folder, ModelFiles(folder, self._settings.hf_overrides))
        frontend = Frontend(tokenizer, self._send, FrontendOptions(pooling=self.pooling))
        frontend.ready = msgspec.structs.replace(self.ready, blocked_reason="")  # a failed check is looked into, too
        return frontend

    @property
    def keeps_ties(self) -> bool:
        """Whether top_k keeps all tokens that equal its last one."""
        return self._settings.handle_topk_duplicates

    @property
    def offloads(self) -> bool:
        """Whether evicted blocks are kept on the host."""
        return bool(self._settings.kv_offloading_size)

    @property
    def stats(self) -> Stats:
        return self.loop.scheduler.stats()

    def forget_prefixes(self) -> None:
        """Empty the prefix cache and the encoder cache."""
        self.loop.scheduler.pool.forget_contents()
        if self.loop.scheduler.images is not None:
            self.loop.scheduler.images.forget()

    def run(self, prompts: Sequence[Asks], pace: Pace = at_once) -> list[Seen]:
        """Run ``prompts`` and return the output of each.

        Raises PreheatError if the engine fails a request; the others are cancelled.
        """
        first = self._take_ids(len(prompts))
        ids = range(first, first + len(prompts))
        waiting = deque(prompt.request(id) for id, prompt in zip(ids, prompts, strict=True))
        deltas, running = list[Delta](), 0
        while waiting or running:
            for _ in range(min(pace(running), len(waiting))):
                self._transport.send(waiting.popleft())
                running += 1
            for delta in self._advance():
                deltas.append(delta)
                if (error := _failure(delta)) is not None:
                    self._cancel(ids)
                    raise error
                running -= sum(id in ids for id in delta.finished)
        self.loop.scheduler.check()
        self.answers = _answers(deltas, ids)
        seen = self._watcher.take(first)
        if self.pools:
            return [Seen([answer.pooled], [float(np.frombuffer(answer.pooled, "f4").max())]) for answer in self.answers]
        # Logits that were computed ahead of a sequence's end do not count.
        counts = enumerate((len(answer.tokens) for answer in self.answers), first)
        return [Seen(seen[id].bits[:count], seen[id].levels[:count]) for id, count in counts]

    def cut_off(self, prompts: Sequence[Prompt]) -> None:
        """Start ``prompts`` and cancel all of them after one step, as if their clients left."""
        first = self._take_ids(len(prompts))
        for id, prompt in enumerate(prompts, first):
            self._transport.send(prompt.request(id))
        self._advance()
        self._cancel(range(first, first + len(prompts)))

    def _cancel(self, ids: Iterable[int]) -> None:
        """Cancel the requests ``ids``; some may have ended."""
        for id in ids:
            self._transport.send(Cancel(id))
        self._advance()
        self._settle()

    def _settle(self) -> None:
        """Wait for the steps in flight, and forget their logits."""
        self.loop.finish()
        self._watcher.take(0)

    def serve(self, prompts: Sequence[Prompt], moves: Callable[[], bool] = lambda: False) -> list[RequestState]:
        """Answer ``prompts`` all at once through the frontend, as for clients.

        Before each step, ``moves`` says whether the engine loses all requests: they go on behind their clients' tokens.
        """
        states = [
            self.frontend.prepare(prompt.tokens, prompt.params, cache_salt=prompt.salt, lora_name=prompt.lora_name)
            for prompt in prompts
        ]
        self.frontend.start(states)
        while self.frontend.busy:
            if moves():
                self._move()
            self._deliver(self._advance())
        self.loop.scheduler.check()
        if failed := next((state.error for state in states if state.error is not None), None):
            raise PreheatError(f"the engine failed a request: {failed.message}")
        self._seen = self._watcher.take(0)
        return states

    def _deliver(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            self._journal.seen(delta)
            self.frontend.handle(_FROM_ENGINE.decode(msgspec.msgpack.encode(delta)))

    def _send(self, message: ToEngine) -> None:
        """Send a message of the frontend, encoded as between two processes."""
        match message:
            case Request():
                self._journal.sent(message)
            case Cancel():
                self._journal.forget(message.id)
        self._transport.send(_TO_ENGINE.decode(msgspec.msgpack.encode(message)))

    def _move(self) -> None:
        """Cancel all requests behind the steps in flight, and send them as the journal resumes them."""
        self.loop.drain_steps()
        self._deliver(message for message in self._transport.receive() if isinstance(message, Delta))
        for request in self._journal.resumed():
            self._send(Cancel(request.id))
            self._send(request)

    def seen_of(self, choice: Choice) -> Seen:
        """Return the output of a choice that was served last."""
        seen, count = self._seen[choice.id], len(choice.token_ids)
        return Seen(seen.bits[:count], seen.levels[:count])

    def _take_ids(self, count: int) -> int:
        """Return the first of ``count`` new ids."""
        self._ids += count
        return self._ids - count

    def _advance(self) -> list[Delta]:
        """Take the messages that have arrived, run a step, and return the deltas."""
        self.loop.take(0)
        self.loop.step()
        return [message for message in self._transport.receive() if isinstance(message, Delta)]

    @contextmanager
    def unwatched(self) -> Iterator[CheckRunner]:
        """Yield a runner of test sequences on the free blocks.

        Nobody looks at logits meanwhile.
        """
        self.loop.executor.watch_logits(None)
        try:
            yield CheckRunner(self.loop.scheduler.pool, self.loop.packer, self.loop.executor)
        finally:
            self.loop.executor.watch_logits(self._watcher.look)

    @contextmanager
    def keeping_logits(self) -> Iterator[dict[int, list[Tensor]]]:
        """Yield the logits of the next run, by the prompt's number.

        They are fp32 [vocab] on the host at each position. For requests served next, they are by the choice's id.
        """
        kept: dict[int, list[Tensor]] = {}
        self._watcher.kept = kept
        try:
            yield kept
        finally:
            self._watcher.kept = None


def _answers(deltas: Sequence[Delta], ids: range) -> list[Answer]:
    found: dict[int, Answer] = defaultdict(lambda: Answer([], [], 0, []))
    for delta in deltas:
        for place, (id, token) in enumerate(zip(delta.ids, delta.tokens, strict=True)):
            found[id].tokens.append(token)
            if place in delta.logprobs:
                found[id].logprobs.append(delta.logprobs[place])
        for id, entries in delta.prompt_logprobs.items():
            found[id].prompt_logprobs.extend(entries)
        for id, cached in delta.started.items():
            found[id] = found[id]._replace(cached=cached)
        for id, pooled in delta.pooled.items():
            found[id] = found[id]._replace(pooled=pooled)
    return [found[id] for id in ids]


def _failure(delta: Delta) -> PreheatError | None:
    """Return the error of a failed request, None if no request failed."""
    for finish in delta.finished.values():
        if finish.reason == "error":
            return PreheatError(f"the engine failed a request: {finish.error and finish.error.message}")
    return None


class LogitWatcher:
    """Digests the logits of every step of ``executor`` from now on.

    Only :meth:`take` waits for the device.
    """

    def __init__(self, executor: Executor) -> None:
        self._backend = executor.backend
        self._seen: list[tuple[np.ndarray, np.ndarray, Tensor, Tensor]] = []
        self._copies: list[tuple[np.ndarray, np.ndarray, Tensor]] = []
        self.kept: dict[int, list[Tensor]] | None = None
        executor.watch_logits(self.look)

    def look(self, logits: Tensor, batch: InputBatch) -> None:
        """See :data:`preheat.execution.executor.LogitWatch`."""
        rows, positions = batch.schedule.sampled()
        digests = self._backend.row_digests(logits).clone()  # they are valid until the next call
        self._seen.append((batch.schedule.ids[rows], positions, digests, logits.amax(1)))
        if self.kept is not None:
            self._copies.append((batch.schedule.ids[rows], positions, logits.clone()))

    def take(self, first: int) -> dict[int, Seen]:
        """Return digests and greatest logits since the last call.

        They are in the order of positions, by request. Copies go to ``kept``, by the number of the request from
        ``first`` on.
        """
        if self.kept is not None:
            copies = [(int(owner) - first, int(at), line) for owners, positions, lines in self._copies
                    for owner, at, line in zip(owners, positions, lines.cpu(), strict=True)]  # fmt: skip
            last = {(number, at): line for number, at, line in copies}
            for number, at in sorted(last):
                self.kept.setdefault(number, []).append(last[number, at])
            self._copies.clear()
        found: dict[int, list[tuple[int, int, float]]] = defaultdict(list)
        for owners, *columns in self._seen:
            rows = zip(*(torch.as_tensor(column).tolist() for column in columns), strict=True)
            for owner, row in zip(owners, rows, strict=True):
                found[owner].append(row)
        self._seen.clear()
        return {owner: _in_order(rows) for owner, rows in found.items()}


def _in_order(rows: list[tuple[int, int, float]]) -> Seen:
    """Return the last record of each position.

    The position behind a rejected draft is computed again.
    """
    last = sorted({position: (bits, level) for position, bits, level in rows}.items())
    return Seen(np.array([bits for _, (bits, _) in last]).tolist(), [level for _, (_, level) in last])
