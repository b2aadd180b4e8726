"""The process of the command line: ``preheat`` and ``python -m preheat``."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading

INTERRUPTED = 130


def main() -> int:
    """Run the command line and return its exit status. Ctrl-C ends it at once, whatever it imports, compiles or runs.

    A KeyboardInterrupt would be raised anywhere in it, torch's import and compilers included, which swallow it, print
    it or leave threads that the interpreter waits for. The server handles its own signals once its port is open.
    """
    signal.signal(signal.SIGINT, _leave)
    _leave_from_a_thread()
    from preheat.cli import main as run

    return run()


def _leave(*_: object) -> None:
    with contextlib.suppress(Exception):  # what is being written may be half there
        sys.stdout.flush()
        sys.stderr.write("\n" * sys.stderr.isatty())
    os._exit(INTERRUPTED)


def _leave_from_a_thread() -> None:
    """Python calls a handler between two of its own instructions; an operation of torch may take seconds."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def wait() -> None:
        while numbers := os.read(reading, 1):
            if numbers[0] == signal.SIGINT and signal.getsignal(signal.SIGINT) is _leave:
                _leave(*numbers)

    threading.Thread(target=wait, daemon=True, name="interrupt").start()


if __name__ == "__main__":
    sys.exit(main())
