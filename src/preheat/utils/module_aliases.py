"""Modules without files, made from a table of names of other modules' objects."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:  # the classes import archives and temporary files, a third of ``import preheat``, and add nothing here
    Loader, MetaPathFinder = (type(name, (), {}) for name in ("Loader", "MetaPathFinder"))

Names = Mapping[str, Callable[[], object]]
"""The names in a module, and a function that returns the object of each."""


class AliasFinder(MetaPathFinder, Loader):
    """Finder and loader of modules below ``package`` without files.

    It comes after Python's own search. ``table`` is a module with ``modules()``, ``names(module)`` and
    ``program(module)``. They return the modules, a module's names, and the program of ``python -m``. The first search
    imports the table.
    """

    def __init__(self, package: str, table: str) -> None:
        self._package, self._table = package, table

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{self._package}.") or fullname == self._table:
            return None
        name = fullname.removeprefix(f"{self._package}.")
        listed = importlib.import_module(self._table).modules()
        above = any(each.startswith(f"{name}.") for each in listed)
        if name not in listed and not above:
            return None
        return ModuleSpec(fullname, self, origin=fullname, is_package=above)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def get_code(self, fullname: str) -> CodeType:
        """Return the program of ``python -m``, compiled."""
        program = importlib.import_module(self._table).program(fullname.removeprefix(f"{self._package}."))
        return compile(program, fullname, "exec")

    def exec_module(self, module: ModuleType) -> None:
        names: Names = importlib.import_module(self._table).names(module.__name__.removeprefix(f"{self._package}."))

        def find(name: str) -> object:
            if name not in names:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            value = names[name]()
            setattr(module, name, value)
            return value

        module.__doc__ = "Names that vLLM's users import from here."
        module.__getattr__ = find  # type: ignore[method-assign]
        module.__dir__ = lambda: sorted(names)  # type: ignore[method-assign]
        module.__all__ = sorted(names)  # type: ignore[attr-defined]
