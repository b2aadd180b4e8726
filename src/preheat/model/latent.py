"""Attention over latent vectors (MLA), around the attention of one key head.

Contract. A token's entry in the cache is its normed latent vector and its turned numbers: one key, which is the value
too. A query meets the entries directly: the first numbers of a head are multiplied by its map to keys (one product,
rounded to the model's dtype), the others turn. Attention has the order of any attention of one key head
(:mod:`preheat.backends.cpu.paged_attention`), over all numbers of an entry; the output's turned numbers are dropped.
The head's map to values then makes the head's output (one product, rounded). A prompt and a decoding row do the same,
so a token has the same bits in any chunk, batch or cache state. Each product is a linear layer's, in its order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from preheat.backends.base.layers import HeadLayers, InsertingNorm, Linear, Norm


@dataclass(frozen=True, slots=True)
class Latent:
    """Maps of one layer.

    ``keys`` [key numbers -> rank] and ``vals`` [rank -> value numbers] are a linear layer for each of ``heads`` heads,
    and ``rope`` the turned numbers of a head. ``norm`` is the latent vector's. ``q`` makes queries of its ``q_norm`` of
    the first inputs, if there is one.
    """

    keys: HeadLayers
    vals: HeadLayers
    heads: int
    rank: int
    rope: int
    norm: Norm
    q: Linear | None
    q_norm: Norm | None

    def project(self, made: Tensor) -> Tensor:
        """Return queries and entry of each token, [tokens, (heads + 1) * (rank + rope)].

        ``made`` [tokens, n] has the inputs of the queries, then the latent vector, then the numbers that turn.
        """
        tokens, entry = len(made), self.rank + self.rope
        query, last = made[:, :-entry], made[:, -entry:]
        if self.q is not None and self.q_norm is not None:
            normed = made.new_empty(query.shape)
            _insert(self.q_norm, query, normed)
            query = self.q(normed)
        out = made.new_empty(tokens, self.heads + 1, entry)
        self.keys(query.view(tokens, self.heads, -1), out[:, :-1])
        _insert(self.norm, last, out[:, -1])
        return out.flatten(1)

    def values(self, attended: Tensor) -> Tensor:
        """Return each head's output, [tokens, heads * value numbers], of ``attended`` [tokens, heads * entry]."""
        latent = attended.view(len(attended), self.heads, -1)[:, :, : self.rank]
        out = attended.new_empty(len(attended), self.heads, self.vals.outputs)
        self.vals(latent, out)
        return out.flatten(1)

    def linears(self) -> Iterator[tuple[str, Linear | HeadLayers]]:
        """Yield the linear layers, each with its path."""
        if self.q is not None:
            yield "q", self.q
        yield "up.keys", self.keys
        yield "up.values", self.vals


def _insert(norm: Norm, x: Tensor, out: Tensor) -> None:
    """Write the norm of each row of ``x`` to ``out``, then the row's other numbers."""
    if isinstance(norm, InsertingNorm):
        norm.insert(x, out)
        return
    size = norm.weight.shape[-1]
    out[:, :size] = norm(x[:, :size].contiguous())
    if size < x.shape[1]:
        out[:, size:] = x[:, size:]
