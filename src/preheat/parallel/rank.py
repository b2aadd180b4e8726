"""The entry of a rank's process: ``python -m preheat.parallel.rank RANK DESCRIPTOR DEVICE``."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from preheat.backends.registry import preload, wake
from preheat.utils.gc import kept_imports


def main() -> None:
    """Wake the rank's device, import torch without collections of garbage, and be the rank on the descriptor's line."""
    rank, line, device = int(sys.argv[1]), Connection(int(sys.argv[2])), sys.argv[3]
    wake(device, rank)
    with kept_imports():
        from preheat.parallel.worker import run

        preload(device)
    run(rank, line, door=None)


if __name__ == "__main__":
    main()
