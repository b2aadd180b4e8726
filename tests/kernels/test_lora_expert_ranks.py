"""Adapters of experts on CUDA, with inner numbers shared by ranks: 1, 2 and 4 ranks give the same bits.

Ranks are slices of the experts, called one after the other, see :mod:`tests.kernels.test_lora_ranks`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from preheat.backends.base.layers import ExpertsWeights, LayerContext
from preheat.backends.cuda.matmul.config import ExpertsShape
from preheat.backends.cuda.matmul.kernels import KernelConfigs
from preheat.backends.cuda.matmul.lora import routed as lora_routed
from preheat.backends.cuda.matmul.moe import experts as moe
from preheat.backends.cuda.ranks.collective import RankSums
from preheat.ops import matmul
from preheat.ops.matmul import NOTHING, LowRankPair, add_delta, delta, tree_sum
from preheat.ops.moe import combine, route
from preheat.ops.proof import noise
from preheat.ops.values import Routing
from tests import layers
from tests.kernels.backend import InterpretedCuda
from tests.kernels.test_lora_experts import config
from tests.kernels.test_lora_ranks import on_ranks

HIDDEN, INNER, EXPERTS, TOKENS = 40, 4 * 24, 3, 5
ROUTING = Routing(2, True, False)
WHOSE = [[0, -1, 1][token % 3] for token in range(TOKENS)]


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """Give a K split of few numbers several parts, and few outputs several programs."""
    monkeypatch.setattr(lora_routed, "PART", 16)
    monkeypatch.setattr(lora_routed, "WIDTH", 32)
    monkeypatch.setattr(matmul, "PART", 16)


class Configs(KernelConfigs):
    """Kernels of experts with rows in blocks of ``block``."""

    def __init__(self, block: int) -> None:
        super().__init__()
        self._block = block

    def experts(self, shape: ExpertsShape, tokens: int):
        return config(torch.float32, self._block)


@cache
def weights(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    gate_up, down = noise(EXPERTS * 2 * INNER, HIDDEN, seed=3) / 12, noise(EXPERTS * HIDDEN, INNER, seed=4) / 10
    return gate_up.view(EXPERTS, 2 * INNER, HIDDEN).to(dtype), down.view(EXPERTS, HIDDEN, INNER).to(dtype)


@cache
def adapter(adapter_slot: int, dtype: torch.dtype) -> dict[int, LowRankPair]:
    """Return the matrices of an adapter by part.

    Adapter 0 leaves up and down of expert 1 alone, and gate of expert 2.
    """
    found = {}
    for part in range(3 * EXPERTS):
        if adapter_slot == 0 and part in (4, 5, 6):
            continue
        inputs, outputs = (INNER, HIDDEN) if part % 3 == 2 else (HIDDEN, INNER)
        rank = (3, 16, 21)[(adapter_slot + part // 3) % 3]
        a = noise(rank, inputs, seed=100 * adapter_slot + part) / inputs**0.5
        b = noise(outputs, rank, seed=100 * adapter_slot + part + 50) / 4
        found[part] = LowRankPair(a.to(dtype), b.to(dtype), 0.3 + adapter_slot)
    return found


def tokens(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return noise(TOKENS, HIDDEN, seed=1).to(dtype), noise(TOKENS, EXPERTS, seed=2).to(dtype)


def run(world: int, dtype: torch.dtype, block: int = 16, rows: list[int] | None = None,
        whose: list[int] | None = None, order: tuple[int, int] = (0, 1),
        adapter_slots: int = 2) -> list[Tensor]:  # fmt: skip
    """Return the outputs of each of ``world`` ranks for the tokens ``rows``.

    Their adapters are given by ``whose``, by default ``WHOSE``, and lie in the adapter slots of ``order``.
    """
    rows = list(range(TOKENS)) if rows is None else rows
    given = [WHOSE[row] for row in rows] if whose is None else whose
    x, logits = tokens(dtype)
    gate_up, down = weights(dtype)

    def experts(ranks: RankSums) -> Tensor:
        part = INNER // ranks.world
        kept = slice(ranks.rank * part, (ranks.rank + 1) * part)
        halves = gate_up.view(EXPERTS, 2, INNER, HIDDEN)[:, :, kept].reshape(EXPERTS, -1, HIDDEN)
        backend = InterpretedCuda()
        backend._configs = Configs(block)
        adapted, weights_of = (
            backend.adapters.rows(16, adapter_slots),
            ExpertsWeights(halves, down[:, :, kept].contiguous()),
        )
        value = layers.experts_value(*weights_of[:2], ROUTING, layers.splits(4 // ranks.world, ranks.rank))
        value = layers.with_room(value, adapter_slots, 21 + 16 * (adapter_slots > 2), dtype)
        made: Any = backend.experts(value, weights_of, LayerContext(ranks, adapted))
        for number, adapter_slot in enumerate(order):
            made.slots.write(adapter_slot, made.slots.pack({
                at: each._replace(a=each.a[:, kept]) if at % 3 == 2 else each._replace(b=each.b[kept])
                for at, each in adapter(number, dtype).items()
            }))  # fmt: skip
        adapted.describe(0, "tokens", np.array([order[each] if each >= 0 else -1 for each in given], np.int32))
        adapted.use("tokens" if max(given) >= 0 else None)
        found = made(x[rows], logits[rows])
        assert not made._counts.any()
        return found

    return on_ranks(world, experts)


def right(dtype: torch.dtype) -> Tensor:
    """Return the reference: :func:`preheat.ops.matmul.delta`, token by token, in the order of the contract."""
    (x, logits), (gate_up, down) = tokens(dtype), weights(dtype)
    chosen, shares = route(logits, ROUTING)
    given = torch.zeros(4, TOKENS, 2, HIDDEN)
    more = torch.full((TOKENS, 2, HIDDEN), NOTHING)
    for token, adapter_slot in enumerate(WHOSE):
        own, row = adapter(adapter_slot, dtype) if adapter_slot >= 0 else {}, x[token, None]
        for slot, expert in enumerate(chosen[token].tolist()):
            halves = [(row.float() @ half.float().T).to(dtype) for half in gate_up[expert].chunk(2)]
            for part, half in enumerate(halves):
                if (factors := own.get(3 * expert + part)) is not None:
                    halves[part] = add_delta(half, delta(row, factors))
            inner = (F.silu(halves[0].float()).to(dtype).float() * halves[1].float()).to(dtype)
            for k_split, (mine, columns) in enumerate(zip(inner.chunk(4, 1), down[expert].chunk(4, 1), strict=True)):
                given[k_split, token, slot] = mine.float() @ columns.float().T
            if (factors := own.get(3 * expert + 2)) is not None:
                more[token, slot] = delta(inner, factors, 4)
    return add_delta(tree_sum([combine(k_split, shares) for k_split in given]).to(dtype), combine(more, shares))


@pytest.mark.parametrize(("block", "dtype", "worlds"), [(1, torch.bfloat16, [2]), (16, torch.float32, [2, 4])], ids=str)
def test_the_sum_over_ranks_has_the_bits_of_one_rank_and_equals_the_reference(block, dtype, worlds):
    (one,) = run(1, dtype, block)
    for world in worlds:
        assert all(torch.equal(each, one) for each in run(world, dtype, block))
    expected = right(dtype)
    error = (one.double() - expected.double()).abs().amax(1) / expected.double().abs().amax(1)
    assert (error < (1e-5 if dtype == torch.float32 else 1e-2)).all(), error
    (plain,) = run(1, dtype, block, whose=[-1] * TOKENS)
    alike = [torch.equal(mine, base) for mine, base in zip(one, plain, strict=True)]
    assert alike == [adapter_slot < 0 for adapter_slot in WHOSE]


def test_a_row_has_the_same_bits_in_any_batch_adapter_slot_and_block():
    (one,) = run(1, torch.float32)
    for rows, block in (([0], 1), ([4, 3, 2], 32)):
        (found,) = run(1, torch.float32, block, rows=rows, order=(3, 1), adapter_slots=4)
        assert torch.equal(found, one[rows])


def test_parts_that_are_cut_from_a_ranks_first_input_on_have_other_bits(monkeypatch):
    """Negative control of the test of bits."""
    shrunk = moe.shrink_slots

    def wrong(kept: lora_routed.Kept, *more: Any) -> Tensor:
        return shrunk(replace(kept, rows=torch.cat(kept.rows.unbind(), 1)[None]), *more)

    monkeypatch.setattr(moe, "shrink_slots", wrong)
    one, two = (run(world, torch.float32)[0] for world in (1, 2))
    alike = [torch.equal(*each) for each in zip(one, two, strict=True)]
    assert alike == [adapter_slot < 0 for adapter_slot in WHOSE]
