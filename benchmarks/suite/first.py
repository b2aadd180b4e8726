"""The first request of each kind against later ones.

This module has the kinds, the repeats, and the comparison.
"""

from __future__ import annotations

import statistics
from typing import Any

REPEATS = 5
"""Repeats of a first request."""

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "0.7, top-p 0.9, top-k 50": {"temperature": 0.7, "top_p": 0.9, "top_k": 50},
    "0.8, top-p 0.85": {"temperature": 0.8, "top_p": 0.85},
    "1.2, top-p 0.8, top-k 100": {"temperature": 1.2, "top_p": 0.8, "top_k": 100},
    "seed": {"temperature": 1.0, "seed": 7},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
    "penalties": {"temperature": 0.5, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "bias and min-p": {"temperature": 1.0, "min_p": 0.1, "logit_bias": {5: 1.0}},
}
"""Each takes another way through the sampler."""


def ratio_row(name: str, length: int, first: float, later: list[float]) -> dict[str, Any]:
    """Return a first request's milliseconds beside the median of the same request later."""
    steady = statistics.median(later)
    return {
        "setting": name,
        "length": length,
        "first_ms": round(first, 2),
        "steady_ms": round(steady, 2),
        "ratio": round(first / steady, 3),
    }
