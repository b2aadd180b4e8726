"""Walk a tree of specs: yield its leaves, or change them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar, cast

from preheat.model.latent_specs import UpSpec
from preheat.model.mlp_specs import ExpertsSpec
from preheat.model.recurrence_specs import ConvSpec
from preheat.model.tensor_specs import (
    DistanceSpec,
    EmbeddingSpec,
    GateSpec,
    HeadSpec,
    LinearSpec,
    NormSpec,
    PatchSpec,
    VectorSpec,
)

N = TypeVar("N")

Leaf = (
    LinearSpec
    | NormSpec
    | EmbeddingSpec
    | ExpertsSpec
    | GateSpec
    | PatchSpec
    | VectorSpec
    | ConvSpec
    | HeadSpec
    | DistanceSpec
    | UpSpec
)
"""The specs with tensors of their own."""


def leaves(node: object, path: str = "") -> Iterator[tuple[str, Leaf]]:
    """Yield every leaf below ``node`` with its path, in field order."""
    found: list[tuple[str, Leaf]] = []
    _collect(node, path, found)
    return iter(found)


def _collect(node: Any, path: str, found: list[tuple[str, Leaf]]) -> None:
    """Append every leaf below ``node`` to ``found``."""
    form = _form(node.__class__)
    if form is Leaf:
        found.append((path, node))
    elif form is tuple:
        for number, child in enumerate(node):
            _collect(child, f"{path}.{number}" if path else str(number), found)
    elif form:
        absent = getattr(node, "elsewhere", ())
        for name in form:
            child = getattr(node, name)
            if _form(child.__class__) and name not in absent:  # most fields are numbers and words
                _collect(child, f"{path}.{name}" if path else name, found)


@cache
def _form(kind: Any) -> Any:
    """Return how a node of a type is walked: ``Leaf``, ``tuple``, or the names of a dataclass's fields.

    It is empty for a type without nodes.
    """
    if issubclass(kind, Leaf):
        return Leaf
    if issubclass(kind, tuple):
        return tuple
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()


def with_leaves(node: N, change: Callable[[str, Leaf], Leaf], path: str = "") -> N:
    """Return ``node`` with every leaf replaced by ``change(path, leaf)``.

    Paths are as in :func:`leaves`.
    """
    found: Any = node
    form = _form(cast(Any, type(node)))
    if form is Leaf:
        found = change(path, found)
    elif form is tuple:
        found = tuple(with_leaves(child, change, _below(path, at)) for at, child in enumerate(found))
    elif form:
        children = {at: getattr(node, at) for at in form}
        changed = {at: with_leaves(child, change, _below(path, at)) for at, child in children.items()}
        changed = {at: child for at, child in changed.items() if child is not children[at]}
        found = replace(found, **changed) if changed else found
    return cast(N, found)


def with_linears(node: N, change: Callable[[str, LinearSpec], LinearSpec]) -> N:
    """Return ``node`` with every linear layer changed, like :func:`with_leaves`."""
    return with_leaves(node, lambda path, leaf: change(path, leaf) if isinstance(leaf, LinearSpec) else leaf)


def _below(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)
