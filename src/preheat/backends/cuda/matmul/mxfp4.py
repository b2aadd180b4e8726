"""Weights in MXFP4 on CUDA: how codes of e2m1 and scales that are powers of two lie in memory, and become numbers.

Eight codes share a word, and four exponents of a step's groups share another. A few instructions make four pairs of
bfloat16 of them, exactly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import num_warps

from preheat.backends.cuda.device.launch import multiplied_by_warp_groups

RAISED: tl.constexpr = tl.constexpr(126)
"""By so much the bytes of exponents are greater than e8m0: a byte is then the exponent of a number of bfloat16 that
takes the bits of e2m1 to the weight. Scales up to 2, twice as much for codes, leave room for it."""


def mixed(low: Tensor, high: Tensor) -> Tensor:
    """Pack eight codes of e2m1 into a word, so that few instructions make four pairs of bfloat16 of them.

    Words lie in the order c, a. Both halves of a word have codes of neighbors d, in this order of bits:

    ====  ===  ===  ===  ===  ===  ===  ===  ===  ===  ===  ===  ===  ===  ===  ===  ===
    bit   15   14   13   12   11   10   9    8    7    6    5    4    3    2    1    0
    code  A    D    D    B    D    D    C    A    A    A    B    B    B    C    C    C
    of it sign m    sign sign e1   e0   sign e1   e0   m    e1   e0   m    e1   e0   m
    ====  ===  ===  ===  ===  ===  ===  ===  ===  ===  ===  ===  ===  ===  ===  ===  ===

    A and B are inputs of the step's first half (b = 0, 1), C and D 64 inputs behind.
    """
    (one, two), (three, four) = (each.movedim(-2, -4).unbind(-2) for each in (low, high))
    lower = (one & 3) << 6 | (two & 7) << 3 | three & 7
    upper = (one & 8) << 4 | (one & 4) >> 2 | (two & 8) << 1 | (three & 8) >> 2
    upper |= (four & 8) << 2 | (four & 1) << 6 | (four & 6) << 1
    return torch.stack((lower, upper), -1).flatten(-5)


LARGE_WORDS = torch.uint32
"""The dtype of words of exponents that are not raised, else int32. So an update of weights finds another dtype."""


def words_of(scales: Tensor, splits: int) -> Tensor:
    """Pack the exponents of four groups into a word [..., steps of all splits, outputs].

    ``scales`` [..., outputs, groups] are halved. Exponents are greater than e8m0 by :data:`RAISED`. If a scale leaves
    no room for it, all exponents are e8m0 as stored, and words are of :data:`LARGE_WORDS`.
    """
    large = not torch.equal(scales.clamp(max=1.0), scales)
    exponents = torch.frexp(scales)[1].add_(127 + (0 if large else RAISED.value)).unflatten(-1, (splits, -1))
    padded = torch.nn.functional.pad(exponents, (0, -exponents.shape[-1] % 4)).to(torch.uint8)
    words = padded.flatten(-2).contiguous().view(torch.int32).transpose(-1, -2).contiguous()
    return words.view(LARGE_WORDS) if large else words


def _e2m1(high: bool, large: bool) -> str:
    """Return the assembly that makes numbers of four codes in a word, A and B or, if ``high``, C and D; scaled.

    See :func:`mixed`. The bits of e2m1 are the highest bits of a number of bfloat16 that is 2**126 times smaller. Bits
    of D come to their places in three copies of one product; no bit of one meets a bit of another. With ``large``
    scales 2**126 is a factor of its own.
    """
    places = ("shl.b32 word, $2, 6;", "shl.b32 word, $2, 3;")
    if high:
        apart = "shr.u32 word, $2, 8; and.b32 word, word, 0x006C006C; mul.lo.u32 word, word, 0x00000421;"
        places = (places[0], apart)
    else:
        places = ("mov.b32 word, $2;", places[1])
    lines = ["{ .reg .b32 word, most, none; mov.b32 none, 0x80008000; mov.b32 most, 0x7E807E80;"]
    for pair, place in enumerate(places):
        lines += [place, "and.b32 word, word, 0x81C081C0;"]
        lines += ["fma.rn.bf16x2 word, word, most, none;"] * large
        lines += [f"fma.rn.bf16x2 ${pair}, word, ${3 + pair}, none;"]
    return " ".join([*lines, "}"])


E2M1 = tl.constexpr(tuple(tl.constexpr(_e2m1(at >= 2, at % 2 == 1)) for at in range(4)))
"""The assembly of both pairs of codes, for scales that leave room, and for large ones."""


@triton.jit
def _power(words, number: tl.constexpr, LARGE: tl.constexpr):
    """Return the factor of group ``number`` of a step, bfloat16, from ``words`` of four exponents."""
    bits = ((words >> (number * 8)) & 0xFF) << 7
    if LARGE:
        bits = tl.maximum(bits, 0x40)  # 2**-127 is below the least normal number
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def lying(out):
    """Return the outputs in the order in which :func:`powers_decoded` reads them.

    A lane that loads sixteen bytes of an output then has the numbers that the matrix unit wants from it.
    """
    return out.reshape(out.shape[0] // 16, 2, 8).permute(1, 0, 2).reshape(out.shape[0])


@triton.jit
def powers_decoded(pair, words, HIGH: tl.constexpr, LARGE: tl.constexpr):
    """Return the numbers, bfloat16, of half a step, the second with ``HIGH``, from bytes ``pair`` [outputs, half].

    Outputs lie as :func:`lying` says, bytes as :func:`mixed`. ``words`` [outputs] are the scales of the step's groups.
    """
    OUTPUTS: tl.constexpr = pair.shape[0]
    HALF: tl.constexpr = pair.shape[1]
    FIRST: tl.constexpr = 2 if HIGH else 0
    second = (tl.arange(0, HALF) // 8 % 2 == 1)[None, :]  # bytes of the second group of a half
    scales = tl.where(second, _power(words, FIRST + 1, LARGE)[:, None], _power(words, FIRST, LARGE)[:, None])
    PURE: tl.constexpr = multiplied_by_warp_groups(OUTPUTS, num_warps())  # see widened
    numbers = tl.inline_asm_elementwise(
        E2M1[FIRST + (1 if LARGE else 0)], "=&r,=&r,r,r,r", [pair, scales], dtype=tl.bfloat16, is_pure=PURE, pack=4
    )
    return numbers.reshape(2, OUTPUTS // 16, 8, 4, 4, 2, 2).permute(1, 0, 2, 4, 5, 3, 6).reshape(OUTPUTS, HALF)


@triton.jit
def mixed_nibbles(pair, HIGH: tl.constexpr):
    """Return the codes of half a step, in order, from bytes ``pair`` [outputs, half] as :func:`mixed` lays them."""
    OUTPUTS: tl.constexpr = pair.shape[0]
    low, high = pair.reshape(OUTPUTS, pair.shape[1] // 2, 2).split()
    if HIGH:
        one = (high & 2) << 2 | low & 7
        two = (high & 0x20) >> 2 | (high & 0xC) >> 1 | (high & 0x40) >> 6
    else:
        one = (high & 0x80) >> 4 | (high & 1) << 2 | low >> 6
        two = (high & 0x10) >> 1 | (low >> 3) & 7
    both = tl.join(one, two).reshape(OUTPUTS, 4, 4, 2, 2)
    return both.permute(0, 2, 4, 1, 3).reshape(pair.shape)


@triton.jit
def powers_of(words, columns, GROUP: tl.constexpr, LARGE: tl.constexpr):
    """Return the halved scales [outputs, inputs] of ``columns`` of a step, fp32, from its ``words`` [outputs]."""
    exponent = (words[:, None] >> (columns // GROUP * 8)[None, :]) & 0xFF
    if not LARGE:
        exponent = tl.maximum(exponent - RAISED, 0)  # words are filled up with zeros
    halved = tl.where(exponent > 1, (exponent - 1) << 23, 0x200000 << exponent)  # the last two are not normal
    return halved.to(tl.float32, bitcast=True)
