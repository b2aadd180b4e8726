"""What kernels written for Hopper share: rings in shared memory, filled by one warp and emptied by others, and the
descriptors from which the copy engine (TMA) fills them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@gluon.jit
def ring(at, STAGES: gl.constexpr):
    """The place in a ring of the ``at``-th that went in, and its phase."""
    return at % STAGES, at // STAGES & 1


@gluon.jit
def barriers(PLACES: gl.constexpr, count: gl.constexpr):
    """One for each place of a ring, for so many who arrive."""
    made = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(PLACES):
        mbarrier.init(made.index(place), count=count)
    return made


def descriptor(tensor: Tensor, *block: int) -> TensorDescriptor:
    """Of ``tensor``, numbers which is copied in pieces of the shape ``block``."""
    size = tensor.element_size()
    width = min(128, block[-1] * size)
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=width if width >= 32 else 0, element_bitwidth=8 * size, rank=len(block)
    )
    return TensorDescriptor.from_tensor(tensor, list(block), layout)


def is_hopper(device: torch.device | None = None) -> bool:
    """Whether ``device``, by default the current GPU, is one of compute capability 9."""
    if device is not None and device.type != "cuda":  # Triton's interpreter
        return False
    return torch.cuda.get_device_capability(device)[0] == 9
