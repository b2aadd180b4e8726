"""The decoder: one class for every architecture; what differs between them is in the spec and in the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from preheat.model.rope import rope_table
from preheat.model.spec import ModelSpec
from preheat.model.weights import LayerWeights, Weights
from preheat.ops.embedding import embed
from preheat.ops.norm import RMSNorm
from preheat.ops.rotary import apply_rope_

Attention = Callable[[int, Tensor], Tensor]
"""``attention(layer, qkv)``: store the keys and values of ``qkv`` [tokens, heads + 2 * kv heads, dim], attend with its
queries, return [tokens, heads * dim]."""

Tap = Callable[[int, Tensor], None]
"""``tap(layer, residual)``: look at the residual stream [tokens, hidden] after a layer; the next one changes it."""

Region = Callable[..., Tensor]
"""A part of a layer: a function of its hidden states [tokens, ...], the layer's weights and more, without a state."""


Rope = tuple[Tensor, Tensor]
"""Cosines and sines [tokens, 1, dim] that turn the step's queries and keys."""


class Heads(NamedTuple):
    """How many heads are ``turned`` by rope (queries, then keys), how many there are in ``all``, and their ``dim``."""

    turned: int
    all: int
    dim: int


def before_attention(normed: Tensor, layer: LayerWeights, rope: Rope, heads: Heads) -> Tensor:
    """Queries, keys and values of ``normed`` [tokens, hidden], as [tokens, all heads, dim]."""
    qkv = layer.qkv(normed).view(-1, heads.all, heads.dim)
    parts = qkv[:, : heads.turned]
    if layer.qk_norm is not None:
        layer.qk_norm.apply_(parts)
    apply_rope_(parts, *rope)
    return qkv


def after_attention(attended: Tensor, residual: Tensor, layer: LayerWeights, norm: RMSNorm) -> Tensor:
    """The rest of a layer, from ``attended`` [tokens, heads * dim].

    Adds to ``residual`` [tokens, hidden] in place and returns its ``norm``, with which the next layer begins.
    """
    normed = layer.post_norm.add(layer.o(attended), residual)
    return norm.add(layer.down(layer.gate_up(normed)), residual)


def project(normed: Tensor, layer: LayerWeights, rope: Rope | None, heads: Heads) -> Tensor:
    """As :func:`before_attention`, where attention itself norms and turns what it is given."""
    return layer.qkv(normed).view(-1, heads.all, heads.dim)


def as_it_is(region: Region) -> Region:
    """For eager execution."""
    return region


class Decoder:
    """Runs ``weights`` as ``spec`` says, for positions below ``max_model_len``. Call it under inference mode.

    A layer is two regions around attention: ``before`` and the rest, each as ``build`` makes it. ``rope``
    [max_model_len, 2, 1, dim] are the cosines and sines of each position.
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
        self._norms_after = [layer.input_norm for layer in weights.layers[1:]] + [weights.final_norm]
        turned = spec.num_heads + spec.num_kv_heads
        self._heads = Heads(turned, turned + spec.num_kv_heads, spec.head_dim)
        self._eager = before, after_attention
        self._built = build(before), build(after_attention)

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: Attention, *, eager: bool = False, tap: Tap | None = None
    ) -> Tensor:
        """Hidden states [tokens, hidden] after the final norm, for int64 ``tokens`` and ``positions`` [tokens].

        ``eager`` runs the regions as they are written; ``tap`` is told of every layer.
        """
        cos, sin = self.rope.index_select(0, positions).unbind(1)
        return self.layers(embed(tokens, self.weights.embedding), (cos, sin), attention, eager=eager, tap=tap)

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
        """As :meth:`forward`, from the tokens' embeddings ``residual`` [tokens, hidden], which are overwritten.

        ``only`` runs some of the layers, ascending: those of one kind run the same programs. ``normed`` is what the
        layers before them gave, where there are such, and ``residual`` then the stream that they left.
        """
        before, after = self._eager if eager else self._built
        if normed is None:
            normed = self.weights.layers[0].input_norm(residual)
        for index in range(len(self.weights.layers)) if only is None else only:
            layer = self.weights.layers[index]
            qkv = before(normed, layer, rope, self._heads)
            normed = after(attention(index, qkv), residual, layer, self._norms_after[index])
            if tap is not None:
                tap(index, residual)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [rows, vocab] for ``hidden`` [rows, hidden]."""
        return self.weights.head(hidden).float()
