"""A linear layer made of a backend's products, one for each of its tiles or splits; see :mod:`preheat.ops.matmul`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from preheat.backends.base import ALONE, AdapterSlots, Collective, LayerContext, LayerWeights
from preheat.ops.activation import ACTIVATIONS, clip
from preheat.ops.float8 import simulate
from preheat.ops.matmul import tree_sum
from preheat.ops.values import Finish, Matmul, SumOrder


class Product(Protocol):
    """``x`` [rows, inputs] times one matrix [outputs, inputs], and its bias: [rows, outputs], a new tensor."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def weights(self) -> Iterable[Tensor]:
        """See :class:`preheat.backends.base.HasWeights`."""


P = TypeVar("P", bound=Product)

Make = Callable[[Tensor, "Tensor | None"], P]
"""Makes the backend's product of a weight [outputs, inputs] and a bias [outputs]."""


class Products(Protocol):
    """The products of a layer: for ``x`` [rows, inputs of this rank] the fp32 sums [rows, outputs] of each split, or of
    a layer that is not split its outputs in the dtype of ``x``. ``parts`` are prepared by some backends.
    """

    @property
    def parts(self) -> Sequence[Product]: ...

    def __call__(self, x: Tensor) -> list[Tensor]: ...

    def weights(self) -> Iterable[Tensor]:
        """See :class:`preheat.backends.base.HasWeights`."""


class Terms(AdapterSlots, Protocol):
    """What the adapters of a step's rows add to a layer."""

    def shrink(self, x: Tensor) -> Sequence[Any]:
        """``x`` [rows, inputs of this rank] times the first matrices: for each adapter and part the fp32 ``sums``."""

    def expand(self, y: Tensor, shrunk: Sequence[Any], roots: Sequence[Tensor]) -> None:
        """Add to ``y`` [rows, outputs], in place, what :meth:`shrink` gave, whose sums of all ranks are ``roots``."""

    def tensors(self) -> Iterable[Tensor]:
        """The matrices of all slots."""


class Tiles(Generic[P]):
    """Products over all inputs, one after the other, whose outputs follow each other: a library may add in another
    order where there are more outputs, and ranks have different numbers of tiles.
    """

    def __init__(self, parts: Sequence[P]) -> None:
        self.parts = parts

    @classmethod
    def of(cls, make: Make[P], weight: Tensor, bias: Tensor | None, tiles: Sequence[int]) -> Tiles[P]:
        """Of ``weight`` [outputs, inputs] and ``bias`` in ``tiles`` of so many outputs each; none: in one."""
        if not tiles:
            return cls([make(weight, bias)])
        biases = [None] * len(tiles) if bias is None else torch.split(bias, list(tiles))
        parts = torch.split(weight, list(tiles))
        return cls([make(part.contiguous(), own) for part, own in zip(parts, biases, strict=True)])

    def __call__(self, x: Tensor) -> list[Tensor]:
        if len(self.parts) == 1:
            return [self.parts[0](x)]
        return [torch.cat([part(x) for part in self.parts], dim=-1)]

    def weights(self) -> Iterator[Tensor]:
        for part in self.parts:
            yield from part.weights()


class Splits(Generic[P]):
    """The products of a matrix [outputs, inputs] that is cut into splits of its inputs, each fp32. Libraries round
    their results to the dtype of their inputs, so products are made in fp32, which holds every product of the dtype's
    numbers.
    """

    def __init__(self, make: Make[P], weight: Tensor, order: SumOrder) -> None:
        self._size = weight.shape[1] // order.own
        self.parts = [make(part.float().contiguous(), None) for part in torch.split(weight, self._size, 1)]

    def __call__(self, x: Tensor) -> list[Tensor]:
        inputs = torch.split(x.float(), self._size, 1)
        return [part(mine.contiguous()) for part, mine in zip(self.parts, inputs, strict=True)]

    def weights(self) -> Iterator[Tensor]:
        for part in self.parts:
            yield from part.weights()


