"""Turn the engine's tokens into a client's text: find stop strings, end choices, count."""

from __future__ import annotations

import time
from collections.abc import Callable

from preheat.core import Cancel, Delta, Finish, ToEngine
from preheat.errors import PreheatError
from preheat.frontend import request_log
from preheat.frontend.receipt import Proof, StepDigests
from preheat.frontend.repetition import REPEATED
from preheat.frontend.request_state import Choice, RequestState
from preheat.frontend.tracing import RequestTraces
from preheat.metrics import Metrics


class OutputProcessor:
    """The unfinished choices, by request id.

    ``send`` hands a message to the engine. ``log``: requests are logged. ``traces`` get each request at its end.
    ``ended`` is called with each choice that has ended.
    """

    def __init__(
        self,
        send: Callable[[ToEngine], None],
        metrics: Metrics,
        *,
        log: bool = False,
        traces: RequestTraces | None = None,
        ended: Callable[[Choice], None] = lambda choice: None,
    ) -> None:
        self.choices: dict[int, Choice] = {}
        self.metrics = metrics
        self._digests = StepDigests(self._proof_of)
        self._send, self._log, self._traces, self._ended = send, log, traces, ended

    def add(self, state: RequestState) -> None:
        """Register ``state``; its requests are about to be sent."""
        state.arrived_at = now = time.monotonic()
        for choice in state.choices:
            choice.times.arrived = now
            self.choices[choice.id] = choice
        self.metrics.arrived(len(state.prompt_ids), state.params, state.sequences)
        if self._log:
            request_log.received(state)

    def abort(self, state: RequestState) -> None:
        """End ``state`` because its client has gone."""
        self._cancel(state, "abort")

    def fail(self, state: RequestState, error: PreheatError) -> None:
        """End ``state`` and all its choices with ``error``."""
        if not state.finished:
            state.error = error
            self._cancel(state, "error")

    def fail_all(self, error: PreheatError) -> None:
        """End all unfinished requests with ``error``."""
        for state in {id(choice.state): choice.state for choice in self.choices.values()}.values():
            self.fail(state, error)

    def process(self, delta: Delta) -> None:
        """Process all rows of one step. This is the hot path."""
        now = time.monotonic()
        choices, ends, logprobs = self.choices, delta.finished, delta.logprobs
        before: dict[float, int] = {}  # choices by the time of their previous token, in most steps a single one
        received = 0
        if delta.started:
            self._process_started(delta, now)
        if delta.prompt_logprobs:
            self._process_prompts(delta)
        if delta.digests:
            self._digests.add(delta.ids, delta.digests)
        for place, (id, token) in enumerate(zip(delta.ids, delta.tokens, strict=True)):
            choice = choices.get(id)
            if choice is None:  # ended here, and the engine does not know yet
                continue
            times, received = choice.times, received + 1
            if times.last:
                before[times.last] = before.get(times.last, 0) + 1
            else:
                self.metrics.first_token.observe(now - times.arrived)
                choice.state.first_token_at = choice.state.first_token_at or now
                times.first = now
            times.last = now
            end = ends.get(id) if ends else None
            hidden = end is not None and end.stop_id == token and not choice.state.params.include_stop_str_in_output
            if choice.push(token, logprobs.get(place) if logprobs else None, hidden):
                if end is None:
                    self._send(Cancel(id))
                self._end(choice, "stop", choice.found_stop)
            elif end is None and choice.repeats():
                self._send(Cancel(id))
                self._end(choice, "repetition", REPEATED)
            elif end is None and choice.state.stream and choice.has_delta:
                _notify(choice.state)
        self.metrics.generation_tokens += received
        for at, count in before.items():
            self.metrics.inter_token.observe(now - at, count)
        for id, end in ends.items():
            if choice := choices.get(id):
                choice.pooled = delta.pooled.get(id, b"")
                self._process_finish(choice, end)
        if delta.stats is not None:
            self.metrics.update(delta.stats)

    def _proof_of(self, id: int) -> Proof | None:
        choice = self.choices.get(id)
        return None if choice is None else choice.proof

    def _cancel(self, state: RequestState, reason: str) -> None:
        for choice in state.choices:
            if choice.finish_reason is None:
                self._send(Cancel(choice.id))
                self._end(choice, reason)

    def _process_prompts(self, delta: Delta) -> None:
        """Give prompts their log-probabilities."""
        for id, entries in delta.prompt_logprobs.items():
            if choice := self.choices.get(id):
                choice.state.prompt_logprobs.extend(entries)

    def _process_started(self, delta: Delta, now: float) -> None:
        for id, cached in delta.started.items():
            choice = self.choices.get(id)
            if choice is not None and choice.proof is not None:
                choice.proof.adapter = delta.adapters.get(id, "")
            if choice is None or choice.times.started:  # a sequence starts again after a preemption
                continue
            choice.times.started = now
            self.metrics.waiting -= 1
            self.metrics.running += 1
            self.metrics.queue.observe(now - choice.times.arrived)
            if choice.index == 0 or choice.state.chunks:
                choice.state.cached_tokens += cached
                self.metrics.cached_tokens += cached

    def _process_finish(self, choice: Choice, end: Finish) -> None:
        if end.reason == "error":
            error = end.error.restore() if end.error else PreheatError("The engine could not run this request")
            self.fail(choice.state, error)
        else:
            named = end.stop_id in (choice.state.params.stop_token_ids or ())  # not the model's own end of sequence
            self._end(choice, end.reason, end.stop_id if named else None)

    def _end(self, choice: Choice, reason: str, stop_reason: int | str | None = None) -> None:
        state = choice.state
        if choice.proof is not None:
            self._digests.give()
        del self.choices[choice.id]
        choice.finish(reason, stop_reason)
        self._ended(choice)
        self.metrics.ended(str(choice.finish_reason), choice.times, len(choice.token_ids))
        state.unfinished -= 1
        if self._log and not state.unfinished:
            request_log.ended(state)
        if self._traces is not None and not state.unfinished:
            self._traces.ended(state)
        if state.stream or state.finished:
            _notify(state)


def _notify(state: RequestState) -> None:
    if state.on_change is not None:
        state.on_change()
