"""Adapters of layers that ranks share on CUDA: 1, 2 and 4 ranks give the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from preheat.backends.base.layers import LayerContext
from preheat.backends.cuda.matmul.lora import shrink as lora_shrink
from preheat.backends.cuda.matmul.lora import slots as lora
from preheat.backends.cuda.ranks.collective import RankSums
from preheat.ops import matmul
from preheat.ops.kinds import Scheme
from preheat.ops.matmul import LowRankPair, add_delta, delta
from preheat.ops.proof import noise, signed_pairs
from preheat.ops.values import LowRank
from tests import layers
from tests.cpu.test_quantized_layers import random_weight
from tests.kernels.backend import InterpretedCuda
from tests.kernels.ranks import Heard, on_ranks

ROWS, OUTPUTS, SLOTS = 21, 40, 2
WHOSE = [[1, -1, 0, 1][row % 4] for row in range(ROWS)]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """Give a K split of 256 inputs two parts of two steps, and a K split of 150 an uneven second part."""
    monkeypatch.setattr(lora_shrink, "PART", 128)
    monkeypatch.setattr(lora_shrink, "CHUNK", 64)
    monkeypatch.setattr(matmul, "PART", 128)


def numbers(inputs: int, dtype: torch.dtype) -> tuple[Tensor, list[LowRankPair]]:
    """Return rows and two adapters.

    Their products nearly cancel: each order of addition has bits of its own.
    """
    x = signed_pairs(noise(ROWS, inputs, seed=8) * noise(ROWS, inputs, seed=9).exp(), 1.0).to(dtype)
    found = []
    for seed, rank in ((10, 5), (20, 21)):
        a = signed_pairs(noise(rank, inputs, seed=seed) * noise(rank, inputs, seed=seed + 1).exp(), -1.0)
        found.append(LowRankPair(a.to(dtype), noise(OUTPUTS, rank, seed=seed + 2).to(dtype), 2.0**16 * 0.37))
    return x, found


def plain_numbers(inputs: int, dtype: torch.dtype) -> tuple[Tensor, list[LowRankPair]]:
    x = noise(ROWS, inputs, seed=8).to(dtype)
    return x, [
        LowRankPair((noise(r, inputs, seed=r) / 50).to(dtype), noise(OUTPUTS, r).to(dtype), 0.37) for r in (5, 21)
    ]


def by_columns(
    world: int, inputs: int, dtype: torch.dtype, k_splits: int = 4, whose: list[int] = WHOSE, make: Any = numbers,
    scheme: Scheme | None = None,
) -> list[Tensor]:  # fmt: skip
    """Return the outputs of a layer on each of ``world`` ranks; they share its inputs.

    It has ``k_splits`` K splits, and is quantized if there is a ``scheme``.
    """
    x, given = make(inputs, dtype)
    weight, bias = (noise(OUTPUTS, inputs) / 50).to(dtype), noise(OUTPUTS, seed=4).to(dtype)
    codes = scheme and random_weight(scheme, OUTPUTS, inputs, dtype=dtype)

    def layer(ranks: RankSums) -> Tensor:
        part = inputs // ranks.world
        mine = slice(ranks.rank * part, (ranks.rank + 1) * part)
        backend = InterpretedCuda()
        rows = backend.adapters.rows(32, SLOTS)
        own: Any = weight[:, mine].contiguous()
        if codes is not None:
            own = codes.cut(((0, OUTPUTS),), (mine.start, mine.stop))
        term = LowRank((OUTPUTS,), SLOTS, 40, layers.name_of(dtype), shared="inputs")
        made: Any = layers.linear(
            backend, own, bias, order=layers.splits(k_splits // ranks.world, ranks.rank, k_splits), terms=(term,),
            context=LayerContext(ranks, rows),
        )  # fmt: skip
        for slot, each in enumerate(given):
            made.slots.write(slot, made.slots.pack({0: each._replace(a=each.a[:, mine])}))
        rows.describe(0, "tokens", np.array(whose, np.int32))
        rows.use("tokens" if any(slot >= 0 for slot in whose) else None)
        return made(x[:, mine].contiguous())

    return on_ranks(world, layer, 1 if scheme is None else 2)


@DTYPES
@pytest.mark.parametrize("inputs", [4 * 16, 4 * 150, 4 * 256])
def test_ranks_of_a_layer_divided_by_columns_have_the_bits_of_one_rank(inputs, dtype):
    (one,) = by_columns(1, inputs, dtype)
    for world in (2, 4):
        assert all(torch.equal(each, one) for each in by_columns(world, inputs, dtype))
    (plain,) = by_columns(1, inputs, dtype, whose=[-1] * ROWS)
    alike = [torch.equal(mine, base) for mine, base in zip(one, plain, strict=True)]
    assert alike == [slot < 0 for slot in WHOSE]


def test_beside_float8_too():
    """Ranks agree on the scales of rows first."""
    given = {"scheme": Scheme(code="fp8", scales="channel", activations="token"), "make": plain_numbers}
    one, plain = (by_columns(1, 4 * 32, torch.float32, whose=each, **given)[0] for each in (WHOSE, [-1] * ROWS))
    assert all(torch.equal(each, one) for each in by_columns(2, 4 * 32, torch.float32, **given))
    assert [torch.equal(mine, base) for mine, base in zip(one, plain, strict=True)] == [slot < 0 for slot in WHOSE]


@DTYPES
def test_the_added_term_equals_the_reference(dtype):
    inputs = 4 * 150
    x, given = plain_numbers(inputs, dtype)
    one, plain = (by_columns(1, inputs, dtype, whose=each, make=plain_numbers)[0] for each in (WHOSE, [-1] * ROWS))
    for slot, each in enumerate(given):
        mine = [row for row in range(ROWS) if WHOSE[row] == slot]
        right = add_delta(plain[mine], delta(x[mine], each, 4))
        if dtype == torch.bfloat16:
            assert (one[mine] != right).float().mean() < 0.01
        torch.testing.assert_close(one[mine], right, atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 2**-7)


def test_k_splits_that_follow_the_number_of_ranks_have_other_bits():
    """Negative control of the test of bits: a rank adds its inputs in one sum."""
    found = [by_columns(world, 4 * 150, torch.float32, k_splits=world)[0] for world in (1, 2, 4)]
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])


def test_ranks_that_are_added_in_another_order_have_other_bits(monkeypatch):
    (one,) = by_columns(1, 4 * 150, torch.float32)
    right = lora.add_roots

    def in_a_row(parts, to, scales):
        sums = parts.clone()
        sums[0] = parts[0] + parts[1] + parts[2] + parts[3]
        sums[1:] = 0
        right(sums, to, scales)

    monkeypatch.setattr(lora, "add_roots", in_a_row)
    assert not torch.equal(by_columns(4, 4 * 150, torch.float32)[0], one)


def by_rows(world: int, dtype: torch.dtype, activation: Any, divided: bool) -> list[Tensor]:
    """Return each half of the outputs of a layer with two adapters; ``world`` ranks share its rows.

    The first matrices may be ``divided``, too: five tiles of ranks.
    """
    inputs, sizes = 300, (96, 96)
    x, weight = noise(ROWS, inputs, seed=5).to(dtype), (noise(sum(sizes), inputs) / 30).to(dtype)

    def layer(ranks: RankSums) -> Tensor:
        def mine(rows: Tensor) -> Tensor:
            return rows.chunk(ranks.world)[ranks.rank]

        backend = InterpretedCuda()
        rows = backend.adapters.rows(32, SLOTS)
        outputs = tuple(size // ranks.world for size in sizes)
        term = LowRank(outputs, SLOTS, 70, layers.name_of(dtype), shared="ranks" if divided else "whole")
        own = torch.cat([mine(part) for part in weight.split(sizes)])
        made: Any = layers.linear(backend, own, activation=activation, terms=(term,), context=LayerContext(ranks, rows))
        for slot, of_parts in enumerate(((69, 7), (21, 7))):
            given = {
                part: LowRankPair((noise(r, inputs, seed=r) / 30).to(dtype), mine(noise(96, r, seed=2).to(dtype)), 0.37)
                for part, r in enumerate(of_parts)
            }
            made.slots.write(slot, made.slots.pack(given))
        rows.describe(0, "tokens", np.array(WHOSE, np.int32))
        rows.use("tokens")
        return made(x)

    found = on_ranks(world, layer)
    return [torch.cat(halves, 1) for halves in zip(*(y.chunk(1 if activation else 2, 1) for y in found), strict=True)]


@DTYPES
@pytest.mark.parametrize("activation", [None, "silu_and_mul"])
def test_rows_of_a_layer_on_ranks_have_the_bits_of_one(activation, dtype):
    one = by_rows(1, dtype, activation, divided=False)
    for world in (2, 4):
        for divided in (False, True):
            found = by_rows(world, dtype, activation, divided)
            assert all(torch.equal(mine, whole) for mine, whole in zip(found, one, strict=True))


def test_tiles_of_ranks_in_another_order_have_other_bits(monkeypatch):
    one = by_rows(1, torch.float32, None, divided=False)
    right = Heard.gather
    monkeypatch.setattr(Heard, "gather", lambda self, x: right(self, x).flip(0))
    assert not torch.equal(by_rows(2, torch.float32, None, divided=True)[0], one[0])
