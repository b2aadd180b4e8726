"""The served adapters, by name.

They are read beside the loop; a request waits only for its own adapter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from preheat.core import AdapterReport, LoadAdapter, Request, UnloadAdapter
from preheat.errors import AlreadyThere, ModelNotFound, NotFound, PreheatError, WireError
from preheat.schedule.adapters import Adapter

Read = Callable[[str, str], Adapter]
"""``read(name, path)``: the adapter in a folder, packed for an adapter slot. Raises a PreheatError if it cannot be
served.
"""


NO_ADAPTERS = "enable_lora is off"


class _Waiting(NamedTuple):
    """A request, or a message, that waits for an adapter to be read."""

    message: Request | LoadAdapter
    name: str
    adapter: Future[Adapter]


class Adapters:
    """The served adapters; ``read`` reads them from their folders.

    The host keeps at most ``most`` adapters: the latest that requests named. Others are read again when a request
    names them. Adapters of running requests and on the device stay, whatever becomes of their names.
    """

    def __init__(self, read: Read, most: int) -> None:
        self._read, self._most = read, most
        self._threads = ThreadPoolExecutor(1, "adapters")
        self._paths: dict[str, str] = {}  # of the served adapters
        self._kept: OrderedDict[str, Adapter] = OrderedDict()
        self._reading: dict[str, Future[Adapter]] = {}
        self._waiting: list[_Waiting] = []
        self._leaving: list[UnloadAdapter] = []
        self._chosen: dict[int, Adapter] = {}  # by request id, until the request is queued
        self._reports: list[AdapterReport] = []

    @property
    def pending(self) -> bool:
        """Whether an adapter is being read, waits for requests to end, or has a report due."""
        return bool(self._waiting or self._leaving or self._reports)

    @property
    def names(self) -> list[str]:
        """The names of the served adapters."""
        return [*self._paths]

    @property
    def digests(self) -> dict[str, str]:
        """The digests of the adapters that the host keeps, by name."""
        return {name: adapter.digest for name, adapter in self._kept.items()}

    def serve(self, name: str, path: str, adapter: Adapter | None = None) -> Adapter:
        """Serve ``adapter`` as ``name``; by default, read it from ``path`` now.

        An adapter without a path is always kept: it cannot be read again.
        """
        adapter = self._read(name, path) if adapter is None else adapter
        self._paths[name] = path
        self._keep(name, adapter)
        return adapter

    def load(self, message: LoadAdapter) -> None:
        """Read an adapter; the report follows."""
        name = message.name
        if any(each.name == name for each in self._leaving):
            self._tell(message, AlreadyThere(f"the adapter {name!r} is being unloaded: try again later"))
        elif not message.in_place and (name in self._paths or self._is_being_loaded(name)):
            why = f"there is an adapter {name!r} already: unload it, or replace it in place"
            self._tell(message, AlreadyThere(why, param="lora_name"))
        else:
            self._waiting.append(_Waiting(message, name, self._threads.submit(self._read, name, message.path)))

    def unload(self, message: UnloadAdapter) -> None:
        """Stop serving an adapter; the report follows when its last request has ended."""
        if message.name not in self._paths:
            why = f"there is no adapter {message.name!r}"
            self._tell(message, NotFound(why, param="lora_name"))
            return
        del self._paths[message.name]
        self._kept.pop(message.name, None)
        self._reading.pop(message.name, None)
        self._leaving.append(message)

    def start(self, request: Request) -> bool:
        """Find the adapter of ``request``; :meth:`chosen` then returns it.

        Return False if the adapter is being read; :meth:`take` returns the request later. Raises ModelNotFound for a
        name that is not served.
        """
        name = request.lora_name
        if name not in self._paths:
            raise ModelNotFound(f"there is no adapter {name!r}", param="model")
        if name in self._kept:
            self._kept.move_to_end(name)
            self._chosen[request.id] = self._kept[name]
            return True
        if name not in self._reading:
            self._reading[name] = self._threads.submit(self._read, name, self._paths[name])
        self._waiting.append(_Waiting(request, name, self._reading[name]))
        return False

    def chosen(self, request: Request) -> Adapter | None:
        """Return the adapter of a request that is about to be queued; None if it has none."""
        return self._chosen.pop(request.id, None)

    def peek(self, request: Request) -> Adapter | None:
        """Return the adapter of a request that :meth:`chosen` will return."""
        return self._chosen.get(request.id)

    def cancel(self, request_id: int) -> bool:
        """Forget a request. Return False if it does not wait here."""
        self._chosen.pop(request_id, None)
        count = len(self._waiting)
        self._waiting = [each for each in self._waiting if _request_id(each) != request_id]
        return len(self._waiting) < count

    def cancel_all(self) -> list[int]:
        """Forget all requests. Return the ids of the waiting ones."""
        ids = [id for each in self._waiting if (id := _request_id(each)) is not None]
        self._chosen.clear()
        self._waiting = [each for each in self._waiting if _request_id(each) is None]
        return ids

    def take(self, timeout: float) -> list[tuple[Request, PreheatError | None]]:
        """Return the requests that no longer wait.

        Each comes with an error if its adapter could not be read. Wait at most ``timeout`` seconds for one.
        """
        if timeout and self._waiting and not self._reports:
            wait([each.adapter for each in self._waiting], timeout, FIRST_COMPLETED)
        waiting, self._waiting = self._waiting, []
        found: list[tuple[Request, PreheatError | None]] = []
        for each in waiting:
            if not each.adapter.done():
                self._waiting.append(each)
            elif isinstance(each.message, LoadAdapter):
                self._loaded(each.message, _outcome(each))
            else:
                found.append((each.message, self._choose(each.message, each)))
        return found

    def reports(self, serves: Callable[[str], bool]) -> list[AdapterReport]:
        """Return the reports that are due; ``serves(name)`` says whether requests with the adapter are left."""
        held = {each.name for each in self._waiting if isinstance(each.message, Request)}
        for message in [*self._leaving]:
            if message.name not in held and not serves(message.name):
                self._leaving.remove(message)
                self._tell(message)
        reports, self._reports = self._reports, []
        return reports

    def _choose(self, request: Request, waiting: _Waiting) -> PreheatError | None:
        """Give ``request`` the adapter that was read, or return the error."""
        adapter, known = _outcome(waiting), self._reading.get(waiting.name) is waiting.adapter
        if known:
            del self._reading[waiting.name]
        if isinstance(adapter, PreheatError):
            return adapter
        if known:
            self._keep(waiting.name, adapter)
        self._chosen[request.id] = adapter
        return None

    def _loaded(self, message: LoadAdapter, adapter: Adapter | PreheatError) -> None:
        if isinstance(adapter, PreheatError):
            self._tell(message, adapter)
            return
        self._reading.pop(message.name, None)  # the adapter that is being read is an old one of this name
        self.serve(message.name, message.path, adapter)
        self._tell(message)

    def _is_being_loaded(self, name: str) -> bool:
        return any(each.name == name and isinstance(each.message, LoadAdapter) for each in self._waiting)

    def _keep(self, name: str, adapter: Adapter) -> None:
        self._kept[name] = adapter
        self._kept.move_to_end(name)
        while len(self._kept) > self._most and (oldest := next(filter(self._paths.get, self._kept), None)):
            del self._kept[oldest]

    def _tell(self, message: LoadAdapter | UnloadAdapter, error: PreheatError | None = None) -> None:
        self._reports.append(AdapterReport(message.name, message.id, WireError.of(error) if error else None))


def _outcome(waiting: _Waiting) -> Adapter | PreheatError:
    error = waiting.adapter.exception()
    if error is None:
        return waiting.adapter.result()
    return error if isinstance(error, PreheatError) else PreheatError(f"the adapter {waiting.name!r}: {error}")


def _request_id(waiting: _Waiting) -> int | None:
    return waiting.message.id if isinstance(waiting.message, Request) else None
