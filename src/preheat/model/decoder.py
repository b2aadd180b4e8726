"""The decoder: one class for every architecture; what differs between them is in the spec and in the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from preheat.backends.base import Attend, Norm, Region
from preheat.model.layers import Layer, Weights
from preheat.model.rope import rope_table
from preheat.model.specs import ModelSpec

Tap = Callable[[int, Tensor], None]
"""``tap(layer, residual)``: look at the residual stream [tokens, hidden] after a layer; the next one changes it. After
the last layer it is that of the tokens that went on."""


class Attended(NamedTuple):
    """Where a step stands behind its last attention: what that gave, ``out`` [tokens, heads * dim], and the stream
    ``residual`` [tokens, hidden]. No token needs another from here on, so only those that are asked for go on.
    """

    out: Tensor
    residual: Tensor


def project(normed: Tensor, layer: Layer, dim: int) -> Tensor:
    """Queries, keys and values of ``normed`` [tokens, hidden], as [tokens, all heads, dim]."""
    return layer.attention.qkv(normed).view(len(normed), -1, dim)


def after_attention(attended: Tensor, residual: Tensor, layer: Layer, norm: Norm) -> Tensor:
    """The rest of a layer, from ``attended`` [tokens, heads * dim].

    Adds to ``residual`` [tokens, hidden] in place and returns its ``norm``, with which the next layer begins.
    """
    normed = layer.post_norm.add(layer.attention.o(attended), residual)
    return norm.add(layer.mlp(normed), residual)


class Decoder:
    """Runs ``weights`` as ``spec`` says, for positions below ``max_model_len``. Call it under inference mode.

    A layer is two regions around attention, each as ``build`` makes it. ``ropes[layer]`` [max_model_len, 2, 1, dim] are
    the cosines and sines of each position, for attention; layers of the same kind share them. The rest of the last
    layer is run by :meth:`finish`, only for tokens that are sampled: of a prompt that is one.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        max_model_len: int,
        build: Callable[[Region], Region] = lambda region: region,
    ) -> None:
        self.spec, self.weights = spec, weights
        self.dtype = weights.embedding.dtype
        kinds = [(layer.attention.rope, layer.attention.head_dim) for layer in spec.layers]
        device = weights.embedding.device
        tables = {kind: rope_table(*kind, max_model_len, self.dtype).to(device) for kind in set(kinds)}
        self.ropes = [tables[kind] for kind in kinds]
        self._last = len(weights.layers) - 1
        self._eager = project, after_attention
        self._built = build(project), build(after_attention)

    def layers(
        self,
        residual: Tensor,
        attend: Attend,
        only: Sequence[int] | None = None,
        *,
        normed: Tensor | None = None,
        eager: bool = False,
        tap: Tap | None = None,
    ) -> Tensor:
        """What the last layer's attention gave, from the tokens' embeddings ``residual`` [tokens, hidden], which are
        overwritten. ``eager`` runs the regions as they are written; ``tap`` is told of every layer but the last.

        ``only`` runs some of the layers, ascending: those of one kind run the same programs. Where the last layer is
        not among them, what the next one begins with is returned: it is given back as ``normed``, with ``residual``.
        """
        before, after = self._eager if eager else self._built
        weights = self.weights.layers
        if normed is None:
            normed = weights[0].input_norm(residual)
        for index in range(len(weights)) if only is None else only:
            attended = attend(index, before(normed, weights[index], self.spec.layers[index].attention.head_dim))
            if index == self._last:
                return attended
            normed = after(attended, residual, weights[index], weights[index + 1].input_norm)
            if tap is not None:
                tap(index, residual)
        return normed

    def finish(self, attended: Attended, *, eager: bool = False, tap: Tap | None = None) -> Tensor:
        """Hidden states [tokens, hidden] after the final norm; the residual stream is overwritten.

        ``eager`` and ``tap`` as in :meth:`layers`: it is told of the last layer.
        """
        _, after = self._eager if eager else self._built
        hidden = after(attended.out, attended.residual, self.weights.layers[self._last], self.weights.final_norm)
        if tap is not None:
            tap(self._last, attended.residual)
        return hidden
