"""Dummy steps: programs of the plan run on dummy requests, through the packer and the executor that serve."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from preheat.core import SamplingParams, Swaps
from preheat.execution.encoder import noise
from preheat.execution.executor import Executor, LaunchedStep
from preheat.execution.input_batch import InputBatch, Packer
from preheat.model.decoder import Attended
from preheat.plan.buckets import Bucket
from preheat.plan.plan import Plan
from preheat.warmup.dummy_batch import DummyBatches, DummyRow, rows_of

T = TypeVar("T")

SWAPPED_PAIR = (1, 0)
"""The blocks that warm-up swaps: two swaps leave the cache unchanged."""


class DummySteps:
    """Runs dummy steps, which leave nothing behind: slots are given back, keys and values go to the pad block."""

    def __init__(self, plan: Plan, packer: Packer, executor: Executor) -> None:
        self.plan, self.packer, self.executor = plan, packer, executor
        self._batches = DummyBatches(packer.slots, plan.limits, executor.decoder.spec.vocab_size)
        self._states = Attended(torch.empty(0, 0), torch.empty(0, 0))

    @contextmanager
    def adapted(self) -> Iterator[None]:
        """Meanwhile all rows of dummy steps have adapters, in every place in turn."""
        seats = self.executor.adapters
        assert seats is not None, "there are no places for adapters"
        self._batches.places = seats.places
        try:
            yield
        finally:
            self._batches.places = 0

    def run(self, bucket: Bucket, run: Callable[[InputBatch], T]) -> T:
        """The result of ``run``, such as the executor's `execute`, on a batch padded to ``bucket``."""
        rows = rows_of(self.plan.dispatcher.example(bucket), self.plan.limits)
        with self._batches.work(rows) as schedule:
            batch = self.packer.pack(schedule)
            if batch.bucket != bucket:
                raise RuntimeError(f"the dummy step for {bucket} runs as {batch.bucket}")
            return run(batch)

    def run_ahead(self, bucket: Bucket, count: int) -> None:
        """``count`` steps padded to ``bucket``, each launched while the one before it runs."""
        launched = deque[LaunchedStep]()

        def run(first: InputBatch) -> None:
            for number in range(count):
                batch = first if not number else self.packer.pack(first.schedule)
                launched.append(self.executor.launch(batch))
                if len(launched) > 1:
                    launched.popleft().result()
            launched.popleft().result()

        self.run(bucket, run)

    def sample(self, rows: int, params: SamplingParams, times: int) -> bool:
        """Sample ``rows`` rows ``times`` times from random hidden states; False if there are no rows to sample from."""
        with self._batches.work(self._batches.sampled(rows, params), params) as schedule:
            if not schedule.rows:
                return False
            batch = self.packer.pack(schedule)
            attended = self._attended(batch.padded_tokens)
            for _ in range(times):
                self.executor.finish(attended, batch)
        return True

    def logits(self) -> Tensor:
        """fp32 [1, vocab] on the host of a step of one token, the first of its sequence: the same at every call."""
        with self._batches.work([DummyRow(0, 1, decoding=True)]) as schedule:
            return self.executor.logits(self.packer.pack(schedule)).cpu().clone()

    def encode(self, images: int) -> None:
        """Encode so many images of noise, whose embeddings nothing reads."""
        assert self.executor.encoder is not None, "the model sees no images"
        tower = self.executor.encoder.tower
        self.executor.encode([(place, noise(tower, place)) for place in range(images)])

    def swap(self, pairs: int) -> None:
        """All pairs are the same, because padding would swap block 0 with itself, which contradicts swapping it."""
        self.executor.swap(Swaps(np.full((pairs, 2), SWAPPED_PAIR, np.int32), pairs))

    def _attended(self, tokens: int) -> Attended:
        """Random states of ``tokens`` tokens, the same at every call."""
        if len(self._states.out) < tokens:
            decoder = self.executor.decoder
            device = decoder.weights.embedding.device
            generator = torch.Generator(device).manual_seed(0)
            count = max(tokens, 2 * self.plan.sampler_sizes[-1])
            widths = decoder.spec.layers[-1].attention.o.inputs, decoder.spec.hidden_size
            random = (torch.randn(count, width, generator=generator, device=device) for width in widths)
            self._states = Attended(*(states.to(decoder.dtype) for states in random))
        return Attended(*(states[:tokens] for states in self._states))
