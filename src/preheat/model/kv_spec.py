"""The spec of a token's entry in the KV cache of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KVDtype = Literal["auto", "fp8_e4m3", "fp8_e5m2"]


@dataclass(frozen=True)
class KVSpec:
    """Entry of a token in a layer's KV cache.

    It is a key and a value of ``head_dim`` numbers for each head. Both are divided by ``scales`` (key, value) and
    stored in ``dtype``; auto is the model's dtype. See :mod:`preheat.ops.float8`. ``latent``: the key is the value too,
    so an entry has no other rows than its keys.
    """

    num_kv_heads: int
    head_dim: int
    dtype: KVDtype = "auto"
    scales: tuple[float, float] = (1.0, 1.0)
    latent: bool = False

    @property
    def sides(self) -> int:
        """Rows of a head: its key and its value, or one row for both."""
        return 1 if self.latent else 2

    @property
    def entry(self) -> tuple[int, int, int]:
        """Shape of a token's entry."""
        return self.sides, self.num_kv_heads, self.head_dim

    @property
    def values(self) -> int:
        """Numbers per token."""
        return self.sides * self.num_kv_heads * self.head_dim

    def bytes(self, itemsize: int) -> int:
        """Return the bytes per token.

        The model's dtype has ``itemsize`` bytes.
        """
        return self.values * (itemsize if self.dtype == "auto" else 1)
