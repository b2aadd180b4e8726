"""Last steps of blocks, and the same steps one after the other, for tests on any device."""

from collections.abc import Iterator

import torch
from torch import Tensor

from preheat.backends.base.layers import Closing
from preheat.backends.cuda.pointwise.closing import BlockNorm
from preheat.ops.proof import noise


def steps_of(size: int, kind: str, tokens: int = 4, device: str = "cpu") -> Iterator[Closing]:
    """Yield steps of rows of ``size`` numbers: the fewest, the most, and some in between."""

    def norm(seed: int) -> BlockNorm:
        return BlockNorm(noise(size, seed=seed).bfloat16().to(device), 1e-6, kind)

    beside = noise(tokens, size, seed=2).bfloat16().to(device)
    scalar = torch.tensor([0.7], dtype=torch.bfloat16, device=device)
    yield Closing((norm(3),))
    yield Closing((norm(3), norm(4), norm(5)), first=norm(6))
    yield Closing((norm(3),), beside=beside)
    yield Closing((norm(3), norm(4)), norm(5), beside, norm(6), norm(7), scalar)


def one_by_one(row: Tensor, residual: Tensor, steps: Closing) -> list[Tensor]:
    """Take ``steps`` of ``row`` [tokens, size] with a launch for each; return the norms of ``residual``."""
    row = row if steps.first is None else steps.first(row)
    if steps.beside is not None:
        row = row + (steps.beside if steps.beside_norm is None else steps.beside_norm(steps.beside))
    residual.add_(row if steps.last is None else steps.last(row))
    if steps.scalar is not None:
        residual.mul_(steps.scalar)
    return [norm(residual) for norm in steps.norms]
