"""A linear layer for each head, made of a backend's layers; see :class:`preheat.backends.base.layers.HeadLayers`."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from preheat.backends.base.backend import Operations
from preheat.backends.base.layers import LayerWeights
from preheat.ops.values import Matmul


class EachHead:
    """A layer of ``backend`` for each head, one after the other."""

    def __init__(self, backend: Operations, value: Matmul, weight: Tensor) -> None:
        self._layers = [backend.layer(value, LayerWeights(each.contiguous())) for each in weight]
        self._inputs, self.outputs = value.inputs, value.outputs

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """See :class:`preheat.backends.base.layers.HeadLayers`."""
        for head, layer in enumerate(self._layers):
            out[:, head, : self.outputs] = layer(x[:, head, : self._inputs].contiguous())
        if x.shape[2] > self._inputs:
            out[:, :, self.outputs :] = x[:, :, self._inputs :]

    def weights(self) -> Iterator[Tensor]:
        """See :class:`preheat.backends.base.layers.HasWeights`."""
        for layer in self._layers:
            yield from layer.weights()

    def state(self) -> Iterator[Tensor]:
        """See :class:`preheat.backends.base.layers.HasWeights`."""
        for layer in self._layers:
            yield from layer.state()
