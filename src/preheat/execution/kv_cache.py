"""Caches in blocks: keys and values, and features.

Keys and values are one allocation; a head that drafts has features.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from preheat.cache_groups import WHOLE, CacheGroup, group_of, room_of
from preheat.model.specs import ModelSpec
from preheat.ops.float8 import DTYPES

CACHED = {torch.float16: torch.bfloat16}
"""Dtypes of caches that are not the model's."""


class BlockCache:
    """Blocks in every layer: ``data`` [layers, blocks, ...], contiguous.

    A block is a whole number of 64-bit words, which :attr:`blocks` are, [blocks, words] for each of the layers.
    """

    def __init__(self, data: Tensor) -> None:
        self.data, self.layers = data, list(data.unbind(0))
        self.blocks = [layer.view(len(layer), -1).view(torch.int64) for layer in self.layers]  # moved in whole words

    def swap(self, pairs: Tensor) -> None:
        """Swap the contents of pairs of blocks, layer by layer.

        ``pairs`` is int64 [n, 2]. A pair may be given more than once, and a block with itself; else no block may occur
        twice. Meanwhile it takes the memory of 2n blocks of one layer.
        """
        here, there = pairs.flatten(), pairs.flip(1).flatten()
        contents = self.blocks[0].new_empty(len(here), self.blocks[0].shape[1])
        for blocks in self.blocks:
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
    block is of one group at a time. A layer that reads another layer's keys and values has that layer's part.

    Where entries differ, ``data`` is [1, blocks, numbers]: all of a block lies together, and its group's layers follow
    each other from the beginning. A layer's part then has a stride from block to block.
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
        own = [each.kv.entry for each in spec.attentions]
        sources = [at if each.source is None else each.source for at, each in enumerate(spec.attentions)]
        owners = sorted(set(sources))
        entries = [own[at] if at in owners else () for at in range(len(own))]
        alike, numbers = len(set(own)) == 1, room_of(groups, entries)
        shape = (1, num_blocks, numbers * block_size)
        if alike:
            sides, heads, dim = own[0]
            shape = (numbers // prod(own[0]), num_blocks, sides, heads, block_size, dim)  # type: ignore[assignment]
        super().__init__(torch.zeros(shape, dtype=DTYPES.get(spec.kv_dtype, CACHED.get(dtype, dtype)), device=device))
        found = [group_of(groups, each) if groups[0].layers else (0, owners.index(each)) for each in sources]
        self.group_of_layer, places = zip(*found, strict=True)
        if alike:
            self.layers = [self.layers[place] for place in places]
            return
        self.layers, before = [], [0]  # numbers before each owner, where all layers are one group
        for at in owners:
            before.append(before[-1] + prod(own[at]))
        for place, (sides, heads, dim) in zip(places, own, strict=True):
            first = place * sides * heads * dim if groups[0].layers else before[place]
            size = sides * heads * dim * block_size
            part = self.data[0, :, first * block_size :][:, :size]
            self.layers.append(part.view(num_blocks, sides, heads, block_size, dim))


class FeatureCache(BlockCache):
    """Features: ``rows`` [blocks * slots, size], ``size`` numbers for each token.

    A token's row is the number of its block times the slots of a block, plus its place there.
    """

    def __init__(self, num_blocks: int, block_size: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(torch.zeros(1, num_blocks, block_size, size, dtype=dtype, device=device))
        self.rows = self.data.view(-1, size)
