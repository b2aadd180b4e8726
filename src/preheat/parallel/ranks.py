"""The other ranks as the leader sees them.

The leader starts them, sends them orders, and ends them. A rank is a process that runs :mod:`preheat.parallel.worker`.
Through its connection to the leader it receives the settings, and reports. It ends when the connection ends, so it
never outlives the leader. A thread of the leader watches the processes and their heartbeats. When one rank dies, the
leader ends all. No torch here.
"""

from __future__ import annotations

import itertools
import logging
import pickle
import signal
import subprocess
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import Empty
from typing import Any, Protocol

from preheat.backends.base.facts import Mode
from preheat.backends.rendezvous import Rendezvous
from preheat.errors import PreheatError, RankDied, WireError
from preheat.parallel.channel import wait as wait_for
from preheat.parallel.reports import Heard
from preheat.parallel.sites import Memory, Network, Site
from preheat.parallel.wire import Address, Door, hang_up
from preheat.parallel.world import world_size
from preheat.settings import Settings
from preheat.utils.children import child_environment, python_command

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 0.1
_LAST_WORDS_SECONDS = 3.0


class RankProcess(Protocol):
    """A rank's process as the leader sees it.

    ``reason``: why it ended, as far as it is known, else empty.
    """

    @property
    def reason(self) -> str: ...

    def poll(self) -> int | None:
        """Return its exit status; None while it runs."""

    def kill(self) -> None: ...

    def leave(self) -> None:
        """Kill it and release its resources."""


@dataclass(frozen=True)
class Started:
    """A rank that has begun.

    Others reach it at its ``door``, if it has one. ``device`` is the number of its device among the devices that it
    sees.
    """

    process: RankProcess
    line: Connection
    door: Address | None
    device: int


class Launcher(Protocol):
    """Starts ranks 1 and up.

    ``nodes`` has the node of every rank, the leader's first. If there are several nodes, all ranks have doors; ``door``
    is the leader's.
    """

    @property
    def nodes(self) -> Sequence[object]: ...

    @property
    def door(self) -> Door | None: ...

    def launch(self) -> list[Started]: ...


class Child(subprocess.Popen[bytes]):
    """A process of this machine."""

    @property
    def reason(self) -> str:
        return ": it was killed, perhaps because the machine ran out of memory" * (self.returncode == -signal.SIGKILL)

    def leave(self) -> None:
        self.kill()
        self.wait()


class Children:
    """A :class:`Launcher` of ``world`` - 1 ranks on ``device``, a platform's name, that are children of this process.

    They start at once: while this process imports torch they do so, too, and then wait for orders.
    """

    door = None

    def __init__(self, world: int, device: str) -> None:
        self.nodes = [""] * world
        self._waiting = [_child(rank, device) for rank in range(1, world)]

    def launch(self) -> list[Started]:
        """Return the children, once; whoever launches them ends them."""
        launched, self._waiting = self._waiting, []
        return launched

    def leave(self) -> None:
        """End the children that nobody has launched."""
        for each in self.launch():
            each.process.leave()
            each.line.close()


def _child(rank: int, device: str) -> Started:
    ours, theirs = Pipe()
    child = Child(
        python_command("preheat.parallel.rank", rank, theirs.fileno(), device),
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,  # Ctrl-C does not reach it
    )
    theirs.close()
    return Started(child, ours, None, device=rank)


@dataclass(frozen=True)
class Orders:
    """The first message to a rank; ``cache`` is the folder of stores."""

    settings: Settings
    mode: Mode
    cache: Path | None
    device: int
    site: Site


