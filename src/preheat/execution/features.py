"""Features: the state of the model that a drafting head reads.

Each token's feature is kept beside its keys and values, at the token's place in its block. It is made of the residual
stream between some layers, copied as a step runs, or is the hidden state of the step. So every token with keys and
values has a feature: in all chunks of a prompt, and in blocks from the prefix cache. Nothing of the step itself is
touched, so no logit can change.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from preheat.backends.base.backend import Backend
from preheat.backends.base.device import HOST_COPIES
from preheat.core import Schedule
from preheat.execution.kv_cache import FeatureCache
from preheat.model.draft_head import Reads
from preheat.schedule.slots import Slots


class Features:
    """Keeps the features that a head ``reads``.

    Steps belong to the sequences in ``slots``; their residual stream has at most ``size`` [tokens, hidden].
    """

    def __init__(
        self,
        cache: FeatureCache,
        reads: Reads,
        slots: Slots,
        backend: Backend,
        *,
        size: tuple[int, int],
    ) -> None:
        tokens, hidden = size
        self.cache, self._reads, self._slots = cache, reads, slots
        self._columns: dict[int, list[slice]] = {}  # by the layer before
        for place, layer in enumerate(reads.layers):
            self._columns.setdefault(layer - 1, []).append(slice(place * hidden, (place + 1) * hidden))
        self._states = cache.rows.new_zeros(tokens, len(reads.layers) * hidden)
        self._places = Places(tokens, backend)

    @property
    def are_hidden_states(self) -> bool:
        """Whether features are the hidden states of a step, which all ranks compute together."""
        return self._reads.fc is None

    def place(self, turn: int, schedule: Schedule, tokens: int) -> None:
        """Prepare for the next step, ``schedule``.

        It is in host copy ``turn``, padded to ``tokens``.
        """
        self._places.send(turn, token_places(self._slots, schedule), tokens)

    def keep(self, layer: int, residual: Tensor) -> None:
        """Copy the state after ``layer``; a :data:`preheat.model.decoder.Tap`."""
        for columns in self._columns.get(layer, ()):
            self._states[: len(residual), columns].copy_(residual)

    def store(self, tokens: int, finish: Callable[[], Tensor]) -> None:
        """Write the features of the step's ``tokens``.

        ``finish`` returns their hidden states, [tokens, hidden]. Padding goes to the pad block.
        """
        fc = self._reads.fc
        found = finish() if fc is None else fc(self._states[:tokens])
        self.cache.rows.index_copy_(0, self._places.rows[:tokens], found)


class FeaturesElsewhere:
    """Features that another rank keeps.

    This rank does its part of computing hidden states, since ranks share layers, and drops them.
    """

    def place(self, turn: int, schedule: Schedule, tokens: int) -> None: ...

    def keep(self, layer: int, residual: Tensor) -> None: ...

    def store(self, tokens: int, finish: Callable[[], Tensor]) -> None:
        finish()


class Places:
    """Rows of a :class:`FeatureCache` in a static buffer: ``rows`` int64 [most].

    Like the rest of a step they are written into one of the host's copies, and copied to the device from there.
    """

    def __init__(self, most: int, backend: Backend) -> None:
        self.rows = torch.zeros(most, dtype=torch.int64, device=backend.device)
        self._host = [backend.host_copy(self.rows) for _ in range(HOST_COPIES)]

    def send(self, turn: int, found: np.ndarray, size: int) -> None:
        """Send the next step's rows ``found``, int64 [n <= size].

        They are padded to ``size`` with the pad block. Return before the device has them.
        """
        host = self._host[turn]
        host.numpy()[: len(found)] = found
        host.numpy()[len(found) : size] = 0
        self.rows[:size].copy_(host[:size], non_blocking=True)


def places(slots: Slots, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the rows of a :class:`FeatureCache`, int64 [n], for ``positions`` [n] of slots ``rows`` [n].

    Positions beyond a sequence's blocks, and so dummy rows, are in the pad block.
    """
    block = np.minimum(positions // slots.block_size, slots.max_blocks - 1)
    found: np.ndarray = (
        slots.block_table[rows, block].astype(np.int64) * slots.block_size + positions % slots.block_size
    )
    return found


def token_places(slots: Slots, schedule: Schedule) -> np.ndarray:
    """Return the rows of all tokens of a step, int64 [tokens]."""
    ends, extend = schedule.extend.cumsum(), schedule.extend
    positions = np.arange(int(ends[-1])) + (schedule.ends - ends).repeat(extend)
    return places(slots, schedule.slots.repeat(extend), positions)
