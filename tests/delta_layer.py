"""A layer of the CUDA backend's gated delta rule with random weights, driven step by step."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from preheat.backends.cuda.recurrence.delta import CudaRecurrences, TapedStates
from preheat.backends.cuda.recurrence.kernels import places
from preheat.core import StepStates
from preheat.limits import Limits
from preheat.ops.delta import DeltaRows, DeltaStates, Heads, recur_of, tree
from preheat.ops.values import Recurrence
from tests.recurrences import random_weights

Part = tuple[int, int, int, int]
"""A text, a number of its tokens, and the slots to read and to write."""

PADDING = 2
SEQUENCES = 4


class DeltaLayer:
    """A layer of ``value`` on ``backend``, and texts of ``lengths``; slots begin with the leftovers of others."""

    def __init__(self, backend: Any, value: Recurrence, lengths: tuple[int, ...], dtype: torch.dtype) -> None:
        self.value, self.device, self.lengths = value, backend.device, lengths
        self.weights, draw = random_weights(value, self.device), torch.Generator().manual_seed(4)
        self.texts = [torch.randn(length, value.inputs, generator=draw).to(self.device, dtype) for length in lengths]
        limits = Limits(
            max_model_len=64, max_num_seqs=SEQUENCES, max_num_batched_tokens=sum(lengths) + PADDING,
            max_num_prefill_seqs=None, block_size=16, num_blocks=9, states=3,
        )  # fmt: skip
        self.kernels = CudaRecurrences(limits, backend)
        self.states = self.kernels.states(value, limits.state_slots, dtype)
        filled = [self.states.window, self.states.matrix]
        if isinstance(self.states, TapedStates):
            filled += self.states.tape
            self.states.begun.fill_(1000)  # a longer text had the slots before
        for each in filled:
            each.fill_(float("nan"))
        self.done = [0] * len(lengths)

    def step(self, *parts: Part, width: int = 0) -> Tensor:
        """Return the outputs of a step; neighboring parts of one text are one row. Padding is checked to be zero.

        A text that leaves its state in the slot of a sequence is that sequence, and else the one of its number.
        """
        text, extend, read, write = np.array(parts).T
        row = np.cumsum(np.diff(text, prepend=text[0]) != 0)
        given, positions = [], list[int]()
        for own, count, *_ in parts:
            given.append(self.texts[own][self.done[own] : self.done[own] + count])
            positions += range(self.done[own], self.done[own] + count)
            self.done[own] += count
        x = torch.cat((*given, given[0].new_full((PADDING, self.value.inputs), float("nan"))))
        places_of = torch.tensor([*positions, *[0] * PADDING], dtype=torch.int32, device=self.device)
        last = write[np.append(np.diff(row) != 0, True)][row]
        owners = np.repeat(np.where(last > SEQUENCES, text, last - 1), extend)
        slots = torch.tensor([*owners, *[SEQUENCES] * PADDING], dtype=torch.int32, device=self.device)
        inputs: Any = SimpleNamespace(positions=places_of, slots=slots, rows=4, width=width)
        step: Any = SimpleNamespace(tokens=len(x))
        self.kernels.send(0, self.kernels.plan(step, StepStates(row, extend, read, write)))
        out = x.new_full((len(x), self.value.value_size), float("nan"))
        self.kernels.run(inputs, x, self.weights, self.states, out)
        assert not out[-PADDING:].any()
        return out[:-PADDING]

    def settled(self, text: int, slot: int) -> Tensor:
        """Return the matrices of ``slot``, which has the state of ``text``, without tokens on a tape."""
        if isinstance(self.states, TapedStates):
            at = torch.tensor([self.done[text], slot - 1], dtype=torch.int32, device=self.device)
            inputs: Any = SimpleNamespace(positions=at[:1], slots=at[1:], rows=4, width=0)
            step: Any = SimpleNamespace(tokens=1)
            alone = StepStates(*np.array(((0,), (1,), (slot,), (slot,))))
            self.kernels.send(0, self.kernels.plan(step, alone))
            self.kernels.settle(inputs, self.value, self.states)
        return self.states.matrix[slot]

    def whole(self) -> list[Tensor]:
        """Compute all texts in one step, each in the slot of its number."""
        texts = [(text, length, text + 1, text + 1) for text, length in enumerate(self.lengths)]
        return list(self.step(*texts).split(self.lengths))

    def plain(self, slot: int) -> Tensor:
        """Return the matrices of ``slot`` as the reference has them: [value heads, key dim, value dim]."""
        return self.states.matrix[slot].transpose(1, 2)[:, places(self.value.key_dim, self.device).long()]

    def rows(self) -> DeltaRows:
        """Return the rows of :meth:`whole` for the reference."""
        slots = np.arange(1, 1 + len(self.lengths))
        return DeltaRows(slots, slots, np.array(self.lengths), self.value.taps, self.device)

    def zeros(self) -> DeltaStates:
        """Return states of the reference for :meth:`rows`."""
        return DeltaStates.of(self.value, 1 + len(self.lengths), self.texts[0].dtype, self.device)


def step_four(layer: DeltaLayer, patch: Any, cuts: Sequence[int] = ()) -> tuple[Tensor, Tensor, Tensor]:
    """Give ``layer`` random inputs of step 4; return its answers, the reference's, and the reference's matrices.

    With ``cuts``, the first text is computed alone in as many steps, one token by the form for decoding.
    """
    value, device, tokens = layer.value, layer.device, sum(layer.lengths)
    draw = torch.Generator().manual_seed(7)
    shapes = [(value.key_heads, value.key_dim)] * 2 + [(value.value_heads, value.value_dim)]
    q, k, v = ((torch.randn(tokens, *shape, generator=draw) * 0.2).to(device) for shape in shapes)
    decay, beta = (torch.rand(tokens, value.value_heads, generator=draw).to(device) for _ in range(2))
    skip = torch.rand(value.value_heads, generator=draw).to(device)
    cross = tree(k * q, -1).repeat_interleave(value.value_heads // value.key_heads, 1)
    order, answers, own = places(value.key_dim, device).long(), list[Tensor](), layer.kernels.recur

    def given(inputs: Any, x: Tensor, weights: Any, states: Any, made: list[Tensor]) -> None:
        done = sum(map(len, answers))
        here = slice(done, done + len(x) - PADDING)
        pair, values, scalars = (each[: len(x) - PADDING] for each in made)
        pair[:, :, order], pair[:, :, value.key_dim + order], values[:] = k[here], q[here], v[here]
        scalars[..., :3] = torch.stack((decay[here], beta[here], cross[here]), -1)
        scalars[..., 3] = skip

    def heard(*args: Any) -> None:
        own(*args)
        answers.append(args[-1][-1][:-PADDING])

    patch.setattr(layer.kernels, "prepare", given)
    patch.setattr(layer.kernels, "recur", heard)
    for count in cuts:
        layer.step((0, count, 1, 1), width=int(count == 1))
    if not cuts:
        layer.whole()
    matrix = layer.zeros().matrix.fill_(float("nan"))
    begins = torch.ones(len(layer.lengths), dtype=torch.bool, device=device)
    right = recur_of(value)(Heads(q, k, v, decay, beta), matrix, layer.rows(), begins)
    return torch.cat(answers), right + skip[:, None] * v if value.rule.skip else right, matrix
