"""Names of vLLM's library that can have no meaning here: they are there, and using one says why not."""

from __future__ import annotations

from typing import Any, Never

from preheat.errors import InvalidRequest


class NotHere(InvalidRequest, AttributeError):
    """A name of vLLM's that has no meaning here was used. The message says why, and what to use instead."""


class Refused:
    """Stands for ``name``. Calling it, looking up an attribute of it, or making a class below it, raises NotHere with
    the ``reason``; an annotation may name it.
    """

    def __init__(self, name: str, reason: str) -> None:
        self._name, self._reason = name, reason
        self.__doc__ = f"Not here: {reason}."

    @property
    def reason(self) -> str:
        return self._reason

    def _refuse(self) -> Never:
        raise NotHere(f"{self._name} is not here: {self._reason}", param=self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Never:
        self._refuse()

    def __mro_entries__(self, bases: tuple[object, ...]) -> Never:
        self._refuse()

    def __or__(self, other: object) -> Refused:
        return self

    __ror__ = __or__

    def __getattr__(self, name: str) -> Never:
        if name.startswith("__"):  # what Python itself looks for
            raise AttributeError(name)
        self._refuse()

    def __repr__(self) -> str:
        return f"<not here: {self._name}>"
