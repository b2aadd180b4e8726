"""Inputs that each layer reads besides the residual stream, and a layer's last steps.

Contract. A token's inputs of all layers: the projection of its embedding, rounded, times the projection's factor,
rounded; each layer's part is normed and rounded; the token's row of the table, which is scaled and rounded, is added
and the sum is rounded; the product with the factor is rounded. A layer's last steps: the gate of the residual stream
after the layer, with its activation, is multiplied by the layer's input and rounded; its projection is normed, and
added to the stream. The stream times the layer's scalar is rounded. All rounding is to the model's dtype. Each step is
about one token, in the orders of a linear layer and of a norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from preheat.backends.base.layers import Linear, Norm


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The makers of the inputs of all layers; ``table`` [tokens, layers * size] is scaled where it is read."""

    table: Tensor
    projection: Linear
    norm: Norm
    factor: float

    def __call__(self, embedded: Tensor, rows: Tensor) -> Tensor:
        """Return [tokens, layers, size] of the ``embedded`` tokens [tokens, hidden].

        ``rows`` [tokens, layers * size] are the tokens' scaled rows of the table; they are overwritten.
        """
        size = self.norm.weight.shape[-1]
        made = self.norm(self.projection(embedded).view(-1, size)).view(len(rows), -1, size)
        return rows.view(made.shape).add_(made).mul_(self.factor)

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """Yield the linear layer with its path."""
        yield "projection", self.projection


@dataclass(frozen=True, slots=True)
class InputReader:
    """The block that reads a layer's input."""

    gate: Linear
    projection: Linear
    norm: Norm

    def __call__(self, residual: Tensor, given: Tensor) -> Tensor:
        """Return the addition to ``residual`` [tokens, hidden] from the inputs ``given`` [tokens, size]."""
        return self.norm(self.projection(self.gate(residual).mul_(given)))


@dataclass(frozen=True, slots=True)
class LayerEnd:
    """Last steps of a layer; ``scalar`` is [1]."""

    scalar: Tensor
    reader: InputReader | None = None

    def __call__(self, residual: Tensor, given: Tensor | None) -> None:
        """Change ``residual`` [tokens, hidden] in place; ``given`` are the inputs of the layer's reader."""
        if self.reader is not None:
            assert given is not None, "the layer was given no input"
            residual.add_(self.reader(residual, given))
        residual.mul_(self.scalar)

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """Yield the linear layers, each with its path."""
        if self.reader is not None:
            yield "reader.gate", self.reader.gate
            yield "reader.projection", self.reader.projection
