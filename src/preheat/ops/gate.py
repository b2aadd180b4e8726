"""Gates of attention's outputs.

Contract: out / (1 + exp(-gate)), element by element, in fp32, one operation after the other. The result is rounded to
the dtype once.
"""

from __future__ import annotations

from torch import Tensor


def gated(out: Tensor, gates: Tensor) -> Tensor:
    """Return ``out`` [tokens, numbers] times the sigmoids of ``gates``, a new tensor."""
    return (out.float() / gates.float().neg().exp_().add_(1.0)).to(out.dtype)
