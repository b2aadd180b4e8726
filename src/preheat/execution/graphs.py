"""Programs: what runs a key of the plan, as a captured graph or, where there is none, operation by operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from preheat.backends.cuda.graph import capture
from preheat.plan.buckets import Bucket

Key = TypeVar("Key")


class Part(NamedTuple):
    """The program of some ``layers`` of a forward step of ``shape``. The first part begins with the tokens, any other
    where the one before it ended.
    """

    shape: Bucket
    layers: range


class Programs(Generic[Key]):
    """``body(key)`` for each key, over static buffers. A graph is captured on the current stream, in memory ``pool``.

    The graphs share their working memory: of two that run, one after the other, nothing is left but what they wrote
    into static buffers.
    """

    def __init__(self, body: Callable[[Key], None], pool: Any = None) -> None:
        self._body, self._pool = body, pool
        self._graphs: dict[Key, torch.cuda.CUDAGraph] = {}

    def __contains__(self, key: Key) -> bool:
        """Whether a graph runs ``key``."""
        return key in self._graphs

    def run(self, key: Key, *, eager: bool = False) -> None:
        """Launch the program of ``key`` on the current stream."""
        graph = None if eager else self._graphs.get(key)
        if graph is None:
            self._body(key)
        else:
            graph.replay()

    def capture(self, key: Key) -> None:
        """Record ``key``, all of whose kernels have run, as a graph."""
        self._graphs[key] = capture(partial(self._body, key), self._pool)

    def forget(self, key: Key) -> None:
        """Give up the graph of ``key``, if there is one."""
        self._graphs.pop(key, None)
