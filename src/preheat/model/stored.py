"""The storage of quantized modules, and the rules that give it; no torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from preheat.ops.kinds import Scheme


@dataclass(frozen=True)
class Stored:
    """The format (:data:`preheat.model.formats.FORMATS`) and the scheme of a module.

    ``others``: other sizes of groups, where the scheme's size does not divide the inputs of a module.
    """

    format: str
    scheme: Scheme
    others: tuple[int, ...] = ()

    def fitted(self, *inputs: int) -> Stored:
        """Return the storage with the first size of groups that divides all ``inputs``; else as it is."""
        sizes = (self.scheme.group, *self.others)
        found = next((size for size in sizes if size and not any(each % size for each in inputs)), self.scheme.group)
        return replace(self, scheme=replace(self.scheme, group=found))


Module = tuple[str, ...]
"""Names of a module in the spec and in other layouts."""

Says = Callable[[Module], Stored | None]
"""Storage rule of modules by their names; None: not quantized."""


Named = Callable[[str], Stored | None]
"""Storage rule of modules by their names in the spec."""


@dataclass(frozen=True)
class Quantization:
    """The rules of a method.

    ``says`` gives the storage of a module, ``head`` the storage of the output head; None: the head is plain.
    ``routers``: ``says`` applies to the routers of experts too. ``tables``: whether the config names a module as a
    quantized table of embeddings.
    """

    says: Says
    head: Says | None = None
    routers: bool = True
    tables: Callable[[Module], bool] = lambda module: False
