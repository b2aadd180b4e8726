"""The gated delta rule: against float64, and the same bits for any cut, order and neighbors."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from preheat.backends.cpu.llvm import delta
from preheat.backends.cpu.llvm.delta import CompiledRecur
from preheat.ops.delta import DeltaRows, DeltaStates, DeltaWeights, Heads, delta_rule, recur
from preheat.ops.values import Recurrence
from tests.recurrences import random_weights

VALUE = Recurrence(key_heads=2, value_heads=6, key_dim=16, value_dim=8, taps=4)
SLOTS, LENGTHS = 5, (23, 1, 9)
CPU = torch.device("cpu")


WEIGHTS = random_weights(VALUE)


def random_texts(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(4)
    return [torch.randn(length, VALUE.inputs, generator=draw).to(dtype) for length in LENGTHS]


def fresh_states(dtype: torch.dtype = torch.float32) -> DeltaStates:
    """States of other sequences, which a row at position 0 must not see."""
    states = DeltaStates.of(VALUE, SLOTS, dtype, CPU)
    states.window.fill_(float("nan"))
    states.matrix.fill_(float("nan"))
    return states


Step = Sequence[tuple[int, int]]  # (text, tokens), in the order of the step's rows


def run(steps: Sequence[Step], states: DeltaStates, slots: Sequence[int] = (1, 2, 3), **how: object) -> list[Tensor]:
    """Return each text's outputs, computed by ``steps``."""
    texts, weights = random_texts(states.window.dtype), how.get("weights", WEIGHTS)
    done, found = [0] * len(texts), [[] for _ in texts]
    rule: Callable[..., Tensor] = how.get("rule", delta_rule)  # type: ignore[assignment]
    for step in steps:
        chosen = np.array([slots[text] for text, _ in step])
        extend = np.array([tokens for _, tokens in step])
        rows = DeltaRows(chosen, chosen, extend, VALUE.taps, CPU)
        begins = torch.tensor([done[text] == 0 for text, _ in step])
        x = torch.cat([texts[text][done[text] : done[text] + tokens] for text, tokens in step])
        padded = torch.cat((x, x.new_full((3, VALUE.inputs), float("nan"))))
        parts = rule(padded, begins, rows, weights, states).split([tokens for _, tokens in step])
        for (text, tokens), part in zip(step, parts, strict=True):
            done[text] += tokens
            found[text].append(part)
    return [torch.cat(parts) for parts in found if parts]


WHOLE: Step = [(0, LENGTHS[0]), (1, LENGTHS[1]), (2, LENGTHS[2])]


def exact_rule(x: Tensor) -> Tensor:
    """Return the outputs of one text in float64, token by token."""
    value, weights = VALUE, WEIGHTS
    x = x.double()
    mixed, z, b, a = x.split((value.channels, value.value_size, value.value_heads, value.value_heads), 1)
    state = torch.zeros(value.value_heads, value.key_dim, value.value_dim, dtype=torch.float64)
    found, share = [], value.value_heads // value.key_heads
    for at in range(len(x)):
        inputs = torch.stack([mixed[at - lag] if at >= lag else mixed[0] * 0 for lag in (3, 2, 1, 0)], 1)
        conv = torch.nn.functional.silu((inputs * weights.taps).sum(1))
        q, k, v = conv.split((value.key_size, value.key_size, value.value_size))
        q, k = (each.view(value.key_heads, -1).repeat_interleave(share, 0) for each in (q, k))
        q, k = (each * ((each * each).sum(1, True) + 1e-6).rsqrt() for each in (q, k))
        decay = (weights.rate * torch.nn.functional.softplus(a[at] + weights.bias)).exp()
        state = state * decay[:, None, None]
        seen = (state * k[:, :, None]).sum(1)
        change = (v.view(value.value_heads, -1) - seen) * b[at].sigmoid()[:, None]
        state = state + k[:, :, None] * change[:, None]
        out = (state * q[:, :, None]).sum(1) * value.key_dim**-0.5
        out = out * (out.square().mean(1, True) + weights.eps).rsqrt() * weights.norm
        found.append((out * torch.nn.functional.silu(z[at].view_as(out))).flatten())
    return torch.stack(found)


