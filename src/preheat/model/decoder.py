"""The decoder: one class for every architecture; what differs between them is in the spec and in the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from preheat.model.layers import Layer, Weights
from preheat.model.rope import rope_table
from preheat.model.specs import ModelSpec
from preheat.ops.embedding import embed
from preheat.ops.norm import RMSNorm
from preheat.ops.rotary import apply_rope_

Attention = Callable[[int, Tensor], Tensor]
"""``attention(layer, qkv)``: store the keys and values of ``qkv`` [tokens, heads + 2 * kv heads, dim], attend with its
queries, return [tokens, heads * dim]."""

Tap = Callable[[int, Tensor], None]
"""``tap(layer, residual)``: look at the residual stream [tokens, hidden] after a layer; the next one changes it. After
the last layer it is that of the tokens that went on."""

Region = Callable[..., Tensor]
"""A part of a layer: a function of its hidden states [tokens, ...], the layer's weights and more, without a state."""


Rope = tuple[Tensor, Tensor]
"""Cosines and sines [tokens, 1, dim] that turn the step's queries and keys."""


class Attended(NamedTuple):
    """Where a step stands behind its last attention: what that gave, ``out`` [tokens, heads * dim], and the stream
    ``residual`` [tokens, hidden]. No token needs another from here on, so only those that are asked for go on.
    """

    out: Tensor
    residual: Tensor

    def take(self, tokens: Tensor) -> Attended:
        """Copies of those of ``tokens``, int64 [rows]."""
        return Attended(self.out.index_select(0, tokens), self.residual.index_select(0, tokens))


class Heads(NamedTuple):
    """How many heads are ``turned`` by rope (queries, then keys), how many there are in ``all``, and their ``dim``."""

    turned: int
    all: int
    dim: int


def before_attention(normed: Tensor, layer: Layer, rope: Rope, heads: Heads) -> Tensor:
    """Queries, keys and values of ``normed`` [tokens, hidden], as [tokens, all heads, dim]."""
    qkv = layer.attention.qkv(normed).view(-1, heads.all, heads.dim)
    parts = qkv[:, : heads.turned]
    if layer.attention.qk_norm is not None:
        layer.attention.qk_norm.apply_(parts)
    apply_rope_(parts, *rope)
    return qkv


def after_attention(attended: Tensor, residual: Tensor, layer: Layer, norm: RMSNorm) -> Tensor:
    """The rest of a layer, from ``attended`` [tokens, heads * dim].

    Adds to ``residual`` [tokens, hidden] in place and returns its ``norm``, with which the next layer begins.
    """
    normed = layer.post_norm.add(layer.attention.o(attended), residual)
    return norm.add(layer.mlp(normed), residual)


def project(normed: Tensor, layer: Layer, rope: Rope | None, heads: Heads) -> Tensor:
    """As :func:`before_attention`, where attention itself norms and turns what it is given."""
    return layer.attention.qkv(normed).view(-1, heads.all, heads.dim)


def as_it_is(region: Region) -> Region:
    """For eager execution."""
    return region


class Decoder:
    """Runs ``weights`` as ``spec`` says, for positions below ``max_model_len``. Call it under inference mode.

    A layer is two regions around attention: ``before`` and the rest, each as ``build`` makes it. ``rope``
    [max_model_len, 2, 1, dim] are the cosines and sines of each position. The rest of the last layer is run by
    :meth:`finish`, for tokens that somebody wants to know of: of a prompt that is one.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        max_model_len: int,
        build: Callable[[Region], Region] = as_it_is,
        before: Region = before_attention,
    ) -> None:
        self.spec, self.weights = spec, weights
        self.dtype = weights.embedding.dtype
        self.rope = rope_table(spec.rope, spec.head_dim, max_model_len, self.dtype).to(weights.embedding.device)
        self._last = len(weights.layers) - 1
        turned = spec.num_heads + spec.num_kv_heads
        self._heads = Heads(turned, turned + spec.num_kv_heads, spec.head_dim)
        self._eager = before, after_attention
        self._built = build(before), build(after_attention)

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: Attention, *, eager: bool = False, tap: Tap | None = None
    ) -> Attended:
        """All that tokens need one another for, for int64 ``tokens`` and ``positions`` [tokens].

        ``eager`` runs the regions as they are written; ``tap`` is told of every layer but the last.
        """
        cos, sin = self.rope.index_select(0, positions).unbind(1)
        residual = embed(tokens, self.weights.embedding)
        return Attended(self.layers(residual, (cos, sin), attention, eager=eager, tap=tap), residual)

    def layers(
        self,
        residual: Tensor,
        rope: Rope | None,
        attention: Attention,
        only: Sequence[int] | None = None,
        *,
        normed: Tensor | None = None,
        eager: bool = False,
        tap: Tap | None = None,
    ) -> Tensor:
        """What the last layer's attention gave, from the tokens' embeddings ``residual`` [tokens, hidden], which are
        overwritten.

        ``only`` runs some of the layers, ascending: those of one kind run the same programs. Where the last layer is
        not among them, what the next one begins with is returned: it is given back as ``normed``, with ``residual``.
        """
        before, after = self._eager if eager else self._built
        weights = self.weights.layers
        if normed is None:
            normed = weights[0].input_norm(residual)
        for index in range(len(weights)) if only is None else only:
            attended = attention(index, before(normed, weights[index], rope, self._heads))
            if index == self._last:
                return attended
            normed = after(attended, residual, weights[index], weights[index + 1].input_norm)
            if tap is not None:
                tap(index, residual)
        return normed

    def finish(self, attended: Attended, *, eager: bool = False, tap: Tap | None = None) -> Tensor:
        """Hidden states [tokens, hidden] after the final norm; the residual stream is overwritten.

        ``eager`` and ``tap`` as in :meth:`forward`: it is told of the last layer.
        """
        _, after = self._eager if eager else self._built
        hidden = after(attended.out, attended.residual, self.weights.layers[self._last], self.weights.final_norm)
        if tap is not None:
            tap(self._last, attended.residual)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [rows, vocab] for ``hidden`` [rows, hidden]."""
        return self.weights.head(hidden).float()
