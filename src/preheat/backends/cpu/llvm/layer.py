"""Linear layers and routed experts with weights in panels, for compiled functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from preheat.backends.base.layers import ALONE, ExpertsWeights, LayerContext, LayerWeights
from preheat.backends.cpu.llvm.adapters import ExpertSlots, PanelSlots, terms_of
from preheat.backends.cpu.llvm.kinds import IN_WORD, Product, Scales, Stored
from preheat.backends.cpu.llvm.memory import exact, panels, rows_in, stored, stored_vector, vector
from preheat.backends.cpu.llvm.pages import in_large_pages
from preheat.backends.support import matmuls
from preheat.ops.kinds import Scheme
from preheat.ops.quantization import QuantizedWeight
from preheat.ops.values import Experts, Latents, LayerEnd, Matmul, Ok, Recurrence, Refused, Support, Value

Run = Callable[[Tensor, Tensor], Tensor]

SMALL_TABLE = 1 << 24
"""Bytes of a table of embeddings that is kept beside its panels: rows side by side are read faster."""


def supports(value: Value) -> Support:
    """Return whether compiled functions run the layer of ``value``."""
    if isinstance(value, Recurrence):
        return Refused("execution mode llvm: layers with states have no function; use --execution-mode eager")
    reason = next((reason for part in matmuls(value) for reason in _missing(part)), _missing_around(value))
    return Ok() if reason is None else Refused(f"execution mode llvm: {reason}; use --execution-mode eager")


def _missing_around(value: Value) -> str | None:
    """Return why there is no function for a value of several layers, None if there is one."""
    if isinstance(value, Latents):
        return "attention over latent vectors has no function"
    if isinstance(value, LayerEnd):
        return "layers with a scalar or an input of their own have no function"
    if isinstance(value, Experts) and (value.corrected or not value.routing.is_plain):
        return "a router by sigmoids, with groups, or with a factor has no function"
    return None


def _missing(value: Matmul) -> Iterator[str]:
    """Yield the reasons why there is no function."""
    if value.input != "plain":
        yield "layers that round their inputs have no function"
    if value.finish.cap is not None:
        yield "outputs that tanh keeps below a limit have no function"
    if (scheme := value.weight.scheme) is not None:
        yield from _missing_codes(scheme, value.inputs)
    if value.order.is_split or value.order.tiles:
        yield "layers that ranks share have no function"


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
        stored = "int8" if scheme.code == "fp8" else scheme.code
        scales = Scales(scheme.group or value.inputs, exact(weight.scales), scheme.zeros, scheme.indexed)
    return Product(value.inputs, value.outputs, stored, *value.finish[:4], scales, terms_of(value))


class PanelLayer:
    """The layer of ``value``. It runs alone once :attr:`run` is set; in a block, the block's functions read it."""

    def __init__(self, value: Matmul, weights: LayerWeights, context: LayerContext = ALONE) -> None:
        self.value, self.how = value, product_of(value, weights.weight)
        self.slots = None if self.how.terms is None else PanelSlots(value, self.how, context.rows)
        self.panels = in_large_pages(panels(self.how, weights.weight))
        self.bias = None if weights.bias is None else vector(self.how, weights.bias)
        self.run: Run | None = None

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``x`` [rows, inputs] float32 -> [rows, outputs] float32."""
        assert self.run is not None, "the functions of the model are not compiled yet"
        x = x if x.dtype == torch.float32 and x.is_contiguous() else x.float().contiguous()
        if out is not None and out.dtype == torch.float32 and out.is_contiguous():
            return self.run(x, out)
        found = self.run(x, torch.empty(len(x), self.how.results))
        return found if out is None else out.copy_(found)

    def weights(self) -> Iterator[Tensor]:
        """See :class:`preheat.backends.base.layers.HasWeights`."""
        yield self.panels
        yield from () if self.bias is None else (self.bias,)

    def state(self) -> Iterable[Tensor]:
        """See :class:`preheat.backends.base.layers.HasWeights`."""
        return () if self.slots is None else self.slots.tensors()

    def stored(self) -> tuple[Tensor, Tensor | None]:
        """See :class:`preheat.backends.base.layers.Layer`."""
        return stored(self.how, self.panels), None if self.bias is None else stored_vector(self.how, self.bias)

    def table(self) -> Tensor | None:
        """See :class:`preheat.backends.base.layers.TableLayer`."""
        if self.how.scales is not None or self.how.gated or self.panels.nbytes < SMALL_TABLE:
            return None
        return rows_in(self.how, self.panels)

    def fields(self, name: str) -> Iterator[tuple[str, int]]:
        """Yield the fields of a layer's frame for the product ``name``, and the addresses to write there."""
        yield name, self.panels.data_ptr()
        if self.bias is not None:
            yield f"{name}_bias", self.bias.data_ptr()
        if self.slots is not None:
            yield f"{name}_terms", self.slots.frame.ctypes.data


class PanelExperts:
    """The routed experts of ``value``, for the functions of a block.

    The panels of an expert lie behind the panels of the expert before, and so do the biases.
    """

    def __init__(self, value: Experts, weights: ExpertsWeights, context: LayerContext = ALONE) -> None:
        self.value = value
        self.gate_up, self.down = product_of(value.gate_up, weights.gate_up), product_of(value.down, weights.down)
        self.slots: ExpertSlots | None = None
        if value.gate_up.terms:
            pairs, count = ((value.gate_up, self.gate_up), (value.down, self.down)), value.down.groups.experts
            self.slots = ExpertSlots(*(PanelSlots(*each, context.rows, count) for each in pairs))
        self.panels = [
            in_large_pages(torch.stack([panels(how, _expert(given, at)) for at in range(value.down.groups.experts)]))
            for how, given in ((self.gate_up, weights.gate_up), (self.down, weights.down))
        ]
        self.biases = [
            torch.stack([vector(how, each) for each in given])
            for how, given in ((self.gate_up, weights.gate_up_bias), (self.down, weights.down_bias))
            if given is not None
        ]

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """Never called: a layer's compiled function runs the experts."""
        raise AssertionError("compiled layers run their experts themselves")

    def weights(self) -> Iterator[Tensor]:
        """See :class:`preheat.backends.base.layers.HasWeights`."""
        yield from (*self.panels, *self.biases)

    def state(self) -> Iterable[Tensor]:
        """See :class:`preheat.backends.base.layers.HasWeights`."""
        return () if self.slots is None else self.slots.tensors()

    def fields(self) -> Iterator[tuple[str, int]]:
        """Yield the fields of a layer's frame, and the addresses and sizes to write there."""
        for name, each in zip(("gate_up", "down"), self.panels, strict=True):
            yield name, each.data_ptr()
            yield f"{name}_step", each[0].nbytes
        for name, bias in zip(("gate_up_bias", "down_bias"), self.biases, strict=False):
            yield name, bias.data_ptr()
        if self.slots is not None:
            yield "gate_up_terms", self.slots.gate_up.frame.ctypes.data
            yield "down_terms", self.slots.down.frame.ctypes.data


def _expert(weight: Tensor | QuantizedWeight, at: int) -> Tensor | QuantizedWeight:
    """Return the matrix of one expert."""
    return weight[at] if isinstance(weight, Tensor) else weight.part(at)


def floats(weight: Tensor) -> Tensor:
    """Return a weight as contiguous float32."""
    return weight.to(torch.float32).contiguous()
