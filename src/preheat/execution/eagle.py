"""A head of EAGLE-3 that drafts.

It is a draft model of one layer over features of the target. See :mod:`preheat.model.eagle`. At position i the head
reads the token at i + 1 and the feature at i. It draws the next token, with the target's noise for the position i + 2.
Its keys and values are at i, in the target's blocks, as the feature is. After the last position that the target has
computed, the head goes on with features of its own. The output at one position is stored as the feature of the next;
the target overwrites it before the head reads the position again. So drafting the first token and drafting the next
ones are the same program.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from preheat.backends.base import StepInputs
from preheat.execution.draft_model import DraftModel
from preheat.execution.executor import Executor
from preheat.execution.features import Features, Places, places, token_places
from preheat.execution.input_batch import InputBatch, Packer
from preheat.execution.kv_cache import FeatureCache
from preheat.model.decoder import Tap
from preheat.model.eagle import LoadedHead
from preheat.plan.plan import Plan
from preheat.schedule.slots import Slots

Made = tuple[Packer, Executor]


class EagleExecutor(Executor):
    """Runs steps of a head over the features in ``cache``.

    ``slots`` has the sequences.
    """

    @torch.inference_mode()
    def __init__(self, *parts: Any, head: LoadedHead, features: FeatureCache, slots: Slots, **more: Any) -> None:
        super().__init__(*parts, **more)
        self._loaded, self._slots, self._kept = head, slots, features.rows
        tokens, hidden = self._residual.shape
        self._embedded = torch.zeros_like(self._residual)
        self._joined = self._residual.new_zeros(tokens, 2 * hidden)
        self._at, self._next = Places(tokens, self.backend), Places(self.buffers.limits.max_sampled, self.backend)

    def _send(self, batch: InputBatch) -> None:
        """Send the step, with the rows of its features.

        These are the rows of its tokens, and of the next positions of sampled rows.
        """
        super()._send(batch)
        slots, schedule = self._slots, batch.schedule
        tokens, following = token_places(slots, schedule), places(slots, batch.sampled_slots, schedule.sampled()[1])
        self._at.send(batch.turn, tokens, len(self.buffers.inputs(batch.bucket).tokens))
        self._next.send(batch.turn, following, batch.sampling_size)

    def _begin(self, inputs: StepInputs, residual: Tensor) -> Tensor:
        """Begin the residual stream as the feature.

        Return the norms of embedding and feature side by side.
        """
        tokens, hidden = residual.shape
        weights, head = self.decoder.weights, self._loaded
        embedded, joined = self._embedded[:tokens], self._joined[:tokens]
        self.backend.embed(inputs, self.sampler.last_token, weights.embedding, embedded)
        torch.index_select(self._kept, 0, self._at.rows[:tokens], out=residual)
        normed = head.hidden_norm(residual)
        joined[:, :hidden].copy_(weights.layers[0].input_norm(embedded))
        joined[:, hidden:].copy_(normed)
        if head.eagle.norm_before_residual:
            residual.copy_(normed)
        return joined

    def _hidden(self, size: int, tap: Tap | None = None, *, adapted: bool = False) -> Tensor:
        """Return hidden states, and store the features of the next positions.

        A feature is the residual stream before the final norm.
        """
        index = self.buffers.sampled[:size]
        sampled = self._states.map(lambda states: self.backend.take_rows(states, index))
        hidden = self.decoder.finish(sampled, eager=tap is not None, tap=tap)
        self._kept.index_copy_(0, self._next.rows[:size], sampled.residual)
        return hidden


class EagleDrafter(DraftModel):
    """A draft model that computes twice at drafted positions.

    The second time it reads the target's features in place of its own.
    """

    def _take_back(self, slots: Slots, rows: np.ndarray) -> None:
        self._computed[rows] = self._known[rows]
        super()._take_back(slots, rows)


def make_drafter(head: LoadedHead, target: Made, plan: Plan, tokens: int, make: Callable[..., Made]) -> EagleDrafter:
    """Return a drafter of up to ``tokens`` tokens with ``head``.

    It has the slots and blocks of ``target``. The target's steps keep features from now on. ``make(executor=...)`` is
    :func:`preheat.execution.build.build` for the head and its ``plan``.
    """
    packer, executor = target
    slots, limits = packer.slots, plan.limits
    backend = executor.backend
    dtype = backend.activation_dtype(head.dtype)
    kept = FeatureCache(limits.num_blocks, limits.block_size, head.spec.hidden_size, dtype, backend.device)
    own, runs = make(executor=partial(EagleExecutor, head=head, features=kept, slots=slots))
    tokens_of, hidden = executor.states.residual.shape
    executor.features = Features(kept, head.fc, head.eagle.layers, slots, backend, size=(tokens_of, hidden))
    executor.other_caches += [runs.cache, kept]
    return EagleDrafter(tokens, Packer(slots, plan, own.buffers, ahead=1), runs)
