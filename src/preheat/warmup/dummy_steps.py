"""Dummy steps: programs of the plan run on dummy requests.

They go through the packer and the executor that serve.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from preheat.core import SamplingParams, Swaps
from preheat.execution.executor import Executor
from preheat.execution.input_batch import InputBatch, Packer
from preheat.execution.launched import LaunchedStep
from preheat.model.decoder import Attended
from preheat.plan.buckets import Bucket
from preheat.plan.plan import Plan
from preheat.plan.programs import Program
from preheat.warmup.dummy_batch import DummyBatches, DummyRow, rows_of

T = TypeVar("T")

SWAPPED_PAIR = (1, 0)
"""The blocks that warm-up swaps: two swaps leave the cache unchanged."""


class DummySteps:
    """Runs dummy steps that leave nothing behind.

    Slots are given back; keys and values go to the pad block.
    """

    def __init__(self, plan: Plan, packer: Packer, executor: Executor) -> None:
        self.plan, self.packer, self.executor = plan, packer, executor
        self._batches = DummyBatches(packer.slots, plan.limits, executor.decoder.spec.vocab_size)
        self._states = Attended(torch.empty(0, 0), torch.empty(0, 0))

    def run(self, program: Program[Bucket], run: Callable[[InputBatch], T]) -> T:
        """Return the result of ``run`` on a batch of ``program``.

        ``run`` is, for example, the executor's `execute`.
        """
        rows = rows_of(self.plan.dispatcher.example(program.size), self.plan.limits)
        with self._batches.work(rows, adapter_slots=self._adapter_slots(program)) as schedule:
            batch = self.packer.pack(schedule)
            if batch.forward_program != program:
                raise RuntimeError(f"the dummy step for {program} runs as {batch.forward_program}")
            return run(batch)

    def run_ahead(self, program: Program[Bucket], count: int) -> None:
        """Run ``count`` steps of ``program``, each launched while the one before it runs."""
        launched = deque[LaunchedStep]()

        def run(first: InputBatch) -> None:
            for number in range(count):
                batch = first if not number else self.packer.pack(first.schedule)
                launched.append(self.executor.launch(batch))
                if len(launched) > 1:
                    launched.popleft().result()
            launched.popleft().result()

        self.run(program, run)

    def sample(self, program: Program[int], params: SamplingParams, times: int) -> bool:
        """Sample the rows of ``program`` ``times`` times from random hidden states.

        Returns False if it has no rows.
        """
        rows = self._batches.sampled(program.size, params)
        with self._batches.work(rows, params, adapter_slots=self._adapter_slots(program)) as schedule:
            if not schedule.rows:
                return False
            batch = self.packer.pack(schedule)
            attended = self._attended(batch.padded_tokens)
            for _ in range(times):
                self.executor.finish(attended, batch)
        return True

    def logits(self) -> Tensor:
        """Return the logits of a sequence's first token.

        They are fp32 [1, vocab] on the host, the same at every call.
        """
        with self._batches.work([DummyRow(0, 1, decoding=True)]) as schedule:
            return self.executor.logits(self.packer.pack(schedule)).cpu().clone()

    def encode(self, images: int, cells: int = 0) -> None:
        """Encode ``images`` images of noise; nothing reads their embeddings.

        Images of any size have ``cells``, in one row.
        """
        assert self.executor.encoder is not None, "the model sees no images"
        encoder, grid = self.executor.encoder, (1, cells) if cells else None
        self.executor.encode([(place, encoder.noise(place, grid)) for place in range(images)])

    def swap(self, pairs: int) -> None:
        """Swap blocks 0 and 1 in every pair.

        Padding would swap block 0 with itself and contradict that.
        """
        self.executor.swap(Swaps(np.full((pairs, 2), SWAPPED_PAIR, np.int32), pairs))

    def _adapter_slots(self, program: Program[Any]) -> int:
        """Return the number of adapter slots of ``program``'s rows.

        The rows use them in turn; 0 without adapters.
        """
        if not program.adapted:
            return 0
        assert self.executor.adapters is not None, "there are no adapter slots"
        return self.executor.adapters.count

    def _attended(self, tokens: int) -> Attended:
        """Return random states of ``tokens`` tokens, the same at every call."""
        if len(self._states.out) < tokens:
            decoder = self.executor.decoder
            device = decoder.weights.embedding.device
            generator = torch.Generator(device).manual_seed(0)
            count = max(tokens, 2 * self.plan.sampler_sizes[-1])
            widths = [decoder.spec.layers[-1].attention.attended, decoder.spec.hidden_size]
            widths += [] if decoder.spec.inputs is None else [decoder.spec.inputs.size]
            random = (torch.randn(count, width, generator=generator, device=device) for width in widths)
            self._states = Attended(*(states.to(decoder.dtype) for states in random))
        return self._states.map(lambda states: states[:tokens])
