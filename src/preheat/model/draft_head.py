"""A head that drafts: a layer over features of a target model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from preheat.backends.base.layers import Linear
from preheat.model.loader import LoadedModel


class Reads(NamedTuple):
    """The part of the target that a feature is made of.

    A feature is ``fc`` of the residual stream before ``layers``, side by side. Without layers it is the hidden state
    after the target's final norm.
    """

    layers: Sequence[int] = ()
    fc: Linear | None = None


@dataclass(frozen=True, kw_only=True)
class LoadedHead(LoadedModel, ABC):
    """A head, loaded as a model of one layer.

    ``bytes_per_block`` counts its own cache and the features.
    """

    fc: Linear

    @property
    @abstractmethod
    def reads(self) -> Reads:
        """The part of the target that a feature is made of."""

    @abstractmethod
    def begin(self, embedded: Tensor, residual: Tensor, joined: Tensor) -> Tensor | None:
        """Begin the residual stream, and return the layer's input; None if it is the norm of the stream.

        ``embedded`` [tokens, hidden] are the embeddings of tokens, ``residual`` [tokens, hidden] the features at the
        positions before them, overwritten by the stream. ``joined`` [tokens, 2 * hidden] is room.
        """

    @abstractmethod
    def following(self, residual: Tensor, hidden: Tensor) -> Tensor:
        """Return the states that stand for the features of the next positions.

        ``residual`` is the residual stream before the final norm, ``hidden`` is its norm, both [rows, hidden].
        """
