"""Cache groups: layers that keep keys and values equally long.

A full layer reads all tokens of a sequence, a layer with a window only the last ones. Each group has a row of the block
table for each sequence. The entries of a group's layers have one shape. All blocks have room for equally many numbers,
and a group has as many layers as fit. So a block of any group has room for a block of any other group, and one pool
serves all groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import lcm, prod
from typing import NamedTuple

import numpy as np

FEW_GROUPS, MAX_GROUPS = 8, 24
"""Groups of most models, and the most groups. The host writes a row of a block table for each group of a sequence."""

Entry = tuple[int, ...]
"""The shape of a token's entry in a layer: rows of a head, heads, and numbers. It is empty in a layer without one."""


class CacheGroup(NamedTuple):
    """Layers that keep keys and values equally long.

    With a ``window``, keys and values of the last ``window`` - 1 tokens before the next one are kept; None keeps all.
    ``layers`` are indices of layers; no layers stands for all layers of a model.
    """

    window: int | None = None
    layers: tuple[int, ...] = ()

    def columns(self, length: int, size: int, in_flight: int) -> int:
        """Return the most blocks of ``size`` tokens that a sequence of ``length`` tokens holds at once.

        The last ``in_flight`` of its tokens may still be computed.
        """
        full = -(-length // size)
        return full if self.window is None else min(full, -(-(self.window - 1 + in_flight) // size) + 1)

    def behind(self, ends: np.ndarray, size: int) -> np.ndarray:
        """Return the number of leading blocks that no token from each position of ``ends`` on reads."""
        return np.maximum(ends - self.window + 1, 0) // size if self.window else np.zeros_like(ends)

    def tail(self, columns: int, size: int) -> int:
        """Return how many of the ``columns`` leading blocks the token behind them reads."""
        return columns if self.window is None else min(columns, -(-(self.window - 1) // size))


WHOLE = (CacheGroup(),)
"""The only group of a model without groups: all layers keep all keys and values."""


def cut(windows: Sequence[int | None], entries: Sequence[Entry] | None = None) -> tuple[CacheGroup, ...]:
    """Return the groups of layers with these ``windows`` and ``entries``, full layers first.

    Without ``entries`` all layers have one shape. The room of a block is a whole number of the entries of one kind of
    layer. It wastes the least room of full layers, then needs few groups, then wastes the least room of all layers.
    """
    kinds: dict[tuple[int | None, Entry], list[int]] = {}
    for layer, window in enumerate(windows):
        if (entry := (1,) if entries is None else entries[layer]) != ():
            kinds.setdefault((window, entry), []).append(layer)
    order = sorted(kinds, key=lambda kind: (kind[0] is not None, -(kind[0] or 0)))

    def costs(room: int) -> tuple[bool, int, bool, int, int]:
        counts = {kind: -(-len(kinds[kind]) // (room // prod(kind[1]))) for kind in order}
        full = sum(counts[kind] * room - len(kinds[kind]) * prod(kind[1]) for kind in order if kind[0] is None)
        groups = sum(counts.values())
        return groups > MAX_GROUPS, full, groups > FEW_GROUPS, groups * room, groups

    least = max(prod(entry) for _, entry in order)
    rooms = {prod(entry) * count for (_, entry), layers in kinds.items() for count in range(1, len(layers) + 1)}
    room = min(sorted(each for each in rooms if each >= least), key=costs)
    return tuple(group for kind in order for group in _parts(kind[0], kinds[kind], room // prod(kind[1])))


def _parts(window: int | None, layers: list[int], width: int) -> Iterator[CacheGroup]:
    """Yield groups of ``width`` of the ``layers``."""
    for first in range(0, len(layers), width):
        yield CacheGroup(window, tuple(layers[first : first + width]))


def room_of(groups: Sequence[CacheGroup], entries: Sequence[Entry]) -> int:
    """Return the numbers for a token that a block has room for.

    They are whole rows of every kind of entry.
    """
    owners = tuple(layer for layer, entry in enumerate(entries) if entry)
    most = max(sum(prod(entries[layer]) for layer in group.layers or owners) for group in groups)
    row = lcm(*(entries[layer][-1] for layer in owners))
    return -(-most // row) * row


def group_of(groups: Sequence[CacheGroup], layer: int) -> tuple[int, int]:
    """Return the number of the group of ``layer``, and the layer's place in the group."""
    for number, group in enumerate(groups):
        if layer in group.layers:
            return number, group.layers.index(layer)
    return 0, layer
