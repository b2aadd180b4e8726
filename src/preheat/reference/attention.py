"""Attention of whole sequences with gradients, over a cache of its own.

The forward pass is the engine's paged attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from preheat.backends.base.attention import Attend, AttentionLayer, StepInputs, StepRows
from preheat.backends.base.backend import Backend
from preheat.execution.kv_cache import KVCache
from preheat.execution.layer_parts import attention_layers
from preheat.limits import Limits
from preheat.model.decoder import Decoder
from preheat.reference.operations import DifferentiableNorm, exact

MULTIPLE = 64
"""Rows are padded to a multiple of this.

So few numbers of rows have to be proven to have the engine's bits.
"""


def padded(count: int) -> int:
    """Return ``count`` rounded up to the padded number of rows.

    It is at least one multiple.
    """
    return max(-(-count // MULTIPLE), 1) * MULTIPLE


@dataclass
class _Tables:
    """Block tables of sequences that follow one another.

    Block 0 is the pad block.
    """

    block_size: int
    block_table: np.ndarray
    table_version: np.ndarray
    table_writes: int = 0
    tables: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.tables = self.block_table[:, None]  # of the only cache group


class WholeSequences:
    """A step that reads whole sequences of ``lengths`` tokens.

    It has ``tokens`` rows in all, the last ones padding, at ``positions`` int32 [tokens] of their sequences. ``limits``
    give the longest sequence and the block size of the cache. The cache is made for this step.
    """

    def __init__(self, lengths: Sequence[int], limits: Limits, device: torch.device) -> None:
        self.limits, self.count = limits, sum(lengths)
        self.tokens = padded(self.count)
        self.ends = np.cumsum(lengths)
        position = np.zeros(self.tokens, np.int32)
        position[: self.count] = np.concatenate([np.arange(length) for length in lengths])
        self.positions = torch.from_numpy(position).to(device)
        self._lengths = np.array(lengths)

    def attend(self, backend: Backend, decoder: Decoder) -> Attend:
        """Return the attention that ``decoder`` calls in each layer."""
        size = self.limits.block_size
        blocks = -(-self._lengths // size)
        cache = KVCache(decoder.spec, 1 + int(blocks.sum()), size, decoder.dtype, backend.device)
        first = 1 + np.cumsum(blocks) - blocks
        rows = len(blocks)
        table = first[:, None] + np.arange(blocks.max())
        tables = _Tables(size, np.minimum(table, blocks.sum()).astype(np.int32), np.zeros(rows, np.int64))
        step = StepRows(
            np.arange(rows), np.zeros(rows, np.int32), self._lengths.astype(np.int32), self.ends, 0, self.tokens
        )
        layers = attention_layers(decoder, cache)
        engine = backend.attention(layers, self.limits, contiguous=False)
        inputs = self._inputs()
        engine.send(0, engine.plan(step, tables), inputs)

        def attend(index: int, qkv: Tensor) -> Tensor:
            layer = layers[index]
            norm = layer.qk_norm
            weight = norm.weight if isinstance(norm, DifferentiableNorm) else None

            def run(qkv: Tensor, *_: Tensor | None) -> Tensor:
                out = qkv.new_zeros(self.tokens, layer.num_heads * layer.head_dim)
                found: Tensor = engine.attend(inputs, out)(index, qkv.clone())
                return found

            def plain(qkv: Tensor, weight: Tensor | None, sinks: Tensor | None) -> Tensor:
                return self._plain(replace(layer, sinks=sinks), qkv, weight)

            return exact(run, plain, qkv, weight, layer.sinks)

        return attend

    def _inputs(self) -> StepInputs:
        nothing = self.positions[:0]
        return StepInputs(nothing, nothing, self.positions, (), nothing, len(self.ends), width=0)

    def _plain(self, layer: AttentionLayer, qkv: Tensor, weight: Tensor | None) -> Tensor:
        """Return attention by formula.

        It is norm, rotation, softmax of the scaled products, in fp32.
        """
        heads, groups = layer.num_heads, layer.num_kv_heads
        turned, value = qkv[:, : heads + groups], qkv[:, heads + groups :]
        if isinstance(layer.qk_norm, DifferentiableNorm) and weight is not None:
            turned = layer.qk_norm.plain(turned, weight)
        if layer.rope is not None:
            cos, sin = layer.rope.index_select(0, self.positions).unbind(1)
            turned = turned * cos + turned.roll(layer.head_dim // 2, -1) * sin
        query, key = turned[:, :heads], turned[:, heads:]
        if layer.growth is not None:
            query = query * layer.growth[self.positions][:, None, None]
        parts = []
        for first, last in zip(self.ends - self._lengths, self.ends, strict=True):
            q, k, v = (x[first:last].transpose(0, 1)[None].float() for x in (query, key, value))
            bias = _bias(layer, int(last - first), qkv.device)
            if layer.sinks is not None:  # a key of zeros whose score is its bias, with a value of zeros
                k, v = (F.pad(each, (0, 0, 0, 1)) for each in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=layer.scale, enable_gqa=heads > groups)
            parts.append(out[0].transpose(0, 1).flatten(1))
        return F.pad(torch.cat(parts), (0, 0, 0, self.tokens - self.count)).to(qkv.dtype)


def _bias(layer: AttentionLayer, length: int, device: torch.device) -> Tensor:
    """Return the bias of scores, fp32 [1 or heads, queries, keys].

    It is -inf where a query does not see a key, else ALiBi's bias or 0. A head's sink is the last key.
    """
    at = torch.arange(length, device=device)
    distance = at - at[:, None]
    hidden = distance > 0
    if layer.window is not None:
        hidden |= distance <= -layer.window
    bias = torch.zeros(1, device=device) if layer.alibi is None else layer.alibi
    found = (bias[:, None, None] * distance).masked_fill(hidden, -torch.inf)
    if layer.sinks is None:
        return found
    own = layer.sinks.view(-1, 1, 1).expand(-1, length, 1)
    return torch.cat((found.expand(len(own), -1, -1), own), 2)
