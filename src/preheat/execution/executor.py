"""The executor: the two programs of a step, back to back.

The device keeps the tokens that it drew, so that the next step may be launched before the host has seen them. Only the
cache keeps state of requests between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from preheat.backends.base.sampling import SampledRows
from preheat.core import Image, StepResult, Swaps
from preheat.errors import PreheatError
from preheat.execution.inference import in_inference_mode
from preheat.execution.input_batch import InputBatch
from preheat.execution.launched import LaunchedStep
from preheat.execution.model_programs import ModelPrograms
from preheat.execution.pooler import Pooler
from preheat.model.decoder import Attended, Tap
from preheat.ops.sampling import SamplingInput
from preheat.plan.programs import Part, Program
from preheat.schedule.adapters import Loads
from preheat.schedule.defrag import swap_parts

LogitWatch = Callable[[Tensor, InputBatch], None]
"""Reader of logits: ``watch(logits, batch)`` is called before anything is drawn from them.

``logits`` are the fp32 logits [sampling rows, vocab] of a step. The reader must neither change nor keep them, nor wait
for the device.
"""


class Executor(ModelPrograms):
    """Runs steps of one model on one device."""

    goes_on = True
    """Whether a step may go on after :meth:`launch` returns, where the backend's functions can start one."""

    _watch: LogitWatch | None = None

    def on_death(self, report: Callable[[PreheatError], None]) -> None:
        """Have ``report`` called when another process of the engine dies.

        It is called in a thread. Here there is no other process.
        """

    def watch_logits(self, watch: LogitWatch | None) -> None:
        """Let ``watch`` see the logits of every step; None: no reader."""
        self._watch = watch

    def execute(self, batch: InputBatch) -> StepResult:
        """Run a step and wait for it."""
        return self.launch(batch).result()

    @in_inference_mode  # embeddings with a scale or positions are torch's, in static buffers
    def launch(self, batch: InputBatch) -> LaunchedStep:
        """Start a step behind all work started before.

        If a row wants prompt logprobs, wait for the step: the logprobs may be many.
        """
        if self._start(batch):
            return LaunchedStep(batch, self.sampler, {}, draw=self._finish)
        self._run(batch)
        return self._draw(batch)

    def _start(self, batch: InputBatch) -> bool:
        """Start a step up to its logits in the backend's functions, or return False.

        The functions run plain steps: their rows sample, without adapters, images, states that are kept, inputs of
        each layer, or positions of several parts.
        """
        functions, size = self.decoder.functions, batch.sampling_size
        if functions is None or not self.goes_on or not size or batch.adapters is not None:
            return False
        if self.features is not None or self.encoder is not None or isinstance(self.sampler, Pooler):
            return False
        if self._inputs is not None or self.decoder.turns is not None:
            return False
        self._send(batch)
        self._use("tokens", False)
        inputs = self.buffers.inputs(batch.bucket)
        residual = self._first_tokens(inputs.tokens.shape[0])[0]
        self._begin(inputs, residual)
        index, logits = self.buffers.first_sampled(size), self._first_logits(size)
        attended = functions.start(residual, index, self.decoder.weights.head, logits)
        if attended is not None:
            self._states = Attended(attended, residual)
        return attended is not None

    @in_inference_mode
    def _finish(self, batch: InputBatch) -> LaunchedStep:
        """Wait for the logits of a started step, and draw."""
        self._wait()
        self.sampler.describe(batch.turn, batch.sampling, batch.sampled_slots)
        logits = self._first_logits(batch.sampling_size)
        self.sampler.sample(batch.sampling.level, logits)
        return self._answer(batch, self._watched(batch, logits))

    def _wait(self) -> None:
        """Wait for a started step: its input and its states are static buffers."""
        if self.decoder.functions is not None:
            self.decoder.functions.wait()

    @in_inference_mode
    def begin(self, batch: InputBatch) -> None:
        """Start a step up to its logits.

        :meth:`complete` draws from them once the masks are written.
        """
        self._run(batch)

    @in_inference_mode
    def complete(self, batch: InputBatch) -> LaunchedStep:
        """Start the rest of the step that began last."""
        return self._draw(batch)

    def masks(self, turn: int) -> np.ndarray:
        """Return the masks of host copy ``turn``, for writing.

        They are int32 [sampled tokens, words].
        """
        return self.sampler.masks(turn)

    @in_inference_mode
    def forward(self, batch: InputBatch, *, eager: bool = False) -> Attended:
        """Run a step's tokens and return their states.

        The states are valid until the next step. Keys and values are in the cache then.
        """
        self._run(batch, eager=eager)
        return self._states.map(lambda states: states[: batch.bucket.tokens])

    @in_inference_mode
    def finish(self, attended: Attended, batch: InputBatch) -> StepResult:
        """Return the result of ``batch`` from the states of its tokens."""
        self._send(batch)
        self._states = self.states
        for static, given in zip(self._states, attended, strict=True):
            if static is not None and given is not None:
                static[: len(given)].copy_(given)
        return self._draw(batch).result()

    @in_inference_mode
    def logits(self, batch: InputBatch, *, eager: bool = False, tap: Tap | None = None) -> Tensor:
        """Return fp32 [sampling rows, vocab] of a step, a new tensor.

        The programs that serve run it, or ``eager`` operations. ``tap`` is called after every layer and needs eager
        operations.
        """
        if tap is None and not eager and self._start(batch):
            self._finish(batch).result()
            return self._first_logits(batch.sampling_size)[: len(batch.sampled_rows)].to(torch.float32, copy=True)
        if tap is None:
            self._run(batch, eager=eager)
        else:
            self._send(batch)
            adapted = batch.adapters is not None
            self._use("tokens", adapted)
            self._states = self._forward(batch.bucket, self._layers, tap)
            self._hidden(batch.sampling_size, tap, adapted=adapted)
        logits = self._sample_rows(batch, eager=eager) if len(batch.sampled_rows) else None
        self._answer(batch, logits).result()
        kept = self._logits[:0] if logits is None else logits[: len(batch.sampled_rows)]
        return kept.to(torch.float32, copy=True)  # logits may be a static buffer; the next step overwrites it

    @in_inference_mode
    def draw(
        self, logits: Tensor, sampling: SamplingInput, slots: np.ndarray, *, turn: int | None = None
    ) -> np.ndarray:
        """Draw from ``logits`` [rows, vocab] for the sequences in ``slots`` [rows]: tokens, integers [rows].

        ``turn`` is the host copy, taken for this call, that holds the rows' masks; by default the next one.
        """
        return self.draw_with_logprobs(logits, sampling, slots, np.empty(0, np.int64), turn=turn)[0]

    @in_inference_mode
    def draw_with_logprobs(
        self,
        logits: Tensor,
        sampling: SamplingInput,
        slots: np.ndarray,
        reporting: np.ndarray,
        *,
        turn: int | None = None,
    ) -> SampledRows:
        """Draw as :meth:`draw`, and report log-probabilities of the rows at ``reporting``.

        Each report has the drawn token, and the tokens that the request names.
        """
        turn = self.buffers.turn()[0] if turn is None else turn
        self.sampler.describe(turn, sampling, slots)
        given, reports = logits.to(self._logits), len(reporting) > 0
        self.sampler.sample(sampling.level, given)
        if reports:
            self.sampler.report(given)
        self.sampler.fetch(turn, tokens=True, reports=reports)
        return self.sampler.read(turn, len(logits), reporting, np.zeros(len(reporting), np.int64))

    @in_inference_mode
    def load_adapters(self, loads: Loads) -> None:
        """Start the copies that load adapters into slots, between two steps."""
        assert self.adapters is not None, "there are no adapter slots"
        for slot, adapter in loads:
            self.adapters.load(slot, adapter.packed)

    @in_inference_mode
    def clear_adapter(self, slot: int) -> None:
        """Empty adapter slot ``slot``: nothing is added to its rows any more."""
        assert self.adapters is not None, "there are no adapter slots"
        self.adapters.clear(slot)

    @in_inference_mode
    def encode(self, images: Sequence[tuple[int, Image]]) -> None:
        """Encode ``images``, each to its place among the embeddings."""
        assert self.encoder is not None, "the model sees no images"
        self.encoder.encode(self.buffers.turn()[0], images)

    @in_inference_mode
    def swap(self, swaps: Swaps) -> None:
        """Swap the contents of blocks; where programs are graphs, padded to the size of one program."""
        for part in swap_parts(swaps.pairs, swaps.size, padded=self.backend.facts.captures):
            pairs = torch.from_numpy(part).to(torch.int64).to(self.backend.device)
            for cache in (self.cache, *self.other_caches):
                cache.swap(pairs)

    @in_inference_mode
    def fill_block(self, block: int, byte: int) -> None:
        """Overwrite all bytes of a block.

        0 gives zeros, and 255 numbers that are NaN.
        """
        for cache in (self.cache, *self.other_caches):
            cache.data[:, block].view(torch.uint8).fill_(byte)

    @in_inference_mode
    def fill_values(self, layers: Sequence[int], block: int, place: int) -> None:
        """Overwrite the cached values of a token in ``layers``.

        The token is at ``place`` of ``block``, on this rank. The values are so great that every sum with them shows it.
        """
        great = min(torch.finfo(self.cache.data.dtype).max / 4, 1e30)
        for layer in layers:
            values = self.cache.layers[layer][block, -1, :, place]
            values.copy_(torch.full(values.shape, great))

    @in_inference_mode
    def prepare(self, batch: InputBatch) -> None:
        """Run one layer of each kind of a step, and draw.

        All kernels and calls of the step's programs have then run once.
        """
        self._send(batch)
        for layer in self._kinds:
            self.forwards.run(Part(batch.forward_program, range(layer, layer + 1)), eager=True)
        if self.features is not None:
            tokens = len(self.buffers.inputs(batch.bucket).tokens)
            self._store(self.features, self.states.map(lambda states: states[:tokens]))
        self._states = self.states
        self._draw(batch).result()

    def _send(self, batch: InputBatch) -> None:
        """Send the input of the step's programs to the device.

        Images that it lacks are encoded.
        """
        self._wait()
        self.buffers.send(batch.turn, batch.pieces)
        inputs = self.buffers.inputs(batch.bucket)
        self.attention.send(batch.turn, batch.work, inputs)
        if self.features is not None:
            self.features.place(batch.turn, batch.schedule, len(inputs.tokens))
        if batch.schedule.images is not None and self.encoder is not None:
            self.encoder.encode(batch.turn, batch.schedule.images.encode)
        if batch.adapters is not None and self.adapters is not None:
            self.adapters.describe(batch.turn, "tokens", batch.adapters.repeat(batch.schedule.extend))
            self.adapters.describe(batch.turn, "sampled", batch.adapters[batch.sampled_rows])

    def _run(self, batch: InputBatch, *, eager: bool = False) -> None:
        self._send(batch)
        for part in self._parts_of(batch.forward_program):
            self._states = self.forwards.run(part, eager=eager)

    def _draw(self, batch: InputBatch) -> LaunchedStep:
        return self._answer(batch, self._sample_rows(batch) if len(batch.sampled_rows) else None)

    def _sample_rows(self, batch: InputBatch, *, eager: bool = False) -> Tensor:
        """Draw for the sampling rows; return their logits [sampling_size, vocab]."""
        self.sampler.describe(batch.turn, batch.sampling, batch.sampled_slots)
        return self._watched(batch, self.samples.run(batch.sampler_program, eager=eager))

    def _watched(self, batch: InputBatch, logits: Tensor) -> Tensor:
        """Let the reader of logits see the logits of a step, and return them."""
        if self._watch is not None:
            self._watch(self._drawn(batch, logits).float(), batch)
        return logits

    def _drawn(self, batch: InputBatch, logits: Tensor) -> Tensor:
        """Return the logits of sampled positions; in an engine that pools, the last state of each sampling row."""
        if isinstance(self.sampler, Pooler):
            places = np.searchsorted(batch.sampled_rows, batch.schedule.sampled()[0], side="right") - 1
            return logits[torch.from_numpy(places).to(logits.device)]
        return logits[: len(batch.sampled_rows)]

    def _answer(self, batch: InputBatch, logits: Tensor | None) -> LaunchedStep:
        """Compute the wanted logprobs and digests, and start all copies to the host."""
        reports = len(batch.reporting) > 0
        if logits is not None and reports:
            self.sampler.report(logits)
        if logits is not None and batch.digested:
            self.sampler.digest(batch.turn, logits)
        if isinstance(self.sampler, Pooler) and batch.bounds is not None:
            self.sampler.add_up(batch.turn, batch.bounds)
            reports = False  # the states themselves stay on the device
        self.sampler.fetch(batch.turn, tokens=logits is not None, reports=reports)
        return LaunchedStep(batch, self.sampler, self._prompt_logprobs(batch))

    def _prompt_logprobs(self, batch: InputBatch) -> dict[int, list[Any]]:
        """Return each row's entries, one per successor.

        An entry comes from the hidden state of the token before the successor.
        """
        found: dict[int, list[Any]] = {}
        for part in batch.prompt_parts:
            size = len(part.before)
            self.buffers.sampled[:size].copy_(torch.from_numpy(part.before))
            program = Program("head", size, adapted=batch.adapters is not None)
            if batch.adapters is not None and self.adapters is not None:
                self.adapters.describe(batch.turn, "sampled", batch.adapters[part.row].repeat(size))
            entries = self.sampler.logprobs(self._heads.run(program), part.successors, part.alternatives)
            found.setdefault(part.row, []).extend(entries)
        return found
