"""Versions of installed packages."""

from __future__ import annotations

from functools import cache
from importlib import metadata


@cache
def version_of(package: str) -> str | None:
    """Return the version of an installed package, read once a process; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
