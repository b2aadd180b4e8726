"""The folder of everything that preheat keeps between boots."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from preheat.settings import Settings

OFF = "off"


def cache_root(settings: Settings) -> Path | None:
    """Return the folder of all stores, or None.

    It is ``--cache-dir``, else ``preheat`` in the user's cache; None if it is "off".
    """
    if settings.cache_dir == OFF:
        return None
    if settings.cache_dir is not None:
        return Path(settings.cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG specification: a relative path is ignored
        home = os.path.expanduser("~")
        base = os.path.join(home, ".cache") if os.path.isabs(home) else tempfile.gettempdir()
    return Path(base) / "preheat"
