"""The decoder: one class for all architectures; only spec and weights differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from preheat.backends.base.attention import Attend
from preheat.backends.base.functions import LayerFunctions
from preheat.backends.base.layers import FusedInput, Norm, Region
from preheat.model.layers import BesideInputs, DecoderLayer, fused, normed
from preheat.model.rope import query_factors, rope_table
from preheat.model.specs import ModelSpec
from preheat.model.turns import StepTurns
from preheat.model.weights import Weights
from preheat.ops.distances import distance_table

Inputs = tuple[FusedInput | None, FusedInput | None, Tensor | None]

Deep = Callable[[int, Tensor], bool]
"""Adder of embeddings behind a layer: ``deep(layer, residual)`` adds to some rows in place; False: it has none."""

Tap = Callable[[int, Tensor], None]
"""Reader of the residual stream: ``tap(layer, residual)`` is called after a layer.

``residual`` is [tokens, hidden]; the next layer overwrites it. After the last layer it has only the tokens that
:meth:`Decoder.finish` was given.
"""


class Attended(NamedTuple):
    """State after the last layer's attention.

    ``out`` [tokens, heads * dim] is the output of attention, ``residual`` is [tokens, hidden]. ``given`` [tokens, size]
    is the last layer's input, if it has one. From here on tokens do not depend on each other, so only sampled tokens
    continue.
    """

    out: Tensor
    residual: Tensor
    given: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> Attended:
        """Return the state with each tensor changed."""
        given = None if self.given is None else change(self.given)
        return Attended(change(self.out), change(self.residual), given)


def project(x: Tensor, layer: DecoderLayer, dim: int) -> Tensor:
    """Return queries, keys and values of normed ``x`` [tokens, hidden]: [tokens, all heads, dim]."""
    return layer.attention.project(x).view(len(x), -1, dim)


def after_attention(
    attended: Tensor, residual: Tensor, layer: DecoderLayer, norm: Norm, inputs: Inputs = (None, None, None)
) -> Tensor:
    """Run the rest of a layer, from the attention's output ``attended`` [tokens, heads * dim].

    Add to ``residual`` [tokens, hidden] in place and return its ``norm``, the input of the next layer. ``inputs`` are
    the fused inputs of this layer's second block and of the next layer, and the layer's own input [tokens, size].
    """
    here, following, given = inputs
    if layer.attention.latent is not None:
        attended = layer.attention.latent.values(attended)
    if layer.parallel:
        x: Tensor | BesideInputs = normed(layer.post_norm, residual, None, here)
        residual.add_(layer.attention_output(attended))
    else:
        x = layer.joined_attention(attended, residual, here)
    return layer.joined_mlp(x, residual, norm, following, given)


class Decoder:
    """Runs ``weights`` according to ``spec``, for positions below ``max_model_len``.

    Call it under inference mode. A layer is two regions around attention, each compiled by ``build``. ``ropes[layer]``
    [max_model_len, 2, 1, dim] are the cosines and sines of each position, ``alibi[layer]`` fp32 [heads] the slopes, if
    it has any; ``growth`` [max_model_len] the factors of queries. Layers of the same kind share them. Where tokens have
    places on several axes, ``turns`` has the rows of a step of at most ``max_tokens`` tokens, for all layers.
    :meth:`finish` runs the rest of the last layer, only for sampled tokens.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        max_model_len: int,
        build: Callable[[Region], Region] = lambda region: region,
        dtype: torch.dtype | None = None,
        *,
        max_tokens: int = 0,
    ) -> None:
        self.spec, self.weights = spec, weights
        self.dtype = weights.embedding.dtype if dtype is None else dtype
        self.functions: LayerFunctions | None = None
        kinds = [(layer.attention.rope, layer.attention.rope_dim) for layer in spec.layers]
        device = weights.embedding.device
        tables = {
            (rope, dim): None if rope is None else rope_table(rope, dim, max_model_len, self.dtype).to(device)
            for rope, dim in set(kinds)
        }
        self.ropes = [tables[kind] for kind in kinds]
        self.turns = self._turns(max_tokens)
        slopes = {
            each: None if each is None else torch.tensor(each, dtype=torch.float32, device=device)
            for each in {layer.attention.alibi for layer in spec.layers}
        }
        self.alibi = [slopes[layer.attention.alibi] for layer in spec.layers]
        own, biases = weights.distances, spec.distances
        self.distances = None if own is None or biases is None else distance_table(own, biases.most, max_model_len)
        factors = {
            each: None if each is None else query_factors(each, max_model_len, self.dtype).to(device)
            for each in {layer.attention.growth for layer in spec.layers}
        }
        self.growth = [factors[layer.attention.growth] for layer in spec.layers]
        self._fused = [(fused(layer.attention.qkv), fused(layer.mlp)) for layer in weights.layers]
        self._last = len(weights.layers) - 1
        self._eager = project, after_attention
        self._built = build(project), build(after_attention)

    def _turns(self, max_tokens: int) -> StepTurns | None:
        """Return the rotations of a step by places; None where tokens turn by their position, or without steps."""
        for layer, table in zip(self.spec.layers, self.ropes, strict=True):
            rope = layer.attention.rope  # all layers that turn have the same
            if rope is not None and table is not None:
                return StepTurns(table, rope.sections, max_tokens) if rope.sections and max_tokens else None
        return None

    def tables(self) -> Iterator[Tensor]:
        """Yield the tables of positions, and the tables of functions. No step writes them."""
        for tables in (self.ropes, self.alibi, self.growth):
            yield from (table for table in tables if table is not None)
        if self.functions is not None:
            yield from self.functions.tables()

    def layers(
        self,
        residual: Tensor,
        attend: Attend,
        only: Sequence[int] | None = None,
        *,
        given: Tensor | None = None,
        inputs: Tensor | None = None,
        eager: bool = False,
        tap: Tap | None = None,
        deep: Deep | None = None,
    ) -> Tensor:
        """Return the output of the last layer's attention.

        ``residual`` [tokens, hidden] are the embeddings; they are overwritten. ``inputs`` [tokens, layers, size] are
        inputs of each layer, if there are any. ``eager`` runs the regions uncompiled. ``deep`` and then ``tap`` are
        called after every layer but the last.

        ``only`` runs some of the layers, ascending. Without the last layer among them, the input of the next layer is
        returned. Pass it as ``given`` together with ``residual`` to continue.
        """
        before, after = self._eager if eager else self._built
        weights = self.weights.layers
        part = range(len(weights)) if only is None else only
        if self.functions is not None:
            return self._by_functions(self.functions, residual, part, given, (deep, tap))
        x = self._first(residual) if given is None else given
        for index in part:
            attended = attend(index, before(x, weights[index], self.spec.layers[index].attention.head_dim))
            if index == self._last:
                return attended
            following = None if index == part[-1] else self._fused[index + 1][0]
            norm = weights[index + 1].input_norm
            own = None if inputs is None else inputs[:, index]
            x = after(attended, residual, weights[index], norm, (self._fused[index][1], following, own))
            if deep is not None and deep(index, residual):
                x = normed(norm, residual, None, following)
            if tap is not None:
                tap(index, residual)
        return x

    def _by_functions(
        self, functions: LayerFunctions, residual: Tensor, part: Sequence[int], given: Tensor | None,
        calls: tuple[Deep | None, Tap | None],
    ) -> Tensor:  # fmt: skip
        """Run the layers of ``part`` as :meth:`layers` does; the next layer's input is the residual stream itself."""
        deep, tap = calls
        for at, index in enumerate(part):
            if deep is None and tap is None:
                return functions.layers(part[at:], residual, given)
            out = functions.layers([index], residual, given)
            if deep is not None and (index == self._last or not deep(index, residual)):
                deep = None
            if tap is not None and index != self._last:
                tap(index, residual)
        return out

    def _first(self, residual: Tensor) -> Tensor:
        """Return the first layer's input."""
        return normed(self.weights.layers[0].input_norm, residual, None, self._fused[0][0])

    def finish(self, attended: Attended, *, eager: bool = False, tap: Tap | None = None) -> Tensor:
        """Return hidden states [tokens, hidden] after the final norm; the residual stream is overwritten.

        ``eager`` is as in :meth:`layers`; ``tap`` is called after the last layer.
        """
        if self.functions is not None:
            hidden = self.functions.finish(attended.out, attended.residual)
            if tap is not None:
                tap(self._last, attended.residual)
            return hidden
        _, after = self._eager if eager else self._built
        layer, here = self.weights.layers[self._last], self._fused[self._last][1]
        out, residual, given = attended
        hidden = after(out, residual, layer, self.weights.final_norm, (here, None, given))
        if tap is not None:
            tap(self._last, attended.residual)
        return hidden
