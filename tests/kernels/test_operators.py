"""Learned operators and loads have the bits of Triton's interpreter for numbers that they have not seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.kernels import operators


@triton.jit
def _operate(one, other, out, floats: tl.constexpr, number: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    a, b = tl.load(one + at), tl.load(other + at)
    tl.store(out + at, a + b)
    tl.store(out + SIZE + at, a - b)
    tl.store(out + 2 * SIZE + at, a * b)
    tl.store(out + 3 * SIZE + at, (a < b).to(tl.int32) + 2 * (a >= number).to(tl.int32))
    tl.store(out + 4 * SIZE + at, number - a * number)
    if not floats:
        tl.store(out + 5 * SIZE + at, a // b)
        tl.store(out + 6 * SIZE + at, a % b)
        tl.store(out + 7 * SIZE + at, (a & b) | (a ^ number))


@triton.jit
def _read(table, out, count, SIZE: tl.constexpr, hidden: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(table + at, mask=at < count, other=hidden).to(tl.float32))


def by_numpy(a: np.ndarray, b: np.ndarray, number: int, floats: bool) -> list[np.ndarray]:
    found = [a + b, a - b, a * b, (a < b) + 2 * (a >= number), number - a * number]
    if not floats:
        wide, other = a.astype(np.float64), b.astype(np.float64)
        found += [np.trunc(wide / other), np.fmod(a, b), (a & b) | (a ^ number)]
    return found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.int32, torch.int32),
        (torch.int64, torch.int32),
        (torch.int32, torch.int64),
        (torch.float32, torch.float32),
    ],
)
def test_numbers_after_the_first(one: torch.dtype, other: torch.dtype) -> None:
    """The first numbers are alike, and teach; the others are of both signs."""
    floats = one.is_floating_point
    for draw in range(3):
        numbers = torch.randint(-1000, 1000, (2, 16), generator=torch.Generator().manual_seed(draw))
        numbers[1][numbers[1] == 0] = 7
        a, b = (numbers if draw else torch.ones_like(numbers)).unbind()
        a, b = a.to(one), b.to(other)
        out = torch.zeros(8, 16, dtype=torch.promote_types(one, other))
        _operate[(1,)](a, b, out, floats, 3, 16)
        for found, right in zip(out.numpy(), by_numpy(a.numpy(), b.numpy(), 3, floats), strict=False):
            assert (found == right).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hidden", [float("-inf"), 0.0, 1.5])
def test_what_a_mask_hides_is_converted(dtype: torch.dtype, hidden: float) -> None:
    """The first load hides nothing, so its mask teaches nothing about the hidden number."""
    table, out = torch.arange(8).to(dtype), torch.empty(8)
    for count in (8, 5, 0):
        _read[(1,)](table, out, count, 8, hidden)
        assert torch.equal(out, torch.where(torch.arange(8) < count, table.float(), hidden))


def test_a_function_with_other_bits_is_not_learned() -> None:
    """Negative control: a wrong function never replaces Triton's."""
    ones = [tl.tensor(tl_handle([2.0, 3.0]), tl.block_type(tl.float32, [2])) for _ in range(2)]

    def slow(one: tl.tensor, other: tl.tensor) -> tl.tensor:
        return operators.interpreter_semantic.add(one, other, sanitize_overflow=False)

    for function, learned in ((np.add, 1), (np.subtract, 0)):
        ways: dict[object, object] = {}
        found = operators._learn(ways, function, slow, *ones, moves=True)
        assert found.handle.data.tolist() == [4.0, 6.0] and len(ways) == learned


def tl_handle(numbers: list[float]) -> operators.TensorHandle:
    return operators.TensorHandle(np.array(numbers, np.float32), tl.float32)
