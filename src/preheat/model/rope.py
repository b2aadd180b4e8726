"""Rotary frequencies and the table of cosines and sines for every position."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from preheat.model.attention_specs import QueryGrowth, RopeSpec
from preheat.utils.angles import cos_sin, log, power


def inverse_frequencies(rope: RopeSpec, head_dim: int, length: int) -> Tensor:
    """Return fp32 [head_dim / 2]: radians per position of each pair of dimensions, after scaling.

    Sequences have up to ``length`` tokens.
    """
    if rope.kind == "proportional":
        return _proportional(rope, head_dim)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    powers = torch.from_numpy(power(rope.theta, exponents.tolist()))
    if rope.kind == "longrope":
        factors = rope.long_factor if length > rope.original_length else rope.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * powers)
    plain = 1.0 / powers
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(plain, rope, head_dim)
    return plain


def attention_factor(rope: RopeSpec) -> float:
    """Return the factor of cosines and sines: 1 except for yarn and longrope."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope":
        return math.sqrt(1 + log(rope.factor) / log(rope.original_length)) if rope.factor > 1 else 1.0
    return 0.1 * log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def rope_table(rope: RopeSpec, head_dim: int, length: int, dtype: torch.dtype) -> Tensor:
    """Return [length, 2, 1, head_dim]: cosines at index 0, sines at 1, as ``ops.rotary`` takes them.

    Angles are fp32 products of position and frequency, as in training. Their cosines and sines are the same on every
    machine (:mod:`preheat.utils.angles`), times the attention factor in fp32, rounded to ``dtype`` at the end. The
    sines of the first half are negated, so that "rotate half" becomes a swap of the halves. Dimensions that do not
    turn, at the end of each half, have cosine 1 and sine 0.
    """
    turned = rope.turned(head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse_frequencies(rope, turned, length))
    cos, sin = (torch.from_numpy(each) * attention_factor(rope) for each in cos_sin(angles.numpy()))
    if turned < head_dim:
        rest = (0, (head_dim - turned) // 2)
        cos, sin = F.pad(cos, rest, value=1.0), F.pad(sin, rest)
    table = torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)), dim=1)
    return table.unsqueeze(2).to(dtype)


def query_factors(growth: QueryGrowth, length: int, dtype: torch.dtype) -> Tensor:
    """Return [length]: the factor of a query at each position, computed in float64 and rounded once."""
    steps = range(-(-length // growth.length))
    factors = torch.tensor([1 + growth.rate * log(1 + step) for step in steps], dtype=torch.float64)
    return factors.repeat_interleave(growth.length)[:length].to(dtype)


def _proportional(rope: RopeSpec, head_dim: int) -> Tensor:
    """Return the frequencies of a whole head for the first pairs, and 0 for the others."""
    turned = int(rope.partial * head_dim // 2)
    exponents = torch.arange(0, 2 * turned, 2, dtype=torch.float32) / head_dim
    found = 1.0 / torch.from_numpy(power(rope.theta, exponents.tolist()))
    return F.pad(found, (0, head_dim // 2 - turned)) / rope.factor


def _llama3(plain: Tensor, rope: RopeSpec) -> Tensor:
    """Slow long wavelengths by ``factor``, keep short ones, interpolate between."""
    wavelength = 2 * math.pi / plain
    slowed = torch.where(wavelength > rope.original_length / rope.low_freq_factor, plain / rope.factor, plain)
    blend = (rope.original_length / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - blend) * slowed / rope.factor + blend * slowed
    low, high = rope.original_length / rope.low_freq_factor, rope.original_length / rope.high_freq_factor
    return torch.where((wavelength >= high) & (wavelength <= low), between, slowed)


def _yarn(plain: Tensor, rope: RopeSpec, head_dim: int) -> Tensor:
    """Blend kept frequencies with frequencies slowed by ``factor``.

    The weights are a linear ramp over the dimensions.
    """

    def dimension(rotations: float) -> float:
        """Return the dimension that turns ``rotations`` times within the original length."""
        return head_dim * log(rope.original_length / (rotations * 2 * math.pi)) / (2 * log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return plain / rope.factor * (1 - kept) + plain * kept
