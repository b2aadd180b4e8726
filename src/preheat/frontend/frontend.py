"""Text in, text out: the two processors between clients and the engine.

The engine handles only token ids. The frontend is a synchronous state machine that never waits. ``LLM`` drives it
between steps of the loop, the server from its event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from preheat.core import (
    AdapterReport,
    Command,
    Delta,
    Died,
    EngineState,
    FromEngine,
    Image,
    Outcome,
    Progress,
    Ready,
    Request,
    ResetPrefixCache,
    ToEngine,
)
from preheat.errors import (
    Asleep,
    EngineDead,
    InvalidRequest,
    NotInvariant,
    NotReady,
    PreheatError,
    TooManyRequests,
    WireError,
)
from preheat.frontend.adapters import Adapters
from preheat.frontend.answer_format import AnswerFormats
from preheat.frontend.chat_template import ChatTemplate
from preheat.frontend.input_processor import InputProcessor
from preheat.frontend.long_texts import LongTexts
from preheat.frontend.options import USUAL, FrontendOptions
from preheat.frontend.output_processor import OutputProcessor
from preheat.frontend.params_checker import recommended_params
from preheat.frontend.pooling_tasks import PoolingTasks
from preheat.frontend.prompt_embeds import PromptEmbeds
from preheat.frontend.receipts import Receipts
from preheat.frontend.relay import Relay, apart
from preheat.frontend.request_state import Choice, RequestState
from preheat.frontend.tokenizer import Tokenizer
from preheat.metrics import Metrics
from preheat.pooling.pooling import Pooling
from preheat.utils.contract import Contract, digest_of

if TYPE_CHECKING:
    from preheat.frontend.images import Source  # needs Pillow; models without images do without it


_encode = msgspec.msgpack.Encoder().encode

MOST_BYTES = 2**28
"""Most bytes that one client's request gives to the engine."""

ID_BYTES = 8
"""Bytes of a token id in a list."""