class Layer:
    """The layer of ``value``, made of ``products``. ``finish`` follows them, where they do not end with it themselves;
    the bias is theirs, unless the inputs are split.
    """

    def __init__(
        self,
        value: Matmul,
        weights: LayerWeights,
        products: Products,
        *,
        context: LayerContext = ALONE,
        slots: Terms | None = None,
        finish: Finish | None = None,
    ) -> None:
        finish = value.finish if finish is None else finish
        self.value, self._products, self._ranks, self.slots = value, products, context.ranks, slots
        self._split, self._divided = value.order.is_split, any(term.shared == "ranks" for term in value.terms)
        self._bias = weights.bias.float() if self._split and weights.bias is not None else None
        self._rounding, self._most = weights.rounding, weights.most
        self._activation = None if finish.activation is None else ACTIVATIONS[finish.activation]
        self._limit = finish.clip

    @property
    def parts(self) -> Sequence[Product]:
        """The products, for a backend that prepares them."""
        return self._products.parts

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``x`` [rows, inputs of this rank] -> [rows, outputs], a new tensor of its dtype."""
        if self._rounding is not None:
            x = simulate(x, self._rounding, self._most)
        terms = self.slots
        y = self._whole(self._products(x), x.dtype) if terms is None else self._with_terms(x, terms)
        if self._activation is not None:
            return self._activation(y)
        return y if self._limit is None else clip(y, self._limit)

    def _whole(self, sums: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The layer's outputs of its products: of all ranks, where these share the inputs."""
        return self._rounded(all_ranks(tree_sum(sums), self._ranks), dtype) if self._split else sums[0]

    def _rounded(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        return (total if self._bias is None else total + self._bias).to(dtype)

    def _with_terms(self, x: Tensor, terms: Terms) -> Tensor:
        """The outputs with the terms of this step. Sums of terms travel with the layer's own, in one exchange."""
        sums, shrunk = self._products(x), terms.shrink(x)
        if not shrunk:
            return self._whole(sums, x.dtype)
        roots = [each.sums for each in shrunk]
        if self._split:
            total, *roots = all_ranks_at_once([tree_sum(sums), *roots], self._ranks)
            y = self._rounded(total, x.dtype)
        else:
            y = sums[0]
            if self._divided and self._ranks is not None:
                roots = tiles_of_all_ranks(roots, self._ranks)
        terms.expand(y, shrunk, roots)
        return y

    def weights(self) -> Iterator[Tensor]:
        """See :class:`preheat.backends.base.HasWeights`."""
        yield from self._products.weights()
        yield from (each for each in (self._bias, self._rounding) if each is not None)

    def state(self) -> Iterable[Tensor]:
        """See :class:`preheat.backends.base.HasWeights`."""
        return () if self.slots is None else self.slots.tensors()


def all_ranks(partial: Tensor, ranks: Collective | None) -> Tensor:
    """The sum of all ranks' fp32 ``partial``, in the tree's order."""
    assert ranks is not None, "a layer with split inputs has at least one rank"
    return tree_sum(ranks.gather(partial).unbind())


def all_ranks_at_once(parts: Sequence[Tensor], ranks: Collective | None) -> list[Tensor]:
    """The same of several fp32 tensors, in one exchange."""
    found = all_ranks(torch.cat([part.reshape(-1) for part in parts]), ranks)
    sums = torch.split(found, [part.numel() for part in parts])
    return [mine.view(part.shape) for mine, part in zip(sums, parts, strict=True)]


def tiles_of_all_ranks(parts: Sequence[Tensor], ranks: Collective) -> list[Tensor]:
    """Of each of ``parts`` [tiles of a rank, ...], which ranks divide, all tiles in their order, in one exchange."""
    found = ranks.gather(torch.cat([each.reshape(-1) for each in parts]))
    sizes = [each.numel() for each in parts]
    whole = zip(torch.split(found, sizes, 1), parts, strict=True)
    return [in_order(mine.view(-1, *part.shape)) for mine, part in whole]


def in_order(shrunk: Tensor) -> Tensor:
    """``shrunk`` of each rank, [ranks, tiles of a rank, rows, TILE], by the tiles' numbers."""
    return shrunk.transpose(0, 1).flatten(0, 1)
