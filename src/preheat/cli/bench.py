"""The command bench."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from preheat.errors import PreheatError


def run_bench(words: Sequence[str]) -> int:
    """Run the ``benchmarks`` package, found beside ``src`` in a checkout and not installed."""
    root = Path(__file__).parents[3]
    if not (root / "benchmarks" / "__main__.py").is_file():
        raise PreheatError(
            "the benchmarks are not installed with preheat: clone its repository and run `scripts/bench` there"
        )
    # The default handler lets it stop the servers that it started.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return int(importlib.import_module("benchmarks.__main__").main(words))
