"""Formats of quantized linear layers in checkpoints.

No torch is imported before a layer is loaded. Every format is read into the same codes, scales and zero points
(:class:`preheat.ops.quantization.QuantizedWeight`), one module at a time; a backend lays them out for its kernels.
Unpacked integers are kept around zero: 8 (or 128) is subtracted from codes and zero points alike, so that their
difference stays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from preheat.backends.base.layers import ExpertsWeights, LayerWeights
from preheat.errors import ModelError
from preheat.model.mlp_specs import ExpertsSpec
from preheat.model.reading import Shape, WeightReader
from preheat.model.tensor_specs import LinearSpec
from preheat.ops.kinds import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from preheat.backends.base.layers import Linear
    from preheat.ops.quantization import QuantizedWeight


def expert_modules(spec: ExpertsSpec) -> Iterator[tuple[str, Shape]]:
    """Yield name and shape of every module of the experts."""
    for expert in spec.numbers:
        yield spec.gate.format(expert), (spec.inner, spec.hidden)
        yield spec.up.format(expert), (spec.inner, spec.hidden)
        yield spec.down.format(expert), (spec.hidden, spec.inner)


def reorder(rows: Tensor, order: tuple[tuple[int, int], ...]) -> None:
    """Put the ranges of ``rows`` into this ``order``, in place."""
    rows.copy_(in_order(rows, order))


def in_order(rows: Tensor, order: tuple[tuple[int, int], ...]) -> Tensor:
    """Return the ranges of ``rows`` in this ``order``: a new tensor."""
    import torch

    places = torch.cat([torch.arange(start, end) for start, end in order]).to(rows.device)
    if rows.itemsize > 1:
        return rows.index_select(0, places)
    return rows.view(torch.uint8).index_select(0, places).view(rows.dtype)  # float8 cannot be selected everywhere


class QuantizedFormat(ABC):
    """Base class of the quantized formats.

    A subclass names the tensors of a module, and reads them.
    """

    @abstractmethod
    def module_tensors(self, scheme: Scheme, outputs: int, inputs: int) -> Mapping[str, Shape]:
        """Return the shapes of a module's tensors, without the bias.

        Keys follow the module's name in the tensor's name.
        """

    @abstractmethod
    def read(self, name: str, out: QuantizedWeight, loader: WeightReader) -> None:
        """Fill ``out`` [outputs, inputs] with the module ``name``."""

    def tensors(self, spec: LinearSpec | ExpertsSpec) -> Mapping[str, Shape]:
        scheme = _scheme(spec)
        if isinstance(spec, ExpertsSpec):
            modules = list(expert_modules(spec))
        else:
            modules = [(name, (outputs, spec.inputs)) for name, outputs in spec.parts]
        found = {
            f"{name}.{tensor}": shape
            for name, (outputs, inputs) in modules
            for tensor, shape in self.module_tensors(scheme, outputs, inputs).items()
        }
        if isinstance(spec, LinearSpec) and spec.bias:
            found |= {f"{name}.bias": (outputs,) for name, outputs in spec.parts}
        return found

    def load(self, spec: LinearSpec, loader: WeightReader) -> Linear:
        """Return the layer of ``spec``.

        Its parts are read into the rows of one weight. A shard reads all parts and drops the rows and columns of other
        ranks. So parts keep the scales that they have on one rank.
        """
        weight = loader.empty_weight(_scheme(spec), spec.stored_outputs, spec.stored_inputs or spec.inputs)
        bias = loader.empty(spec.stored_outputs) if spec.bias else None
        start = 0
        for name, outputs in spec.parts:
            self.read(name, weight.part(slice(start, start + outputs)), loader)
            if bias is not None:
                loader.source.fill(f"{name}.bias", bias[start : start + outputs])
            start += outputs
        if spec.sharded:
            weight, bias = weight.cut(spec.order, spec.columns), None if bias is None else in_order(bias, spec.order)
        elif spec.order:
            for rows in (*weight.row_tensors, *([] if bias is None else [bias])):
                reorder(rows, spec.order)
        return loader.layer_of(spec, LayerWeights(weight, bias))

    def experts(self, spec: ExpertsSpec, loader: WeightReader) -> ExpertsWeights:
        """Return the stacked weights, each matrix read straight to its destination."""
        scheme, count, inner = _scheme(spec), spec.num_experts, spec.whole_inner
        matrices = replace(spec, inner=inner).matrices
        gate_up, down = (loader.empty_weight(scheme, count, *shape) for shape in matrices)
        for at, expert in enumerate(spec.numbers):
            self.read(spec.gate.format(expert), gate_up.part(at, slice(0, inner)), loader)
            self.read(spec.up.format(expert), gate_up.part(at, slice(inner, 2 * inner)), loader)
            self.read(spec.down.format(expert), down.part(at), loader)
        if spec.kept is not None:
            first, last = spec.kept
            gate_up = gate_up.cut((spec.kept, (inner + first, inner + last)), None)
            down = down.cut(((0, spec.hidden),), spec.kept)
        return ExpertsWeights(gate_up, down)


def _scheme(spec: LinearSpec | ExpertsSpec) -> Scheme:
    assert spec.scheme is not None
    return spec.scheme


class Online(QuantizedFormat):
    """A plain module that is quantized when it is read.

    Modules are read one at a time. Codes and scales are computed from the checkpoint's own numbers by
    :func:`preheat.ops.quantization.quantize_weight`.
    """

    def module_tensors(self, scheme: Scheme, outputs: int, inputs: int) -> Mapping[str, Shape]:
        return {"weight": (outputs, inputs)}

    def read(self, name: str, out: QuantizedWeight, loader: WeightReader) -> None:
        from preheat.ops.quantization import quantize_weight

        quantize_weight(loader.read(f"{name}.weight", *out.shape), out)


class Fp8(QuantizedFormat):
    """``weight`` in e4m3fn with factors named ``scale``.

    There is one scale, one for each output, or one for each block of 128 x 128. ``input_scale`` is the static scale of
    activations, if there is one; among parts with the same input the greatest counts.
    """

    def __init__(self, scale: str) -> None:
        self._scale = scale

    def module_tensors(self, scheme: Scheme, outputs: int, inputs: int) -> Mapping[str, Shape]:
        blocks = -(-outputs // 128), -(-inputs // 128)
        scales = {"tensor": (), "channel": (outputs, 1), "block": blocks}[scheme.scales]
        found: dict[str, Shape] = {"weight": (outputs, inputs), self._scale: scales}
        return found | {"input_scale": ()} if scheme.activations == "static" else found

    def read(self, name: str, out: QuantizedWeight, loader: WeightReader) -> None:
        outputs, inputs = out.shape
        loader.source.fill(f"{name}.weight", out.codes)
        scales = loader.read(f"{name}.{self._scale}", *self.module_tensors(out.scheme, outputs, inputs)[self._scale])
        if out.scheme.scales == "block":
            scales = scales.repeat_interleave(128, 0)[:outputs]
        out.scales.copy_(scales.expand(out.scales.shape))
        if out.static is not None:
            static = loader.read(f"{name}.input_scale")
            if not float(static) > 0:
                raise ModelError(f"{name}.input_scale must be positive, got {float(static)}")
            out.static.copy_(static.maximum(out.static))


class PackQuantized(QuantizedFormat):
    """compressed-tensors' ``pack-quantized``.

    Codes of an output are side by side in words, lowest bits first.
    """

    def module_tensors(self, scheme: Scheme, outputs: int, inputs: int) -> Mapping[str, Shape]:
        per_word, groups = 32 // _bits(scheme), scheme.groups(inputs)
        found: dict[str, Shape] = {
            "weight_packed": (outputs, -(-inputs // per_word)), "weight_scale": (outputs, groups), "weight_shape": (2,)
        }  # fmt: skip
        return found | {"weight_zero_point": (-(-outputs // per_word), groups)} if scheme.zeros else found

    def read(self, name: str, out: QuantizedWeight, loader: WeightReader) -> None:
        bits, (outputs, inputs) = _bits(out.scheme), out.shape
        shapes = self.module_tensors(out.scheme, outputs, inputs)
        words = loader.read_words(f"{name}.weight_packed", *shapes["weight_packed"])
        out.codes.copy_(_unpacked(words, bits)[:, :inputs] - (1 << bits - 1))
        out.scales.copy_(loader.read(f"{name}.weight_scale", *shapes["weight_scale"]))
        if out.zeros is not None:
            words = loader.read_words(f"{name}.weight_zero_point", *shapes["weight_zero_point"])
            out.zeros.copy_(_unpacked(words.t(), bits).t()[:outputs] - (1 << bits - 1))


class Awq(QuantizedFormat):
    """AutoAWQ's ``gemm``.

    An input's codes are side by side, eight outputs a word, in the order of :data:`AWQ_ORDER`.
    """

    def module_tensors(self, scheme: Scheme, outputs: int, inputs: int) -> Mapping[str, Shape]:
        groups = scheme.groups(inputs)
        return {"qweight": (inputs, outputs // 8), "qzeros": (groups, outputs // 8), "scales": (groups, outputs)}

    def read(self, name: str, out: QuantizedWeight, loader: WeightReader) -> None:
        shapes = self.module_tensors(out.scheme, *out.shape)
        out.codes.copy_(self._columns(loader.read_words(f"{name}.qweight", *shapes["qweight"])).t())
        assert out.zeros is not None
        out.zeros.copy_(self._columns(loader.read_words(f"{name}.qzeros", *shapes["qzeros"])).t())
        out.scales.copy_(loader.read(f"{name}.scales", *shapes["scales"]).t())

    @staticmethod
    def _columns(words: Tensor) -> Tensor:
        nibbles = _unpacked(words, 4).view(*words.shape, 8)
        return nibbles[:, :, AWQ_ORDER].reshape(len(words), -1) - 8


AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Nibble of a word for each of its eight columns."""


