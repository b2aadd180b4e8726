"""Modules that are only names for what lies elsewhere: imported as any other, made from a table and of no file."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

Names = Mapping[str, Callable[[], object]]
"""The names in a module, and what gives the object of each."""


class AliasFinder(MetaPathFinder, Loader):
    """Finds modules below ``package`` that have no file, once Python has looked for one. ``table`` is the module, with
    ``modules()``, ``names(module)`` and ``program(module)``, that lists them and says what ``python -m`` runs; it is
    imported when the first one is asked for.
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
        """What ``python -m`` runs."""
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
