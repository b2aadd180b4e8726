"""How checkpoints store quantized linear layers. No torch is imported before a layer is loaded.

Every format is read into the same codes, scales and zero points (:class:`preheat.ops.quantization.QuantizedWeight`),
one module at a time; a backend lays them out for its kernels. Unpacked whole numbers are kept around zero: 8 (or 128)
is taken from codes and zero points alike, so that their difference stays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from preheat.backends.base import LayerWeights
from preheat.errors import ModelError
from preheat.model.specs import ExpertsSpec, LinearSpec
from preheat.ops.kinds import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from preheat.backends.base import Linear
    from preheat.model.loader import WeightLoader
    from preheat.ops.quantization import QuantizedWeight

Shape = tuple[int, ...]


def expert_modules(spec: ExpertsSpec) -> Iterator[tuple[str, Shape]]:
    """Name and shape of every module of the experts."""
    for expert in range(spec.num_experts):
        yield spec.gate.format(expert), (spec.inner, spec.hidden)
        yield spec.up.format(expert), (spec.inner, spec.hidden)
        yield spec.down.format(expert), (spec.hidden, spec.inner)


def reorder(rows: Tensor, order: tuple[tuple[int, int], ...]) -> None:
    """Put the ranges of ``rows`` into this ``order``, in place."""
    before, at = rows.clone(), 0
    for start, end in order:
        rows[at : at + end - start].copy_(before[start:end])
        at += end - start


def taken(rows: Tensor, order: tuple[tuple[int, int], ...]) -> Tensor:
    """The ranges of ``rows`` in this ``order``: a new tensor."""
    import torch

    return torch.cat([rows[start:end] for start, end in order])


class QuantizedFormat(ABC):
    """What formats share: subclasses say what a module's tensors are, and read them."""

    @abstractmethod
    def module_tensors(self, scheme: Scheme, outputs: int, inputs: int) -> Mapping[str, Shape]:
        """Shape of every tensor of a module but the bias, by what follows its name."""

    @abstractmethod
    def read(self, name: str, out: QuantizedWeight, loader: WeightLoader) -> None:
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

    def load(self, spec: LinearSpec, loader: WeightLoader) -> Linear:
        """The parts read into the rows of one weight. Of a shard all are read, and what it has not is let go: so parts
        have the scales that they have on one rank.
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
            weight, bias = weight.cut(spec.order, spec.columns), None if bias is None else taken(bias, spec.order)
        elif spec.order:
            for rows in (*weight.row_tensors, *([] if bias is None else [bias])):
                reorder(rows, spec.order)
        return loader.layer_of(spec, LayerWeights(weight, bias))

    def experts(self, spec: ExpertsSpec, loader: WeightLoader) -> tuple[QuantizedWeight, QuantizedWeight]:
        """Each matrix read into its place."""
        scheme, count, inner = _scheme(spec), spec.num_experts, spec.whole_inner
        matrices = replace(spec, inner=inner).matrices
        gate_up, down = (loader.empty_weight(scheme, count, *shape) for shape in matrices)
        for expert in range(count):
            self.read(spec.gate.format(expert), gate_up.part(expert, slice(0, inner)), loader)
            self.read(spec.up.format(expert), gate_up.part(expert, slice(inner, 2 * inner)), loader)
            self.read(spec.down.format(expert), down.part(expert), loader)
        if spec.kept is not None:
            first, last = spec.kept
            gate_up = gate_up.cut((spec.kept, (inner + first, inner + last)), None)
            down = down.cut(((0, spec.hidden),), spec.kept)
        return gate_up, down


def _scheme(spec: LinearSpec | ExpertsSpec) -> Scheme:
    assert spec.scheme is not None
    return spec.scheme


class OnlineFp8(QuantizedFormat):
    """A module that is stored as usual and quantized when it is read, one at a time: a scale for each output, by
    :func:`preheat.ops.quantization.quantize_channels`, from the checkpoint's own numbers.
    """

    def module_tensors(self, scheme: Scheme, outputs: int, inputs: int) -> Mapping[str, Shape]:
        return {"weight": (outputs, inputs)}

    def read(self, name: str, out: QuantizedWeight, loader: WeightLoader) -> None:
        from preheat.ops.quantization import quantize_channels

        quantize_channels(loader.read(f"{name}.weight", *out.shape), out)


class Fp8(QuantizedFormat):
    """``weight`` in e4m3fn; the scales, which multiply, are ``scale``: one, one for each output, or one for each block
    of 128 x 128. ``input_scale`` where activations have a static one; of parts that share their input the largest
    counts.
    """

    def __init__(self, scale: str) -> None:
        self._scale = scale

    def module_tensors(self, scheme: Scheme, outputs: int, inputs: int) -> Mapping[str, Shape]:
        blocks = -(-outputs // 128), -(-inputs // 128)
        scales = {"tensor": (), "channel": (outputs, 1), "block": blocks}[scheme.scales]
        found: dict[str, Shape] = {"weight": (outputs, inputs), self._scale: scales}
        return found | {"input_scale": ()} if scheme.activations == "static" else found

    def read(self, name: str, out: QuantizedWeight, loader: WeightLoader) -> None:
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
    """compressed-tensors' ``pack-quantized``: codes of an output side by side in whole words, lowest bits first."""

    def module_tensors(self, scheme: Scheme, outputs: int, inputs: int) -> Mapping[str, Shape]:
        per_word, groups = 32 // _bits(scheme), scheme.groups(inputs)
        found: dict[str, Shape] = {
            "weight_packed": (outputs, -(-inputs // per_word)), "weight_scale": (outputs, groups), "weight_shape": (2,)
        }  # fmt: skip
        return found | {"weight_zero_point": (-(-outputs // per_word), groups)} if scheme.zeros else found

    def read(self, name: str, out: QuantizedWeight, loader: WeightLoader) -> None:
        bits, (outputs, inputs) = _bits(out.scheme), out.shape
        shapes = self.module_tensors(out.scheme, outputs, inputs)
        words = loader.read_words(f"{name}.weight_packed", *shapes["weight_packed"])
        out.codes.copy_(_unpacked(words, bits)[:, :inputs] - (1 << bits - 1))
        out.scales.copy_(loader.read(f"{name}.weight_scale", *shapes["weight_scale"]))
        if out.zeros is not None:
            words = loader.read_words(f"{name}.weight_zero_point", *shapes["weight_zero_point"])
            out.zeros.copy_(_unpacked(words.t(), bits).t()[:outputs] - (1 << bits - 1))


class Awq(QuantizedFormat):
    """AutoAWQ's ``gemm``: an input's codes side by side, eight outputs a word, in the order of :data:`AWQ_ORDER`."""

    def module_tensors(self, scheme: Scheme, outputs: int, inputs: int) -> Mapping[str, Shape]:
        groups = scheme.groups(inputs)
        return {"qweight": (inputs, outputs // 8), "qzeros": (groups, outputs // 8), "scales": (groups, outputs)}

    def read(self, name: str, out: QuantizedWeight, loader: WeightLoader) -> None:
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
"""The nibble of a word that holds each of its eight columns."""


class Gptq(QuantizedFormat):
    """GPTQ: an output's codes below each other, those of several inputs a word. ``g_idx`` says which group an input
    belongs to.

    ``added`` to the zero points that are stored: 1 in files of version 1, 0 in version 2. None: the file is symmetric,
    so each zero point is the half of the range. Writers confuse the versions, and the numbers tell which one it is: a
    module that stores one zero point everywhere, the half or the half less one, is symmetric too.
    """

    def __init__(self, added: int | None) -> None:
        self._added = added

    def module_tensors(self, scheme: Scheme, outputs: int, inputs: int) -> Mapping[str, Shape]:
        per_word, groups = 32 // _bits(scheme), scheme.groups(inputs)
        return {
            "qweight": (inputs // per_word, outputs), "qzeros": (groups, outputs // per_word),
            "scales": (groups, outputs), "g_idx": (inputs,),
        }  # fmt: skip

    def read(self, name: str, out: QuantizedWeight, loader: WeightLoader) -> None:
        bits, shapes = _bits(out.scheme), self.module_tensors(out.scheme, *out.shape)
        words = loader.read_words(f"{name}.qweight", *shapes["qweight"])
        out.codes.copy_(_unpacked(words.t(), bits) - (1 << bits - 1))
        zeros = _unpacked(loader.read_words(f"{name}.qzeros", *shapes["qzeros"]), bits)
        assert out.zeros is not None
        out.zeros.copy_(self._around_zero(name, zeros, 1 << bits - 1).t())
        out.scales.copy_(loader.read(f"{name}.scales", *shapes["scales"]).t())
        self._read_index(name, out, loader)

    def _around_zero(self, name: str, stored: Tensor, half: int) -> Tensor:
        """The module's zero points, less ``half`` of the range."""
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
    def _read_index(name: str, out: QuantizedWeight, loader: WeightLoader) -> None:
        """Parts that are stacked share their index: they were quantized with the same inputs."""
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
"""In place of an index that is not known yet, or that dummy weights have not: groups follow each other."""


def _bits(scheme: Scheme) -> int:
    return 4 if scheme.code == "int4" else 8


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """The whole numbers of ``bits`` bits in int32 ``words`` [rows, n], lowest first: int16 [rows, n * 32 / bits]."""
    import torch

    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    numbers = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return numbers.flatten(1).to(torch.int16)
