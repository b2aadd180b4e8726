"""From what the engine computed to what a client reads: book each step, make text, find stop strings, end choices."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

from preheat.core import Cancel, Delta, Finish, Stats, ToEngine
from preheat.errors import PreheatError
from preheat.frontend.request_state import Choice, RequestState
from preheat.metrics import Metrics


class OutputProcessor:
    """Keeps every choice that is not finished, in ``choices`` by request id. ``send`` hands a message to the engine."""

    def __init__(self, send: Callable[[ToEngine], None], metrics: Metrics) -> None:
        self.choices: dict[int, Choice] = {}
        self.metrics = metrics
        self._send = send

    def add(self, state: RequestState) -> None:
        """The requests of ``state`` are about to be sent."""
        state.arrived_at = time.monotonic()
        self.choices |= {choice.id: choice for choice in state.choices}
        self.metrics.waiting += len(state.choices)
        self.metrics.prompt_tokens += len(state.prompt_ids)

    def abort(self, state: RequestState) -> None:
        """The client does not want it any more: end its choices and free what they hold."""
        self._cancel(state, "abort")

    def fail(self, state: RequestState, error: PreheatError) -> None:
        """End ``state`` with ``error``; what its other choices hold is freed."""
        if not state.finished:
            state.error = error
            self._cancel(state, "error")

    def fail_all(self, error: PreheatError) -> None:
        """End everything that runs with ``error``."""
        for state in {id(choice.state): choice.state for choice in self.choices.values()}.values():
            self.fail(state, error)

    def process(self, delta: Delta) -> None:
        """Book all rows of one step: the hot path."""
        now = time.monotonic()
        choices, ends, logprobs = self.choices, delta.finished, delta.logprobs
        before: list[float] = []  # when each choice had its last token
        if delta.started:
            self._book_started(delta.started, now)
        for id, entries in delta.prompt_logprobs.items():
            if choice := choices.get(id):
                choice.state.prompt_logprobs.extend(entries)
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
            hidden = end is not None and end.stop_id == token and not choice.state.params.include_stop_str_in_output
            if choice.push(token, logprobs.get(place) if logprobs else None, hidden):
                if end is None:
                    self._send(Cancel(id))
                self._end(choice, "stop", choice.found_stop)
            elif end is None and choice.state.stream and choice.has_delta:
                _notify(choice.state)
        self.metrics.generation_tokens += len(before)
        for at, times in Counter(before).items():  # one or two moments: most had their last token together
            self.metrics.inter_token.observe(now - at, times)
        for id, end in ends.items():
            if choice := choices.get(id):
                self._book_end(choice, end)
        if delta.stats is not None:
            self._book_stats(delta.stats)

    def _cancel(self, state: RequestState, reason: str) -> None:
        for choice in state.choices:
            if choice.finish_reason is None:
                self._send(Cancel(choice.id))
                self._end(choice, reason)

    def _book_started(self, started: Mapping[int, int], now: float) -> None:
        for id, cached in started.items():
            choice = self.choices.get(id)
            if choice is None or choice.started:  # after a preemption it starts again
                continue
            choice.started = True
            self.metrics.waiting -= 1
            self.metrics.running += 1
            self.metrics.queue.observe(now - choice.state.arrived_at)
            if choice.index == 0:
                choice.state.cached_tokens = cached

    def _book_first(self, choice: Choice, now: float) -> None:
        self.metrics.generation_tokens += 1
        self.metrics.first_token.observe(now - choice.state.arrived_at)

    def _book_end(self, choice: Choice, end: Finish) -> None:
        if end.reason == "error":
            error = end.error.restore() if end.error else PreheatError("The engine could not run this request")
            self.fail(choice.state, error)
        else:
            self._end(choice, end.reason, _stop_reason(choice.state, end))

    def _book_stats(self, stats: Stats) -> None:
        metrics = self.metrics
        metrics.cache_usage = stats.blocks_used / max(stats.blocks_total, 1)
        metrics.prefix_queries, metrics.prefix_hits = stats.prefix_queries, stats.prefix_hits
        metrics.preemptions = stats.preemptions
        metrics.blocks_moved = stats.blocks_moved

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


def _stop_reason(state: RequestState, end: Finish) -> int | None:
    """A stop token that the request named is reported to its client; the model's own end of sequence is not."""
    return end.stop_id if end.stop_id in (state.params.stop_token_ids or ()) else None
