"""Names of vLLM's library without a meaning here: they exist, and using one raises an error."""

from __future__ import annotations

from typing import Any, Never

from preheat.errors import InvalidRequest


class NotHere(InvalidRequest, AttributeError):
    """The use of a vLLM name that has no meaning here. The message has the reason and a replacement."""


class Refused:
    """A substitute for ``name``; an annotation may use it.

    Calling it, reading an attribute of it, or making a class below it raises NotHere with the ``reason``.
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
        if name.startswith("__"):  # Python itself looks for such names
            raise AttributeError(name)
        self._refuse()

    def __repr__(self) -> str:
        return f"<not here: {self._name}>"
