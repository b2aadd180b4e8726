"""Quantized weights on CUDA: how codes and scales lie in memory, and how they become numbers again.

See :mod:`preheat.ops.quantization` for the meaning of codes and scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.device.launch import begin, options, widened
from preheat.backends.cuda.device.sizes import cdiv
from preheat.backends.cuda.matmul.config import may_be_shuffled, whole_groups
from preheat.backends.cuda.matmul.mxfp4 import LARGE_WORDS, mixed, mixed_nibbles, powers_of, words_of
from preheat.backends.cuda.pointwise.norm import QuantizedInput
from preheat.backends.cuda.pointwise.quantize import quantize_rows
from preheat.ops.fp4 import nibbles_of
from preheat.ops.kinds import Scheme
from preheat.ops.quantization import QuantizedRows, QuantizedWeight, plain_rows

STEP: tl.constexpr = tl.constexpr(128)
"""Inputs of a step. A byte of four-bit codes holds two codes: in its low bits the code of an input of the step's first
half, in its high bits the code 64 inputs behind."""


@dataclass(frozen=True)
class PlainWeight:
    """A weight [outputs, inputs], of experts [experts, outputs, inputs], that is not quantized.

    ``splits``: how many splits the inputs have.
    """

    tensor: Tensor
    splits: int = 1
    form: ClassVar[Literal["plain"]] = "plain"
    shuffled: ClassVar[bool] = False
    bf16_scales: ClassVar[bool] = False
    quantized_input: ClassVar[None] = None

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All tensors of the weight."""
        return iter((self.tensor,))

    def __len__(self) -> int:
        return len(self.tensor)

    def rows(self, x: Tensor | QuantizedRows) -> Tensor:
        """Return ``x`` as the kernels of the weight read rows."""
        return plain_rows(x)

    def plain(self) -> Tensor:
        """Return the weight in the model's dtype."""
        return self.tensor

    def room(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory for outputs, in ``dtype`` or the model's."""
        return self.tensor.new_empty(size, dtype=dtype)


@dataclass(frozen=True)
class DeviceWeight:
    """A quantized weight as the kernels read it.

    ``codes`` are [outputs, inputs]. Codes of four bits are uint8 [outputs, whole steps * 64], and of MXFP4 [steps,
    outputs, 64]: so a step of a tile is one piece of memory. ``scales`` and ``zeros`` are fp32 [groups, outputs].
    Experts, if there are any, are the first dimension. Zero points are fp32, because the compiler would load zero
    points of two bytes where they are needed, and not ahead. Scales that are powers of two are int32 [steps, outputs]
    instead: a word has the exponents of a step's four groups as bytes, see
    :func:`preheat.backends.cuda.matmul.mxfp4.words_of`.

    ``shuffled``: codes of four bits lie in the order of Hopper's matrix unit. Their scales are numbers of float16, or
    of bfloat16 and stored in it. :mod:`preheat.backends.cuda.matmul.hopper.small_m` reads shuffled weights; other
    kernels get them dequantized.

    ``splits``: how many splits the inputs have. The codes of each split fill whole steps.
    """

    scheme: Scheme
    dtype: torch.dtype
    shape: torch.Size
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    index: Tensor | None
    static: Tensor | None
    shuffled: bool = False
    splits: int = 1

    @classmethod
    def of(cls, weight: QuantizedWeight, *, shuffled: bool = False, splits: int = 1) -> DeviceWeight:
        """Lay out ``weight`` for the kernels: scales of neighboring outputs are neighbors.

        A weight may be ``shuffled`` only if :func:`can_be_shuffled` is true of it.
        """
        codes, powers = weight.codes, weight.scheme.powers
        scales = words_of(weight.scales, splits) if powers else weight.scales.transpose(-1, -2).contiguous()
        if weight.scheme.bits == 4:
            halves = _halves(nibbles_of(codes) if weight.scheme.code == "fp4" else codes, splits)
            codes = mixed(*halves) if powers else _packed(*halves, "cadb" if shuffled else "abcd")
            if powers:
                codes = codes.unflatten(-1, (-1, STEP.value // 2)).transpose(-2, -3).contiguous()
        zeros = None if weight.zeros is None else weight.zeros.transpose(-1, -2).contiguous().float()
        if shuffled and _same(scales, torch.bfloat16):
            scales = scales.bfloat16()
        return cls(
            weight.scheme,
            weight.dtype,
            weight.shape,
            codes,
            scales,
            zeros,
            weight.index,
            weight.static,
            shuffled,
            splits,
        )

    @property
    def bf16_scales(self) -> bool:
        """Whether scales are stored in bfloat16."""
        return self.scales.dtype == torch.bfloat16

    @property
    def large_scales(self) -> bool:
        """Whether scales that are powers of two are too large to be raised."""
        return self.scales.dtype == LARGE_WORDS

    @property
    def form(self) -> Literal["codes", "float8"]:
        """Whether codes become numbers in a kernel, or are multiplied as they are."""
        return "codes" if self.scheme.activations is None else "float8"

    @property
    def quantized_input(self) -> QuantizedInput | None:
        """How the norm before a layer of the weight quantizes the layer's input; None: not at all."""
        activations = self.scheme.activations
        return None if activations is None else QuantizedInput(activations, self.static)

    def rows(self, x: Tensor | QuantizedRows) -> Tensor | QuantizedRows:
        """Return ``x`` as the kernels of the weight read rows."""
        return plain_rows(x) if self.scheme.activations is None else codes_of(x, self)

    def plain(self) -> Tensor:
        """Return the weight in the model's dtype, a new tensor."""
        return dequantized_experts(self) if len(self.shape) > 2 else dequantized(self)

    def room(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory for outputs, in ``dtype`` or the model's."""
        return torch.empty(size, dtype=dtype or self.dtype, device=self.codes.device)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All tensors of the weight."""
        return (
            tensor for tensor in (self.codes, self.scales, self.zeros, self.index, self.static) if tensor is not None
        )


Weight = PlainWeight | DeviceWeight


def can_be_shuffled(weight: QuantizedWeight) -> bool:
    """Whether a layer's ``weight`` may lie in the order of Hopper's matrix unit. Its scales have to allow it."""
    if len(weight.shape) != 2 or not may_be_shuffled(weight.scheme, *weight.shape, weight.dtype):
        return False
    return any(_same(weight.scales, dtype) for dtype in (torch.float16, torch.bfloat16))


def _same(scales: Tensor, dtype: torch.dtype) -> bool:
    """Whether all ``scales`` are numbers of ``dtype``."""
    return torch.equal(scales.to(dtype).float(), scales)


def _halves(codes: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Return the codes, uint8 below 16, of the inputs of both halves of each step: int8 between -8 and 7, or nibbles.

    The inputs of each split are filled up with zeros to whole steps. Results are [..., steps, 4, 2, 4, 2]: inputs
    16 a + 8 b + 2 c + d of half a step.
    """
    parts = codes.unflatten(-1, (splits, -1))
    padded = torch.nn.functional.pad(parts, (0, -parts.shape[-1] % STEP.value)).view(torch.uint8) & 0xF
    low, high = padded.view(*codes.shape[:-1], -1, 2, 4, 2, 4, 2).unbind(-5)
    return low, high


def _packed(low: Tensor, high: Tensor, order: str) -> Tensor:
    """Pack two codes of four bits into a byte.

    Bytes of inputs 16 a + 8 b + 2 c + d of a step lie in the ``order`` of these letters. Where c and a come first, a
    lane of the matrix unit finds its sixteen bytes side by side.
    """
    both = low | high << 4
    laid: Tensor = both.movedim(["abcd".index(letter) - 4 for letter in order], [-4, -3, -2, -1])
    return laid.flatten(-5)


@triton.jit
def signed(nibbles):
    """Convert four-bit numbers between -8 and 7 to fp32.

    Put them behind the bits of 2**23: cheaper than a conversion.
    """
    return ((nibbles ^ 8).to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0


@triton.jit
def of_nibbles(nibbles, E2M1: tl.constexpr):
    """Convert codes of four bits to fp32: integers, or twice the numbers of e2m1.

    The bits of e2m1 are the bits of a number of float16 that is 2**14 times smaller, also below the least normal one.
    """
    if E2M1:
        half = (((nibbles & 8).to(tl.uint16) << 12) | ((nibbles & 7).to(tl.uint16) << 9)).to(tl.float16, bitcast=True)
        numbers = half.to(tl.float32) * 32768.0
    else:
        numbers = signed(nibbles)
    return numbers


@triton.jit
def nibbles(pair, HIGH: tl.constexpr, POWERS: tl.constexpr):
    """Return the codes of half a step, the second with ``HIGH``, from bytes ``pair`` that are not shuffled."""
    if POWERS:
        return mixed_nibbles(pair, HIGH)
    return pair >> 4 if HIGH else pair & 0xF


@triton.jit
def codes_at(codes, out, k, outputs, row_bytes, POWERS: tl.constexpr):
    """Return the places [outputs, half a step] of codes of four bits, of the step of input ``k``."""
    HALF: tl.constexpr = STEP // 2
    at = (k // STEP * outputs + out).to(tl.int64) * HALF if POWERS else out.to(tl.int64) * row_bytes + k // 2
    return codes + at[:, None] + tl.arange(0, HALF)[None, :]


@triton.jit
def scales_of(
    scales, zeros, index, out, k, size, outputs, groups, GROUP: tl.constexpr, EVEN: tl.constexpr,
    INPUTS: tl.constexpr, POWERS: tl.constexpr = False, LARGE: tl.constexpr = False,
):  # fmt: skip
    """Load scales and zero points of ``INPUTS`` weights of each output, from input ``k`` of ``size`` on.

    The result is [outputs, 1] if the weights are ``EVEN``, all of one group, else [outputs, INPUTS]. ``POWERS``: a word
    of ``scales`` has the exponents of a step's four groups, of ``LARGE`` scales as stored.
    """
    columns = k + tl.arange(0, INPUTS)
    if POWERS:
        words = tl.load(scales + (k // STEP) * outputs + out)
        scale = powers_of(words, columns % STEP, GROUP, LARGE)
    else:
        if GROUP == 0:
            at = out[:, None]
        elif EVEN:
            at = (k // GROUP) * outputs + out[:, None]
        else:
            if index is not None:
                group = tl.load(index + columns, mask=columns < size, other=0)
            else:
                group = tl.minimum(columns // GROUP, groups - 1)
            at = group[None, :] * outputs + out[:, None]
        scale = tl.load(scales + at).to(tl.float32)
    zero = scale  # not read
    if zeros is not None:
        zero = tl.load(zeros + at)
    return scale, zero


@triton.jit
def decoded(numbers, scale, zero, zeros, dtype: tl.constexpr):
    """Return weights [outputs, inputs] in ``dtype`` from codes as fp32 ``numbers``."""
    if zeros is not None:
        numbers -= zero
    return widened(numbers * scale, dtype, True)


@triton.jit
def _dequantize(
    codes, scales, zeros, index, weight, outputs, inputs, size, groups, row_bytes, split_bytes, FOUR: tl.constexpr,
    E2M1: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, POWERS: tl.constexpr, LARGE: tl.constexpr,
    SHUFFLED: tl.constexpr, OUTPUTS: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Dequantize one step of one split for ``OUTPUTS`` outputs."""
    begin(overlap)
    HALF: tl.constexpr = STEP // 2
    dtype: tl.constexpr = weight.dtype.element_ty
    rows = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    out, k, split = tl.minimum(rows, outputs - 1), tl.program_id(1) * STEP, tl.program_id(2)
    codes += split * split_bytes
    if index is not None:
        index += split * size
    elif GROUP > 0:
        scales += split * groups * outputs
        if zeros is not None:
            zeros += split * groups * outputs
    to = weight + out.to(tl.int64)[:, None] * inputs + split * size
    if FOUR:
        pair = tl.load(codes_at(codes, out, k, outputs, row_bytes, POWERS))
        if SHUFFLED:
            pair = pair.reshape(OUTPUTS, 4, 4, 2, 2).permute(0, 2, 4, 1, 3).reshape(OUTPUTS, HALF)
        for half in tl.static_range(2):
            at = k + half * HALF
            scale, zero = scales_of(
                scales, zeros, index, out, at, size, outputs, groups, GROUP, EVEN, HALF, POWERS, LARGE
            )
            w = decoded(of_nibbles(nibbles(pair, half == 1, POWERS), E2M1), scale, zero, zeros, dtype)
            columns = (at + tl.arange(0, HALF))[None, :]
            tl.store(to + columns, w, mask=(rows < outputs)[:, None] & (columns < size))
    else:
        columns = (k + tl.arange(0, STEP))[None, :]
        at = codes + out.to(tl.int64)[:, None] * row_bytes + columns
        numbers = tl.load(at, mask=columns < size, other=0.0).to(tl.float32)
        scale, zero = scales_of(scales, zeros, index, out, k, size, outputs, groups, GROUP, EVEN, STEP)
        w = decoded(numbers, scale, zero, zeros, dtype)
        tl.store(to + columns, w, mask=(rows < outputs)[:, None] & (columns < size))


def dequantized(weight: DeviceWeight) -> Tensor:
    """Return the weight [outputs, inputs] in the model's dtype, a new tensor."""
    outputs, inputs = weight.shape
    result = torch.empty((outputs, inputs), dtype=weight.dtype, device=weight.codes.device)
    steps = cdiv(inputs // weight.splits, STEP.value)
    _dequantize[(cdiv(outputs, 32), steps, weight.splits)](
        weight.codes, weight.scales, weight.zeros, weight.index, result, outputs, inputs, *layout(weight), OUTPUTS=32,
        SHUFFLED=weight.shuffled, FOUR=weight.scheme.bits == 4, E2M1=weight.scheme.code == "fp4",
        GROUP=weight.scheme.group, EVEN=whole_groups(weight.scheme), POWERS=weight.scheme.powers,
        LARGE=weight.large_scales, **options(num_warps=4, num_stages=1),
    )  # fmt: skip
    return result


def layout(weight: DeviceWeight) -> tuple[int, int, int, int]:
    """Return inputs and groups of a split, bytes of an output's codes, and bytes from a split's codes to the next.

    Where the checkpoint gives the group of each input, the groups are the groups of all inputs.
    """
    codes, groups = weight.codes, weight.scales.shape[-2]
    of_split = groups if weight.index is not None else groups // weight.splits
    row_bytes = codes.shape[-1] * (codes.shape[-3] if weight.scheme.powers else 1)
    split_bytes = row_bytes // weight.splits * (codes.shape[-2] if weight.scheme.powers else 1)
    return weight.shape[-1] // weight.splits, of_split, row_bytes, split_bytes


def dequantized_experts(weight: DeviceWeight) -> Tensor:
    """Return the weights [experts, outputs, inputs] in the model's dtype, a new tensor."""
    return torch.stack([dequantized(_expert(weight, number)) for number in range(weight.shape[0])])


def _expert(weight: DeviceWeight, number: int) -> DeviceWeight:
    zeros = None if weight.zeros is None else weight.zeros[number]
    return replace(
        weight, shape=weight.shape[1:], codes=weight.codes[number], scales=weight.scales[number], zeros=zeros
    )


def codes_of(x: Tensor | QuantizedRows, weight: DeviceWeight) -> QuantizedRows:
    """Return ``x`` quantized for the layer of ``weight``."""
    if isinstance(x, QuantizedRows):
        return x
    assert weight.scheme.activations is not None
    return quantize_rows(x, weight.scheme.activations, weight.static)
