"""Shell completion (``preheat completion``): a script with every command and flag, made by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from preheat.errors import PreheatError

SHELLS = ("bash", "zsh", "fish")


def script(parser: argparse.ArgumentParser, commands: Iterable[argparse.ArgumentParser], shell: str) -> str:
    """Return a script that completes ``parser`` and its ``commands`` in ``shell``.

    A flag with a FILE or a DIR completes to one. Raises PreheatError if shtab is not installed.
    """
    try:
        import shtab
    except ImportError:
        raise PreheatError("completion needs shtab: pip install 'preheat[completion]'") from None
    places = {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY}
    for command in (parser, *commands):
        for action in command._actions:
            if (place := places.get(str(action.metavar))) is not None:
                action.complete = place  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell))
