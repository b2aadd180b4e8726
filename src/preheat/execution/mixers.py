"""The mixers of a model with states or gates: a recurrence in some layers, attention in the others.

A step names the state slots that its rows read and write, see :mod:`preheat.schedule.states`. Without names each row
uses the state slot of its sequence's slot. A sequence that begins at position 0 reads a zero state, whatever its slot
holds, so nothing is cleared when a sequence ends, is aborted or is preempted. Steps run in order, so a slot that
changes hands is written by its old sequence before the new one begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from preheat.backends.base.attention import (
    Attend,
    Attention,
    AttentionWork,
    BlockTables,
    Recurrences,
    StepInputs,
    StepRows,
)
from preheat.backends.base.backend import Backend
from preheat.core import StepStates, own_states
from preheat.model.attention_specs import AttentionSpec
from preheat.model.decoder import Decoder
from preheat.model.layers import RecurrenceWeights
from preheat.model.recurrence_specs import DeltaSpec
from preheat.ops.delta import DeltaRows, DeltaStates, DeltaWeights, delta_rule
from preheat.ops.values import Recurrence

Gate = Callable[[Tensor, Tensor], Tensor]
"""See :meth:`preheat.backends.base.backend.Operations.gated`."""


@dataclass(slots=True)
class MixerWork(AttentionWork):
    """The work of a step: attention's ``own``, and the ``rows`` of the recurrences, None without any."""

    own: AttentionWork
    rows: Any


class HostRecurrences:
    """The reference around a backend's :meth:`~preheat.backends.base.backend.Operations.recur`.

    See :class:`Recurrences`.
    """

    def __init__(self, backend: Backend) -> None:
        self._device, self._recur = backend.device, cache(backend.recur)
        self._rows: DeltaRows | None = None

    def states(self, value: Recurrence, slots: int, dtype: torch.dtype) -> DeltaStates:
        self._taps, _ = value.taps, self._recur(value)
        return DeltaStates.of(value, slots, dtype, self._device)

    def plan(self, step: StepRows, states: StepStates) -> DeltaRows:
        return DeltaRows(states.read, states.write, states.extend, self._taps, self._device, row=states.row)

    def send(self, turn: int, rows: DeltaRows) -> None:
        self._rows = rows

    def run(self, inputs: StepInputs, x: Tensor, weights: DeltaWeights, states: DeltaStates, out: Tensor) -> Tensor:
        rows = self._rows
        assert rows is not None, "no step was sent"
        begins = inputs.positions.index_select(0, rows.first) == 0
        out[: rows.count] = delta_rule(x, begins, rows, weights, states, by=self._recur(weights.value))
        out[rows.count :] = 0
        return out

    def clear(self) -> None:
        """Do nothing: each step sends its rows."""


class _Recurrence(NamedTuple):
    weights: DeltaWeights
    states: DeltaStates
    outputs: int


class _Attention(NamedTuple):
    number: int  # among the layers with keys
    heads: int  # of queries, keys and values
    outputs: int
    gated: bool


class Mixers:
    """``attention`` for the layers of ``decoder`` that have keys, and a recurrence for the others.

    There are ``slots`` state slots, in the model's ``dtype`` where the contract says so. Slot 0 is for padding. Where
    there is no other slot, dummy steps use this one. ``by`` runs the recurrences, and ``gate`` the gates of attention.
    """

    def __init__(
        self,
        attention: Attention,
        decoder: Decoder,
        slots: int,
        *,
        dtype: torch.dtype,
        by: Recurrences,
        gate: Gate,
    ) -> None:
        self.attention, self._last, self._gated, self._recurrences = attention, slots - 1, gate, by
        self._layers: list[_Recurrence | _Attention] = []
        number = 0
        for spec, layer in zip(decoder.spec.layers, decoder.weights.layers, strict=True):
            own, weights = spec.attention, layer.attention
            if isinstance(own, DeltaSpec) and isinstance(weights, RecurrenceWeights):
                states = self._recurrences.states(own.value, slots, dtype)
                self._layers.append(_Recurrence(weights.delta, states, own.attended))
            elif isinstance(own, AttentionSpec):
                heads = own.num_heads + 2 * own.num_kv_heads
                self._layers.append(_Attention(number, heads, own.o.inputs, own.gated))
                number += 1

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
        own, rows = self.attention.plan(step, tables), None
        if self.states:
            states = step.states or own_states(step.slots, step.extend)
            read, write = (np.minimum(each, self._last) for each in (states.read, states.write))
            rows = self._recurrences.plan(step, states._replace(read=read, write=write))
        steady = own.steady if step.states is None else -1
        return MixerWork(own.lists, steady, own.table_writes, own, rows)

    def write(self, turn: int, tables: BlockTables) -> None:
        self.attention.write(turn, tables)

    def send(self, turn: int, work: AttentionWork, inputs: StepInputs) -> None:
        """Send the work of attention and of the recurrences."""
        assert isinstance(work, MixerWork)
        self.attention.send(turn, work.own, inputs)
        if work.rows is not None:
            self._recurrences.send(turn, work.rows)

    def attend(self, inputs: StepInputs, out: Tensor) -> Attend:
        """Return the mixer of each layer.

        ``out`` serves the layers of its width. A padding token's output is zero in layers with states.
        """
        room = {each.outputs: out for each in self._layers}
        for width in room:
            if width != out.shape[1]:
                room[width] = out.new_empty(len(out), width)
        attends = {width: self.attention.attend(inputs, each) for width, each in room.items()}

        def attend(index: int, x: Tensor) -> Tensor:
            layer = self._layers[index]
            given = room[layer.outputs]
            if isinstance(layer, _Recurrence):
                return self._recurrences.run(inputs, x.flatten(1), layer.weights, layer.states, given)
            if not layer.gated:
                return attends[layer.outputs](layer.number, x)
            gates = x[:, layer.heads :].flatten(1)
            found = self._gated(attends[layer.outputs](layer.number, x[:, : layer.heads].contiguous()), gates)
            return found if found is given else given.copy_(found)

        return attend

    def clear(self) -> None:
        self.attention.clear()
        self._recurrences.clear()
