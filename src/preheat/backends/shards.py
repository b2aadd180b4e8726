"""Linear layers of which a rank has a part, made of a backend's own; see :mod:`preheat.ops.matmul`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from preheat.backends.base import Collective, Linear
from preheat.ops.matmul import tree_sum

Make = Callable[[Tensor, "Tensor | None"], Linear]
"""Makes the backend's layer of a weight [outputs, inputs] and a bias [outputs]."""


class Products(Protocol):
    """The products of a matrix [outputs, inputs of this rank], one for each of so many ``leaves``. ``parts`` are the
    layers among them, for a backend that prepares those.
    """

    leaves: int
    parts: Sequence[Linear]

    def __call__(self, x: Tensor) -> list[Tensor]:
        """Of ``x`` [rows, inputs of this rank]: fp32 [rows, outputs] for each leaf."""


class TiledLinear:
    """``weight`` and ``bias`` in ``tiles``, so many rows each, whose products are computed one after the other: a
    library may add in another order where there are more outputs, and ranks have different numbers of tiles.
    """

    def __init__(self, make: Make, weight: Tensor, bias: Tensor | None, tiles: Sequence[int]) -> None:
        biases = [None] * len(tiles) if bias is None else torch.split(bias, list(tiles))
        parts = torch.split(weight, list(tiles))
        self.parts = [make(part.contiguous(), own) for part, own in zip(parts, biases, strict=True)]

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``x`` [rows, inputs] -> [rows, outputs], a new tensor of its dtype."""
        return torch.cat([part(x) for part in self.parts], dim=-1)


class LeafLinear:
    """The ``products`` of a matrix [outputs, inputs of this rank] in ``leaves``, and their sum over all ranks."""

    def __init__(self, products: Products, bias: Tensor | None, collective: Collective) -> None:
        self.leaves, self._leaves, self.parts = products.leaves, products, products.parts
        self._bias, self._collective = None if bias is None else bias.float(), collective

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``x`` [rows, inputs of this rank] -> [rows, outputs], a new tensor of its dtype, the same on all ranks."""
        return self.finish(all_ranks(self.partial(x), self._collective), x.dtype)

    def partial(self, x: Tensor) -> Tensor:
        """This rank's sum, fp32 [rows, outputs]."""
        return tree_sum(self._leaves(x))

    def finish(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        """The layer's outputs of the sum of all ranks."""
        return (total if self._bias is None else total + self._bias).to(dtype)

    def with_others(self, x: Tensor, others: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The layer's outputs, and of each of the ``others``, fp32, what all ranks have together: in one exchange."""
        total, *rest = all_ranks_at_once([self.partial(x), *others], self._collective)
        return self.finish(total, x.dtype), rest


class Leaves:
    """The products of a matrix [outputs, inputs] that is cut into ``leaves`` of its inputs, each fp32. Libraries round
    what they return to the dtype of their inputs, so products are made in fp32, which holds every product of the
    dtype's numbers.
    """

    def __init__(self, make: Make, weight: Tensor, leaves: int) -> None:
        self.leaves, self._size = leaves, weight.shape[1] // leaves
        self.parts: Sequence[Linear] = [
            make(part.float().contiguous(), None) for part in torch.split(weight, self._size, 1)
        ]

    def __call__(self, x: Tensor) -> list[Tensor]:
        """Of ``x`` [rows, inputs]: fp32 [rows, outputs] for each leaf."""
        inputs = torch.split(x.float(), self._size, 1)
        return [part(mine.contiguous()) for part, mine in zip(self.parts, inputs, strict=True)]


def all_ranks(partial: Tensor, collective: Collective) -> Tensor:
    """The sum of all ranks' fp32 ``partial``, in the tree's order."""
    return tree_sum(collective.gather(partial).unbind())


def all_ranks_at_once(parts: Sequence[Tensor], collective: Collective) -> list[Tensor]:
    """The same of several fp32 tensors, in one exchange."""
    found = all_ranks(torch.cat([part.reshape(-1) for part in parts]), collective)
    sums = torch.split(found, [part.numel() for part in parts])
    return [mine.view(part.shape) for mine, part in zip(sums, parts, strict=True)]
