"""``python -m benchmarks [NAME ...] [arguments]``: run benchmarks; without a name, list them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from benchmarks.registry import ALL, SINGLE, SUITE, listing
from preheat.errors import PreheatError, SettingsError
from preheat.utils.text import did_you_mean


def main(words: Sequence[str]) -> int:
    """Run the benchmarks named in ``words``.

    Returns the exit status: 0, or 1 where a benchmark failed.
    """
    if not words:
        print(listing())
        return 0
    name, *rest = words
    if name in SINGLE:
        importlib.import_module(f"benchmarks.{name}").main(rest)
        return 0
    known = [*SUITE, ALL, *SINGLE]
    if not name.startswith("-") and name not in known:
        raise SettingsError(f"no benchmark is called {name}{did_you_mean(name, known)}")
    from benchmarks.suite import command

    return command.main(words)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except PreheatError as error:
        print(f"benchmarks: error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, SettingsError) else 1)
