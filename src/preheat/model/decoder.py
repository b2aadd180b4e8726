"""The decoder: one class for every architecture; they differ in the spec and the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from preheat.backends.base import Attend, Norm, Region
from preheat.model.layers import Layer, Weights
from preheat.model.rope import rope_table
from preheat.model.specs import ModelSpec

Tap = Callable[[int, Tensor], None]
"""``tap(layer, residual)`` sees the residual stream [tokens, hidden] after a layer; the next layer overwrites it. After
the last layer it only has the tokens that :meth:`Decoder.finish` was given."""


class Attended(NamedTuple):
    """The state after the last layer's attention: its output ``out`` [tokens, heads * dim] and ``residual`` [tokens,
    hidden]. From here on tokens do not depend on each other, so only those that are sampled continue.
    """

    out: Tensor
    residual: Tensor


def project(normed: Tensor, layer: Layer, dim: int) -> Tensor:
    """Queries, keys and values of ``normed`` [tokens, hidden], as [tokens, all heads, dim]."""
    return layer.attention.qkv(normed).view(len(normed), -1, dim)


def after_attention(attended: Tensor, residual: Tensor, layer: Layer, norm: Norm) -> Tensor:
    """The rest of a layer, from the attention's output ``attended`` [tokens, heads * dim].

    Adds to ``residual`` [tokens, hidden] in place and returns its ``norm``, the input of the next layer.
    """
    normed = layer.post_norm.add(layer.attention_output(attended), residual)
    return norm.add(layer.mlp_output(normed), residual)


class Decoder:
    """Runs ``weights`` according to ``spec``, for positions below ``max_model_len``. Call it under inference mode.

    A layer is two regions around attention, each compiled by ``build``. ``ropes[layer]`` [max_model_len, 2, 1, dim] are
    the cosines and sines of each position, ``alibi[layer]`` fp32 [heads] the slopes, if it has any; layers of the same
    kind share them. :meth:`finish` runs the rest of the last layer, only for tokens that are sampled.
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
        tables = {
            (rope, dim): None if rope is None else rope_table(rope, dim, max_model_len, self.dtype).to(device)
            for rope, dim in set(kinds)
        }
        self.ropes = [tables[kind] for kind in kinds]
        slopes = {
            each: None if each is None else torch.tensor(each, dtype=torch.float32, device=device)
            for each in {layer.attention.alibi for layer in spec.layers}
        }
        self.alibi = [slopes[layer.attention.alibi] for layer in spec.layers]
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
        """The output of the last layer's attention, from the embeddings ``residual`` [tokens, hidden], which are
        overwritten. ``eager`` runs the regions uncompiled; ``tap`` is called after every layer but the last.

        ``only`` runs some of the layers, ascending. If the last one is not among them, the input of the next one is
        returned, to be passed as ``normed`` together with ``residual``.
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
        """Hidden states [tokens, hidden] after the final norm; the residual stream is overwritten. ``eager`` is as in
        :meth:`layers`; ``tap`` is called after the last layer.
        """
        _, after = self._eager if eager else self._built
        hidden = after(attended.out, attended.residual, self.weights.layers[self._last], self.weights.final_norm)
        if tap is not None:
            tap(self._last, attended.residual)
        return hidden
