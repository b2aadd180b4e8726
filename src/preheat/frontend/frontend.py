"""Text in, text out: the two processors between clients and an engine that only knows token ids.

A synchronous state machine that never waits: ``LLM`` drives it between steps of the loop, the server from its event
loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from preheat.core import Delta, Died, FromEngine, Progress, Ready, ToEngine
from preheat.errors import EngineDead, NotInvariant, NotReady, TooManyRequests
from preheat.frontend.input_processor import InputProcessor
from preheat.frontend.output_processor import OutputProcessor
from preheat.frontend.request_state import RequestState
from preheat.frontend.tokenizer import Tokenizer
from preheat.metrics import Metrics


class Frontend:
    """Serves one model. ``send`` hands a message to the engine; :meth:`handle` takes each one that comes back.

    A request is checked by ``prepare``, sent by :meth:`start` and may be ended by ``abort``, at any time.

    ``ready`` holds the engine's limits once it can run. ``max_queued``: most sequences that may wait for their first
    step. For ``max_logprobs`` and ``seed`` see :class:`InputProcessor`.
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
        self.input = InputProcessor(tokenizer, self.limits, max_logprobs=max_logprobs, seed=seed)
        self.output = OutputProcessor(send, self.metrics)
        self.prepare, self.abort, self.fail_all = self.input.prepare, self.output.abort, self.output.fail_all
        self.ready: Ready | None = None
        self.progress: Progress | None = None
        self.dead: str | None = None
        self._send, self._max_queued = send, max_queued

    @property
    def busy(self) -> bool:
        """Some choice is not finished."""
        return bool(self.output.choices)

    @property
    def num_unfinished(self) -> int:
        """Choices that are not finished, waiting ones included."""
        return len(self.output.choices)

    def limits(self) -> Ready:
        """The engine's limits. Raises EngineDead or NotReady, saying why it takes no requests."""
        if self.dead is not None:
            raise EngineDead(self.dead)
        if self.ready is None:
            raise NotReady("The engine is still starting; try again later")
        if self.ready.blocked_reason:
            raise NotReady(_blocked(self.ready))
        return self.ready

    def check_blocked(self) -> None:
        """Raise NotInvariant where the engine can run but must not."""
        if self.ready is not None and self.ready.blocked_reason:
            raise NotInvariant(_blocked(self.ready))

    def start(self, states: Iterable[RequestState]) -> None:
        """Send prepared requests to the engine: all, or none with TooManyRequests when the queue is full."""
        states = list(states)
        asked, waiting = sum(state.params.n for state in states), self.metrics.waiting
        if self._max_queued is not None and waiting + asked > self._max_queued:
            raise TooManyRequests(f"{waiting} sequences are waiting already; try again later")
        self.limits()
        for state in states:
            requests = self.input.fan_out(state)
            self.output.add(state)
            for request in requests:
                self._send(request)

    def handle(self, message: FromEngine) -> None:
        """Book a message of the engine."""
        match message:
            case Delta():
                self.output.process(message)
            case Progress():
                self.progress = message
            case Ready():
                self.ready = message
            case Died():
                self.die(message.message)

    def die(self, message: str) -> None:
        """The engine is gone: end what runs, refuse what comes."""
        if self.dead is None:
            self.dead = message
            self.fail_all(EngineDead(message))


def _blocked(ready: Ready) -> str:
    return f"The check at boot failed, so no requests are taken: {ready.blocked_reason}"
