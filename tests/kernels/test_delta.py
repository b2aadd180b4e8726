"""Recurrences on CUDA, in the interpreter: against the reference, for any cuts, neighbors and slots."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from preheat.backends.cuda.device.card import PORTABLE
from preheat.backends.cuda.lacking import lacking
from preheat.backends.cuda.pointwise.gate import gated
from preheat.backends.cuda.recurrence import delta
from preheat.backends.cuda.recurrence.delta import Config
from preheat.core import StepStates
from preheat.ops import gate
from preheat.ops.delta import delta_rule
from preheat.ops.values import Recurrence
from tests.delta_layer import DeltaLayer, step_four
from tests.kernels.backend import InterpretedCuda
from tests.recurrences import MAMBA, RULES

SIZES = {
    "one run": Recurrence(key_heads=1, value_heads=2, key_dim=16, value_dim=8, taps=4),
    "several runs": Recurrence(key_heads=2, value_heads=2, key_dim=64, value_dim=4, taps=2),
    "few numbers": Recurrence(key_heads=1, value_heads=1, key_dim=4, value_dim=16, taps=5),
    **{
        name: Recurrence(key_heads=1, value_heads=6, key_dim=16, value_dim=8, taps=4, rule=rule)
        for name, rule in RULES.items()
    },
    "two norms": Recurrence(key_heads=2, value_heads=4, key_dim=8, value_dim=4, taps=2, rule=MAMBA._replace(normed=2)),
}
VALUE, LENGTHS = SIZES["one run"], (11, 1, 5)


def layer(value: Recurrence = VALUE, dtype: torch.dtype = torch.float32) -> DeltaLayer:
    return DeltaLayer(InterpretedCuda(), value, LENGTHS, dtype)


@pytest.fixture(scope="module")
def right() -> tuple[DeltaLayer, list[Tensor]]:
    made = layer()
    return made, made.whole()


@pytest.mark.parametrize(("name", "dtype"), [(name, torch.float32) for name in SIZES] + [("one run", torch.bfloat16)])
def test_it_is_the_reference(name, dtype):
    """Exponentials and roots are the interpreter's own, so numbers are near; windows are the same."""
    made = layer(SIZES[name], dtype)
    found, states = torch.cat(made.whole()), made.zeros()
    expected = delta_rule(torch.cat(made.texts), torch.ones(3, dtype=torch.bool), made.rows(), made.weights, states)
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-3}
    torch.testing.assert_close(found, expected, **close)
    for slot in (1, 2, 3):
        torch.testing.assert_close(made.plain(slot), states.matrix[slot], rtol=1e-5, atol=1e-6)
        assert torch.equal(made.states.window[slot], states.window[slot])


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("one run", Config(4, 1, 0, 1)),
        ("one run", Config(16, 4, 0, 2)),
        ("several runs", Config(2, 1, 0, 4)),
        ("few numbers", Config(4, 1, 0, 4)),
        ("mamba", Config(4, 1, 0, 2)),
        ("two norms", Config(4, 1, 0, 1)),
        ("lengths and no delta", Config(8, 1, 0, 2)),
        ("delta with skips", Config(8, 1, 0, 2)),
    ],
)
def test_the_recurrence_has_the_bits_of_the_reference(name, config, monkeypatch):
    """The same inputs of step 4 give the same bits in any configuration: one tree for each sum."""
    monkeypatch.setattr(delta, "PROMPTS", config)
    made = layer(SIZES[name])
    found, expected, matrix = step_four(made, monkeypatch)
    assert torch.equal(found, expected)
    for slot in (1, 2, 3):
        assert torch.equal(made.plain(slot), matrix[slot])


LONG = Recurrence(key_heads=1, value_heads=1, key_dim=16, value_dim=4, taps=2)


def test_200_tokens_have_the_bits_of_the_reference(monkeypatch):
    """The form for prompts and the form for decoding, with cuts at ends of blocks and beside them."""
    made = DeltaLayer(InterpretedCuda(), LONG, (200,), torch.float32)
    found, expected, matrix = step_four(made, monkeypatch, (1, 1, 1, 61, 128, 1, 7))
    assert torch.equal(found, expected) and torch.equal(made.plain(1), matrix[1])


