"""Preparation of requests before the scheduler's queue.

Threads beside the loop read a request's adapter, pull the blocks of its prompt from another engine, then compile its
grammar. The request waits for them here, and joins the queue then; other requests go on.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from preheat.core import AdapterReport, LoadAdapter, Request, UnloadAdapter
from preheat.errors import InvalidRequest, ModelNotFound, PreheatError, WireError
from preheat.grammar.service import Grammars
from preheat.kv_transfer.pulls import Pulls
from preheat.lora.service import Adapters
from preheat.schedule.grammar import GrammarState
from preheat.schedule.scheduler import Scheduler


class Admission:
    """The way of requests to the scheduler's queue.

    ``grammars`` serve structured outputs and ``adapters`` LoRA; a string instead is the reason why there are none.
    ``reject`` answers a request that cannot be served, ``report`` reports the outcome for an adapter. ``pulls``, if
    any, bring blocks from other engines.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        grammars: Grammars | str,
        adapters: Adapters | str,
        reject: Callable[[Request, PreheatError], None],
        report: Callable[[AdapterReport], None],
    ) -> None:
        self._scheduler, self._grammars, self._adapters = scheduler, grammars, adapters
        self._reject, self._report = reject, report
        self.pulls: Pulls | None = None

    @property
    def _services(self) -> list[Adapters | Pulls | Grammars]:
        found = (self._adapters, self.pulls, self._grammars)
        return [each for each in found if each is not None and not isinstance(each, str)]

    @property
    def pending(self) -> bool:
        """Whether an adapter is being read, a block pulled or a grammar compiled."""
        for service in (self._adapters, self.pulls, self._grammars):
            if service is not None and not isinstance(service, str) and service.pending:
                return True
        return False

    def add(self, request: Request) -> None:
        """Accept a request, or reject one that cannot be served."""
        try:
            if not request.lora_name:
                self._pull(request)
            elif isinstance(self._adapters, str):
                raise ModelNotFound(f"there is no adapter {request.lora_name!r}: {self._adapters}")
            elif self._adapters.start(request):
                self._pull(request)
        except PreheatError as error:
            self._refuse(request, error)

    def take(self, wait: float = 0.0) -> None:
        """Pass on prepared requests; wait up to ``wait`` seconds for the first one."""
        adapters, grammars = self._adapters, self._grammars
        if not isinstance(adapters, str) and adapters.pending:
            for request, error in adapters.take(wait):
                if error is None:
                    self._pull(request)
                else:
                    self._refuse(request, error)
            for report in adapters.reports(self._scheduler.serves):
                self._report(report)
        if self.pulls is not None and self.pulls.pending:
            for request in self.pulls.take(wait):
                self._compile(request)
        if not isinstance(grammars, str) and grammars.pending:
            for request, state in grammars.take(wait):
                if isinstance(state, PreheatError):
                    self._refuse(request, state)
                else:
                    self._queue(request, state)

    def cancel(self, request_id: int) -> bool:
        """Forget a request; return False if it does not wait here."""
        return any(service.cancel(request_id) for service in self._services)

    def cancel_all(self) -> list[int]:
        """Forget all waiting requests, and return their ids."""
        return [*chain.from_iterable(service.cancel_all() for service in self._services)]

    def change(self, message: LoadAdapter | UnloadAdapter) -> None:
        """Begin to load or unload an adapter; a report follows."""
        if isinstance(self._adapters, str):
            error = WireError.of(InvalidRequest(self._adapters))
            self._report(AdapterReport(message.name, message.id, error))
        elif isinstance(message, LoadAdapter):
            self._adapters.load(message)
        else:
            self._adapters.unload(message)

    def _pull(self, request: Request) -> None:
        """Pull the blocks, if any, of a request whose adapter is loaded."""
        adapter = None if isinstance(self._adapters, str) else self._adapters.peek(request)
        if self.pulls is None or not self.pulls.start(request, adapter):
            self._compile(request)

    def _compile(self, request: Request) -> None:
        """Compile the grammar, if any, of a request with its adapter and its blocks."""
        masked = request.params.masked
        if not masked:
            self._queue(request, None)
        elif isinstance(self._grammars, str):
            why = f"{masked[0]} is not supported here: {self._grammars}"
            self._refuse(request, InvalidRequest(why, param=masked[0]))
        else:
            self._grammars.start(request)

    def _queue(self, request: Request, grammar: GrammarState | None) -> None:
        adapter = None if isinstance(self._adapters, str) else self._adapters.chosen(request)
        try:
            self._scheduler.add(request, grammar, adapter)
        except PreheatError as error:
            # The frontend rejects such requests; one that slips through must not stop the loop.
            self._refuse(request, error)

    def _refuse(self, request: Request, error: PreheatError) -> None:
        self.cancel(request.id)
        self._reject(request, error)
