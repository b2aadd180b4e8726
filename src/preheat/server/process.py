"""The engine's process, as the server sees it: started, talked to, watched, stopped.

The child reads its settings from standard input and leaves when that closes, so that it never outlives its server,
however that ends.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec

from preheat.core import Drain
from preheat.settings import Settings
from preheat.transport import FrontendTransport, remove_sockets

ENGINE = "preheat.startup:run_engine"
"""What the child runs: ``module:function``, called with the settings and the transport's address."""

_STDIN = 0
_STOP_SECONDS = 5.0


class EngineProcess:
    """Runs ``entry`` in a child of its own session, which a terminal's Ctrl-C does not reach."""

    def __init__(self, settings: Settings, entry: str = ENGINE) -> None:
        self.transport = FrontendTransport()
        command = [sys.executable, "-m", "preheat.server.process", self.transport.address, entry]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        try:
            self._write(msgspec.json.encode(settings) + b"\n")
        except BrokenPipeError:  # it is gone already, which :meth:`watch` will report
            pass

    def _write(self, data: bytes) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(data)
        self._child.stdin.flush()

    @property
    def pid(self) -> int:
        return self._child.pid

    def watch(self, on_message: Callable[[], None], on_exit: Callable[[int], None]) -> None:
        """Call ``on_message`` when the transport may hold something, ``on_exit`` at once when the child ends."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self.transport.fileno(), on_message)
        loop.call_soon(on_message)  # what came before is announced by no further edge

        def wait() -> None:
            code = self._child.wait()
            if not loop.is_closed():
                loop.call_soon_threadsafe(on_exit, code)

        threading.Thread(target=wait, daemon=True, name="engine-exit").start()

    async def stop(self, now: bool) -> None:
        """Let the engine leave, or end it when that takes too long; ``now`` does not ask."""
        asyncio.get_running_loop().remove_reader(self.transport.fileno())
        self.transport.send(Drain(now))
        try:
            if not now:
                await asyncio.to_thread(self._child.wait, _STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        self._child.kill()
        await asyncio.to_thread(self._child.wait)
        if self._child.stdin is not None:
            self._child.stdin.close()
        self.transport.close()


def _leave_with_parent(address: str) -> None:
    while os.read(_STDIN, 1):
        pass
    remove_sockets(address)
    os._exit(1)


def main() -> None:
    """The child: settings from standard input, then the entry named on the command line."""
    address, entry = sys.argv[1:]
    with open(_STDIN, "rb", buffering=0, closefd=False) as pipe:
        settings = msgspec.json.decode(pipe.readline(), type=Settings)
    threading.Thread(target=_leave_with_parent, args=[address], daemon=True, name="parent-exit").start()
    module, _, function = entry.partition(":")
    getattr(importlib.import_module(module), function)(settings, address)


if __name__ == "__main__":
    main()
