"""A head that drafts: a draft model of one layer over features of the target.

See :mod:`preheat.model.eagle` and :mod:`preheat.model.mtp`. At position i the head reads the token at i + 1 and the
feature at i. It draws the next token, with the target's noise for the position i + 2.
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

from preheat.backends.base.adapters import AdapterStep
from preheat.backends.base.attention import StepInputs
from preheat.execution.draft_model import DraftModel
from preheat.execution.executor import Executor
from preheat.execution.features import Features, Places, places, token_places
from preheat.execution.inference import in_inference_mode
from preheat.execution.input_batch import InputBatch, Packer
from preheat.execution.kv_cache import FeatureCache
from preheat.model.adapters import ModelAdapterSlots
from preheat.model.decoder import Tap
from preheat.model.draft_head import LoadedHead
from preheat.plan.plan import Plan
from preheat.schedule.slots import Slots

Made = tuple[Packer, Executor]


class HeadExecutor(Executor):
    """Runs steps of a head over the features in ``cache``.

    ``slots`` has the sequences. ``shared`` are the target's adapters, in linear layers that the head uses too.
    """

    @in_inference_mode
    def __init__(
        self,
        *parts: Any,
        head: LoadedHead,
        features: FeatureCache,
        slots: Slots,
        shared: ModelAdapterSlots | None,
        **more: Any,
    ) -> None:
        super().__init__(*parts, **more)
        self._shared = shared
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

    def _begin(self, inputs: StepInputs, residual: Tensor) -> Tensor | None:
        """Begin the residual stream of embeddings and features; return the layer's input as the head does."""
        tokens, table = len(residual), self.decoder.weights.embedding
        embedded, joined = self._embedded[:tokens], self._joined[:tokens]
        self.backend.embed(inputs, self.sampler.last_token, table, embedded)
        torch.index_select(self._kept, 0, self._at.rows[:tokens], out=residual)
        return self._loaded.begin(embedded, residual, joined)

    def _use(self, step: AdapterStep, adapted: bool) -> None:
        """Leave adapters out: drafts are drawn without them."""
        if self._shared is not None:
            self._shared.use(None)

    def _hidden(self, size: int, tap: Tap | None = None, *, adapted: bool = False) -> Tensor:
        """Return hidden states, and store the features of the next positions."""
        self._use("sampled", adapted)
        index = self.buffers.sampled[:size]
        sampled = self._states.map(lambda states: self.backend.take_rows(states, index))
        hidden = self.decoder.finish(sampled, eager=tap is not None, tap=tap)
        self._kept.index_copy_(0, self._next.rows[:size], self._loaded.following(sampled.residual, hidden))
        return hidden


class HeadDrafter(DraftModel):
    """A draft model that computes twice at drafted positions.

    The second time it reads the target's features in place of its own.
    """

    def _take_back(self, slots: Slots, rows: np.ndarray) -> None:
        self._computed[rows] = self._known[rows]
        super()._take_back(slots, rows)


def make_drafter(head: LoadedHead, target: Made, plan: Plan, tokens: int, make: Callable[..., Made]) -> HeadDrafter:
    """Return a drafter of up to ``tokens`` tokens with ``head``.

    It has the slots and blocks of ``target``. The target's steps keep features from now on. ``make(executor=...)`` is
    :func:`preheat.execution.build.build` for the head and its ``plan``.
    """
    packer, executor = target
    slots, limits = packer.slots, plan.limits
    backend = executor.backend
    dtype = backend.activation_dtype(head.dtype)
    kept = FeatureCache(limits.num_blocks, limits.block_size, head.spec.hidden_size, dtype, backend.device)
    own, runs = make(executor=partial(HeadExecutor, head=head, features=kept, slots=slots, shared=executor.adapters))
    tokens_of, hidden = executor.states.residual.shape
    executor.keep_features(Features(kept, head.reads, slots, backend, size=(tokens_of, hidden)))
    executor.other_caches += [runs.cache, kept]
    return HeadDrafter(tokens, Packer(slots, plan, own.buffers, ahead=1), runs)
