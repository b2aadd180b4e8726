"""The entry of a builder: ``python -m preheat.backends.cuda.device.builder DESCRIPTOR...``.

See :mod:`preheat.backends.cuda.device.builders`. There is a process for each descriptor; it compiles the kernels that
arrive there, one at a time, and answers each with an empty message. It ends when the other end of its line is closed.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from multiprocessing.connection import Connection


def serve(line: Connection) -> None:
    """Compile the kernels that arrive on ``line``.

    A kernel that does not compile is left to the boot, which then meets the same error.
    """
    from preheat.backends.cuda.device.compiling import compile_job

    with suppress(EOFError, OSError):
        while True:
            job = line.recv_bytes()
            with suppress(Exception):
                compile_job(job)
            line.send_bytes(b"")


def main() -> None:
    """Import the kernels once, then serve each line in a process of its own."""
    lines = [Connection(int(number)) for number in sys.argv[1:]]
    from preheat.backends.cuda.device.triton_key import ASKED
    from preheat.utils.gc import kept_imports

    ASKED.begin()
    with kept_imports():
        import preheat.backends.cuda.backend  # noqa: F401 - forks share the kernels, and Triton's key
    mine = next((line for line in lines[1:] if os.fork() == 0), lines[0])
    for line in lines:
        if line is not mine:
            line.close()
    serve(mine)
    with suppress(ChildProcessError):
        while mine is lines[0]:
            os.wait()
    os._exit(0)  # without torch's clean-up, which takes longer than the work


if __name__ == "__main__":
    main()
