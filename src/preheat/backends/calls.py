"""The graph driver of programs that are never captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

from preheat.backends.base.backend import K, R


class Calls(Generic[K, R]):
    """Calls the function, for devices without graphs and for programs that are not captured."""

    def __init__(self, body: Callable[[K], R]) -> None:
        self._body = body

    def __contains__(self, key: K) -> bool:
        return False

    def run(self, key: K, *, eager: bool = False) -> R:
        return self._body(key)

    def capture(self, key: K) -> None:
        """Do nothing: there is no graph to make."""

    def forget(self, key: K) -> None:
        """Do nothing: there is no graph to give up."""
