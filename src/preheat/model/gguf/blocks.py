"""Blocks of quantized numbers in GGUF files, and their rules.

Contract: a number is computed in float32 by the format's rule, one rounding for each operation: ``scale * code``,
``scale * code + least`` or ``(scale * step) * code - (least * step)``. The bits equal the bits of
``gguf.quants.dequantize``. Scales are float16, and may be infinite or NaN, as in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def dequantized(kind: str, data: memoryview | Bytes, inputs: int) -> Floats:
    """Return rows of ``inputs`` numbers of a type as float32 [rows, inputs]: a new array."""
    raw = np.frombuffer(data, dtype=np.uint8)
    if kind in _PLAIN:
        return _PLAIN[kind](raw).reshape(-1, inputs)
    size, rule = _RULES[kind]
    with np.errstate(all="ignore"):  # scales may be infinite; the loader names tensors that are not finite
        return rule(raw.reshape(-1, size)).reshape(-1, inputs)


def codes_and_scales(kind: str, data: memoryview | Bytes, inputs: int) -> tuple[NDArray[np.int8], Floats]:
    """Return the codes [rows, inputs] of a packed type, around zero, and the scales [rows, inputs / 32].

    A number is scale * code.
    """
    blocks = np.frombuffer(data, dtype=np.uint8).reshape(-1, _RULES[kind][0])
    codes = _eights(blocks) if kind == "Q8_0" else _fours(blocks)
    return codes.reshape(-1, inputs), _half(blocks, 0).reshape(-1, inputs // 32)


def _half(blocks: Bytes, at: int) -> Floats:
    """Return the float16 numbers at byte ``at`` of each block, [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(data: Bytes, run: int) -> Bytes:
    """Return the low nibbles of ``run`` bytes, then their high nibbles, run after run: [blocks, 2 * bytes]."""
    runs = data.reshape(len(data), -1, 1, run)
    return np.concatenate((runs & np.uint8(15), runs >> np.uint8(4)), axis=2).reshape(len(data), -1)


def _fifth_bits(data: Bytes) -> Bytes:
    """Return the bits of four bytes, the lowest first, at place 4 of a code: [blocks, 32]."""
    return np.unpackbits(np.ascontiguousarray(data), axis=1, bitorder="little") << np.uint8(4)


def _eights(blocks: Bytes) -> NDArray[np.int8]:
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8)


def _fours(blocks: Bytes) -> NDArray[np.int8]:
    return _nibbles(blocks[:, 2:], 16).view(np.int8) - np.int8(8)


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _eights(blocks).astype(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _fours(blocks).astype(np.float32)


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:], 16).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    codes = (_nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])).view(np.int8) - np.int8(16)
    return _half(blocks, 0) * codes.astype(np.float32)


def _q5_1(blocks: Bytes) -> Floats:
    codes = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * codes.astype(np.float32) + _half(blocks, 2)


def _steps(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Return eight steps of the scale and of the least number, six bits each, from twelve bytes of a block.

    The first four bytes hold four steps of scales, the next four steps of least numbers. The last four bytes hold the
    low nibbles of the other steps; their high bits are the high bits of the first eight bytes.
    """
    scale, least, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((scale & 63, (rest & 15) | ((scale >> 2) & 48)), axis=1)
    return scales, np.concatenate((least & 63, (rest >> 4) | ((least >> 2) & 48)), axis=1)


def _scaled(blocks: Bytes, codes: Bytes) -> Floats:
    """Return the numbers of Q4_K and Q5_K from ``codes`` [blocks, 8, 32]."""
    scales, least = _steps(blocks[:, 4:16])
    scale = (_half(blocks, 0) * scales.astype(np.float32))[:, :, None]
    return scale * codes.astype(np.float32) - (_half(blocks, 2) * least.astype(np.float32))[:, :, None]


def _q4_k(blocks: Bytes) -> Floats:
    return _scaled(blocks, _nibbles(blocks[:, 16:], 32).reshape(-1, 8, 32))


def _q5_k(blocks: Bytes) -> Floats:
    high = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)
    return _scaled(blocks, _nibbles(blocks[:, 48:], 32).reshape(-1, 8, 32) | (high << np.uint8(4)))


def _q6_k(blocks: Bytes) -> Floats:
    """Return numbers of six bits: low nibbles, pairs of high bits, int8 steps of the scale for 16 numbers each."""
    low = _nibbles(blocks[:, :128], 64).reshape(-1, 8, 32)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    codes = (low | ((pairs.reshape(-1, 8, 32) & 3) << 4)).view(np.int8) - np.int8(32)
    steps = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    scale = _half(blocks, 208) * steps
    return scale[:, :, None] * codes.reshape(-1, 16, 16).astype(np.float32)


_PLAIN: Mapping[str, Callable[[Bytes], Floats]] = {
    "F32": lambda raw: raw.view(np.float32).copy(),
    "F16": lambda raw: raw.view(np.float16).astype(np.float32),
    "BF16": lambda raw: (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32),
}
_RULES: Mapping[str, tuple[int, Callable[[Bytes], Floats]]] = {
    "Q8_0": (34, _q8_0), "Q4_0": (18, _q4_0), "Q4_1": (20, _q4_1), "Q5_0": (22, _q5_0), "Q5_1": (24, _q5_1),
    "Q4_K": (144, _q4_k), "Q5_K": (176, _q5_k), "Q6_K": (210, _q6_k),
}  # fmt: skip
