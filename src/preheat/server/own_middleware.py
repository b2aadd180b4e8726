"""ASGI middleware of the operator's own (``--middleware``), loaded by its path when the server boots."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp

from preheat.errors import SettingsError

Wrap = Callable[[ASGIApp], ASGIApp]


def load_middleware(paths: Sequence[str]) -> list[Wrap]:
    """What wraps an app, for each path ``module.NAME``: a class of ASGI, or an ``async def`` of a request and what
    answers it, as Starlette's ``BaseHTTPMiddleware`` has it. Raises SettingsError for a path that is neither.
    """
    return [_loaded(path) for path in paths]


def wrapped(app: ASGIApp, wraps: Sequence[Wrap]) -> ASGIApp:
    """``app`` behind the middleware; what is named last is asked first, as in vLLM."""
    for wrap in wraps:
        app = wrap(app)
    return app


def _loaded(path: str) -> Wrap:
    module, _, name = path.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except Exception as error:  # a module of one's own may raise anything
        raise SettingsError(
            f"middleware {path!r} cannot be loaded ({type(error).__name__}: {error}): give module.NAME, of a module "
            "that PYTHONPATH finds",
            param="middleware",
        ) from error
    if inspect.isclass(found):
        return cast("Wrap", found)
    if inspect.iscoroutinefunction(found):
        return lambda app: BaseHTTPMiddleware(app, dispatch=found)
    raise SettingsError(f"middleware {path!r} must be a class or an async def", param="middleware")