class Ranks:
    """The ranks 1 and up of ``settings``, started by ``launcher``.

    They run in ``mode``; ``cache`` is the folder of stores.
    """

    def __init__(self, settings: Settings, mode: Mode, cache: Path | None, launcher: Launcher) -> None:
        self.world = world_size(settings)
        self.on_a_node = max(Counter(launcher.nodes).values())
        started = launcher.launch()
        self.processes = [each.process for each in started]
        self.heard = [Heard(each.line) for each in started]
        self._door, self._site = launcher.door, _site(launcher, started)
        self._watch = _Watch(self.processes, self.heard, self._site, settings.engine_heartbeat_timeout_s)
        self.check, self.fault = self._watch.check, _no_fault
        self.numbers = itertools.count(1)  # of what ranks do beside their steps
        self._sender = self._site.sender([each.line for each in started], self.check)
        self.close = weakref.finalize(self, self._watch.leave)
        for each in started:
            self._order(each, Orders(settings, mode, cache, each.device, self._site))
        self._watch.start()

    fault: Callable[[], str | None]
    """See :meth:`preheat.backends.base.collective.Collective.fault`."""

    def _order(self, rank: Started, orders: Orders) -> None:
        try:
            rank.line.send_bytes(pickle.dumps(orders))
        except OSError:  # it has exited already, as the watch will see
            return

    def rendezvous(self) -> Rendezvous:
        """Return the rendezvous of rank 0 with the others. Raises RankDied."""
        rendezvous = self._site.rendezvous(0, self._door, self.check)
        if self._door is not None:
            self._door.close()
        return rendezvous

    def on_death(self, report: Callable[[PreheatError], None]) -> None:
        """Have ``report`` called, in a thread, when a rank has died."""
        self._watch.report = report

    def on_end(self, abort: Callable[[], None]) -> None:
        """Have ``abort`` called, in a thread, after the report of a death."""
        self._watch.abort = abort

    def tell(self, name: str, *args: Any) -> None:
        """Have every rank call ``name(*args)``, after all earlier calls. Raises RankDied."""
        self.check()
        try:
            self._sender.send((name, args))
        except OSError as error:
            raise self.death(error) from None

    def check_step(self) -> None:
        """Raise RankDied if the engine is over, or if the device ended an exchange of a step without an answer."""
        self.check()
        if (why := self.fault()) is not None:
            raise self.death(PreheatError(why))

    def call(self, name: str, *args: Any) -> list[Any]:
        """Call as :meth:`tell`; wait for each rank's result and return them."""
        self.tell(name, *args)
        return self.answers()

    def answers(self) -> list[Any]:
        """Return each rank's next answer. Raises the first answered error, and RankDied."""
        found = [self._answer(heard) for heard in self.heard]
        for answer in found:
            if isinstance(answer, WireError):
                raise answer.restore()
        return found

    def outcome(self, number: int, rank: int) -> Any:
        """Wait for what ``rank`` does beside its steps under ``number``; return the outcome, or the error."""
        outcomes = self.heard[rank - 1].outcomes
        wait_for(lambda: number in outcomes, self.check)
        answer = outcomes.pop(number)
        return answer.restore() if isinstance(answer, WireError) else answer

    def _answer(self, heard: Heard) -> Any:
        while True:
            try:
                return heard.answers.get(timeout=_WATCH_SECONDS)
            except Empty:
                self.check()

    def death(self, error: BaseException) -> RankDied:
        """Return the error to raise when a step cannot go on.

        The reason is a rank that died, else the leader's own ``error``; such an error ends all ranks.
        """
        gone = isinstance(error, OSError)  # the process at the other end of a connection has died
        until = time.monotonic() + (_LAST_WORDS_SECONDS + _WATCH_SECONDS if gone else 2 * _WATCH_SECONDS)
        while time.monotonic() < until:
            try:
                self.check()
            except RankDied as died:
                return died
            time.sleep(_WATCH_SECONDS / 10)
        said = f"rank 0: {type(error).__name__}: {error}"
        self._watch.end(f"A step of several ranks failed in the middle, so none can go on: {said}")
        return RankDied(self._watch.reason or "")


def _no_fault() -> str | None:
    """Return None: no device has reported a fault."""
    return None


def _site(launcher: Launcher, started: Sequence[Started]) -> Site:
    """Return shared memory if one node has all ranks, else the network."""
    if len(set(launcher.nodes)) == 1:
        return Memory.open(len(launcher.nodes))
    assert launcher.door is not None
    return Network((launcher.door.address, *(each.door for each in started if each.door is not None)))


class _Watch:
    """The thread that notices when a rank dies.

    It has no reference to the :class:`Ranks`, so that they can be collected. ``reason``: why the engine is over, None
    before.
    """

    def __init__(self, processes: Sequence[RankProcess], heard: Sequence[Heard], site: Site, limit: float) -> None:
        self.processes, self.heard, self.site, self._limit = processes, heard, site, limit
        self.reason: str | None = None
        self.report: Callable[[PreheatError], None] = lambda error: None
        self.abort: Callable[[], None] = lambda: None
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True, name="ranks")
        self._gone: dict[int, float] = {}  # time of the end of each connection, by rank

    def start(self) -> None:
        self._thread.start()

    def leave(self) -> None:
        """Stop watching, end all ranks, and release their resources."""
        self.stopped.set()
        for process in self.processes:
            process.leave()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()  # it reads from the connections
        for heard in self.heard:
            heard.line.close()
        self.site.close()

    def check(self) -> None:
        """Raise RankDied, with the reason, if the engine is over."""
        if self.reason is not None:
            raise RankDied(self.reason)

    def end(self, why: str) -> None:
        """Note the reason and end all ranks, once."""
        with self._lock:
            if self.stopped.is_set():
                return
            self.stopped.set()
        logger.error("%s", why)
        self.reason = why
        for process, heard in zip(self.processes, self.heard, strict=True):
            hang_up(heard.line)
            process.kill()
        self.site.close()  # nobody else is left to do it if this process is killed next
        self.report(RankDied(why))
        self.abort()

    def _run(self) -> None:
        looked = time.monotonic()
        while not self.stopped.is_set():
            lines = {heard.line: heard for heard in self.heard if heard.open}
            for line in wait(list(lines), _WATCH_SECONDS):
                lines[line].listen()  # type: ignore[index]
            if (now := time.monotonic()) - looked >= _WATCH_SECONDS:
                looked = now
                self._look()

    def _look(self) -> None:
        for rank, (process, heard) in enumerate(zip(self.processes, self.heard, strict=True), 1):
            if (why := self._why(rank, process, heard)) is not None:
                self.end(why)

    def _why(self, rank: int, process: RankProcess, heard: Heard) -> str | None:
        """Return why a rank is dead.

        None if it is alive, or if the reason is not known yet.
        """
        now = time.monotonic()
        if (code := process.poll()) is not None:
            heard.listen()
            return f"Rank {rank} ended with status {code}" + (f": {heard.failure}" if heard.failure else process.reason)
        if not heard.open and now - self._gone.setdefault(rank, now) > _LAST_WORDS_SECONDS:
            return f"Rank {rank} cannot be reached: its node is gone, or the network between"
        if heard.heard is not None and now - heard.heard > self._limit:
            return (
                f"Rank {rank} has sent no heartbeat for {self._limit:g} s (--engine-heartbeat-timeout-s): its "
                "process is stopped, or its node cannot be reached"
            )
        return None
