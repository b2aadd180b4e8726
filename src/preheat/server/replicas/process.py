"""The engine's process, as the server sees it.

The child reads its settings from standard input and exits when that closes, so it never outlives the server. SIGTERM
asks the server to let it go: the server sends it no more requests, and ends it behind the last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from preheat.core import Drain
from preheat.settings import Settings
from preheat.transport import FrontendTransport, announce_leaving, remove_sockets
from preheat.utils.children import child_environment, python_command
from preheat.utils.lifeline import Lifeline

ENGINE = "preheat.startup:run_engine"
"""The child's entry, as ``module:function``; called with the settings and the transport's address."""

_STDIN = 0
_STOP_SECONDS = 5.0


def _start(arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a child that runs :func:`main`."""
    command = python_command("preheat.server.replicas.process", *arguments)
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=environment)


class EngineProcess:
    """A child process that runs ``entry``.

    The child has its own session, so that Ctrl-C does not reach it.

    ``variables`` are added to its environment.
    """

    def __init__(
        self, settings: Settings, entry: str = ENGINE, variables: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.transport = FrontendTransport()
        self.open = True
        self._child = _start([self.transport.address, entry], child_environment(variables))
        assert self._child.stdin is not None
        self._stdin = self._child.stdin
        with contextlib.suppress(BrokenPipeError):  # the child has exited; :meth:`watch` will report it
            self._stdin.write(msgspec.json.encode(settings) + b"\n")
            self._stdin.flush()

    def watch(self, on_message: Callable[[], None], on_exit: Callable[[int | None], None]) -> None:
        """Call ``on_message`` when there may be messages, ``on_exit`` when the child exits.

        The child exits when its memory is free; ``on_exit(None)`` comes before, if it dies without a message.
        """
        loop = asyncio.get_running_loop()
        loop.add_reader(self.transport.fileno(), on_message)
        loop.call_soon(on_message)  # earlier messages cause no further edge

        def tell(code: int | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(on_exit, code)

        def wait_for_death(lifeline: Lifeline) -> None:
            if lifeline.died():
                tell(None)

        def wait() -> None:
            code = self._child.wait()
            if lifeline is not None:
                lifeline.close()
                death.join()  # so that the death is told first
            tell(code)

        if (lifeline := self.transport.lifeline) is not None:
            death = threading.Thread(target=wait_for_death, args=[lifeline], daemon=True, name="engine-death")
            death.start()
        threading.Thread(target=wait, daemon=True, name="engine-exit").start()

    def said(self, code: int | None) -> str:
        """Return in words how the child has ended, with status ``code``, or that it dies."""
        if code is None:
            return "The engine's process dies"
        killed = ": it was killed, perhaps because the machine ran out of memory" if code == -signal.SIGKILL else ""
        return f"The engine's process ended with status {code}{killed}"

    def kill(self) -> None:
        """Kill the child and its children; also a child that is stopped."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)

    def discard(self) -> None:
        """Close the transport of a child that has exited, and end what it left behind."""
        if self.open:
            self.open = False
            asyncio.get_running_loop().remove_reader(self.transport.fileno())
            self.kill()  # its children, such as ranks, still hold memory of devices
            self._stdin.close()
            self.transport.close()

    async def stop(self, now: bool) -> None:
        """Drain the engine, and kill it after a timeout, or at once if ``now``."""
        if not self.open:
            return
        self.open = False
        asyncio.get_running_loop().remove_reader(self.transport.fileno())
        self.transport.send(Drain(now))
        if not now:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._child.wait, _STOP_SECONDS)
        self._child.kill()
        await asyncio.to_thread(self._child.wait)
        self._stdin.close()
        self.transport.close()


def _exit_with_parent(address: str) -> None:
    while os.read(_STDIN, 1):
        pass
    remove_sockets(address)
    os._exit(1)


def main() -> None:
    """Run the child.

    It reads the settings from standard input, then calls the entry of the command line.
    """
    address, entry = sys.argv[1:]
    with open(_STDIN, "rb", buffering=0, closefd=False) as pipe:
        settings = msgspec.json.decode(pipe.readline(), type=Settings)
    threading.Thread(target=_exit_with_parent, args=[address], daemon=True, name="parent-exit").start()
    signal.signal(signal.SIGTERM, lambda *_: announce_leaving(address))
    module, _, function = entry.partition(":")
    getattr(importlib.import_module(module), function)(settings, address)


if __name__ == "__main__":
    main()
