"""The slow parts of Triton's keys, computed by a process beside the imports. Neither torch nor Triton here.

The key of a kernel in Triton's cache covers Triton's own files, hundreds of megabytes, and the platform, which another
program names. Triton takes both with its first kernel, in half a second. A thread of this process would need Python's
lock for every megabyte, and the imports of a boot hold the lock.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import suppress
from typing import NamedTuple

from preheat.utils.children import child_environment, python_command

LONGEST = 10.0
"""Seconds after which this process computes the key itself: a process needs about one."""


class TritonKey(NamedTuple):
    """What Triton says about itself; ``installation`` is the file of the Triton that says so."""

    installation: str
    files: str
    platform: str


class Asked:
    """A question to a process, asked at most once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def begin(self) -> None:
        """Start the process, unless it was started. Without processes to be had, do nothing."""
        with self._lock, suppress(OSError):
            self._process = self._process or subprocess.Popen(
                python_command(__name__, warns=False),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # Ctrl-C does not reach it
                env=child_environment(),
            )

    def answer(self) -> TritonKey | None:
        """Wait for the answer, and return it; None if there is none."""
        with self._lock:
            if self._process is None or self._process.stdout is None or self._process.stdout.closed:
                return None
            try:
                told, _ = self._process.communicate(timeout=LONGEST)
                return TritonKey(**json.loads(told))
            except (subprocess.TimeoutExpired, ValueError, TypeError):
                return None

    def leave(self) -> None:
        """End the process."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait()


ASKED = Asked()


def main() -> None:
    """Print Triton's answers."""
    import triton
    from triton.runtime.build import platform_key
    from triton.runtime.cache import triton_key

    json.dump(TritonKey(triton.__file__, triton_key(), platform_key())._asdict(), sys.stdout)


if __name__ == "__main__":
    main()
