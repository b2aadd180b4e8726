"""How a checkpoint stores linear layers, and how they are loaded. No torch here.

A quantization scheme is a format: a class here or in a file of its own, and a line in :data:`FORMATS`. Its kernels
belong to the backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from preheat.model.specs import LinearSpec, ModelSpec, leaves

if TYPE_CHECKING:
    from preheat.backends.base import Linear
    from preheat.model.loader import WeightLoader

Shape = tuple[int, ...]


class LinearFormat(Protocol):
    """One way to store linear layers."""

    def tensors(self, spec: LinearSpec) -> Mapping[str, Shape]:
        """Name and shape of every tensor that ``spec`` is loaded from."""

    def load(self, spec: LinearSpec, loader: WeightLoader) -> Linear:
        """The layer of ``spec``: allocate it with ``loader.empty``, read each tensor once, straight into its place,
        with ``loader.source.fill``, and let ``loader.backend`` make the layer.
        """


class Plain:
    """``<module>.weight`` [outputs, inputs] and ``<module>.bias`` [outputs], in a floating-point dtype."""

    def tensors(self, spec: LinearSpec) -> Mapping[str, Shape]:
        found: dict[str, Shape] = {f"{name}.weight": (outputs, spec.inputs) for name, outputs in spec.parts}
        if spec.bias:
            found |= {f"{name}.bias": (outputs,) for name, outputs in spec.parts}
        return found

    def load(self, spec: LinearSpec, loader: WeightLoader) -> Linear:
        """One matrix, each part read into its rows."""
        weight = loader.empty(spec.outputs, spec.inputs)
        bias = loader.empty(spec.outputs) if spec.bias else None
        start = 0
        for name, outputs in spec.parts:
            loader.source.fill(f"{name}.weight", weight[start : start + outputs])
            if bias is not None:
                loader.source.fill(f"{name}.bias", bias[start : start + outputs])
            start += outputs
        return loader.backend.linear(weight, bias, gated=spec.gated)


FORMATS: Mapping[str, LinearFormat] = {"plain": Plain()}
"""The formats by the name in :attr:`LinearSpec.format`."""


def expected_tensors(spec: ModelSpec, formats: Mapping[str, LinearFormat] = FORMATS) -> dict[str, Shape]:
    """Name and shape of every tensor that a checkpoint of this model must have."""
    found: dict[str, Shape] = {}
    for _, leaf in leaves(spec):
        if isinstance(leaf, LinearSpec):
            found |= formats[leaf.format].tensors(leaf)
        else:
            found[f"{leaf.name}.weight"] = leaf.shape
    return found
