"""A linear layer made of a backend's products, one for each tile or K split; see :mod:`preheat.ops.matmul`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from preheat.backends.base.adapters import AdapterSlots
from preheat.backends.base.collective import Collective
from preheat.backends.base.layers import ALONE, LayerContext, LayerWeights
from preheat.ops.float8 import simulate
from preheat.ops.matmul import finished, tree_sum
from preheat.ops.moe import combine, visits
from preheat.ops.values import Finish, Matmul, SumOrder


class Product(Protocol):
    """``x`` [rows, inputs] times one matrix [outputs, inputs], plus its bias: [rows, outputs], a new tensor."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def weights(self) -> Iterable[Tensor]:
        """See :class:`preheat.backends.base.layers.HasWeights`."""


P = TypeVar("P", bound=Product)

Make = Callable[[Tensor, "Tensor | None"], P]
"""Returns the backend's product of a weight [outputs, inputs] and a bias [outputs]."""


class Products(Protocol):
    """The products of a layer, one for each tile or K split.

    For ``x`` [rows, inputs of this rank] they return the fp32 sums [rows, outputs] of each K split. A layer without K
    splits returns its outputs in the dtype of ``x``. Some backends prepare ``parts``.
    """

    @property
    def parts(self) -> Sequence[Product]: ...

    def __call__(self, x: Tensor) -> list[Tensor]: ...

    def weights(self) -> Iterable[Tensor]:
        """See :class:`preheat.backends.base.layers.HasWeights`."""


class Terms(AdapterSlots, Protocol):
    """Adapter terms of a step's rows, added to a layer."""

    def shrink(self, x: Tensor) -> Sequence[Any]:
        """Multiply ``x`` [rows, inputs of this rank] by the first adapter matrices.

        Returns the fp32 ``sums`` of each adapter and part.
        """

    def expand(self, y: Tensor, shrunk: Sequence[Any], roots: Sequence[Tensor]) -> None:
        """Add the results of :meth:`shrink` to ``y`` [rows, outputs], in place; ``roots`` are their sums over ranks."""

    def tensors(self) -> Iterable[Tensor]:
        """Return the matrices of all adapter slots."""


class Tiles(Generic[P]):
    """Products over all inputs, one for each tile of outputs.

    A library may add in another order where there are more outputs, and ranks have different numbers of tiles.
    """

    def __init__(self, parts: Sequence[P]) -> None:
        self.parts = parts

    @classmethod
    def of(cls, make: Make[P], weight: Tensor, bias: Tensor | None, tiles: Sequence[int]) -> Tiles[P]:
        """Split ``weight`` [outputs, inputs] and ``bias`` into tiles of ``tiles`` outputs; none: one tile."""
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
    """The fp32 products of a matrix [outputs, inputs], one for each K split.

    Libraries round their results to the dtype of their inputs. So products are made in fp32, which holds every product
    of the dtype's numbers.
    """

    def __init__(self, make: Make[P], weight: Tensor, order: SumOrder) -> None:
        self._size = weight.shape[1] // order.own_k_splits
        self.parts = [make(part.float().contiguous(), None) for part in torch.split(weight, self._size, 1)]

    def __call__(self, x: Tensor) -> list[Tensor]:
        inputs = torch.split(x.float(), self._size, 1)
        return [part(mine.contiguous()) for part, mine in zip(self.parts, inputs, strict=True)]

    def weights(self) -> Iterator[Tensor]:
        for part in self.parts:
            yield from part.weights()


