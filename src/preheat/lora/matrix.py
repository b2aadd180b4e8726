"""A matrix of an adapter's file."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from preheat.errors import AdapterError


class Matrix(NamedTuple):
    """A matrix of an adapter, and the largest magnitude in it."""

    numbers: Tensor
    largest: float


def read_matrix(file: Any, name: str, dtype: torch.dtype, digest: Any) -> Matrix:
    """Return the tensor ``name`` in ``dtype``; add its numbers to ``digest``. Raises AdapterError if one is not finite.

    The work is numpy's, on this thread: torch would share each small operation among all threads of the process, and a
    busy machine makes them wait for each other.
    """
    stored = file.get_tensor(name).contiguous()
    # A copy: the file is mapped, and may be written to while the adapter is served.
    stored = torch.from_numpy(stored.view(torch.uint8).numpy().copy()).view(stored.dtype).view(stored.shape)
    digest.update(f" {stored.dtype} {list(stored.shape)} ".encode())
    digest.update(stored.view(torch.uint8).numpy().data)
    numbers = stored.to(dtype)
    largest = largest_magnitude(numbers)
    if not math.isfinite(largest):
        raise AdapterError(f"tensor {name} is not finite in {numbers.dtype}: save the adapter again")
    return Matrix(numbers, largest)


def largest_magnitude(numbers: Tensor) -> float:
    """Return the largest magnitude: infinite or not a number if any is so.

    Magnitudes have the order of their bits as integers, and numbers that are not finite have the greatest.
    """
    size = numbers.element_size()
    bits = numbers.view(torch.int16 if size == 2 else torch.int32).numpy().view(f"u{size}")
    most = np.array([(bits & ((1 << 8 * size - 1) - 1)).max()], bits.dtype)
    return float(torch.from_numpy(most.view(f"i{size}")).view(numbers.dtype))
