"""A client's request while it is served: its choices, their text, and the part already sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, cast

import msgspec

from preheat.core import BlockSource, SamplingParams, Segment, TokenLogprobs
from preheat.errors import PreheatError
from preheat.figures import Times
from preheat.frontend.detokenize import SILENT, Detokenizer
from preheat.frontend.flat_logprobs import FlatLogprobs
from preheat.frontend.marks import Mark, mark_chars
from preheat.frontend.outputs import (
    BeamSearchOutput,
    CompletionOutput,
    Logprob,
    PositionLogprobs,
    RequestOutput,
    RequestStateStats,
)
from preheat.frontend.repetition import checker_of
from preheat.frontend.stop import StopChecker, StopStrings
from preheat.frontend.tokenizer import Tokenizer
from preheat.utils.reasoning import Phase

if TYPE_CHECKING:
    from preheat.frontend.adapters import LoRARequest
    from preheat.frontend.receipt import Proof, Receipt
    from preheat.frontend.relay import Relay


FREED_AT_ONCE = 1_000
"""Most log-probabilities freed in one step; so many take about 0.2 ms."""

_Position = TypeVar("_Position", PositionLogprobs, PositionLogprobs | None)


class CheckedParams(NamedTuple):
    """Values that several prompts with the same parameters share.

    They are the checked sampling parameters, the token ids that end a sequence, the token ids of ``bad_words``, and the
    stop strings, if any.
    """

    params: SamplingParams
    stop_ids: list[int]
    bad_words: list[list[int]]
    strings: StopStrings | None


@dataclass(slots=True)
class OutputDelta:
    """The gain of a choice since the last :meth:`Choice.take_delta`; ``first``: since its beginning."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    first: bool


class Choice:
    """One sequence as its client sees it: tokens become text, up to a stop string."""

    __slots__ = (
        "_begun", "_detokenizer", "_repetition", "_sent_parts", "_shown_at", "_stop", "finish_reason", "id", "index",
        "logprobs", "parts", "pooled", "proof", "sent", "sent_end", "state", "stop_reason", "times", "token_ids",
    )  # fmt: skip

    def __init__(
        self, state: RequestState, index: int, id: int, detokenizer: Detokenizer, stop: StopChecker | None
    ) -> None:
        self.state, self.index, self.id = state, index, id
        self._detokenizer, self._stop = detokenizer, stop
        self._repetition = checker_of(state.params.repetition_detection)
        self.token_ids: list[int] = []
        self.parts: list[str] = []
        self.logprobs: list[TokenLogprobs] | None = None if state.params.logprobs is None else []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.proof: Proof | None = None  # becomes the receipt
        self.pooled = b""  # of an engine that pools: fp32 [hidden]
        self.times = Times()
        self.sent_end = self._begun = False
        self.sent = self._sent_parts = 0  # tokens, and pieces of text
        self._shown_at = 0  # the number of tokens when the first text was there

    def push(self, token: int, logprobs: TokenLogprobs | None, hidden: bool) -> bool:
        """Add a token; a ``hidden`` one adds no text. Return whether a stop string is complete."""
        self.token_ids.append(token)
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.append(logprobs)
        if hidden:
            return False
        text = self._detokenizer.push(token)
        if self._stop is not None:
            return self._show(text)
        if text:
            self._add(text)
        return False

    def repeats(self) -> bool:
        """Look at the last token. Return whether it completes a repetition, which ends the text."""
        if self._repetition is None:
            return False
        return self._repetition.push(self.token_ids[-1]) and len(self.token_ids) >= self.state.params.min_tokens

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """End the choice for ``reason``. Text still buffered is added, and may complete a stop string."""
        if reason != "abort" and (self._stop is None or self._stop.found is None):
            if self._show(self._detokenizer.finish()):
                reason, stop_reason = "stop", self.found_stop
            elif self._stop is not None and (text := self._stop.finish()):
                self._add(text)
        self.finish_reason, self.stop_reason = reason, stop_reason

    @property
    def receipt(self) -> Receipt | None:
        """The receipt, made at its first reading; None before the end, and if none is wanted."""
        return None if self.proof is None else self.proof.receipt

    @property
    def found_stop(self) -> str | None:
        return self._stop.found if self._stop else None

    @property
    def has_delta(self) -> bool:
        """Whether there is something to send: new text, or the end.

        New tokens count as text if no text is made. An error is in ``state.error`` instead. If the prompt's logprobs
        are requested, nothing is sent before they are known.
        """
        state = self.state
        if self.sent_end or (state.params.prompt_logprobs is not None and not state.prompt_logprobs):
            return False
        if self.finish_reason is not None:
            return self.finish_reason != "error"
        if self._detokenizer is SILENT:
            return len(self.token_ids) > self.sent
        return len(self.parts) > self._sent_parts

    @property
    def begins(self) -> bool:
        """Whether nothing was sent yet."""
        return not self._begun

    def is_due(self, interval: int) -> bool:
        """Return whether to send now: the beginning, the end, or at least ``interval`` new tokens."""
        return not self._begun or self.finish_reason is not None or len(self.token_ids) - self.sent >= interval

    def take_delta(self, most: int | None = None) -> OutputDelta:
        """Return the part that was not sent yet; the caller sends it now.

        It has at most ``most`` tokens, if given, and as many pieces of text. Then the first part ends with the first
        piece, even if more tokens came before the server could send it, unless the whole answer did.
        """
        start, text_from = self.sent, self._sent_parts
        first, self._begun = not self._begun, True
        pieces = most
        if first and self.parts and most is not None and self.finish_reason is None:
            most, pieces = min(self._shown_at, most), 1
        ids = self.token_ids[start:] if most is None else self.token_ids[start : start + most]
        parts = self.parts[text_from:] if pieces is None else self.parts[text_from : text_from + pieces]
        self.sent, self._sent_parts = start + len(ids), text_from + len(parts)
        over = self.sent == len(self.token_ids) and self._sent_parts == len(self.parts)
        self.sent_end = over and self.finish_reason is not None
        text = parts[0] if len(parts) == 1 else "".join(parts)
        return OutputDelta(text, ids, None if self.logprobs is None else self.logprobs[start : self.sent], first)

    @property
    def shown_end(self) -> tuple[str | None, int | str | None]:
        """The finish reason and the stop reason, once the last part was taken."""
        return (self.finish_reason, self.stop_reason) if self.sent_end else (None, None)

    def _show(self, text: str) -> bool:
        if self._stop is not None:
            text = self._stop.push(text, armed=len(self.token_ids) > self.state.params.min_tokens)
        if text:
            self._add(text)
        return self._stop is not None and self._stop.found is not None

    def _add(self, text: str) -> None:
        if not self.parts:
            self._shown_at = len(self.token_ids)
        self.parts.append(text)


