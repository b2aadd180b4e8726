"""The scripted engine, behind a server that reports on standard error each type that msgspec describes."""

from __future__ import annotations

import os
import sys

from msgspec import _utils

from tests.api.scripted import run_engine

__all__ = ["run_engine"]


def _say(kind: type) -> None:
    print(f"described {os.getpid()} {kind.__module__}.{kind.__qualname__}", file=sys.stderr, flush=True)


def _watched(obj):  # type: ignore[no-untyped-def]  # its code runs among the names of msgspec._utils
    _say(obj)
    return _original(obj)  # type: ignore[name-defined]  # noqa: F821


_found = _utils.get_class_annotations
_utils._original = type(_found)(_found.__code__, _utils.__dict__)  # type: ignore[attr-defined]
_utils._say = _say  # type: ignore[attr-defined]
_found.__code__ = _watched.__code__  # msgspec keeps the function, so that another one would not be called
