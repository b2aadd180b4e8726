"""The engine of :mod:`tests.api.watched`, behind a server that describes no types in advance."""

from preheat import startup
from preheat.server import openapi
from tests.api.watched import run_engine

__all__ = ["run_engine"]

openapi.prepare = lambda: None  # type: ignore[assignment]
startup.describe_structs = list  # type: ignore[assignment]
