"""Cache groups: layers that keep keys and values equally long.

A full layer reads all tokens of a sequence, a layer with a window only the last ones. Each group has a row of the block
table for each sequence. All groups have equally many layers, except that the last group of a kind may have fewer. So a
block of any group has room for a block of any other group, and one pool serves all groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

MAX_GROUPS = 8
"""Most groups of a model. The host writes a row of a block table for each group of a sequence."""


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

    def behind(self, end: int, size: int) -> int:
        """Return the number of leading blocks that no token from position ``end`` on reads."""
        return 0 if self.window is None else max(end - self.window + 1, 0) // size

    def tail(self, columns: int, size: int) -> int:
        """Return how many of the ``columns`` leading blocks the token behind them reads."""
        return columns if self.window is None else min(columns, -(-(self.window - 1) // size))


WHOLE = (CacheGroup(),)
"""The only group of a model without groups: all layers keep all keys and values."""


def cut(windows: Sequence[int | None]) -> tuple[CacheGroup, ...]:
    """Return the groups of layers with these ``windows``, full layers first.

    Groups have equal numbers of layers. The number wastes the least room of full layers, then of all layers, then has
    the fewest groups.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    order = sorted(kinds, key=lambda window: (window is not None, -(window or 0)))
    sizes = [len(kinds[window]) for window in order]
    full = len(kinds.get(None, ()))

    def costs(width: int) -> tuple[bool, int, int, int]:
        counts = [-(-size // width) for size in sizes]
        return sum(counts) > MAX_GROUPS, -full % width, sum(counts) * width, sum(counts)

    width = min(range(1, max(sizes) + 1), key=costs)
    return tuple(group for window in order for group in _parts(window, kinds[window], width))


def _parts(window: int | None, layers: list[int], width: int) -> Iterator[CacheGroup]:
    """Yield groups of ``width`` of the ``layers``."""
    for first in range(0, len(layers), width):
        yield CacheGroup(window, tuple(layers[first : first + width]))


def width_of(groups: Sequence[CacheGroup], num_layers: int) -> int:
    """Return for how many layers a block has room, in a model of ``num_layers`` layers."""
    return max(len(group.layers) or num_layers for group in groups)


def group_of(groups: Sequence[CacheGroup], layer: int) -> tuple[int, int]:
    """Return the number of the group of ``layer``, and the layer's place in the group."""
    for number, group in enumerate(groups):
        if layer in group.layers:
            return number, group.layers.index(layer)
    return 0, layer