def test_other_sums_have_other_bits(monkeypatch):
    """Control: the comparison sees a sum over a state that is taken in another order."""
    monkeypatch.setattr("preheat.ops.delta.tree", lambda x, dim: x.flip(dim).cumsum(dim).select(dim, -1))
    made = layer(SIZES["several runs"])
    found, expected, _ = step_four(made, monkeypatch)
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("size", [1, 2, 4, 7])
@pytest.mark.parametrize("name", ["one run", "mamba", "two norms"])
def test_bits_do_not_depend_on_cuts(name, size):
    made, other, parts = layer(SIZES[name]), layer(SIZES[name]), []
    right = other, other.whole()
    for at in range(0, LENGTHS[0], size):
        count = min(size, LENGTHS[0] - at)
        parts.append(made.step((0, count, 4, 4), width=int(count == 1)))
    assert torch.equal(torch.cat(parts), right[1][0])
    assert torch.equal(made.states.matrix[4], right[0].states.matrix[1])
    assert torch.equal(made.states.window[4], right[0].states.window[1])


def test_bits_do_not_depend_on_neighbors(right):
    """A row decodes beside prompts that begin and go on, in another order of rows and other slots."""
    made = layer()
    first = made.step((0, 2, 3, 3), (2, 1, 1, 1))
    second = made.step((2, 1, 1, 1), (1, 1, 4, 4), (0, 9, 3, 3))
    third = made.step((2, 3, 1, 1))
    assert torch.equal(torch.cat((first[:2], second[2:])), right[1][0])
    assert torch.equal(second[1:2], right[1][1])
    assert torch.equal(torch.cat((first[2:], second[:1], third)), right[1][2])


def test_a_row_leaves_the_states_behind_several_tokens(right):
    """Kept states have the bits of a row that ends there, and a row goes on from a kept state in a slot of its own."""
    made, kept = layer(), layer()
    found = made.step((0, 2, 1, 5), (0, 1, 5, 6), (0, 8, 6, 1), (2, 5, 3, 3))
    assert torch.equal(found, torch.cat((right[1][0], right[1][2])))
    made.done[0] = 3
    again = made.step((0, 8, 6, 2))
    assert torch.equal(again, right[1][0][3:])
    kept.step((0, 3, 1, 1))
    assert torch.equal(made.states.window[6], kept.states.window[1])
    assert torch.equal(made.states.matrix[6], kept.states.matrix[1])


def broken(name: str, made: DeltaLayer, patch: pytest.MonkeyPatch) -> None:
    """Plant the fault ``name``: a state in bfloat16, a late window, a neighbor's slot, or a state never begun anew."""
    run, plan = made.kernels.run, made.kernels.plan

    def after(inputs: Any, *args: Any) -> Tensor:
        if name == "stale":
            inputs.positions = inputs.positions + 1
        out = run(inputs, *args)
        if name == "narrow":
            made.states.matrix.copy_(made.states.matrix.bfloat16())
        if name == "late window":
            made.states.window.copy_(made.states.window.roll(1, 1))
        return out

    def moved(step: Any, states: StepStates) -> np.ndarray:
        return plan(step, states._replace(read=states.read - 1) if name == "slot" else states)

    patch.setattr(made.kernels, "run", after)
    patch.setattr(made.kernels, "plan", moved)


@pytest.mark.parametrize("name", ["narrow", "late window", "slot", "stale"])
def test_the_comparisons_see_a_fault(name, right, monkeypatch):
    made = layer()
    broken(name, made, monkeypatch)
    parts = [made.step((0, count, 4, 4)) for count in (4, 7)]
    assert not torch.equal(torch.cat(parts), right[1][0])


def test_no_row_is_computed_after_clear(right):
    made = layer()
    made.step((0, 4, 1, 1))
    window, matrix = made.states.window[1].clone(), made.states.matrix[1].clone()
    made.kernels.clear()
    inputs: Any = SimpleNamespace(
        positions=torch.zeros(6, dtype=torch.int32), slots=torch.zeros(6, dtype=torch.int32), rows=4, width=0
    )
    out = torch.full((6, VALUE.value_size), float("nan"))
    assert not made.kernels.run(inputs, made.texts[0][:6], made.weights, made.states, out).any()
    assert torch.equal(window, made.states.window[1]) and torch.equal(matrix, made.states.matrix[1])


def test_gates_are_the_reference():
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(3, 40, generator=draw).bfloat16()
    out = torch.randn(3, 24, generator=draw).bfloat16()
    expected = gate.gated(out, x[:, 16:])
    assert torch.equal(gated(out, x[:, 16:]), expected)


def test_other_sizes_are_refused_by_name():
    served = dataclasses.replace(VALUE, key_dim=64)
    assert lacking(PORTABLE, served) is None
    for change in ({"key_dim": 512}, {"key_dim": 16}, {"value_dim": 2}):
        assert "states with heads" in (lacking(PORTABLE, dataclasses.replace(served, **change)) or "")
