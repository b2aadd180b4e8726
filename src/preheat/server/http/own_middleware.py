"""The operator's own ASGI middleware (``--middleware``), imported by path at boot."""

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
    """Import the middleware at each path ``module.NAME``.

    A path names an ASGI class, or an ``async def`` with the arguments ``(request, call_next)``, as for Starlette's
    ``BaseHTTPMiddleware``. Raises SettingsError for any other path.
    """
    return [_loaded(path) for path in paths]


def wrapped(app: ASGIApp, wraps: Sequence[Wrap]) -> ASGIApp:
    """Wrap ``app`` in the middleware.

    The last one sees a request first, as in vLLM.
    """
    for wrap in wraps:
        app = wrap(app)
    return app


def _loaded(path: str) -> Wrap:
    module, _, name = path.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except Exception as error:  # the operator's module may raise anything
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
