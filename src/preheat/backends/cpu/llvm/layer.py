"""A linear layer whose weight lies in panels, for compiled functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from preheat.backends.base import LayerWeights
from preheat.backends.cpu.llvm.kinds import IN_WORD, Product, Scales, Stored
from preheat.backends.cpu.llvm.memory import exact, panels, vector
from preheat.ops.kinds import Scheme
from preheat.ops.quantization import QuantizedWeight
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
    if value.input != "plain":
        yield "layers that round their inputs have no function"
    if (scheme := value.weight.scheme) is not None:
        yield from _missing_codes(scheme, value.inputs)
    if value.order.is_split or value.order.tiles:
        yield "layers that ranks share have no function"
    if value.terms:
        yield "layers with adapters have no function"


def _missing_codes(scheme: Scheme, inputs: int) -> Iterator[str]:
    """Yield the reasons why there is no function for codes of ``scheme``."""
    group = scheme.group or inputs
    if scheme.code == "fp8":
        yield "weights in float8 have no function"
    if group % IN_WORD or inputs % group:
        yield f"groups of {group} of {inputs} inputs have no function, only parts of them in multiples of {IN_WORD}"


def product_of(value: Matmul, weight: Tensor | QuantizedWeight) -> Product:
    """Return the kind of function that runs the layer of ``value``.

    Scales of 32 bits are kept in 16 if these have the same values.
    """
    stored: Stored = value.weight.dtype
    scales, scheme = None, value.weight.scheme
    if scheme is not None:
        assert isinstance(weight, QuantizedWeight)
        stored = "int4" if scheme.code == "int4" else "int8"
        scales = Scales(scheme.group or value.inputs, exact(weight.scales), scheme.zeros, scheme.indexed)
    return Product(value.inputs, value.outputs, stored, *value.finish, scales)


class PanelLayer:
    """The layer of ``value``. It runs alone once :attr:`run` is set; in a block, the block's functions read it."""

    slots = None

    def __init__(self, value: Matmul, weights: LayerWeights) -> None:
        self.value, self.how = value, product_of(value, weights.weight)
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
