"""Common parts of families with states: the kinds of layers, and the sizes of a recurrence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from preheat.errors import ModelError
from preheat.model.config import Config
from preheat.ops.values import DELTA, Recurrence, StateRule


def layer_kinds(config: Config, kinds: object, states: tuple[str, ...], full: tuple[str, ...]) -> list[bool]:
    """Return for each of ``kinds`` whether it names a layer with a state: one of ``states`` rather than of ``full``.

    Raises ModelError for an unknown kind, for more or fewer kinds than layers, or without any attention.
    """
    count, known = config.num_layers(), (*states, *full)
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= set(known):
        raise ModelError(
            f"config.json: layer_types must be {count} times {' or '.join(known)}, as many as num_hidden_layers; got "
            f"{kinds!r}"
        )
    if not set(kinds) & set(full):
        raise ModelError(
            f"config.json: layer_types without {full[0]} are not supported: a cache needs a layer with keys"
        )
    return [kind in states for kind in kinds]


def recurrence(config: Config, names: Mapping[str, str], rule: StateRule = DELTA, **known: int) -> Recurrence:
    """Return the sizes of a layer's state, whose fields have ``names`` in the config; ``known`` are not read.

    Raises ModelError, by name, for sizes that the recurrence does not take.
    """
    sizes: dict[str, Any] = {field: config.size(name) for field, name in names.items() if field not in known}
    value = Recurrence(**sizes, **known, rule=rule)
    for field in ("key_dim", "value_dim"):
        size = getattr(value, field)
        if size & (size - 1):
            raise ModelError(f"config.json: {names[field]} {size} is not supported, only powers of two are")
    if value.value_heads % value.key_heads:
        raise ModelError(
            f"config.json: {value.value_heads} {names['value_heads']} cannot share {value.key_heads} "
            f"{names['key_heads']} evenly"
        )
    if value.taps < 2:
        raise ModelError(f"config.json: {names['taps']} {value.taps} is not supported, only 2 or more is")
    return value
