"""HPU Graphs: the driver that captures and replays programs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol

import torch

from preheat.backends.base.backend import K, R
from preheat.backends.hpu.bridge import Bridge


class Variants(Protocol):
    """Variants of programs besides their keys.

    ``variant`` is the variant of the step to run.
    """

    variant: Hashable

    def variants(self, key: Any) -> tuple[Hashable, ...]:
        """Return all variants that steps of the program ``key`` may have."""

    def clear_inputs(self) -> None:
        """Let programs read only padding, whatever their layout."""


class Program(torch.nn.Module):
    """``body(key)`` as a module, for the bridge to wrap."""

    def __init__(self, body: Callable[[K], Any], key: K) -> None:
        super().__init__()
        self._body, self._key = body, key

    def forward(self) -> Any:
        return self._body(self._key)


class HpuGraphs(Generic[K, R]):
    """``body(key)`` for each key and variant, replayed once captured.

    Each graph has memory of its own. With the tensor cache it also keeps its intermediate results;
    ``disable_tensor_cache`` turns the cache off.
    """

    def __init__(
        self,
        body: Callable[[K], R],
        bridge: Bridge,
        variants: Variants,
        *,
        disable_tensor_cache: bool,
        count: Callable[[], None],
    ) -> None:
        """Set up the driver; ``count`` is called for each captured graph."""
        self._body, self._bridge, self._variants = body, bridge, variants
        self._disable_tensor_cache, self._count = disable_tensor_cache, count
        self._graphs: dict[tuple[K, Hashable], Any] = {}

    def __contains__(self, key: K) -> bool:
        return (key, self._variants.variants(key)[0]) in self._graphs

    def run(self, key: K, *, eager: bool = False) -> R:
        captured = None if eager else self._graphs.get((key, self._variants.variant))
        if captured is None:
            with self._bridge.program():
                return self._body(key)
        result: R = captured()
        return result

    def capture(self, key: K) -> None:
        """Capture all variants of ``key``, or none.

        A wrapped module is captured, and run, when it is first called.
        """
        kept = self._variants.variant
        self._variants.clear_inputs()
        try:
            for variant in self._variants.variants(key):
                self._variants.variant = variant
                with self._bridge.whole():
                    module = self._bridge.hpu.wrap_in_hpu_graph(
                        Program(self._body, key), disable_tensor_cache=self._disable_tensor_cache
                    )
                    module()
                self._graphs[key, variant] = module
                self._count()
        except BaseException:
            self.forget(key)
            raise
        finally:
            self._variants.variant = kept

    def forget(self, key: K) -> None:
        for captured in [captured for captured in self._graphs if captured[0] == key]:
            del self._graphs[captured]
