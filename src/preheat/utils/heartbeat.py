"""Signs of life from the engine's process.

With them, the server need not wait for the time limit of a step. A thread beside the loop sends them, because a step on
a CPU may rightly take minutes. It falls silent when the process ends, and while ``alive`` says that the loop waits for
a device that does not answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

INTERVAL_SECONDS = 0.5


class Heartbeat:
    """A thread that calls ``beat`` every :data:`INTERVAL_SECONDS` while ``alive()`` is true, until :meth:`stop`."""

    def __init__(self, beat: Callable[[], None], alive: Callable[[], bool]) -> None:
        self._beat, self._alive, self._stopped = beat, alive, threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            if self._alive():
                self._beat()
            self._stopped.wait(INTERVAL_SECONDS)
