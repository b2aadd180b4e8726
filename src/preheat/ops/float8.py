"""Numbers of eight bits: what rounding to them is, for the KV cache and for quantized linear layers.

Contract. ``x`` is widened to fp32 and divided by the scale, an fp32 number; the quotient is kept between the greatest
numbers of the dtype (448 for e4m3, 57,344 for e5m2) and rounded to the nearest, ties to even; NaN stays NaN. Each
number alone decides its bits: no scale is ever taken from what is rounded.

Attention widens what is stored to the model's dtype, which is exact, and multiplies by the scales elsewhere: that of
the keys with the scores' scale, that of the values with the output.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""By their names in :class:`preheat.model.specs.KVSpec`."""


def round_to(x: Tensor, scale: Tensor, dtype: torch.dtype, most: float | None = None) -> Tensor:
    """``x`` / ``scale`` in ``dtype``; ``scale`` is fp32 and broadcasts. ``most``: keep to a smaller range."""
    most = torch.finfo(dtype).max if most is None else most
    return (x.float() / scale).clamp_(-most, most).to(dtype)


def simulate(x: Tensor, scale: Tensor, most: float) -> Tensor:
    """``x`` rounded to e4m3 and back: what was rounded times the scale, in fp32, in the dtype of ``x``."""
    return (round_to(x, scale, torch.float8_e4m3fn, most).float() * scale).to(x.dtype)