class Launcher(Protocol):
    """A frontend, as a search asks it."""

    def launch(self, state: RequestState) -> None: ...

    def abort(self, state: RequestState) -> None: ...


class Search(Protocol):
    """A source of the choices of a request that are not sampled."""

    def begin(self, frontend: Launcher) -> None: ...

    def abort(self) -> None: ...

    def output(self) -> BeamSearchOutput: ...


@dataclass(slots=True, eq=False)
class RequestState:
    """A client's request, from :meth:`Frontend.prepare` on. ``error`` is set if it failed.

    ``on_change`` is called when there is something to send: in a ``stream`` any text, else only the end.
    ``embedded``: the prompt is embeddings, and ``prompt_ids`` only stand for its positions.
    ``marks``: tokens that the answers' parser looks for. ``phase``: how the answers begin; None: unknown.
    ``call_ids``: tokens that may begin a tool call.
    ``chunks`` are the prompts of a text that is read in chunks: each has a choice, in their order.
    ``max_tokens`` is the limit for each choice; ``unfinished`` counts the choices that are still running.
    """

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    max_tokens: int
    tokenizer: Tokenizer
    stream: bool = False
    cache_salt: str = ""
    segments: list[Segment] = field(default_factory=list)
    priority: int = 0
    lora_name: str = ""
    lora_request: LoRARequest | None = None  # the same adapter, as a caller of the library named it
    embedded: bool = False
    chunks: list[list[int]] = field(default_factory=list)
    checked: CheckedParams | None = None  # params, and the values shared by all prompts of the client's request
    marks: tuple[Mark, ...] = ()
    phase: Phase | None = None
    call_ids: frozenset[int] = frozenset()
    data_parallel_rank: int | None = None  # the replica that the client asks for
    source: BlockSource | None = None  # an engine that has read the prompt
    on_change: Callable[[], None] | None = None
    choices: list[Choice] = field(default_factory=list)
    unfinished: int = 0
    cached_tokens: int = 0
    answered_from_cache: bool = False
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    error: PreheatError | None = None
    search: Search | None = None  # the source of the choices, if they are not sampled
    relay: Relay | None = None  # the request of another frontend, which gets the results as they are
    first_token_at: float = 0.0  # 0: no token yet
    arrived_at: float = field(default_factory=time.monotonic)
    trace_headers: Mapping[str, str] = field(default_factory=dict)  # of the parent span, see preheat.frontend.tracing

    def ask_for_receipt(self) -> None:
        """Have the answer get a receipt, though its client did not ask for one."""
        self.params = msgspec.structs.replace(self.params, receipt=True)

    def new_detokenizer(self) -> Detokenizer:
        """Return a detokenizer for one of the choices."""
        if not self.params.detokenize:
            return SILENT
        return self.tokenizer.detokenizer(self.prompt_ids, self.params.skip_special_tokens, mark_chars(self.marks))

    @property
    def finished(self) -> bool:
        return self.error is not None or (self.unfinished == 0 and bool(self.choices))

    @property
    def sequences(self) -> int:
        """The number of sequences that the engine runs: choices, or chunks."""
        return len(self.chunks) or self.params.n

    @property
    def pooled(self) -> bytes:
        """The pooled state of a text without chunks."""
        return self.choices[0].pooled

    @property
    def prompt_text(self) -> str:
        """The prompt as text, also when it came as token ids."""
        return self.tokenizer.decode(self.shown_ids) if self.prompt is None else self.prompt

    @property
    def shown_ids(self) -> list[int]:
        """The prompt's token ids; empty if the prompt is embeddings."""
        return [] if self.embedded else self.prompt_ids

    def forget(self) -> None:
        """Let go of large objects when nobody will look at them again.

        Choices and their state refer to each other. Only the garbage collector would free them, much later and all at
        once.
        """
        for _ in self.forgetting():
            pass

    def forgetting(self) -> Iterator[None]:
        """Do the same as :meth:`forget`, in steps that free at most :data:`FREED_AT_ONCE` entries each."""
        for entries in (self.prompt_logprobs, *(choice.logprobs for choice in self.choices)):
            while entries:
                del entries[-FREED_AT_ONCE:]
                yield
        self.choices, self.prompt_ids, self.prompt_logprobs, self.segments, self.chunks = [], [], [], [], []
        self.prompt = self.checked = self.search = self.relay = self.on_change = None
        yield

    def output(self, choices: list[CompletionOutput] | None = None) -> RequestOutput:
        """Return the result so far; ``choices`` replace the whole choices."""
        asked, entries = self.params.prompt_logprobs is not None, self.prompt_logprobs
        positions = [None if entry is None else self.position(entry) for entry in entries]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.shown_ids,
            prompt_logprobs=self._shaped(positions) if asked else None,
            outputs=[self._whole(choice) for choice in self.choices] if choices is None else choices,
            finished=self.finished,
            num_cached_tokens=self.cached_tokens,
            metrics=self._stats(),
            lora_request=self.lora_request,
        )

    def _stats(self) -> RequestStateStats:
        times, now = [choice.times for choice in self.choices], time.monotonic()
        return RequestStateStats(
            num_generation_tokens=sum(len(choice.token_ids) for choice in self.choices),
            arrival_time=time.time() - (now - self.arrived_at),
            queued_ts=self.arrived_at,
            scheduled_ts=min((each.started for each in times if each.started), default=0.0),
            first_token_ts=self.first_token_at,
            last_token_ts=max((each.last for each in times), default=0.0),
            first_token_latency=self.first_token_at - self.arrived_at if self.first_token_at else 0.0,
        )

    def position(self, entry: TokenLogprobs, *, ranked: bool = True) -> PositionLogprobs:
        """Return the logprobs of one position by token id, the chosen token first.

        ``ranked``: the other tokens are the most likely ones, so they get ranks.
        """
        decode = self.tokenizer.token_text if self.params.detokenize else _silent
        position = {entry.token: Logprob(entry.logprob, entry.rank, decode(entry.token))}
        for rank, (token, logprob) in enumerate(entry.top, 1):
            position.setdefault(token, Logprob(logprob, rank if ranked else None, decode(token)))
        return position

    def positions(self, entries: Iterable[TokenLogprobs]) -> Sequence[PositionLogprobs]:
        """Return the logprobs of generated tokens in the form that the request asks for."""
        ranked = not self.params.logprob_token_ids
        return self._shaped([self.position(entry, ranked=ranked) for entry in entries])

    def _shaped(self, positions: list[_Position]) -> Sequence[_Position]:
        return cast("Sequence[_Position]", FlatLogprobs(positions)) if self.params.flat_logprobs else positions

    def news(self, choice: Choice) -> CompletionOutput:
        """Return the gain of ``choice`` since the last call; ``cumulative_logprob`` covers all its tokens."""
        delta = choice.take_delta()
        return self._completion(choice, delta.text, delta.token_ids, delta.logprobs)

    def _whole(self, choice: Choice) -> CompletionOutput:
        return self._completion(choice, "".join(choice.parts), [*choice.token_ids], choice.logprobs)

    def _completion(
        self, choice: Choice, text: str, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> CompletionOutput:
        return CompletionOutput(
            index=choice.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=None if choice.logprobs is None else sum(entry.logprob for entry in choice.logprobs),
            logprobs=None if logprobs is None else self.positions(logprobs),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            lora_request=self.lora_request,
            proof=choice.proof,
        )


def _silent(token: int) -> None:
    """Take the place of the tokenizer where no text is made."""
