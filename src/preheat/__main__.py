"""The process of the command line: ``preheat`` and ``python -m preheat``."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading

from preheat import WINDOWS

if sys.platform == "win32":
    sys.exit(WINDOWS)

from preheat.utils.log import leave, protect_stderr

INTERRUPTED = 130

_STDOUT, _STDERR = 1, 2


def main() -> int:
    """Run the command line and return its exit status.

    Ctrl-C ends the process at once.

    A KeyboardInterrupt could be raised anywhere, also in torch's import and in compilers. They swallow it, print it, or
    leave threads that the interpreter waits for. The server handles its own signals once its port is open.
    """
    _open_standard_files()
    protect_stderr()
    signal.signal(signal.SIGINT, _leave)
    _leave_from_a_thread()
    from preheat.cli.main import main as run

    return run()


def _open_standard_files() -> None:
    """Open standard files that were closed.

    Otherwise a socket could take such a descriptor and receive the output.
    """
    while (found := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(found, True)
    os.close(found)
    if sys.stdout is None:
        sys.stdout = sys.__stdout__ = open(_STDOUT, "w", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = sys.__stderr__ = open(_STDERR, "w", closefd=False)  # type: ignore[misc]  # noqa: SIM115


def _leave(*_: object) -> None:
    with contextlib.suppress(Exception):
        sys.stderr.write("\n" * sys.stderr.isatty())
    leave(INTERRUPTED)


def _leave_from_a_thread() -> None:
    """Leave from a thread on SIGINT.

    Python calls a signal handler only between two of its own instructions, and an operation of torch may take seconds.
    """
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
