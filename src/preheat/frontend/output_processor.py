"""From the engine's tokens to what a client reads: make text, find stop strings, end choices, count."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

from preheat.core import Cancel, Delta, Finish, ToEngine
from preheat.errors import PreheatError
from preheat.frontend.request_state import Choice, RequestState
from preheat.metrics import Metrics


class OutputProcessor:
    """Keeps the unfinished choices, by request id. ``send`` hands a message to the engine."""

    def __init__(self, send: Callable[[ToEngine], None], metrics: Metrics) -> None:
        self.choices: dict[int, Choice] = {}
        self.metrics = metrics
        self._send = send

    def add(self, state: RequestState) -> None:
        """Register ``state``; its requests are about to be sent."""
        state.arrived_at = time.monotonic()
        self.choices |= {choice.id: choice for choice in state.choices}
        self.metrics.waiting += len(state.choices)
        self.metrics.prompt_tokens += len(state.prompt_ids)

    def abort(self, state: RequestState) -> None:
        """End ``state`` because its client is no longer interested."""
        self._cancel(state, "abort")

    def fail(self, state: RequestState, error: PreheatError) -> None:
        """End ``state`` with ``error``, all its choices."""
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
        before: list[float] = []  # the time of each choice's previous token
        if delta.started:
            self._process_started(delta.started, now)
        for id, entries in delta.prompt_logprobs.items():
            if choice := choices.get(id):
                choice.state.prompt_logprobs.extend(entries)
        for place, (id, token) in enumerate(zip(delta.ids, delta.tokens, strict=True)):
            choice = choices.get(id)
            if choice is None:  # it has ended here, which the engine does not know yet
                continue
            if choice.last_token_at:
                before.append(choice.last_token_at)
            else:
                self.metrics.generation_tokens += 1
                self.metrics.first_token.observe(now - choice.state.arrived_at)
            choice.last_token_at = now
            end = ends.get(id) if ends else None
            hidden = end is not None and end.stop_id == token and not choice.state.params.include_stop_str_in_output
            if choice.push(token, logprobs.get(place) if logprobs else None, hidden):
                if end is None:
                    self._send(Cancel(id))
                self._end(choice, "stop", choice.found_stop)
            elif end is None and choice.state.stream and choice.has_delta:
                _notify(choice.state)
        self.metrics.generation_tokens += len(before)
        for at, times in Counter(before).items():  # few times: most choices had their previous token in the same step
            self.metrics.inter_token.observe(now - at, times)
        for id, end in ends.items():
            if choice := choices.get(id):
                self._process_finish(choice, end)
        if delta.stats is not None:
            self.metrics.update(delta.stats)

    def _cancel(self, state: RequestState, reason: str) -> None:
        for choice in state.choices:
            if choice.finish_reason is None:
                self._send(Cancel(choice.id))
                self._end(choice, reason)

    def _process_started(self, started: Mapping[int, int], now: float) -> None:
        for id, cached in started.items():
            choice = self.choices.get(id)
            if choice is None or choice.started:  # a sequence starts again after a preemption
                continue
            choice.started = True
            self.metrics.waiting -= 1
            self.metrics.running += 1
            self.metrics.queue.observe(now - choice.state.arrived_at)
            if choice.index == 0:
                choice.state.cached_tokens = cached

    def _process_finish(self, choice: Choice, end: Finish) -> None:
        if end.reason == "error":
            error = end.error.restore() if end.error else PreheatError("The engine could not run this request")
            self.fail(choice.state, error)
        else:
            named = end.stop_id in (choice.state.params.stop_token_ids or ())  # not the model's own end of sequence
            self._end(choice, end.reason, end.stop_id if named else None)

    def _end(self, choice: Choice, reason: str, stop_reason: int | str | None = None) -> None:
        state, metrics = choice.state, self.metrics
        del self.choices[choice.id]
        choice.finish(reason, stop_reason)
        metrics.finished[str(choice.finish_reason)] += 1
        metrics.request.observe(time.monotonic() - state.arrived_at)
        if choice.started:
            metrics.running -= 1
        else:
            metrics.waiting -= 1
        state.unfinished -= 1
        if state.stream or state.finished:
            _notify(state)


def _notify(state: RequestState) -> None:
    if state.on_change is not None:
        state.on_change()
