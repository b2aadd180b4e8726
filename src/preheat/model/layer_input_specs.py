"""The specs of inputs that each layer reads besides the residual stream, and of a layer's last steps."""

from __future__ import annotations

from dataclasses import dataclass

from preheat.model.tensor_specs import EmbeddingSpec, LinearSpec, NormSpec, VectorSpec


@dataclass(frozen=True, kw_only=True)
class LayerInputsSpec:
    """Inputs of ``size`` numbers for each layer, see :mod:`preheat.model.layer_inputs`.

    ``table`` has the rows of all layers for a token. ``projection`` makes as many numbers of the token's embedding, and
    ``norm`` norms a layer's numbers. The sum of both is multiplied by ``factor``.
    """

    size: int
    table: EmbeddingSpec
    projection: LinearSpec
    norm: NormSpec
    factor: float


@dataclass(frozen=True, kw_only=True)
class InputReaderSpec:
    """The block that reads a layer's input.

    ``gate`` of the residual stream, with its activation, multiplies the input; ``projection`` and ``norm`` follow.
    """

    gate: LinearSpec
    projection: LinearSpec
    norm: NormSpec


@dataclass(frozen=True, kw_only=True)
class LayerEndSpec:
    """Last steps of a layer: its ``reader`` is added to the residual stream, and ``scalar`` multiplies the stream."""

    scalar: VectorSpec
    reader: InputReaderSpec | None = None
