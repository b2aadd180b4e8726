"""Caches in blocks: keys and values, and features.

Keys and values are one allocation; a head that drafts has features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from preheat.cache_groups import WHOLE, CacheGroup, group_of, width_of
from preheat.model.specs import ModelSpec
from preheat.ops.float8 import DTYPES

CACHED = {torch.float16: torch.bfloat16}
"""Dtypes of caches that are not the model's."""


class BlockCache:
    """Blocks in every layer: ``data`` [layers, blocks, ...], contiguous.

    A block is a whole number of 64-bit words.
    """

    def __init__(self, data: Tensor) -> None:
        self.data, self.layers = data, list(data.unbind(0))
        self._blocks = [layer.view(len(layer), -1).view(torch.int64) for layer in self.layers]  # moved in whole words

    def swap(self, pairs: Tensor) -> None:
        """Swap the contents of pairs of blocks, layer by layer.

        ``pairs`` is int64 [n, 2]. A pair may be given more than once, and a block with itself; else no block may occur
        twice. Meanwhile it takes the memory of 2n blocks of one layer.
        """
        here, there = pairs.flatten(), pairs.flip(1).flatten()
        contents = self._blocks[0].new_empty(len(here), self._blocks[0].shape[1])
        for blocks in self._blocks:
            torch.index_select(blocks, 0, there, out=contents)
            blocks.index_copy_(0, here, contents)


class KVCache(BlockCache):
    """Keys and values: ``data`` [layers of a group, blocks, 2, kv heads, slots, dim].

    Layers with a state have no keys; the others are numbered among themselves.
    Keys are at index 0 of the third axis, values at 1. Where a key is the value too, the axis has one
    index. Their dtype is ``dtype``, the model's, or the spec's dtype of eight bits; a model in float16 has a cache in
    bfloat16. Block 0 is the pad block. Within a block each head's keys are contiguous, so that a read gathers whole
    heads of whole blocks straight into the layout of the matrix product.

    ``layers`` are the parts of ``data`` for all layers. The layers at one place of their ``groups`` share a part; a
    block is of one group at a time.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        groups: Sequence[CacheGroup] = WHOLE,
    ) -> None:
        count = len(spec.attentions)
        shape = (width_of(groups, count), num_blocks, spec.kv_sides, spec.num_kv_heads, block_size, spec.head_dim)
        super().__init__(torch.zeros(shape, dtype=DTYPES.get(spec.kv_dtype, CACHED.get(dtype, dtype)), device=device))
        self.group_of_layer, places = zip(*(group_of(groups, layer) for layer in range(count)), strict=True)
        self.layers = [self.layers[place] for place in places]


class FeatureCache(BlockCache):
    """Features: ``rows`` [blocks * slots, size], ``size`` numbers for each token.

    A token's row is the number of its block times the slots of a block, plus its place there.
    """

    def __init__(self, num_blocks: int, block_size: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(torch.zeros(1, num_blocks, block_size, size, dtype=dtype, device=device))
        self.rows = self.data.view(-1, size)
