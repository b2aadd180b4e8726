"""Dequantization of GGUF blocks: the bits of llama.cpp's own Python package."""

from __future__ import annotations

import numpy as np
import pytest

from preheat.model.gguf.blocks import codes_and_scales, dequantized
from preheat.model.gguf.kinds import KINDS, PACKED, READ

gguf = pytest.importorskip("gguf", reason="gguf is not installed: scripts/install test")

INPUTS = 512
SPECIAL = (0x0000, 0x8000, 0x0001, 0x83FF, 0x7C00, 0xFC00, 0x7E00, 0x7BFF, 0x3C00)
"""Scales of float16: zeros, denormal numbers, infinities, NaN, the greatest number, one."""
SCALES_AT = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def blocks(kind: str, rows: int = 300) -> np.ndarray:
    """Return random rows of a type; a third of the blocks have special scales."""
    chance = np.random.default_rng(7)
    size = next(each for each in KINDS.values() if each.name == kind)
    raw = chance.integers(0, 256, (rows, size.row_bytes(INPUTS)), dtype=np.uint8)
    if size.numbers > 1:
        every = raw.reshape(-1, size.bytes)
        for at in SCALES_AT.get(kind, (0,)):
            chosen = chance.random(len(every)) < 1 / 3
            words = chance.choice(np.array(SPECIAL, np.uint16), int(chosen.sum()))
            every[chosen, at : at + 2] = words.view(np.uint8).reshape(-1, 2)
    return raw


def reference(kind: str, raw: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.asarray(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    equal = (one.view(np.uint32) == other.view(np.uint32)) | (np.isnan(one) & np.isnan(other))
    return one.dtype == other.dtype == np.float32 and one.shape == other.shape and bool(equal.all())


@pytest.mark.parametrize("kind", READ)
def test_bits_equal_the_package(kind):
    raw = blocks(kind)
    right = reference(kind, raw.copy())
    assert same_bits(dequantized(kind, raw.tobytes(), INPUTS), right)
    if kind != "F32":
        assert np.isnan(right).any() and np.isinf(right).any()
    raw[150] ^= 2  # control: one changed row is seen
    assert not same_bits(dequantized(kind, raw.tobytes(), INPUTS), right)


@pytest.mark.parametrize("kind", PACKED)
def test_codes_and_scales_are_the_numbers(kind):
    raw = blocks(kind)
    codes, scales = codes_and_scales(kind, raw.tobytes(), INPUTS)
    assert (codes.shape, scales.shape) == ((300, INPUTS), (300, INPUTS // 32))
    if PACKED[kind] == "int4":
        assert (codes.min(), codes.max()) == (-8, 7)
    with np.errstate(all="ignore"):
        found = codes.astype(np.float32) * np.repeat(scales, 32, 1)
    assert same_bits(found, reference(kind, raw))


def test_sizes_of_blocks_are_the_package_s():
    known = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {number: (kind.numbers, kind.bytes) for number, kind in KINDS.items()} == {
        number: known[number] for number in KINDS
    }
    assert all(gguf.GGMLQuantizationType(number).name == kind.name for number, kind in KINDS.items())
