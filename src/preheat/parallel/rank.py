"""The entry of a rank's process: ``python -m preheat.parallel.rank RANK DESCRIPTOR``."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from preheat.utils.gc import kept_imports


def main() -> None:
    """Import torch without collections of garbage, and be the rank on the descriptor's line."""
    with kept_imports():
        from preheat.parallel.worker import run
    run(int(sys.argv[1]), Connection(int(sys.argv[2])), door=None)


if __name__ == "__main__":
    main()
