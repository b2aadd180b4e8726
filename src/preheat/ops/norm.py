"""Norms of rows, alone or with the residual addition before them.

Contract. A residual is added before a norm, rounded to the dtype.

Kind "rms", per row, in fp32: the sum of the squares (one reduction over the row, in an order fixed by its length
alone), times 1 / length, plus eps, reciprocal square root, times x; rounded to the dtype; times weight, rounded again.
Every step is correctly rounded, with two exceptions. The sum is torch's over the last dimension and does not depend on
the number of rows. fp32 ``rsqrt`` treats all elements alike.

Kind "rms_once": the same up to the product with x, kept in fp32; times weight in fp32; rounded once.

Kind "rms_plus_one": the same up to the product with x, kept in fp32; times 1 + weight in fp32; rounded once.

Kind "layer": per row, in fp32, the sum times 1 / length is the mean; the sum of the squares of x - mean, times 1 /
length, plus eps, reciprocal square root, times x - mean, times weight, plus bias if there is one; rounded once.

Kind "identity": the row as it is. It stands where a block reads the residual stream without a norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from preheat.ops.kinds import NormKind
from preheat.ops.opaque import opaque


@opaque("(Tensor x, Tensor weight, Tensor share, Tensor eps) -> Tensor", lambda x, *_: torch.empty_like(x))
def _norm(x: Tensor, weight: Tensor, share: Tensor, eps: Tensor) -> Tensor:
    wide = x if x.dtype == torch.float32 else x.float()
    scale = (wide * wide).sum(-1, True).mul_(share).add_(eps).rsqrt_()
    normed = wide * scale
    return (normed if wide is x else normed.type_as(x)).mul_(weight)


@opaque(
    "(Tensor x, Tensor(a!) residual, Tensor weight, Tensor share, Tensor eps) -> Tensor",
    lambda x, *_: torch.empty_like(x),
)
def _add_norm(x: Tensor, residual: Tensor, weight: Tensor, share: Tensor, eps: Tensor) -> Tensor:
    return _norm(residual.add_(x), weight, share, eps)


class RMSNorm:
    """Kind "rms" in plain torch: the norm of rows of ``weight.shape[-1]`` numbers."""

    kind: NormKind = "rms"

    def __init__(self, weight: Tensor, eps: float) -> None:
        """Take ``weight`` [size], or [heads, size] for one norm per head.

        Its dtype is the rows'.
        """
        self.weight, self.eps = weight, eps
        # Scalars are kept as tensors: torch takes longer to wrap a Python number than to run these operations.
        self._eps = torch.tensor(eps, dtype=torch.float32, device=weight.device)
        self._share = torch.tensor(1.0 / weight.shape[-1], dtype=torch.float32, device=weight.device)

    @property
    def factors(self) -> Tensor:
        """Factors of a normed row, fp32, of the shape of ``weight``."""
        return self.weight.float()

    @property
    def bias(self) -> Tensor | None:
        """Numbers added to a normed row, fp32, if there are any."""
        return None

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of ``x`` [tokens, size] or [tokens, heads, size], a new tensor of its dtype."""
        return _norm(x, self.weight, self._share, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add ``x`` to ``residual`` in place; return the norm of the sum."""
        return _add_norm(x, residual, self.weight, self._share, self._eps)


@opaque("(Tensor x, Tensor weight, Tensor share, Tensor eps) -> Tensor", lambda x, *_: torch.empty_like(x))
def _wide_norm(x: Tensor, weight: Tensor, share: Tensor, eps: Tensor) -> Tensor:
    """Return the norm; ``weight`` is fp32, and includes the one where there is one."""
    wide = x.float()
    scale = (wide * wide).sum(-1, True).mul_(share).add_(eps).rsqrt_()
    return (wide * scale).mul_(weight).type_as(x)


@opaque(
    "(Tensor x, Tensor weight, Tensor? bias, Tensor share, Tensor eps) -> Tensor", lambda x, *_: torch.empty_like(x)
)
def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, share: Tensor, eps: Tensor) -> Tensor:
    """Return the norm; ``weight`` and ``bias`` are fp32."""
    wide = x.float()
    centred = wide - wide.sum(-1, True).mul_(share)
    scale = (centred * centred).sum(-1, True).mul_(share).add_(eps).rsqrt_()
    centred.mul_(scale).mul_(weight)
    return (centred if bias is None else centred.add_(bias)).type_as(x)


@opaque("(Tensor x, Tensor(a!) residual) -> Tensor", lambda x, *_: torch.empty_like(x))
def _add_to(x: Tensor, residual: Tensor) -> Tensor:
    """Add ``x`` to ``residual`` in place; return a copy of the sum."""
    return residual.add_(x).clone()


class OnceNorm(RMSNorm):
    """Kind "rms_once": rounded once, after the product with the weight."""

    kind: NormKind = "rms_once"

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__(weight, eps)
        self._wide = weight.float()

    @property
    def factors(self) -> Tensor:
        return self._wide

    def __call__(self, x: Tensor) -> Tensor:
        return _wide_norm(x, self._wide, self._share, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self(_add_to(x, residual))


class PlusOneNorm(OnceNorm):
    """Kind "rms_plus_one": as "rms_once"; a stored weight is the factor minus one."""

    kind: NormKind = "rms_plus_one"

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__(weight, eps)
        self._wide = 1.0 + self._wide


class LayerNorm(RMSNorm):
    """Kind "layer", with a ``bias`` like ``weight`` or none."""

    kind: NormKind = "layer"

    def __init__(self, weight: Tensor, eps: float, bias: Tensor | None = None) -> None:
        super().__init__(weight, eps)
        self._wide, self._bias = weight.float(), None if bias is None else bias.float()

    @property
    def bias(self) -> Tensor | None:
        return self._bias

    def __call__(self, x: Tensor) -> Tensor:
        return _layer_norm(x, self._wide, self._bias, self._share, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self(_add_to(x, residual))


class Identity(RMSNorm):
    """Kind "identity": the weight is not read."""

    kind: NormKind = "identity"

    def __call__(self, x: Tensor) -> Tensor:
        return x.clone()

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return _add_to(x, residual)


class ReplacingNorm:
    """``norm``, which also replaces its input: the residual stream goes on from the norm."""

    def __init__(self, norm: Any) -> None:
        self.norm, self.weight, self.eps, self.kind = norm, norm.weight, norm.eps, norm.kind

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of ``x``, a new tensor, and write it to ``x``."""
        found: Tensor = self.norm(x)
        x.copy_(found)
        return found

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add ``x`` to ``residual`` in place; return the norm of the sum, and write it to ``residual``."""
        found: Tensor = self.norm.add(x, residual)
        residual.copy_(found)
        return found


def make_norm(weight: Tensor, eps: float, kind: NormKind = "rms", bias: Tensor | None = None) -> RMSNorm:
    """Return a norm of ``kind``; only "layer" may have a ``bias``."""
    if kind == "layer":
        return LayerNorm(weight, eps, bias)
    assert bias is None, f"a norm of kind {kind} has no bias"
    if kind == "identity":
        return Identity(weight, eps)
    made = {"rms": RMSNorm, "rms_once": OnceNorm, "rms_plus_one": PlusOneNorm}[kind]
    return made(weight, eps)
