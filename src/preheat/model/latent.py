"""Attention over latent vectors (MLA), around the attention of one key head.

Contract. A token's entry in the cache is its normed latent vector and its turned numbers: one key, which is the value
too. A query meets the entries directly: the first numbers of a head are multiplied by its map to keys (one product,
rounded to the model's dtype), the others turn. Attention has the order of any attention of one key head
(:mod:`preheat.backends.cpu.paged_attention`), over all numbers of an entry; the output's turned numbers are dropped.
The head's map to values then makes the head's output (one product, rounded). A prompt and a decoding row do the same,
so a token has the same bits in any chunk, batch or cache state. Each product is a linear layer's, in its order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from preheat.backends.base.layers import Linear, Norm


@dataclass(frozen=True, slots=True)
class Latent:
    """Maps of one layer.

    ``keys`` [key numbers -> rank] and ``vals`` [rank -> value numbers] are a linear layer for each head, and ``rope``
    the turned numbers of a head. ``norm`` is the latent vector's. ``q`` makes queries of its ``q_norm`` of the first
    inputs, if there is one.
    """

    keys: Sequence[Linear]
    vals: Sequence[Linear]
    rank: int
    rope: int
    norm: Norm
    q: Linear | None
    q_norm: Norm | None

    def project(self, made: Tensor) -> Tensor:
        """Return queries and entry of each token, [tokens, (heads + 1) * (rank + rope)].

        ``made`` [tokens, n] has the inputs of the queries, then the latent vector, then the numbers that turn.
        """
        heads, first = len(self.keys), made.shape[1] - self.rank - self.rope
        query = made[:, :first].contiguous()
        if self.q is not None and self.q_norm is not None:
            query = self.q(self.q_norm(query))
        query = query.view(len(made), heads, -1)
        out = made.new_empty(len(made), heads + 1, self.rank + self.rope)
        for head, key in enumerate(self.keys):
            out[:, head, : self.rank] = key(query[:, head, : -self.rope].contiguous())
        out[:, :heads, self.rank :] = query[:, :, -self.rope :]
        out[:, heads, : self.rank] = self.norm(made[:, first : first + self.rank].contiguous())
        out[:, heads, self.rank :] = made[:, first + self.rank :]
        return out.flatten(1)

    def values(self, attended: Tensor) -> Tensor:
        """Return each head's output, [tokens, heads * value numbers], of ``attended`` [tokens, heads * entry]."""
        latent = attended.view(len(attended), len(self.vals), -1)[:, :, : self.rank]
        return torch.cat([value(latent[:, head].contiguous()) for head, value in enumerate(self.vals)], 1)

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """Yield the linear layers, each with its path."""
        if self.q is not None:
            yield "q", self.q
        for name, maps in (("keys", self.keys), ("values", self.vals)):
            yield from ((f"up.{name}.{head}", each) for head, each in enumerate(maps))
