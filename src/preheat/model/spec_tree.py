"""Walk a tree of specs: yield its leaves, or change them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
    if isinstance(node, Leaf):
        yield path, node
        return
    children: Iterable[tuple[object, Any]] = ()
    if isinstance(node, tuple):
        children = enumerate(node)
    elif names := _field_names(cast(Any, type(node))):
        absent = getattr(node, "elsewhere", ())
        children = ((name, getattr(node, name)) for name in names if name not in absent)
    for name, child in children:
        if isinstance(child, tuple) or _field_names(cast(Any, type(child))):  # most fields are numbers and words
            yield from leaves(child, _below(path, name))


@cache
def _field_names(kind: Any) -> tuple[str, ...]:
    """Return the names of a dataclass's fields, none of another type."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()


def with_leaves(node: N, change: Callable[[str, Leaf], Leaf], path: str = "") -> N:
    """Return ``node`` with every leaf replaced by ``change(path, leaf)``.

    Paths are as in :func:`leaves`.
    """
    found: Any = node
    if isinstance(node, Leaf):
        found = change(path, node)
    elif isinstance(node, tuple):
        found = tuple(with_leaves(child, change, _below(path, at)) for at, child in enumerate(node))
    elif is_dataclass(node):
        children = {field.name: getattr(node, field.name) for field in fields(node)}
        found = replace(found, **{at: with_leaves(child, change, _below(path, at)) for at, child in children.items()})
    return cast(N, found)


def with_linears(node: N, change: Callable[[str, LinearSpec], LinearSpec]) -> N:
    """Return ``node`` with every linear layer changed, like :func:`with_leaves`."""
    return with_leaves(node, lambda path, leaf: change(path, leaf) if isinstance(leaf, LinearSpec) else leaf)


def _below(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)
