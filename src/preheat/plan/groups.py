"""The choice of cache groups for an engine: groups, or one group for all layers with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple, Protocol

from preheat.backends.base.facts import Facts, Mode
from preheat.cache_groups import WHOLE, CacheGroup, Entry, cut, room_of
from preheat.settings import Settings
from preheat.settings.combinations import reason_against, traits_of


class Windows(Protocol):
    """The facts of a model that decide its groups; a model's spec has them."""

    @property
    def layer_windows(self) -> tuple[int | None, ...]: ...

    @property
    def entries(self) -> tuple[Entry, ...]: ...

    @property
    def encodes(self) -> bool: ...

    @property
    def image_tokens(self) -> int: ...
    @property
    def any_size(self) -> bool: ...

    @property
    def max_position_embeddings(self) -> int: ...


class Grouping(NamedTuple):
    """The cache groups of a model.

    ``reason``: why a model with windows has one group for all layers; "" otherwise. A block has ``room`` for so many of
    the ``total`` numbers of a token in all layers.
    """

    groups: tuple[CacheGroup, ...]
    reason: str
    room: int
    total: int

    def of_bytes(self, block_bytes: int) -> int:
        """Return the bytes of a block, where the entries of all layers would have ``block_bytes``."""
        return block_bytes * self.room // self.total

    def __str__(self) -> str:
        names = ("all tokens" if each.window is None else f"a window of {each.window}" for each in self.groups)
        counts = (len(each.layers) for each in self.groups)
        return "; ".join(f"{count} layers, {name}" for count, name in zip(counts, names, strict=True))


def choose(settings: Settings, facts: Facts, spec: Windows, mode: Mode | None = None) -> Grouping:
    """Return the cache groups of a model.

    Groups must save memory for the longest sequence.
    """
    windows, length = spec.layer_windows, settings.max_model_len or spec.max_position_embeddings
    entries = spec.entries
    total = sum(prod(entry) for entry in entries if entry)
    whole = Grouping(WHOLE, "", room_of(WHOLE, entries), total)
    if set(windows) == {None}:
        return whole
    groups = cut(windows, entries)
    room = room_of(groups, entries)
    size = settings.block_size or facts.block_size
    reason = _obstacle(settings, facts, spec, mode)
    if not reason and _most(groups, length, size) * room >= -(-length // size) * whole.room:
        reason = f"a sequence of {length} tokens takes no less memory with groups"
    return whole._replace(reason=reason) if reason else Grouping(groups, "", room, total)


def _obstacle(settings: Settings, facts: Facts, spec: Windows, mode: Mode | None) -> str:
    """Return why these features keep one group; "" if they do not."""
    if settings.disable_hybrid_kv_cache_manager:
        return "disable_hybrid_kv_cache_manager is set"
    if not settings.enable_chunked_prefill:
        return "without enable_chunked_prefill a prompt must fit into the cache as a whole"
    more = {
        "images": spec.image_tokens > 0,
        "any_size": spec.any_size,
        "encoder": spec.encodes,
        mode or "": mode is not None,
    }
    on = traits_of(settings) | {name for name, applies in more.items() if applies}
    return reason_against("groups", on, facts.lacks)


def _most(groups: Sequence[CacheGroup], length: int, size: int) -> int:
    return sum(group.columns(length, size, 1) for group in groups)