class Frontend:
    """Server of one model's requests.

    ``prepare`` checks a request, :meth:`start` sends it, ``abort`` ends it at any time.
    ``send`` hands a message to the engine; :meth:`handle` takes each message that comes back. ``ready``: the engine's
    limits, once it can run.
    """

    def __init__(
        self, tokenizer: Tokenizer, send: Callable[[ToEngine], None], options: FrontendOptions = USUAL
    ) -> None:
        self.tokenizer, self.template = tokenizer, options.template or ChatTemplate(tokenizer)
        self.formats = options.formats or AnswerFormats(tokenizer)
        self.metrics, self.images, self.traces = options.metrics or Metrics("preheat"), options.images, options.traces
        self.adapters, self.pooling = options.adapters or Adapters(send), options.pooling
        self.input = InputProcessor(
            tokenizer,
            self.limits,
            recommended=_own(tokenizer) if options.recommended is None else options.recommended,
            max_logprobs=options.max_logprobs,
            seed=options.seed,
            images=options.images,
            priorities=options.priorities,
            reasoning=self.formats.reasoning,
            long_texts=_long_texts(options.pooling),
        )
        self.tasks = PoolingTasks(options.pooling, self.input.checker)
        self.receipts, self.answers = options.receipts or Receipts(), options.answers
        self.metrics.answer_cache = None if self.answers is None else self.answers.figures
        self.metrics.receipt_log = self.receipts.log
        self.output = OutputProcessor(
            send, self.metrics, log=options.log_requests, traces=options.traces, ended=self._end
        )
        self.prepare, self.fail_all = self.input.prepare, self.output.fail_all
        self.ready: Ready | None = None
        self.progress: Progress | None = None
        self.dead: str | None = None
        self.state = EngineState()
        self._send, self._options = send, options
        self._relays = dict[int, Relay]()  # by id, the requests of other frontends
        self._starting = 0  # sequences of requests that are being sent
        self._commands, self._asked = count(1), dict[int, Callable[[Outcome], None]]()

    @property
    def num_unfinished(self) -> int:
        """Choices that are not finished, waiting ones included."""
        return len(self.output.choices)

    def is_unfinished(self, id: int) -> bool:
        """Return whether the choice ``id`` is not finished."""
        return id in self.output.choices

    @property
    def busy(self) -> bool:
        return self.num_unfinished > 0

    @property
    def halted(self) -> bool:
        """Whether the engine may not answer for a while: it is paused, or carries out a command."""
        return self.state.paused or bool(self._asked)

    @property
    def contract(self) -> Contract:
        """The contract of this frontend and its engine. Raises EngineDead or NotReady without an engine."""
        started = self._started()
        engine = self.state.contract or started.contract or Contract()
        return msgspec.structs.replace(engine, **self.parts)

    @cached_property
    def parts(self) -> dict[str, str]:
        """The frontend's parts of the contract."""
        return {
            "tokenizer": self.tokenizer.digest,
            "template": self.template.digest,
            "defaults": digest_of(dict(self.input.recommended)),
        }

    def limits(self) -> Ready:
        """Return the engine's limits. Raises EngineDead or NotReady, with the reason, if it takes no requests."""
        ready = self._started()
        if self.state.sleeping is not None:
            raise Asleep("The engine is asleep: wake it up with /wake_up")
        if self.state.blocked_reason:
            raise NotReady(self.state.blocked_reason)
        return ready

    def _started(self) -> Ready:
        if self.dead is not None:
            raise EngineDead(self.dead)
        if self.ready is None:
            raise NotReady("The engine is still starting; try again later")
        if self.ready.blocked_reason:
            raise NotReady(_blocked(self.ready))
        return self.ready

    def check_blocked(self) -> None:
        """Raise NotInvariant if the check at boot failed."""
        if self.ready is not None and self.ready.blocked_reason:
            raise NotInvariant(_blocked(self.ready))

    def load_images(self, sources: Sequence[Source]) -> list[Image]:
        """Return the images of a request, in order. Raises InvalidRequest. May wait for the network."""
        self.input.check_images(len(sources))
        return self.images.load(sources, self.input.room_for_images()) if self.images is not None else []

    @property
    def prompt_embeds(self) -> PromptEmbeds:
        """The reader of prompts that are embeddings. Raises InvalidRequest if they are not taken."""
        if self._options.embed_size is None:
            raise InvalidRequest(
                "prompt_embeds needs a server that was started with --enable-prompt-embeds", param="prompt_embeds"
            )
        return PromptEmbeds(self._options.embed_size, lambda: self.limits().max_model_len)

    def start(self, states: Iterable[RequestState]) -> None:
        """Send prepared requests to the engine. Raises TooManyRequests, and sends none, if the queue is full."""
        for _ in self.starting(list(states)):
            pass

    def starting(self, states: Sequence[RequestState]) -> Iterator[None]:
        """Do the same as :meth:`start`, but yield before each message to the engine.

        A caller that does not go on must abort ``states``.
        """
        left = sum(state.sequences for state in states)
        self._check_room(states, left)
        self._starting += left
        try:
            for state in states:
                self.limits()
                if state.search is not None:
                    yield
                requests = self._begin(state, receipts=self.receipts.always)
                kept = self._kept(state, requests)
                self._starting -= state.sequences  # now counted as waiting
                left -= state.sequences
                for part in kept or ():
                    yield
                    self.output.process(part)
                for request in () if kept else requests:
                    yield
                    self._send(request)
        finally:
            self._starting -= left

    def _check_room(self, states: Sequence[RequestState], asked: int) -> None:
        """Raise InvalidRequest or TooManyRequests unless ``states``, ``asked`` sequences, may be sent."""
        self.limits()
        for state in states:
            self.receipts.check(state)
        most = self._options.max_queued
        if most is None:
            return
        if asked > most:
            raise InvalidRequest(
                f"The request asks for {asked} sequences (prompts x n, or chunks), but at most {most} can wait "
                "(--max-queued-requests): ask for fewer"
            )
        waiting = self.metrics.waiting + self._starting
        if waiting + asked > most:
            raise TooManyRequests(f"{waiting} sequences are waiting already; try again later")
        if (size := _bytes_of(states)) > MOST_BYTES:
            raise InvalidRequest(
                f"The request's prompts have {size:,} bytes together, each counted n times, but at most {MOST_BYTES:,} "
                "are sent to the engine: ask for fewer choices or prompts",
                param="n",
            )

    def _begin(self, state: RequestState, *, receipts: bool = False) -> list[Request]:
        """Return the messages for ``state`` to the engine; a beam search sends its own.

        With ``receipts`` the answer gets a receipt, if it can have one.
        """
        if state.search is None:
            if receipts and not state.segments and state.relay is None:
                state.ask_for_receipt()
            requests = self.input.fan_out(state)
            if state.params.receipt:
                for choice, request in zip(state.choices, requests, strict=True):
                    self.receipts.begin(choice, request, self.contract)
            self.output.add(state)
            if state.relay is not None:
                self._relays[requests[0].id] = state.relay
            return requests
        state.search.begin(self)
        return []

    def _kept(self, state: RequestState, requests: Sequence[Request]) -> Iterator[Delta] | None:
        """Return the kept answer of ``state``, None if the engine has to give it."""
        if self.answers is None or state.search is not None or state.relay is not None:
            return None
        kept = self.answers.begin(state, requests, self.contract)
        state.answered_from_cache = kept is not None
        return kept

    def _end(self, choice: Choice) -> None:
        self._relays.pop(choice.id, None)
        if self.answers is not None:
            self.answers.end(choice)
        if choice.proof is not None:
            self.receipts.end(choice, self.contract)

    def launch(self, state: RequestState) -> None:
        """Send the engine requests of ``state``, whatever is waiting."""
        for request in self._begin(state):
            self._send(request)

    def abort(self, state: RequestState) -> None:
        """End ``state`` because its client is no longer interested."""
        if state.search is None:
            self.output.abort(state)
        else:
            state.search.abort()

    def adapter_labels(self, most: int) -> dict[str, str]:
        """Return the labels of vLLM's metric of adapters.

        ``most`` is the greatest number of adapters in a step. The other labels are the names of adapters with running
        requests, and of adapters with requests that wait for their first step.
        """
        running, waiting = set[str](), set[str]()
        for choice in self.output.choices.values():
            if name := choice.state.lora_name:
                (running if choice.times.started else waiting).add(name)
        return {
            "max_lora": str(most),
            "running_lora_adapters": ",".join(sorted(running)),
            "waiting_lora_adapters": ",".join(sorted(waiting)),
        }

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache before the next request. Raises EngineDead or NotReady."""
        self.limits()
        self._send(ResetPrefixCache())

    def command(self, name: str, done: Callable[[Outcome], None], **fields: Any) -> None:
        """Send a :class:`Command` to the engine; ``done`` gets its outcome. Raises EngineDead or NotReady."""
        self._started()
        id = next(self._commands)
        self._asked[id] = done
        self._send(Command(id, name, **fields))  # type: ignore[arg-type]

    def fail(self, ids: Iterable[int], error: PreheatError) -> None:
        """End the unfinished requests of the choices ``ids`` with ``error``."""
        for id in ids:
            if self.is_unfinished(id):  # the failure of another may have ended it
                self.output.fail(self.output.choices[id].state, error)

    def handle(self, message: FromEngine) -> None:
        """Process a message of the engine."""
        match message:
            case Delta():
                if self.answers is not None:
                    self.answers.see(message)
                if self._relays:
                    for id, part in apart(message, self._relays).items():
                        self._relays[id].add(part)
                self.output.process(message)
            case Progress():
                self.progress = message
            case Ready():
                self.ready = message
                self.state.digest, self.state.contract = message.digest, message.contract
            case AdapterReport():
                self.adapters.handle(message)
            case Outcome():
                self.state = message.state
                self.metrics.sleeping = message.state.sleeping
                if (done := self._asked.pop(message.id, None)) is not None:  # its engine may have been given up
                    done(message)
            case Died():
                self.die(message.error.message)

    def die(self, message: str) -> None:
        """End all requests and reject new ones: the engine is dead."""
        if self.dead is None:
            self.dead = message
            self.fail_all(EngineDead(message))
            self.interrupt(message)

    def interrupt(self, message: str) -> None:
        """End pending commands and loads of adapters: their engine will not answer. Requests stay."""
        self.adapters.fail_all(EngineDead(message))
        asked, self._asked = self._asked, {}
        for id, done in asked.items():
            done(Outcome(id, self.state, WireError.of(EngineDead(message))))

    def nudge(self) -> None:
        """Wake the streams that have begun, so that they tell their clients to wait."""
        for state in {id(choice.state): choice.state for choice in self.output.choices.values()}.values():
            if state.stream and state.first_token_at and state.on_change is not None:
                state.on_change()


def _bytes_of(states: Sequence[RequestState]) -> int:
    """Return the bytes that the engine gets for ``states``.

    For each choice, they are the bytes of the prompt, of its embeddings and of the parameters.
    """
    kinds = {id(state.checked): state.checked for state in states}  # mostly one for all
    asked = {key: len(_encode(checked[:3])) if checked else 0 for key, checked in kinds.items()}
    return sum(state.sequences * asked[id(state.checked)] + state.params.n * _prompt_bytes(state) for state in states)


def _prompt_bytes(state: RequestState) -> int:
    return ID_BYTES * len(state.prompt_ids) + sum(len(segment.image.pixels) for segment in state.segments)


def _long_texts(pooling: Pooling | None) -> LongTexts | None:
    return None if pooling is None or pooling.max_embed_len is None else LongTexts(pooling.max_embed_len)


def _own(tokenizer: Tokenizer) -> dict[str, object]:
    return recommended_params(tokenizer.model.generation, tokenizer.model.generation_path)


def _blocked(ready: Ready) -> str:
    return f"The check at boot failed, so no requests are taken: {ready.blocked_reason}"
