"""Factors of rotary frequencies in GGUF files, as the rope parameters of a ``config.json``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Parameters of every Llama 3.1, 3.2 and 3.3.

A file has the factors that follow from them, but not the parameters. The parameters give the bits of the original
checkpoint.
"""

_CLOSE = 1e-5
"""Relative difference of factors that the converter computed in float32."""


def divided(factors: Sequence[float], theta: float, length: int) -> dict[str, Any]:
    """Return rope parameters that divide the frequency of each pair by its factor.

    They are Llama 3's own if its rule gives these ``factors``. ``theta`` is the base, ``length`` the longest sequence.
    """
    params = {**LLAMA3, "factor": max(factors, default=1.0)}
    expected = list(_llama3(params, theta, len(factors)))
    if all(math.isclose(one, other, rel_tol=_CLOSE) for one, other in zip(factors, expected, strict=True)):
        return {"rope_type": "llama3", **params}
    return {
        "rope_type": "longrope", "short_factor": list(factors), "long_factor": list(factors), "attention_factor": 1.0,
        "original_max_position_embeddings": length,
    }  # fmt: skip


def _llama3(params: Mapping[str, float], theta: float, pairs: int) -> Iterator[float]:
    """Yield the factor of each pair by Llama 3's rule."""
    factor, original = params["factor"], params["original_max_position_embeddings"]
    low, high = params["low_freq_factor"], params["high_freq_factor"]
    for pair in range(pairs):
        wavelength = 2 * math.pi * theta ** (pair / pairs)
        blend = (original / wavelength - low) / (high - low)
        blend = min(max(blend, 0.0), 1.0)
        yield 1 / ((1 - blend) / factor + blend)
