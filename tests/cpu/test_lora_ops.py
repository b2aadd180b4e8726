"""Adapters on a CPU: the contract's numbers, and bits that depend only on the row and its adapter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from preheat.backends.base.layers import LayerContext
from preheat.backends.cpu import lowrank
from preheat.backends.cpu.backend import CpuBackend
from preheat.backends.cpu.lowrank import CpuAdapters
from preheat.errors import NotInvariant
from preheat.ops.matmul import NOTHING, LowRankPair, add_delta, delta
from preheat.ops.moe import combine
from preheat.ops.proof import noise, signed_pairs
from preheat.ops.values import LowRank
from tests import layers
from tests.controls import fails

INPUTS, OUTPUTS = 1100, (72, 40)


def layer(slots: int = 3, max_rank: int = 40, dtype: torch.dtype = torch.float32):
    rows = CpuAdapters().rows(32, slots)
    term = LowRank(OUTPUTS, slots, max_rank, "float32")
    weight = noise(sum(OUTPUTS), INPUTS).to(dtype) / 30
    return layers.linear(CpuBackend(), weight, context=LayerContext(rows=rows), terms=(term,)), rows


def factors(rank: int, part: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, float]:
    return noise(rank, INPUTS, seed=seed) / 30, noise(OUTPUTS[part], rank, seed=seed + 1), 0.37


def put(made, slot: int, *given: tuple[torch.Tensor, torch.Tensor, float]) -> None:
    """Put an adapter into slot ``slot``.

    ``given`` has its matrices for each of the first parts.
    """
    made.slots.write(slot, made.slots.pack({part: LowRankPair(*each) for part, each in enumerate(given)}))


def run(made, rows, x: torch.Tensor, slots: list[int]) -> torch.Tensor:
    rows.describe(0, "tokens", np.array(slots, np.int32))
    rows.use("tokens")
    return made(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 16, 23, 40])
def test_the_added_term_equals_the_reference(rank, dtype):
    made, rows = layer(dtype=dtype)
    x = noise(19, INPUTS, seed=5).to(dtype)
    given = [factors(rank, part, seed=10 * part) for part in range(2)]
    put(made, 1, *given)
    base = run(made, rows, x, [-1] * 19)
    found = run(made, rows, x, [1] * 19)
    more = torch.cat([delta(x, LowRankPair(*each)) for each in given], 1)
    torch.testing.assert_close(found, add_delta(base, more), atol=1e-4 if dtype == torch.float32 else 0.06, rtol=1e-5)
    exact = torch.cat([(x.double() @ a.double().T) * scale @ b.double().T for a, b, scale in given], 1)
    torch.testing.assert_close(more.double(), exact, atol=1e-4, rtol=1e-5)


def test_rows_without_an_adapter_are_left_alone_with_the_sign_of_zero():
    made, rows = layer()
    put(made, 0, factors(8, 0))
    x = noise(9, INPUTS, seed=5)
    plain = run(made, rows, x, [-1] * 9)
    found = run(made, rows, x, [0, -1, 1] * 3)
    assert torch.equal(found[1::3], plain[1::3])
    assert torch.equal(found[2::3], plain[2::3])  # an empty adapter slot
    assert torch.equal(found[:, OUTPUTS[0] :], plain[:, OUTPUTS[0] :])  # a part that the adapter leaves alone
    assert not torch.equal(found[::3, : OUTPUTS[0]], plain[::3, : OUTPUTS[0]])
    zero = torch.zeros(1, INPUTS)
    made._products = lambda x: [torch.full((len(x), sum(OUTPUTS)), -0.0)]
    assert torch.signbit(run(made, rows, zero, [-1])).all()
    assert torch.signbit(run(made, rows, zero, [0])[:, OUTPUTS[0] :]).all()


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 64, 65, 200])
def test_a_rows_bits_depend_on_the_row_and_its_adapter_alone(count):
    """Bits depend on neither the number and places of the rows, the adapter slot, nor the largest rank."""
    x = signed_pairs(noise(count, INPUTS, seed=7), 1.0) + noise(count, INPUTS, seed=8)
    wanted = [factors(20, part, seed=part) for part in range(2)]
    results = []
    for slots, max_rank, slot in ((1, 20, 0), (5, 128, 3)):
        made, rows = layer(slots, max_rank)
        for other in range(slots):
            put(made, other, *(factors(20, part, seed=90 + other) for part in range(2)))
        put(made, slot, *wanted)
        results.append(run(made, rows, x, [slot] * count))
        results.append(torch.cat([run(made, rows, row[None], [slot]) for row in x]))
        results.append(run(made, rows, x.flip(0), [slot] * count).flip(0))
        mixed = run(made, rows, x.repeat_interleave(2, 0), [slot, -1] * count)
        results.append(mixed[::2])
    assert all(torch.equal(each, results[0]) for each in results)


def test_the_proof_sees_a_product_that_depends_on_its_rows(monkeypatch):
    """Control: the proof chooses another number of rows.

    With the wrong number the test above fails.
    """
    right = lowrank._in_parts

    def by_rows(rows: torch.Tensor, weight: torch.Tensor, size: int) -> torch.Tensor:
        half = rows.clone()
        half[:, rows.shape[1] // 2 :] = 0
        return right(half, weight, size) + right(rows - half, weight, size) if size > 8 else right(rows, weight, size)

    lowrank.rows_at_once.cache_clear()
    monkeypatch.setattr(lowrank, "_in_parts", by_rows)
    assert lowrank.rows_at_once(512, 16, 1) == lowrank.ROWS
    monkeypatch.setattr(lowrank, "rows_at_once", lambda *_: 64)
    with fails():
        test_a_rows_bits_depend_on_the_row_and_its_adapter_alone(65)


def test_a_product_that_depends_on_a_rows_position_is_refused(monkeypatch):
    right = lowrank._in_parts

    def by_place(rows: torch.Tensor, weight: torch.Tensor, size: int) -> torch.Tensor:
        found = right(rows, weight, size)
        found[::8] += 1e-6
        return found

    lowrank.rows_at_once.cache_clear()
    monkeypatch.setattr(lowrank, "_in_parts", by_place)
    with pytest.raises(NotInvariant, match="position of a row"):
        lowrank.rows_at_once(512, 16, 1)
    lowrank.rows_at_once.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_that_is_weighted_and_added_changes_no_bit(dtype):
    """Adding a weighted NOTHING changes no bit.

    So experts without an adapter keep their bits in a sum of K splits.
    """
    y = torch.tensor([[0.0, -0.0, 1e-40, -3.0]]).to(dtype)
    weights = torch.tensor([[0.0, 1e-45, 0.7]])
    found = add_delta(y, combine(torch.full((1, 3, 4), NOTHING), weights))
    assert torch.equal(found.view(torch.uint8), y.view(torch.uint8))
    zeros = add_delta(y, combine(torch.zeros(1, 3, 4), weights))
    assert not torch.equal(zeros.view(torch.uint8), y.view(torch.uint8))
