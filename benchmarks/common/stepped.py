"""``preheat`` with a wall clock that steps by an hour, forward or back, at each SIGUSR2."""

from __future__ import annotations

import signal
import sys
import time

HOUR = 3600.0


def main() -> int:
    """Run the command line of preheat under a clock that steps."""
    real, offset = time.time, [0.0]
    time.time = lambda: real() + offset[0]

    def step(*_: object) -> None:
        offset[0] = 0.0 if offset[0] else HOUR

    signal.signal(signal.SIGUSR2, step)
    from preheat.cli.main import main as command

    return command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
