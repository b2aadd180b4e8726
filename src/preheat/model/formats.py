"""Formats of linear layers in checkpoints, and their loading. No torch here.

A quantized format (:mod:`preheat.model.formats_quantized`) has a line in :data:`FORMATS` too. Its kernels belong to the
backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

from preheat.backends.base.layers import ExpertsWeights, LayerWeights
from preheat.model.formats_fp4 import MxFp4, NvFp4
from preheat.model.formats_gguf import GgufCodes
from preheat.model.formats_quantized import Awq, Fp8, Gptq, Online, PackQuantized, expert_modules, reorder
from preheat.model.formats_stacked import Stacked, StackedMxFp4
from preheat.model.latent_specs import UpSpec
from preheat.model.mlp_specs import STACKED, STACKED_MXFP4, ExpertsSpec
from preheat.model.reading import Piece, Shape, WeightReader
from preheat.model.recurrence_specs import ConvSpec
from preheat.model.spec_tree import leaves
from preheat.model.tensor_specs import HeadSpec, LinearSpec, NormSpec, PatchSpec

if TYPE_CHECKING:
    from torch import Tensor

    from preheat.backends.base.layers import Linear


Range = tuple[int, int]


class LinearFormat(Protocol):
    """One way to store linear layers."""

    def tensors(self, spec: LinearSpec | ExpertsSpec) -> Mapping[str, Shape]:
        """Return name and shape of every tensor that ``spec`` is loaded from."""

    def load(self, spec: LinearSpec, loader: WeightReader) -> Linear:
        """Return the layer of ``spec``.

        Allocate it with ``loader.empty``, read each tensor once, straight to its destination, with
        ``loader.source.fill``, and let ``loader.layer_of`` make the layer.
        """

    def experts(self, spec: ExpertsSpec, loader: WeightReader) -> ExpertsWeights:
        """Return the weights of ``spec``, stacked over experts.

        Gates above ups are [experts, 2 * inner, hidden], downs [experts, hidden, inner].
        """


class Plain:
    """``<module>.weight`` [outputs, inputs] and ``<module>.bias`` [outputs], in a floating-point dtype."""

    def tensors(self, spec: LinearSpec | ExpertsSpec) -> Mapping[str, Shape]:
        if isinstance(spec, ExpertsSpec):
            return {f"{name}.weight": shape for name, shape in expert_modules(spec)}
        found: dict[str, Shape] = {f"{name}.weight": (outputs, spec.inputs) for name, outputs in spec.parts}
        if spec.bias:
            found |= {f"{name}.bias": (outputs,) for name, outputs in spec.parts}
        return found

    def load(self, spec: LinearSpec, loader: WeightReader) -> Linear:
        return loader.layer_of(spec, LayerWeights(*self.read(spec, loader)))

    def read(self, spec: LinearSpec, loader: WeightReader) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias: one matrix, each part read into its rows."""
        weight = loader.empty(spec.outputs, spec.inputs)
        bias = loader.empty(spec.outputs) if spec.bias else None
        if spec.sharded:
            _read_pieces(spec, loader, weight, bias)
        else:
            self._read_all(spec, loader, weight, bias)
        return weight, bias

    @staticmethod
    def _read_all(spec: LinearSpec, loader: WeightReader, weight: Tensor, bias: Tensor | None) -> None:
        start = 0
        for name, outputs in spec.parts:
            loader.source.fill(f"{name}.weight", weight[start : start + outputs])
            if bias is not None:
                loader.source.fill(f"{name}.bias", bias[start : start + outputs])
            start += outputs
        for rows in (weight, bias):
            if rows is not None and spec.order:
                reorder(rows, spec.order)

    def experts(self, spec: ExpertsSpec, loader: WeightReader) -> ExpertsWeights:
        """Return the stacked weights, each matrix read straight to its destination."""
        count, hidden, inner = spec.num_experts, spec.hidden, spec.inner
        gate_up, down = loader.empty(count, 2 * inner, hidden), loader.empty(count, hidden, inner)
        rows = columns = None
        if spec.kept is not None:
            rows = Piece((spec.stored_inner, hidden), spec.kept)
            columns = Piece((hidden, spec.stored_inner), (0, hidden), spec.kept)
        for at, expert in enumerate(spec.numbers):
            loader.source.fill(f"{spec.gate.format(expert)}.weight", gate_up[at, :inner], rows)
            loader.source.fill(f"{spec.up.format(expert)}.weight", gate_up[at, inner:], rows)
            loader.source.fill(f"{spec.down.format(expert)}.weight", down[at], columns)
        return ExpertsWeights(gate_up, down)


