"""The compiled functions that a plan lists."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from preheat.backends.base.facts import Facts


class Function(NamedTuple):
    """A function by its name in :attr:`Facts.functions`; ``layer`` is the first layer of the kind that it runs."""

    name: str
    layer: int | None = None

    def __str__(self) -> str:
        return self.name if self.layer is None else f"{self.name} of layer {self.layer}"


class Kinds(Protocol):
    """The part of :class:`preheat.model.specs.ModelSpec` that decides which functions there are."""

    @property
    def has_states(self) -> bool: ...
    @property
    def head(self) -> object | None: ...
    @property
    def first_of_kinds(self) -> tuple[int, ...]: ...


def functions_of(spec: Kinds, facts: Facts) -> tuple[Function, ...]:
    """Return the functions of a model on the backend of ``facts``, which are facts in an execution mode."""
    if not any(facts.functions) or spec.has_states:
        return ()
    of_layers, of_models, of_heads = facts.functions
    each = (Function(name, layer) for layer in spec.first_of_kinds for name in of_layers)
    return (*each, *map(Function, of_models), *(map(Function, of_heads) if spec.head is not None else ()))
