"""Rounding to numbers of eight bits.

It is for the KV cache and for quantized linear layers.

Contract. ``x`` is widened to fp32 and divided by the scale, an fp32 number. The quotient is kept between the greatest
numbers of the dtype (448 for e4m3, 57,344 for e5m2) and rounded to the nearest, ties to even; NaN stays NaN. Each
number alone decides its bits: no scale is ever computed from the numbers being rounded.

Attention widens the stored numbers to the model's dtype, exactly, and multiplies by the scales elsewhere. The scale of
the keys joins the scores' scale; the scale of the values joins the output.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Dtypes by their names in :class:`preheat.model.kv_spec.KVSpec`."""


def round_to(x: Tensor, scale: Tensor, dtype: torch.dtype, most: float | None = None) -> Tensor:
    """Return ``x`` / ``scale`` in ``dtype``; ``scale`` is fp32 and broadcasts.

    ``most`` is the greatest magnitude kept; None: the greatest number of the dtype.
    """
    most = torch.finfo(dtype).max if most is None else most
    return (x.float() / scale).clamp_(-most, most).to(dtype)


def simulate(x: Tensor, scale: Tensor, most: float) -> Tensor:
    """Return ``x`` rounded to e4m3, back in its own dtype.

    The rounded numbers are multiplied by the scale in fp32.
    """
    return (round_to(x, scale, torch.float8_e4m3fn, most).float() * scale).to(x.dtype)
