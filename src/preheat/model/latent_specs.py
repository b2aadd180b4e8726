"""The specs of attention over latent vectors."""

from __future__ import annotations

from dataclasses import dataclass

from preheat.model.tensor_specs import LinearSpec, NormSpec
from preheat.ops.kinds import Scheme


@dataclass(frozen=True, kw_only=True)
class UpSpec:
    """The maps from a latent vector of ``rank`` numbers to the keys and the values of each head.

    The checkpoint's module ``name`` has ``stored_heads`` heads, each with ``key`` rows and then ``value`` rows. A shard
    has the heads from ``first`` on. ``format`` and ``scheme`` say how the module is stored; the maps are plain numbers.
    """

    name: str
    heads: int
    key: int
    value: int
    rank: int
    stored_heads: int
    first: int = 0
    format: str = "plain"
    scheme: Scheme | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored_heads * (self.key + self.value), self.rank

    @property
    def weights(self) -> int:
        """Numbers of the own heads."""
        return self.heads * (self.key + self.value) * self.rank

    @property
    def params(self) -> int:
        return self.weights

    def weight_bytes(self, itemsize: int) -> int:
        """Return the bytes of the maps on a device."""
        return self.weights * itemsize


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """Attention over latent vectors (MLA).

    A token has one vector of ``up.rank`` numbers, normed by ``norm``, and ``rope`` numbers that turn: its key and its
    value for all heads. A query of ``up.key`` and ``rope`` numbers is the output of ``q``, which reads the first
    outputs of ``qkv`` after their ``q_norm``; without ``q`` the first outputs of ``qkv`` are the queries. See
    :mod:`preheat.model.latent`.
    """

    rope: int
    up: UpSpec
    norm: NormSpec
    q: LinearSpec | None = None
    q_norm: NormSpec | None = None
