"""Rings in shared memory and TMA descriptors for Hopper's kernels.

One warp fills a ring and other warps empty it. The copy engine (TMA) fills rings by descriptors.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@gluon.jit
def ring(at, STAGES: gl.constexpr):
    """Return the place of item ``at`` in a ring, and the phase of the place."""
    return at % STAGES, at // STAGES & 1


@gluon.jit
def barriers(PLACES: gl.constexpr, count: gl.constexpr):
    """Return a barrier for each place of a ring; ``count`` arrivals complete a barrier."""
    made = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(PLACES):
        mbarrier.init(made.index(place), count=count)
    return made


def descriptor(tensor: Tensor, *block: int) -> TensorDescriptor:
    """Return a descriptor of ``tensor`` for copies of pieces of the shape ``block``."""
    size = tensor.element_size()
    return TensorDescriptor.from_tensor(tensor, list(block), _layout(min(128, block[-1] * size), size, len(block)))


@cache
def _layout(width: int, size: int, rank: int) -> gl.NVMMASharedLayout:
    """Return the layout of pieces in shared memory, with rows of ``width`` bytes of numbers of ``size`` bytes.

    Gluon takes five microseconds to make one.
    """
    return gl.NVMMASharedLayout(swizzle_byte_width=width if width >= 32 else 0, element_bitwidth=8 * size, rank=rank)


def is_hopper(device: torch.device | None = None) -> bool:
    """Return whether ``device``, by default the current GPU, has compute capability 9."""
    if device is not None and device.type != "cuda":  # Triton's interpreter
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def reads_pages(q: Tensor, cache: Tensor, tile: int) -> bool:
    """Return whether kernels of attention for Hopper read these queries [tokens, heads, dim] and this paged cache.

    The copy engine takes ``tile`` keys of a block at once, and needs strides of whole 16 bytes.
    """
    return (
        q.is_cuda
        and is_hopper(q.device)
        and q.element_size() == 2
        and q.shape[2] in (64, 128)
        and cache.shape[3] % tile == 0
        and all(stride * cache.element_size() % 16 == 0 for stride in cache.stride()[:3])
    )
