"""The mixers of a model with states: a recurrence in some layers, attention in the others.

A step names the state slots that its rows read and write, see :mod:`preheat.schedule.states`. Without names each row
uses the state slot of its sequence's slot. A sequence that begins at position 0 reads a zero state, whatever its slot
holds, so nothing is cleared when a sequence ends, is aborted or is preempted. Steps run in order, so a slot that
changes hands is written by its old sequence before the new one begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from preheat.backends.base import Attend, Attention, AttentionWork, Backend, BlockTables, StepInputs, StepRows
from preheat.core import own_states
from preheat.model.decoder import Decoder
from preheat.model.layers import RecurrenceWeights
from preheat.model.recurrence_specs import DeltaSpec
from preheat.model.specs import AttentionSpec
from preheat.ops.delta import DeltaRows, DeltaStates, DeltaWeights, Recur, delta_rule
from preheat.ops.gate import gated


@dataclass(slots=True)
class MixerWork(AttentionWork):
    """The work of a step: attention's ``own``, and the ``rows`` of the recurrences."""

    own: AttentionWork
    rows: DeltaRows


class _Recurrence(NamedTuple):
    weights: DeltaWeights
    states: DeltaStates
    by: Recur


class _Attention(NamedTuple):
    number: int  # among the layers with keys
    heads: int  # of queries, keys and values
    outputs: int
    gated: bool


class Mixers:
    """``attention`` for the layers of ``decoder`` that have keys, and a recurrence for the others.

    There are ``slots`` state slots, in the model's ``dtype`` where the contract says so. Slot 0 is for padding. Where
    there is no other slot, dummy steps use this one.
    """

    def __init__(
        self, attention: Attention, decoder: Decoder, slots: int, dtype: torch.dtype, backend: Backend
    ) -> None:
        self.attention, self._last = attention, slots - 1
        self._layers: list[_Recurrence | _Attention] = []
        self._device, number, made = backend.device, 0, cache(backend.recur)
        for spec, layer in zip(decoder.spec.layers, decoder.weights.layers, strict=True):
            own, weights = spec.attention, layer.attention
            if isinstance(own, DeltaSpec) and isinstance(weights, RecurrenceWeights):
                states = DeltaStates.of(own.value, slots, dtype, self._device)
                self._layers.append(_Recurrence(weights.delta, states, made(own.value)))
            elif isinstance(own, AttentionSpec):
                heads = own.num_heads + 2 * own.num_kv_heads
                self._layers.append(_Attention(number, heads, own.o.inputs, own.gated))
                number += 1
        self._taps = {each.weights.value.taps for each in self._layers if isinstance(each, _Recurrence)}.pop()
        self._work: MixerWork | None = None
        self._begins = torch.zeros(0, dtype=torch.bool)

    @property
    def states(self) -> list[DeltaStates]:
        """The states of each layer that has them."""
        return [each.states for each in self._layers if isinstance(each, _Recurrence)]

    def list_sizes(self, tokens: int, rows: int, *, width: int) -> tuple[int, ...]:
        return self.attention.list_sizes(tokens, rows, width=width)

    def plan(self, step: StepRows, tables: BlockTables) -> MixerWork:
        """Plan attention's work and the recurrences' rows.

        They do not change while the rows decode in their own state slots.
        """
        own, states = self.attention.plan(step, tables), step.states or own_states(step.slots, step.extend)
        read, write = (np.minimum(each, self._last) for each in (states.read, states.write))
        rows = DeltaRows(read, write, states.extend, self._taps, self._device, row=states.row)
        steady = own.steady if step.states is None else -1
        return MixerWork(own.lists, steady, own.table_writes, own, rows)

    def write(self, turn: int, tables: BlockTables) -> None:
        self.attention.write(turn, tables)

    def send(self, turn: int, work: AttentionWork, inputs: StepInputs) -> None:
        """Send attention's work, and find the rows that begin their sequence."""
        assert isinstance(work, MixerWork)
        self.attention.send(turn, work.own, inputs)
        self._work, self._begins = work, inputs.positions.index_select(0, work.rows.first) == 0

    def attend(self, inputs: StepInputs, out: Tensor) -> Attend:
        """Return the mixer of each layer.

        ``out`` serves the layers of its width. A padding token's output is zero in layers with states.
        """
        work, begins = self._work, self._begins
        assert work is not None, "no step was sent"
        room = {each.outputs: out for each in self._layers if isinstance(each, _Attention)}
        for width in room:
            if width != out.shape[1]:
                room[width] = out.new_empty(len(out), width)
        attends = {width: self.attention.attend(inputs, each) for width, each in room.items()}

        def attend(index: int, x: Tensor) -> Tensor:
            layer = self._layers[index]
            if isinstance(layer, _Recurrence):
                found = x.new_zeros(len(x), layer.weights.value.value_size)
                found[: work.rows.count] = delta_rule(
                    x.flatten(1), begins, work.rows, layer.weights, layer.states, by=layer.by
                )
                return found
            if not layer.gated:
                return attends[layer.outputs](layer.number, x)
            gates = x[:, layer.heads :].flatten(1)
            found = attends[layer.outputs](layer.number, x[:, : layer.heads].contiguous())
            return gated(found, gates)

        return attend

    def clear(self) -> None:
        self.attention.clear()
