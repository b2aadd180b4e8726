"""One product with adapters in execution mode llvm: right, and one answer in any company and any slot.

Engines of this mode are tested in ``test_lora.py`` and ``test_lora_check.py``.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from preheat.backends.base.layers import LayerContext, LayerWeights
from preheat.ops.matmul import LowRankPair
from preheat.ops.values import LowRank
from tests.controls import fails
from tests.layers import value_of

pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install llvmlite")
from llvmlite import ir

from preheat.backends.cpu.llvm import functions, job, machine, targets, team, terms
from preheat.backends.cpu.llvm.adapters import PanelAdapters
from preheat.backends.cpu.llvm.kinds import COUNTERS, LAYER_FRAME
from preheat.backends.cpu.llvm.layer import PanelLayer
from preheat.backends.cpu.llvm.memory import zeros

# --- one product with adapters ---

INPUTS, OUTPUTS, RANK = 1104, (72, 40), 23


class Adapted:
    """A product with adapters as a function; ``dtype`` is the model's."""

    def __init__(self, dtype: torch.dtype = torch.float32, slots: int = 3) -> None:
        draw = torch.Generator().manual_seed(5)
        weight = torch.randn(sum(OUTPUTS), INPUTS, generator=draw).to(dtype) / 30
        term = LowRank(OUTPUTS, slots, 40, str(dtype).removeprefix("torch."))
        self.rows = PanelAdapters().rows(64, slots)
        value = value_of(weight, terms=(term,))
        self.layer = PanelLayer(value, LayerWeights(weight), LayerContext(rows=self.rows))
        module = ir.Module("test")
        module.triple = targets.here().triple
        functions.alone(module, "alone", self.layer.how)
        job.jobs(module, COUNTERS)
        code = machine.Code(machine.compile_code(str(module), None)[0])
        self.team, self.address = team.Team(code, 2), code.address("alone")
        self.shrunk = zeros(64 * self.layer.how.shrunk, np.float32)
        self.team.set("shrunk", self.shrunk.ctypes.data)
        self.frame = zeros(len(LAYER_FRAME), np.int64)
        for name, address in self.layer.fields("qkv"):
            self.frame[LAYER_FRAME[name]] = address

    def __call__(self, x: Tensor, slots: list[int]) -> Tensor:
        self.rows.describe(0, "tokens", np.array(slots, np.int32))
        self.rows.use("tokens")
        out = torch.empty(len(x), sum(OUTPUTS))
        self.team.set("adapted", self.rows.adapted)
        self.team.set("slots", self.rows.address)
        self.team.point("x", x)
        self.team.point("attended", out)
        self.team.run(self.address, self.frame.ctypes.data, len(x))
        return out


def pairs(rank: int, dtype: torch.dtype, seed: int) -> dict[int, LowRankPair]:
    draw = torch.Generator().manual_seed(seed)
    return {
        part: LowRankPair(
            torch.randn(rank, INPUTS, generator=draw).to(dtype) / 30,
            torch.randn(outputs, rank, generator=draw).to(dtype),
            0.37,
        )
        for part, outputs in enumerate(OUTPUTS)
    }


def put(made: Adapted, slot: int, given: dict[int, LowRankPair]) -> None:
    assert made.layer.slots is not None
    made.layer.slots.write(slot, made.layer.slots.pack(given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_term_follows_the_contract(dtype):
    """The scaled sums of a model and adapters in bfloat16 are rounded to it; other steps are float32."""
    made, given = Adapted(dtype), pairs(RANK, dtype, seed=1)
    put(made, 1, given)
    x = torch.randn(19, INPUTS)
    more = made(x, [1] * 19).double() - made(x, [-1] * 19)
    scaled = [(x.double() @ given[part].a.double().T * 0.37) for part in (0, 1)]
    scaled = [each.float().to(dtype).double() for each in scaled]
    exact = torch.cat([each @ given[part].b.double().T for part, each in enumerate(scaled)], 1)
    flips = 1e-2 if dtype == torch.bfloat16 else 1e-5  # few sums lie at the middle of two bfloat16 numbers
    assert float((more - exact).abs().max()) < flips
    assert float((more - exact).abs().median()) < 1e-6


def test_rows_without_an_adapter_and_parts_without_matrices_are_left_alone():
    made = Adapted()
    put(made, 0, {0: pairs(RANK, torch.float32, seed=1)[0]})
    x = torch.randn(9, INPUTS)
    plain, found = made(x, [-1] * 9), made(x, [0, -1, 1] * 3)
    assert torch.equal(found[1::3], plain[1::3])
    assert torch.equal(found[2::3], plain[2::3])  # an empty slot
    assert torch.equal(found[:, OUTPUTS[0] :], plain[:, OUTPUTS[0] :])
    assert bool((found[::3, : OUTPUTS[0]] != plain[::3, : OUTPUTS[0]]).all())
    assert made.layer.slots is not None
    made.layer.slots.clear(0)
    assert torch.equal(made(x, [0, -1, 1] * 3), plain)


@pytest.mark.parametrize("target", ["", "avx2", "sse"])
def test_a_rows_bits_depend_on_the_row_and_its_adapter_alone(target, monkeypatch):
    x = torch.randn(13, INPUTS, generator=torch.Generator().manual_seed(2))
    found = list[Tensor]()
    for slots, slot, where in ((3, 1, targets.here()), (5, 4, targets.TARGETS.get(target, targets.here()))):
        monkeypatch.setattr(targets, "here", lambda where=where: where)
        made = Adapted(slots=slots)
        for other in range(slots):
            put(made, other, pairs(30, torch.float32, seed=20 + other))
        put(made, slot, pairs(RANK, torch.float32, seed=1))
        found.append(made(x, [slot] * 13))
        found.append(torch.cat([made(row[None], [slot]) for row in x]))
        found.append(made(x.repeat_interleave(2, 0), [slot, 0] * 13)[::2])
    assert all(torch.equal(each, found[0]) for each in found)


# --- what is planted is seen ---


def test_a_term_that_follows_the_number_of_rows_is_seen(monkeypatch):
    right = terms._sums

    def cut(e, inputs, x, first):
        found = right(e, inputs, x, first)
        return e.b.select(e.b.icmp_signed("==", e.rows, e.i(1)), found, e.b.fmul(found, e.v(1 + 2**-20)))

    monkeypatch.setattr(terms, "_sums", cut)
    with fails():
        test_a_rows_bits_depend_on_the_row_and_its_adapter_alone("", monkeypatch)
