"""A linear layer whose weight lies in panels, for compiled functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from preheat.backends.base import LayerWeights
from preheat.backends.cpu.llvm.kinds import Product, Stored
from preheat.backends.cpu.llvm.memory import panels, vector
from preheat.ops.values import Matmul, Ok, Refused, Support, Value

Run = Callable[[Tensor], Tensor]


def supports(value: Value) -> Support:
    """Return whether compiled functions run the layer of ``value``."""
    reason = next(_missing(value), None)
    return Ok() if reason is None else Refused(f"execution mode llvm: {reason}; use --execution-mode eager")


def _missing(value: Value) -> Iterator[str]:
    """Yield the reasons why there is no function."""
    if not isinstance(value, Matmul):
        yield "layers of routed experts have no function"
        return
    if value.weight.scheme is not None or value.input != "plain":
        yield "quantized layers have no function"
    if value.weight.dtype not in ("float32", "bfloat16"):
        yield f"layers in {value.weight.dtype} have no function"
    if value.order.is_split or value.order.tiles:
        yield "layers that ranks share have no function"
    if value.terms:
        yield "layers with adapters have no function"


def product_of(value: Matmul) -> Product:
    """Return the kind of function that runs the layer of ``value``."""
    stored: Stored = "bfloat16" if value.weight.dtype == "bfloat16" else "float32"
    bias, activation, clip = value.finish
    return Product(value.inputs, value.outputs, stored, bias, activation, clip)


class PanelLayer:
    """The layer of ``value``. It runs alone once :attr:`run` is set; in a block, the block's functions read it."""

    slots = None

    def __init__(self, value: Matmul, weights: LayerWeights) -> None:
        self.value, self.how = value, product_of(value)
        assert isinstance(weights.weight, Tensor), "no value with codes is supported"
        self.panels = panels(self.how, weights.weight)
        self.bias = None if weights.bias is None else vector(self.how, weights.bias)
        self.run: Run | None = None

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``x`` [rows, inputs] float32 -> [rows, outputs] float32."""
        assert self.run is not None, "the functions of the model are not compiled yet"
        found = self.run(x.float().contiguous())
        return found if out is None else out.copy_(found)

    def weights(self) -> Iterator[Tensor]:
        """See :class:`preheat.backends.base.HasWeights`."""
        yield self.panels
        yield from () if self.bias is None else (self.bias,)

    def state(self) -> tuple[Tensor, ...]:
        """See :class:`preheat.backends.base.HasWeights`."""
        return ()


def addresses(layer: PanelLayer) -> tuple[int, int]:
    """Return the addresses of a layer's weight and bias, 0 where there is no bias."""
    return layer.panels.data_ptr(), 0 if layer.bias is None else layer.bias.data_ptr()


def floats(weight: Tensor) -> Tensor:
    """Return a weight as contiguous float32."""
    return weight.to(torch.float32).contiguous()