class Gptq(QuantizedFormat):
    """The formats of GPTQ.

    An output's codes are below each other, several inputs a word. ``g_idx`` has the group of each input. ``added`` is
    the number to add to stored zero points: 1 in files of version 1, 0 in version 2. None: the file is symmetric, so
    each zero point is half of the range. Writers confuse the versions, but the numbers tell them apart. A module with
    the same zero point everywhere, half of the range or one less, is symmetric too.
    """

    def __init__(self, added: int | None) -> None:
        self._added = added

    def module_tensors(self, scheme: Scheme, outputs: int, inputs: int) -> Mapping[str, Shape]:
        per_word, groups = 32 // _bits(scheme), scheme.groups(inputs)
        return {
            "qweight": (inputs // per_word, outputs), "qzeros": (groups, outputs // per_word),
            "scales": (groups, outputs), "g_idx": (inputs,),
        }  # fmt: skip

    def read(self, name: str, out: QuantizedWeight, loader: WeightReader) -> None:
        bits, shapes = _bits(out.scheme), self.module_tensors(out.scheme, *out.shape)
        words = loader.read_words(f"{name}.qweight", *shapes["qweight"])
        out.codes.copy_(_unpacked(words.t(), bits) - (1 << bits - 1))
        zeros = _unpacked(loader.read_words(f"{name}.qzeros", *shapes["qzeros"]), bits)
        assert out.zeros is not None
        out.zeros.copy_(self._around_zero(name, zeros, 1 << bits - 1).t())
        out.scales.copy_(loader.read(f"{name}.scales", *shapes["scales"]).t())
        self._read_index(name, out, loader)

    def _around_zero(self, name: str, stored: Tensor, half: int) -> Tensor:
        """Return the module's zero points, less ``half`` of the range."""
        first = int(stored[0, 0])
        if first in (half, half - 1) and bool(stored.eq(first).all()):
            return stored - first
        if self._added is None:
            wrong = next(each for each in stored.flatten().tolist() if each != half - 1)
            raise ModelError(
                f"{name}.qzeros holds {wrong}, but the checkpoint calls itself symmetric: its zero points can only be "
                f"{half - 1} (checkpoint_format gptq) or {half} (gptq_v2) throughout; if it is not symmetric, set sym "
                "to false in its quantization_config"
            )
        return stored + (self._added - half)

    @staticmethod
    def _read_index(name: str, out: QuantizedWeight, loader: WeightReader) -> None:
        """Read and check the module's ``g_idx``.

        Stacked parts must share it: they were quantized with the same inputs.
        """
        import torch

        inputs, groups = out.shape[1], out.scheme.groups(out.shape[1])
        index, known = loader.read_words(f"{name}.g_idx", inputs), out.index
        in_order = torch.arange(inputs, dtype=torch.int32, device=index.device) // (out.scheme.group or inputs)
        if index.eq(UNSAID).all():
            index = in_order
        if int(index.min()) < 0 or int(index.max()) >= groups:
            raise ModelError(f"{name}.g_idx names groups that do not exist")
        if known is None and not torch.equal(index, in_order):
            raise ModelError(f"{name}.g_idx is not in order, though desc_act is false")
        if known is not None and not known.eq(UNSAID).all() and not torch.equal(index, known):
            raise ModelError(f"{name}.g_idx must equal the g_idx of the modules beside it")
        if known is not None:
            known.copy_(index)


UNSAID = -1
"""Group of an input that is unknown yet, or in dummy weights.

Groups are then consecutive.
"""


def _bits(scheme: Scheme) -> int:
    return 4 if scheme.code == "int4" else 8


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack integers of ``bits`` bits from int32 ``words`` [rows, n], lowest first: int16 [rows, n * 32 / bits]."""
    import torch

    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    numbers = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return numbers.flatten(1).to(torch.int16)
