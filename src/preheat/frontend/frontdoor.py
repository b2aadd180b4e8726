"""The front door: text in, text out, and a loop that never sees text.

In: encode, check everything (what is refused is refused here, with nothing allocated), resolve the sampling
parameters, fan ``n`` choices out to one :class:`~preheat.core.Request` each. Out: book each
:class:`~preheat.core.Delta`, turn tokens into text, find stop strings, end choices. The state machine is synchronous
and never waits: ``LLM`` drives it between steps of the loop, the server from its event loop.
"""

from __future__ import annotations

import itertools
import operator
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from preheat.core import (
    MAX_STOP_IDS,
    Cancel,
    Delta,
    Died,
    Finish,
    FromEngine,
    Progress,
    Ready,
    Request,
    SamplingParams,
    ToEngine,
)
from preheat.errors import (
    ContextTooLong,
    EngineDead,
    InvalidRequest,
    NotInvariant,
    NotReady,
    PreheatError,
    TooManyRequests,
)
from preheat.frontend.detokenize import SILENT
from preheat.frontend.request_state import Choice, Ticket, stop_reason
from preheat.frontend.stop import StopChecker, StopStrings
from preheat.frontend.tokenizer import Tokenizer
from preheat.metrics import Metrics

MAX_STOP_STRINGS = 128
MAX_STOP_CHARS = 16_384
_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class FrontDoor:
    """Serves one model. ``send`` hands a message to the engine; :meth:`handle` takes each one that comes back.

    ``ready`` holds the engine's limits once it can run. ``seed`` fixes the seeds drawn for requests without one;
    None draws them from the system. ``max_queued``: most sequences that may wait for their first step.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        send: Callable[[ToEngine], None],
        *,
        max_logprobs: int = 20,
        max_queued: int | None = None,
        metrics: Metrics | None = None,
        seed: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.metrics = metrics or Metrics("preheat")
        self.ready: Ready | None = None
        self.progress: Progress | None = None
        self.dead: str | None = None
        self._send = send
        self._max_logprobs, self._max_queued = max_logprobs, max_queued
        self._random = random.Random(seed)
        self._ids = itertools.count(1)
        self._choices: dict[int, Choice] = {}

    # ------------------------------------------------------------------------------------------------------- in

    @property
    def busy(self) -> bool:
        """Some choice is not finished."""
        return bool(self._choices)

    @property
    def num_running(self) -> int:
        """Choices that are not finished, waiting ones included."""
        return len(self._choices)

    def params(self, **given: Any) -> SamplingParams:
        """Sampling parameters from what a client gave; the checkpoint's recommendations, then our defaults, fill in.

        None means "not given". Raises InvalidRequest for a value outside its range or of the wrong type.
        """
        recommended = {name: self.tokenizer.generation.get(name) for name in _RECOMMENDED}
        values = {"max_tokens": self.tokenizer.generation.get("max_new_tokens"), **recommended}
        values |= {name: value for name, value in given.items() if value is not None}
        kept = {name: value for name, value in values.items() if value is not None or name == "max_tokens"}
        return check_params(kept)

    def prepare(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str = "",
        text: str | None = None,
        add_special_tokens: bool = True,
        cache_salt: str = "",
        cap_length: bool = False,
    ) -> Ticket:
        """Check a request completely and give its ticket; nothing is sent before :meth:`start`.

        ``text`` is the prompt's text where ``prompt`` holds its token ids already. ``cap_length`` shortens
        ``max_tokens`` to what fits the context instead of refusing. Raises NotReady, EngineDead, InvalidRequest.
        """
        ready = self._limits()
        params = check_params(msgspec.structs.asdict(params))
        if isinstance(prompt, str):
            text, ids = prompt, self.tokenizer.encode(prompt, add_special_tokens)
        else:
            ids = self._checked_ids(prompt)
        if not ids:
            raise InvalidRequest("The prompt is empty; give at least one token", param="prompt")
        self._check_tokens(params)
        max_tokens = _room(len(ids), params, ready.max_model_len, cap_length)
        return Ticket(request_id, text, ids, params, max_tokens, self.tokenizer, cache_salt=cache_salt)

    def start(self, tickets: Iterable[Ticket]) -> None:
        """Send prepared requests to the engine: all, or none with TooManyRequests when the queue is full."""
        tickets = list(tickets)
        asked = sum(ticket.params.n for ticket in tickets)
        if self._max_queued is not None and self.metrics.waiting + asked > self._max_queued:
            raise TooManyRequests(f"{self.metrics.waiting} sequences are waiting already; try again later")
        self._limits()
        for ticket in tickets:
            self._start(ticket)

    def _start(self, ticket: Ticket) -> None:
        params = ticket.params
        seed = self._random.getrandbits(64) if params.seed is None else params.seed % 2**64
        stop_ids = self._stop_ids(params)
        strings = StopStrings(params.stop_strings, params.include_stop_str_in_output) if params.stop_strings else None
        ticket.arrived_at = time.monotonic()
        ticket.running = params.n
        for index in range(params.n):
            detokenizer = (
                self.tokenizer.detokenizer(ticket.prompt_ids, params.skip_special_tokens)
                if params.detokenize
                else SILENT
            )
            stop = StopChecker(strings) if strings else None
            choice = Choice(ticket, index, next(self._ids), detokenizer, stop)
            ticket.choices.append(choice)
            self._choices[choice.id] = choice
            asked = params if index == 0 else msgspec.structs.replace(params, prompt_logprobs=None)
            message = Request(
                choice.id, ticket.prompt_ids, asked, seed, ticket.max_tokens, index, stop_ids, ticket.cache_salt
            )
            self._send(message)
        self.metrics.waiting += params.n
        self.metrics.prompt_tokens += len(ticket.prompt_ids)

    def check_held(self) -> None:
        """Raise NotInvariant where the engine can run and must not."""
        if self.ready is not None and self.ready.held:
            raise NotInvariant(held_back(self.ready))

    def _limits(self) -> Ready:
        if self.dead is not None:
            raise EngineDead(self.dead)
        if self.ready is None:
            raise NotReady("The engine is still starting; try again later")
        if self.ready.held:
            raise NotReady(held_back(self.ready))
        return self.ready

    def _checked_ids(self, prompt: Sequence[int]) -> list[int]:
        try:
            ids = [operator.index(id) for id in prompt]
        except TypeError as error:
            raise InvalidRequest("A prompt of token ids must hold whole numbers only", param="prompt") from error
        self.check_vocabulary(ids, "prompt")
        return ids

    def check_vocabulary(self, ids: Iterable[int], param: str) -> None:
        """Raise InvalidRequest, naming ``param``, for the first id that the model does not know."""
        size = self.tokenizer.vocab_size
        bad = next((id for id in ids if not 0 <= id < size), None)
        if bad is not None:
            raise InvalidRequest(f"{param} has token id {bad}, but ids must be in 0 .. {size - 1}", param=param)

    def check_logprobs(self, count: int | None, param: str) -> None:
        """Raise InvalidRequest, naming ``param``, if ``count`` alternatives are more than may be asked for."""
        if (count or 0) > self._max_logprobs:
            raise InvalidRequest(
                f"{param} is {count}, but at most {self._max_logprobs} are allowed (--max-logprobs)", param=param
            )

    def check_text(self, param: str, instead: str) -> None:
        """Raise InvalidRequest, naming ``param`` and what to do ``instead``, unless there is a tokenizer."""
        if not self.tokenizer.speaks:
            raise InvalidRequest(
                f"{param} is about text, and there is no tokenizer (skip_tokenizer_init): {instead}", param=param
            )

    def _stop_ids(self, params: SamplingParams) -> list[int]:
        """The ids that end a sequence, ascending."""
        return sorted({*(() if params.ignore_eos else self.tokenizer.eos_ids), *(params.stop_token_ids or ())})

    def _check_tokens(self, params: SamplingParams) -> None:
        self.check_logprobs(params.logprobs, "logprobs")
        self.check_logprobs(params.prompt_logprobs, "prompt_logprobs")
        self.check_vocabulary(params.stop_token_ids or (), "stop_token_ids")
        if (count := len(self._stop_ids(params))) > MAX_STOP_IDS:
            raise InvalidRequest(
                f"stop_token_ids and the model's end-of-sequence ids are {count:,} together, but at most "
                f"{MAX_STOP_IDS:,} can end a request; give fewer stop_token_ids",
                param="stop_token_ids",
            )
        self.check_vocabulary(params.logit_bias or (), "logit_bias")
        stops = params.stop_strings
        if stops:
            self.check_text("stop", "use stop_token_ids")
        if len(stops) > MAX_STOP_STRINGS or sum(map(len, stops)) > MAX_STOP_CHARS:
            raise InvalidRequest(
                f"stop may have {MAX_STOP_STRINGS} strings of {MAX_STOP_CHARS} characters together", param="stop"
            )

    # ------------------------------------------------------------------------------------------------------ out

    def handle(self, message: FromEngine) -> None:
        """Book a message of the engine."""
        match message:
            case Delta():
                self._book(message)
            case Progress():
                self.progress = message
            case Ready():
                self.ready = message
            case Died():
                self.die(message.message)

    def abort(self, ticket: Ticket) -> None:
        """The client does not want it any more: end its choices and free what they hold."""
        for choice in ticket.choices:
            if choice.finish_reason is None:
                self._send(Cancel(choice.id))
                self._end(choice, "abort")

    def fail(self, ticket: Ticket, error: PreheatError) -> None:
        """End ``ticket`` with ``error``; what its other choices hold is freed."""
        if ticket.finished:
            return
        ticket.error = error
        for choice in ticket.choices:
            if choice.finish_reason is None:
                self._send(Cancel(choice.id))
                self._end(choice, "error")

    def fail_all(self, error: PreheatError) -> None:
        """End everything that runs with ``error``."""
        for ticket in {id(choice.ticket): choice.ticket for choice in self._choices.values()}.values():
            self.fail(ticket, error)

    def die(self, message: str) -> None:
        """The engine is gone: end what runs, refuse what comes."""
        if self.dead is None:
            self.dead = message
            self.fail_all(EngineDead(message))

    def _book(self, delta: Delta) -> None:
        """The hot path: all rows of one step."""
        now = time.monotonic()
        choices, ends, logprobs = self._choices, delta.finished, delta.logprobs
        before: list[float] = []  # when each choice had its last token
        if delta.started:
            self._book_started(delta.started, now)
        for id, entries in delta.prompt_logprobs.items():
            if choice := choices.get(id):
                choice.ticket.prompt_logprobs.extend(entries)
        for place, (id, token) in enumerate(zip(delta.ids, delta.tokens, strict=True)):
            choice = choices.get(id)
            if choice is None:  # it ended here before the engine knew
                continue
            if choice.last_token_at:
                before.append(choice.last_token_at)
            else:
                self._book_first(choice, now)
            choice.last_token_at = now
            end = ends.get(id) if ends else None
            hidden = end is not None and end.stop_id == token and not choice.ticket.params.include_stop_str_in_output
            if choice.push(token, logprobs.get(place) if logprobs else None, hidden):
                if end is None:
                    self._send(Cancel(id))
                self._end(choice, "stop", choice.found_stop)
            elif end is None and choice.ticket.stream and choice.has_news:
                _notify(choice.ticket)
        self.metrics.generation_tokens += len(before)
        for at, times in Counter(before).items():  # one or two moments: most had their last token together
            self.metrics.inter_token.observe(now - at, times)
        for id, end in ends.items():
            if choice := choices.get(id):
                self._book_end(choice, end)
        if delta.stats is not None:
            self._book_stats(delta)

    def _book_started(self, started: dict[int, int], now: float) -> None:
        for id, cached in started.items():
            choice = self._choices.get(id)
            if choice is None or choice.started:  # after a preemption it starts again
                continue
            choice.started = True
            self.metrics.waiting -= 1
            self.metrics.running += 1
            self.metrics.queue.observe(now - choice.ticket.arrived_at)
            if choice.index == 0:
                choice.ticket.cached_tokens = cached

    def _book_first(self, choice: Choice, now: float) -> None:
        self.metrics.generation_tokens += 1
        self.metrics.first_token.observe(now - choice.ticket.arrived_at)

    def _book_end(self, choice: Choice, end: Finish) -> None:
        if end.reason == "error":
            self.fail(choice.ticket, PreheatError(end.message or "The engine could not run this request"))
        else:
            self._end(choice, end.reason, stop_reason(choice.ticket, end))

    def _book_stats(self, delta: Delta) -> None:
        stats, metrics = delta.stats, self.metrics
        assert stats is not None
        metrics.cache_usage = stats.blocks_used / max(stats.blocks_total, 1)
        metrics.prefix_queries, metrics.prefix_hits = stats.prefix_queries, stats.prefix_hits
        metrics.preemptions = stats.preemptions
        metrics.blocks_moved = stats.blocks_moved

    def _end(self, choice: Choice, reason: str, because: int | str | None = None) -> None:
        ticket, metrics = choice.ticket, self.metrics
        del self._choices[choice.id]
        choice.finish(reason, because)
        metrics.finished[str(choice.finish_reason)] += 1
        metrics.request.observe(time.monotonic() - ticket.arrived_at)
        if choice.started:
            metrics.running -= 1
        else:
            metrics.waiting -= 1
        ticket.running -= 1
        if ticket.stream or ticket.finished:
            _notify(ticket)


def held_back(ready: Ready) -> str:
    """What is said where no requests are taken although the engine can run."""
    return f"The check at boot failed, so no requests are taken: {ready.held}"


def check_params(values: dict[str, Any]) -> SamplingParams:
    """``values`` as sampling parameters. Raises InvalidRequest for a wrong type, a bad value or an unknown name."""
    try:
        return msgspec.convert(values, SamplingParams)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        param = path.rstrip("`").partition("[")[0] or message.partition(" ")[0]
        raise InvalidRequest(f"{param}: {message}" if path else message, param=param) from error


def _notify(ticket: Ticket) -> None:
    if ticket.on_change is not None:
        ticket.on_change()


def _room(prompt: int, params: SamplingParams, max_model_len: int, cap: bool) -> int:
    """Tokens that may be generated after ``prompt`` tokens. Raises ContextTooLong, with the numbers."""
    head = f"This model's maximum context length is {max_model_len} tokens. However, "
    if prompt >= max_model_len:
        raise ContextTooLong(
            f"{head}your prompt has {prompt} tokens, and at least 1 must be left for the completion. "
            "Please shorten the prompt.",
            param="prompt",
        )
    room = max_model_len - prompt
    asked = room if params.max_tokens is None else params.max_tokens
    if asked > room and not cap:
        raise ContextTooLong(
            f"{head}you requested {prompt + asked} tokens ({prompt} in the prompt, {asked} in the completion). "
            "Please shorten the prompt or reduce max_tokens.",
            param="max_tokens",
        )
    if params.min_tokens > min(asked, room):
        raise InvalidRequest(
            f"min_tokens is {params.min_tokens}, but only {min(asked, room)} can be generated", param="min_tokens"
        )
    return min(asked, room)
