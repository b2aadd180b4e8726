"""The paged key/value cache: one allocation, a block's keys and values side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from preheat.model.spec import ModelSpec


class KVCache:
    """``data`` [layers, blocks, slots, 2, kv heads, dim]: keys at index 0 of the fourth axis, values at 1.

    Block 0 is the pad block. One row of ``flat(layer)`` is what one token writes, so that keys and values take one
    operation; one block is contiguous within a layer, so that a read gathers whole blocks.
    """

    def __init__(self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (spec.num_layers, num_blocks, block_size, 2, spec.num_kv_heads, spec.head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = [self.data[i] for i in range(spec.num_layers)]
        self._flat = [layer.view(num_blocks * block_size, 2 * spec.num_kv_heads, spec.head_dim) for layer in self.layers]

    @staticmethod
    def bytes_per_block(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
        """Bytes that one block takes over all layers."""
        return spec.num_layers * block_size * 2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize

    def write(self, layer: int, kv_slots: Tensor, kv: Tensor) -> None:
        """Store ``kv`` [tokens, 2 * kv heads, dim] (keys, then values) at ``kv_slots`` [tokens]."""
        self._flat[layer].index_copy_(0, kv_slots, kv)