def _read_pieces(spec: LinearSpec, loader: WeightReader, weight: Tensor, bias: Tensor | None) -> None:
    """Read a shard's rows and columns straight to their destination, and put rows that lie together into order."""
    at, inputs, outputs = 0, spec.stored_inputs or spec.inputs, dict(spec.parts)
    for name, rows, order in _together(spec):
        place = slice(at, at + rows[1] - rows[0])
        loader.source.fill(f"{name}.weight", weight[place], Piece((outputs[name], inputs), rows, spec.columns))
        if bias is not None:
            loader.source.fill(f"{name}.bias", bias[place], Piece((outputs[name],), rows))
        for read in (weight, bias) if len(order) > 1 else ():
            if read is not None:
                reorder(read[place], order)
        at = place.stop


def _together(spec: LinearSpec) -> Iterator[tuple[str, Range, tuple[Range, ...]]]:
    """Yield modules with rows [from, to) to read at once, and the order of these rows.

    Consecutive pieces of a module are one if their rows have no others between them.
    """
    for name, pieces in groupby(spec.pieces(), key=lambda piece: piece[0]):
        ranges = [rows for _, rows in pieces]
        low, high = min(start for start, _ in ranges), max(end for _, end in ranges)
        if high - low == sum(end - start for start, end in ranges):
            yield name, (low, high), tuple((start - low, end - low) for start, end in ranges)
        else:
            yield from ((name, rows, ()) for rows in ranges)


FORMATS: Mapping[str, LinearFormat] = {
    "plain": Plain(),
    "quantize": Online(),
    "fp8": Fp8("weight_scale"),
    "fp8-block": Fp8("weight_scale_inv"),
    "pack-quantized": PackQuantized(),
    "awq": Awq(),
    "gptq": Gptq(1),
    "gptq_v2": Gptq(0),
    "gptq-symmetric": Gptq(None),
    "gguf": GgufCodes(),
    "mxfp4-pack-quantized": MxFp4(),
    "nvfp4-pack-quantized": NvFp4(),
    STACKED: Stacked(),
    STACKED_MXFP4: StackedMxFp4(),
}
"""The formats by the name in :attr:`LinearSpec.format`."""


def expected_tensors(spec: object, formats: Mapping[str, LinearFormat] = FORMATS) -> dict[str, Shape]:
    """Return name and shape of every tensor of a spec's checkpoint.

    ``spec`` may be a part of a model's.
    """
    found: dict[str, Shape] = {}
    for _, leaf in leaves(spec):
        if isinstance(leaf, UpSpec) and leaf.scheme is not None:
            parts = ((leaf.name, leaf.shape[0]),)
            stored = LinearSpec(parts=parts, inputs=leaf.rank, format=leaf.format, scheme=leaf.scheme)
            found |= formats[leaf.format].tensors(stored)
        elif isinstance(leaf, LinearSpec | ExpertsSpec):
            found |= formats[leaf.format].tensors(leaf)
        elif leaf.params:
            found[f"{leaf.name}.weight"] = leaf.shape
            if isinstance(leaf, ConvSpec | HeadSpec | NormSpec | PatchSpec) and leaf.bias:
                found[f"{leaf.name}.bias"] = leaf.shape[:1]
    return found