def compiled(value: Recurrence = VALUE, threads: int = 1) -> Callable[..., Tensor]:
    return functools.partial(delta_rule, by=CompiledRecur(value, None, threads))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_function_has_the_bits_of_the_reference(dtype, threads, monkeypatch):
    """Rows that begin, go on, and move to another slot; columns of whole vectors and of parts of them."""
    monkeypatch.setattr(delta, "SHARED_FROM", 1)
    rule = compiled(threads=threads)
    steps = [[(0, 5), (2, 1)], [(2, 8), (0, 1)], [(1, 1)], [(0, 17)]]
    one, other = fresh_states(dtype), fresh_states(dtype)
    for got, right in zip(run(steps, one, rule=rule), run(steps, other), strict=True):
        assert torch.equal(got, right)
    assert torch.equal(one.matrix[1:4], other.matrix[1:4])


@pytest.mark.parametrize("value", [(1, 2, 128, 128, 4), (2, 2, 4, 64, 3)])
def test_it_has_them_for_other_sizes(value):
    value = Recurrence(**dict(zip(("key_heads", "value_heads", "key_dim", "value_dim", "taps"), value, strict=True)))
    weights, x = random_weights(value), torch.randn(7, value.inputs, generator=torch.Generator().manual_seed(1))
    read, write, extend = np.array([0, 2]), np.array([1, 2]), np.array([4, 3])
    found = []
    for rule in (delta_rule, compiled(value)):
        states = DeltaStates.of(value, 3, torch.float32, CPU)
        states.matrix.normal_(generator=torch.Generator().manual_seed(2))
        rows = DeltaRows(read, write, extend, value.taps, CPU)
        out = rule(x, torch.tensor([False, True]), rows, weights, states)
        found.append((out, states.matrix))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


class TakenTwice:
    """The compiled function with a head that two threads run."""

    def __init__(self, right: CompiledRecur) -> None:
        self._right = right

    def __call__(self, *places: int) -> None:
        self._right(*places)
        ctypes.c_int64.from_address(places[9]).value -= 3
        self._right(*places)


def test_a_head_that_is_claimed_twice_is_seen():
    by = CompiledRecur(VALUE, None)
    by._recur = TakenTwice(by._recur)
    one, other = fresh_states(), fresh_states()
    run([WHOLE], one, rule=functools.partial(delta_rule, by=by))
    run([WHOLE], other)
    assert not torch.equal(one.matrix, other.matrix)


