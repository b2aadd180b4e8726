"""Rules of recurrences: each against float64, and the same bits for any rule, cut and neighbors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import silu, softplus

from preheat.backends.cpu.llvm.delta import CompiledRecur
from preheat.ops import delta
from preheat.ops.delta import DeltaRows, DeltaStates, DeltaWeights, delta_rule, recur
from preheat.ops.values import Recurrence, StateRule
from tests.recurrences import MAMBA, RULES, random_weights

LENGTH, SLOTS = 23, 3
CPU = torch.device("cpu")


def layer(rule: StateRule, **sizes: int) -> Recurrence:
    return Recurrence(**{"key_heads": 2, "value_heads": 6, "key_dim": 16, "value_dim": 8, "taps": 4} | sizes, rule=rule)


def inputs_of(value: Recurrence, length: int = LENGTH, seed: int = 4) -> Tensor:
    return torch.randn(length, value.inputs, generator=torch.Generator().manual_seed(seed))


def states_of(value: Recurrence) -> DeltaStates:
    """Return the states of other sequences, which a row at position 0 must not see."""
    states = DeltaStates.of(value, SLOTS, torch.float32, CPU)
    states.window.fill_(float("nan"))
    states.matrix.fill_(float("nan"))
    return states


def in_cuts(value: Recurrence, cuts: Sequence[int], beside: bool = False, **how: Callable[..., Tensor]) -> Tensor:
    """Return a text's outputs, computed in ``cuts``, and its state; ``beside``: beside a row that begins."""
    x, other, weights, states = inputs_of(value), inputs_of(value, 2, 5), random_weights(value), states_of(value)
    found, at = [], 0
    for count in cuts:
        slots, extend = (np.array([2, 1]), np.array([2, count])) if beside else (np.array([1]), np.array([count]))
        rows = DeltaRows(slots, slots, extend, value.taps, CPU)
        begins = torch.tensor([True, at == 0][-len(slots) :])
        own = x[at : at + count]
        out = delta_rule(torch.cat((other, own)) if beside else own, begins, rows, weights, states, **how)
        found.append(out[-count:])
        at += count
    return torch.cat([*found, states.matrix[1].view(-1, value.value_size), *_window(states, value)])


def _window(states: DeltaStates, value: Recurrence) -> list[Tensor]:
    flat = states.window[1].flatten()
    return [torch.nn.functional.pad(flat, (0, -len(flat) % value.value_size)).view(-1, value.value_size)]


def exact(value: Recurrence, weights: DeltaWeights, x: Tensor) -> Tensor:
    """Return the outputs of one text in float64, token by token."""
    rule, share = value.rule, value.value_heads // value.key_heads
    mixed, z, *gates = x.double().split([value.channels, *value.parts[3:]], 1)
    state = torch.zeros(value.value_heads, value.key_dim, value.value_dim, dtype=torch.float64)
    found = []
    for at in range(len(x)):
        past = torch.stack([mixed[at - lag] if at >= lag else mixed[0] * 0 for lag in range(value.taps)[::-1]], 1)
        given = (past * weights.taps).sum(1) + (weights.conv_bias if weights.conv_bias is not None else 0)
        q, k, v = silu(given).split(value.parts[:3])
        q, k = (each.view(value.key_heads, -1).repeat_interleave(share, 0) for each in (q, k))
        if rule.unit:
            q, k = (each * ((each * each).sum(1, True) + 1e-6).rsqrt() for each in (q, k))
            q = q * value.key_dim**-0.5
        v, step = v.view(value.value_heads, -1), softplus(gates[-1][at] + weights.bias).clamp(*rule.limits)
        beta = gates[0][at].sigmoid() if rule.betas else step
        state = state * (weights.rate * step).exp()[:, None, None]
        held = (state * k[:, :, None]).sum(1) if rule.delta else 0
        state = state + k[:, :, None] * ((v - held) * beta[:, None])[:, None]
        out = (state * q[:, :, None]).sum(1) + (weights.skip[:, None] * v if weights.skip is not None else 0)
        gate = silu(z[at].view_as(out))
        out = out * gate if rule.gate_first else out
        whole = out.reshape(-1, rule.normed * value.value_dim)
        out = (whole * (whole.square().mean(1, True) + weights.eps).rsqrt()).view_as(out) * weights.norm
        found.append((out if rule.gate_first else out * gate).flatten())
    return torch.stack(found)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("sizes", [{}, {"key_heads": 1, "value_heads": 12, "key_dim": 64, "taps": 2}])
def test_each_rule_is_the_one_of_float64(name, sizes):
    value = layer(RULES[name], **sizes)
    got = in_cuts(value, [LENGTH])[:LENGTH]
    right = exact(value, random_weights(value), inputs_of(value))
    assert (got - right).norm() <= 3e-6 * right.norm()


@pytest.mark.parametrize("name", RULES)
def test_each_field_of_a_rule_changes_numbers(name):
    """Control: the comparison sees a rule with one field less or more."""
    value = layer(RULES[name])
    weights, x, rule = random_weights(value), inputs_of(value), RULES[name]
    right = exact(value, weights, x)
    others = [
        rule._replace(unit=not rule.unit), rule._replace(delta=not rule.delta), rule._replace(limits=(0.6, 0.7)),
        rule._replace(gate_first=not rule.gate_first), rule._replace(normed=3 if rule.normed != 3 else 1),
    ]  # fmt: skip
    for other in others:
        got = exact(layer(other), weights, x)
        assert (got - right).norm() > 1e-3 * right.norm(), other


RULE = st.builds(
    StateRule, unit=st.booleans(), delta=st.booleans(), betas=st.booleans(), skip=st.booleans(), bias=st.booleans(),
    limits=st.sampled_from([(0.0, float("inf")), (0.2, 1.0)]), gate_first=st.booleans(),
    normed=st.sampled_from([1, 2, 3, 6]),
)  # fmt: skip


@given(RULE, st.lists(st.integers(1, 9), max_size=9), st.booleans())
@settings(max_examples=40, deadline=None)
def test_any_cut_of_any_rule_gives_the_same_bits(rule, cuts, beside):
    left, value = LENGTH, layer(rule)
    chosen = []
    for each in cuts:
        chosen += [min(each, left)] * (left > 0)
        left -= min(each, left)
    chosen += [left] * (left > 0)
    whole = in_cuts(value, [LENGTH])
    assert torch.equal(in_cuts(value, chosen, beside), whole)
    assert torch.equal(in_cuts(value, [1] * LENGTH), whole)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_compiled_function_has_the_bits_of_the_reference(name, threads, monkeypatch):
    monkeypatch.setattr("preheat.backends.cpu.llvm.delta.SHARED_FROM", 1)
    value = layer(RULES[name], value_dim=32)
    cuts = [5, 1, 1, 16]
    assert torch.equal(in_cuts(value, cuts, by=CompiledRecur(value, None, threads)), in_cuts(value, cuts))


def test_the_comparisons_see_a_fault(monkeypatch):
    """Control: the other rule's step 4, and squares of heads in another order, change bits."""
    value = layer(MAMBA)
    right = in_cuts(value, [LENGTH])
    assert not torch.equal(in_cuts(value, [LENGTH], by=recur), right)
    monkeypatch.setattr(delta, "tree", lambda x, dim: x.flip(dim).cumsum(dim).select(dim, -1))
    assert not torch.equal(in_cuts(value, [LENGTH]), right)
