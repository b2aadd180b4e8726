"""The decoder: one class for every architecture; what differs between them is in the spec and in the weights."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from preheat.model.rope import rope_table
from preheat.model.spec import ModelSpec
from preheat.model.weights import Weights
from preheat.ops.activation import silu_and_mul
from preheat.ops.embedding import embed
from preheat.ops.rotary import apply_rope_

Attention = Callable[[int, Tensor], Tensor]
"""``attention(layer, qkv)``: store the keys and values of ``qkv`` [tokens, heads + 2 * kv heads, dim], attend with its
queries, return [tokens, heads * dim]."""


class Decoder:
    """Runs ``weights`` as ``spec`` says, for positions below ``max_model_len``. Call it under inference mode."""

    def __init__(self, spec: ModelSpec, weights: Weights, max_model_len: int) -> None:
        self.spec, self.weights = spec, weights
        self.dtype = weights.embedding.dtype
        self._rope = rope_table(spec.rope, spec.head_dim, max_model_len, self.dtype)
        self._norms_after = [layer.input_norm for layer in weights.layers[1:]] + [weights.final_norm]
        self._turned = spec.num_heads + spec.num_kv_heads  # heads that rope turns: queries, then keys
        self._heads = (self._turned + spec.num_kv_heads, spec.head_dim)

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states [tokens, hidden] after the final norm, for int64 ``tokens`` and ``positions`` [tokens]."""
        cos, sin = self._rope.index_select(0, positions).unbind(1)
        residual = embed(tokens, self.weights.embedding)
        normed = self.weights.layers[0].input_norm(residual)
        for index, layer in enumerate(self.weights.layers):
            qkv = layer.qkv(normed).view(-1, *self._heads)
            turned = qkv[:, : self._turned]
            if layer.qk_norm is not None:
                turned.copy_(layer.qk_norm(turned))
            apply_rope_(turned, cos, sin)
            normed = layer.post_norm.add(layer.o(attention(index, qkv)), residual)
            normed = self._norms_after[index].add(layer.down(silu_and_mul(layer.gate_up(normed))), residual)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [rows, vocab] for ``hidden`` [rows, hidden]."""
        return self.weights.head(hidden).float()