def test_it_is_the_rule_of_float64():
    for text, got in zip(random_texts(), run([WHOLE], fresh_states()), strict=True):
        right = exact_rule(text)
        assert (got - right).norm() <= 2e-6 * right.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_depend_neither_on_cuts_nor_on_neighbors(dtype):
    """One token at a time, chunks of every size, alone and beside others: outputs and states have the same bits."""
    states = fresh_states(dtype)
    right = run([WHOLE], states)
    for size in (1, 2, 3, 4, 5, 8, 22, 23):
        alone = fresh_states(dtype)
        cuts = [size] * (LENGTHS[0] // size) + [LENGTHS[0] % size] * (LENGTHS[0] % size > 0)
        (got,) = run([[(0, tokens)] for tokens in cuts], alone, slots=(4, 2, 3))
        assert torch.equal(got, right[0]), f"chunks of {size}"
        assert torch.equal(alone.matrix[4], states.matrix[1]) and torch.equal(alone.window[4], states.window[1])


@given(st.lists(st.lists(st.integers(1, 12), max_size=9), min_size=3, max_size=3), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_any_steps_give_the_same_bits(cuts, draw):
    left, queues = list(LENGTHS), [list(each) for each in cuts]
    steps = []
    while any(left):
        step = [(text, min(queues[text].pop() if queues[text] else 30, left[text])) for text in range(3) if left[text]]
        step = [row for row in step if len(step) == 1 or draw.random() < 0.7] or step[:1]
        draw.shuffle(step)
        for text, tokens in step:
            left[text] -= tokens
        steps.append(step)
    for got, right in zip(run(steps, fresh_states()), run([WHOLE], fresh_states()), strict=True):
        assert torch.equal(got, right)


def test_a_row_may_read_one_slot_and_write_another():
    """A slot that nobody writes again keeps the state of its position."""
    states = fresh_states()
    run([[(0, 23)]], states, slots=(1, 2, 3))
    kept, again = dataclasses.replace(states, matrix=states.matrix.clone()), random_texts()[2]
    outs = []
    for slot in (2, 3):
        rows = DeltaRows(np.array([1]), np.array([slot]), np.array([9]), VALUE.taps, CPU)
        outs.append(delta_rule(again, torch.tensor([False]), rows, WEIGHTS, states))
    assert torch.equal(*outs) and torch.equal(states.matrix[2], states.matrix[3])
    assert torch.equal(states.matrix[1], kept.matrix[1])


@pytest.mark.parametrize("rule", [delta_rule, compiled()], ids=["reference", "compiled"])
def test_a_row_may_leave_the_states_behind_several_tokens(rule):
    """Each slot has the state of a row that ends there, beside a row that begins, and outputs do not change."""
    (right,), cuts = run([[(0, LENGTHS[0])]], fresh_states()), (3, 1, 14, 5)
    row, extend = np.array([0, 0, 0, 0, 1]), np.array([*cuts, LENGTHS[2]])
    write = np.array([4, 2, 5, 1, 3])
    rows = DeltaRows(np.array([1, 4, 2, 5, 0]), write, extend, VALUE.taps, CPU, row=row)
    states = DeltaStates.of(VALUE, 6, torch.float32, CPU)
    states.matrix.fill_(float("nan"))
    x, begins = torch.cat((random_texts()[0], random_texts()[2])), torch.tensor([True, False, False, False, True])
    out = rule(x, begins, rows, WEIGHTS, states)
    assert torch.equal(out[: LENGTHS[0]], right)
    for end, slot in zip(np.cumsum(cuts).tolist(), write, strict=False):
        alone = fresh_states()
        run([[(0, end)]], alone)
        assert torch.equal(states.matrix[slot], alone.matrix[1])
        assert torch.equal(states.window[slot], alone.window[1])


def chunkwise(x: Tensor, begins: Tensor, rows: DeltaRows, weights: DeltaWeights, states: DeltaStates) -> Tensor:
    """The recurrence for decoding, and transformers' chunkwise form for prompts."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    def form(heads: Heads, matrix: Tensor, rows: DeltaRows, begins: Tensor) -> Tensor:
        if len(begins) > 1 or len(heads.q) == 1:
            return recur(heads, matrix, rows, begins)
        at = int(rows.read)
        state = matrix[[at]] if not begins else torch.zeros_like(matrix[[at]])
        q, k = (each.repeat_interleave(VALUE.value_heads // VALUE.key_heads, 1)[None] for each in heads[:2])
        out, final = torch_chunk_gated_delta_rule(
            q * VALUE.key_dim**0.5, k, heads.v[None], g=heads.decay.log()[None], beta=heads.beta[None],
            initial_state=state, output_final_state=True,
        )  # fmt: skip
        matrix[at] = final[0]
        return out[0]

    return delta_rule(x, begins, rows, weights, states, by=form)


def narrow_state(*given: object) -> Tensor:
    out = delta_rule(*given)  # type: ignore[arg-type]
    states = given[-1]
    assert isinstance(states, DeltaStates)
    states.matrix.copy_(states.matrix.bfloat16())
    return out


def late_window(*given: object) -> Tensor:
    states = given[-1]
    assert isinstance(states, DeltaStates)
    before = states.window.clone()
    out = delta_rule(*given)  # type: ignore[arg-type]
    states.window[:, :-1] = states.window[:, 1:].clone()
    states.window[:, -1] = before[:, -1]
    return out


def neighbor(x: Tensor, begins: Tensor, rows: DeltaRows, *given: object) -> Tensor:
    rows.read = rows.read.roll(1)
    return delta_rule(x, begins, rows, *given)  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", [chunkwise, narrow_state, late_window, neighbor])
def test_the_comparison_sees_a_fault(fault):
    """Control: another form for prompts, a state in bfloat16, a late window and a neighbor's slot change bits."""
    steps = [[(0, 7)], [(2, 5)], [(0, 1), (2, 1)], *([[(0, 1), (1, 1)]]), *([[(0, 1)]] * 14), [(2, 3)]]
    cut = run(steps, fresh_states(), rule=fault)
    whole = run([[(0, 23)]], fresh_states(), rule=fault)
    assert not torch.equal(cut[0], whole[0])
    right = run([WHOLE], fresh_states())
    assert torch.equal(run(steps, fresh_states())[0], right[0])