class Layer:
    """The layer of ``value``, made of ``products``.

    ``finish`` follows the products, unless they end with it themselves. The products add the bias, unless the inputs
    are split.
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
        self._finish = finish

    @property
    def parts(self) -> Sequence[Product]:
        """Return the products, for a backend that prepares them."""
        return self._products.parts

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return [rows, outputs] for ``x`` [rows, inputs of this rank]: a new tensor of the same dtype."""
        if self._rounding is not None:
            x = simulate(x, self._rounding, self._most)
        terms = self.slots
        y = self._whole(self._products(x), x.dtype) if terms is None else self._with_terms(x, terms)
        return finished(y, self._finish)

    def _whole(self, sums: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the outputs from the products' sums; ranks add theirs if they share the inputs."""
        return self._rounded(all_ranks(tree_sum(sums), self._ranks), dtype) if self._split else sums[0]

    def _rounded(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        return (total if self._bias is None else total + self._bias).to(dtype)

    def _with_terms(self, x: Tensor, terms: Terms) -> Tensor:
        """Return the outputs with the terms of this step.

        Sums of terms travel with the layer's own sums, in one exchange.
        """
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
        """See :class:`preheat.backends.base.layers.HasWeights`."""
        yield from self._products.weights()
        yield from (each for each in (self._bias, self._rounding) if each is not None)

    def state(self) -> Iterable[Tensor]:
        """See :class:`preheat.backends.base.layers.HasWeights`."""
        return () if self.slots is None else self.slots.tensors()

    def stored(self) -> tuple[Tensor, Tensor | None]:
        """See :class:`preheat.backends.base.layers.Layer`."""
        return stored_among(self.value, self.weights())


def stored_among(value: Matmul, tensors: Iterable[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return the weight and the bias of ``value`` among the tensors of its layer, by their shapes."""
    plain = [each.to_dense() if each.layout is not torch.strided else each for each in tensors]
    weight = next(each for each in plain if each.shape == (value.outputs, value.inputs))
    return weight, next((each for each in plain if each.shape == (value.outputs,)), None)


def all_ranks(partial: Tensor, ranks: Collective | None) -> Tensor:
    """Return the sum of all ranks' fp32 ``partial``, in the tree's order."""
    assert ranks is not None, "a layer with split inputs has at least one rank"
    return tree_sum(ranks.gather(partial).unbind())


def all_ranks_at_once(parts: Sequence[Tensor], ranks: Collective | None) -> list[Tensor]:
    """Return the sums over all ranks of several fp32 tensors, in one exchange."""
    found = all_ranks(torch.cat([part.reshape(-1) for part in parts]), ranks)
    sums = torch.split(found, [part.numel() for part in parts])
    return [mine.view(part.shape) for mine, part in zip(sums, parts, strict=True)]


def routed_by_ranks(
    x: Tensor, choice: tuple[Tensor, Tensor], ranks: Collective, count: int, expert: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """Run the chosen experts on the ranks that have them, and return their weighted sum.

    ``choice`` is the result of :func:`preheat.ops.moe.route`. Each rank has ``count`` experts, rank 0 the first ones.
    ``expert(number, slots)`` returns the rows [n, hidden] of this rank's expert ``number`` for ``slots``, as in
    :func:`preheat.ops.moe.routed_splits`. Every rank knows all choices. So each rank sends only its own rows, by expert
    and slot, filled up with zeros to the length of the longest rank. See :mod:`preheat.ops.matmul` for the order of the
    sum.
    """
    chosen, weights = choice
    places: list[list[Tensor]] = [[] for _ in range(ranks.world)]
    mine: list[Tensor] = []
    for number, slots in visits(chosen, count * ranks.world):
        owner, at = divmod(number, count)
        places[owner].append(slots)
        if owner == ranks.rank:
            mine.append(expert(at, slots))
    lengths = [sum(map(len, each)) for each in places]
    sent = x.new_zeros(max(lengths), x.shape[1])
    if mine:
        torch.cat(mine, out=sent[: lengths[ranks.rank]])
    rows = x.new_empty(chosen.numel(), x.shape[1])
    for each, length, found in zip(places, lengths, ranks.gather(sent).unbind(), strict=True):
        if each:
            rows[torch.cat(each)] = found[:length]
    return combine(rows.view(len(x), chosen.shape[1], -1), weights)


def tiles_of_all_ranks(parts: Sequence[Tensor], ranks: Collective) -> list[Tensor]:
    """Gather ``parts`` [tiles of a rank, ...] from all ranks in one exchange; return all tiles in order."""
    found = ranks.gather(torch.cat([each.reshape(-1) for each in parts]))
    sizes = [each.numel() for each in parts]
    whole = zip(torch.split(found, sizes, 1), parts, strict=True)
    return [in_order(mine.view(-1, *part.shape)) for mine, part in whole]


def in_order(shrunk: Tensor) -> Tensor:
    """Return ``shrunk`` [ranks, tiles of a rank, rows, TILE] of all ranks, by the tiles' numbers."""
    return shrunk.transpose(0, 1).flatten(0, 1)
