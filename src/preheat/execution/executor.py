"""The executor: two programs a step, over static buffers, back to back.

``forward(bucket)`` runs all tokens up to the last attention and writes the cache's new keys and values. ``sample(size,
level)`` takes the sampled tokens through the rest and draws. ``forward`` may be cut into parts of a few layers; each
part leaves the input of the next one in static buffers. The device keeps the tokens that it drew, so that the next step
may be launched before the host has seen them. Only the cache keeps state of requests between steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from preheat.backends.base.adapters import AdapterStep
from preheat.backends.base.attention import AttentionLayer, StepInputs
from preheat.backends.base.backend import Backend
from preheat.backends.base.functions import LayerParts, RoutedParts, SharedParts
from preheat.backends.base.sampling import SampledRows, Sampler
from preheat.core import Image, StepResult, Swaps
from preheat.errors import PreheatError
from preheat.execution.buffers import StepBuffers
from preheat.execution.encoder import Encoder
from preheat.execution.features import Features
from preheat.execution.grid_encoder import GridEncoder
from preheat.execution.inference import in_inference_mode
from preheat.execution.input_batch import InputBatch
from preheat.execution.kv_cache import BlockCache, KVCache
from preheat.execution.pooler import Pooler
from preheat.model.adapters import ModelAdapterSlots
from preheat.model.attention_specs import AttentionSpec
from preheat.model.decoder import Attended, Decoder, Deep, Tap
from preheat.model.layers import DenseMlp, MoeMlp
from preheat.ops.sampling import SamplingInput
from preheat.plan.buckets import Bucket
from preheat.plan.programs import Part, Program
from preheat.schedule.adapters import Loads
from preheat.schedule.defrag import swap_parts

LogitWatch = Callable[[Tensor, InputBatch], None]
"""Reader of logits: ``watch(logits, batch)`` is called before anything is drawn from them.

``logits`` are the fp32 logits [sampling rows, vocab] of a step. The reader must neither change nor keep them, nor wait
for the device.
"""


@dataclass(slots=True)
class LaunchedStep:
    """A launched step on the device.

    Its result may be read until another step uses its host copy. ``draw`` belongs to a step that still computes its
    logits: it waits for them, draws, and returns the whole step. Read the result of such a step before the next launch.
    """

    batch: InputBatch
    sampler: Sampler
    prompt_logprobs: dict[int, list[Any]]
    draw: Callable[[InputBatch], LaunchedStep] | None = field(default=None, kw_only=True)

    def result(self) -> StepResult:
        """Wait for the step and return its result."""
        if self.draw is not None:
            return self.draw(self.batch).result()
        batch, rows, reporting = self.batch, self.batch.sampled_rows, self.batch.reporting
        if isinstance(self.sampler, Pooler):
            if batch.bounds is not None:
                return self._sums(self.sampler, batch.bounds)
            states = self.sampler.states(batch.turn, len(rows))
            return StepResult(np.zeros(batch.schedule.total_sampled, np.int64), hidden=_by_row(rows, states))
        tokens, reports = self.sampler.read(batch.turn, len(rows), reporting, batch.alternatives)
        result = StepResult(tokens, prompt_logprobs=self.prompt_logprobs)
        if batch.digested:
            result.digests = self.sampler.digests(batch.turn, len(rows))
        if reports:
            result.logprobs = dict(zip(reporting.tolist(), reports, strict=True))
        return result

    def _sums(self, pooler: Pooler, bounds: np.ndarray) -> StepResult:
        """Return the result of a step whose texts between ``bounds`` are added up."""
        batch, rows = self.batch, self.batch.sampled_rows[bounds[:-1]].tolist()
        sums = pooler.sums(batch.turn, len(rows))
        return StepResult(
            np.zeros(batch.schedule.total_sampled, np.int64),
            hidden={row: sums[place : place + 1] for place, row in enumerate(rows)},
            summed=dict(zip(rows, (bounds[1:] - bounds[:-1]).tolist(), strict=True)),
        )


class Executor:
    """Runs steps of one model on one device.

    A graph holds ``layers_per_graph`` layers, or all. ``encoder`` is for models that see images, ``adapters`` for
    models with adapter slots.
    """

    goes_on = True
    """Whether a step may go on after :meth:`launch` returns, where the backend's functions can start one."""

    @in_inference_mode  # all tensors of a step too: compiled regions would tell them apart
    def __init__(
        self,
        backend: Backend,
        decoder: Decoder,
        cache: KVCache,
        sampler: Sampler,
        buffers: StepBuffers,
        *,
        encoder: Encoder | GridEncoder | None = None,
        adapters: ModelAdapterSlots | None = None,
        layers_per_graph: int | None = None,
    ) -> None:
        self.backend, self.decoder, self.cache = backend, decoder, cache
        self.sampler, self.buffers, self.attention = sampler, buffers, buffers.attention
        self.encoder, self._images = encoder, encoder.embeddings if encoder else None
        self._deep = encoder.deep if encoder else None
        self.adapters = adapters
        spec, limits, device = decoder.spec, buffers.limits, backend.device
        tokens = max(limits.max_num_batched_tokens, limits.max_num_seqs, backend.facts.min_tokens)
        self._residual = torch.zeros(tokens, spec.hidden_size, dtype=decoder.dtype, device=device)
        self._normed = torch.zeros_like(self._residual)
        self._logits = torch.zeros(limits.max_sampled, spec.output_size, dtype=decoder.dtype, device=device)
        self._layers = layers = range(len(spec.layers))
        step = layers_per_graph or len(layers)
        self._parts = [layers[first : first + step] for first in layers[::step]]
        self._kinds = list(spec.first_of_kinds)
        self._attended = torch.zeros(tokens, spec.layers[-1].attention.attended, dtype=decoder.dtype, device=device)
        own, self._inputs = spec.inputs, None
        if own is not None:
            self._inputs = torch.zeros(tokens, len(layers), own.size, dtype=decoder.dtype, device=device)
        self._states = self.states  # states of the last step's tokens
        self._first_tokens = functools.cache(self._views)
        self._first_logits = functools.cache(lambda size: self._logits[:size])
        self.other_caches: list[BlockCache] = []  # caches of the same blocks: a draft model's
        self.features: Features | None = None  # for a head that drafts
        self._watch: LogitWatch | None = None
        self.forwards = backend.programs(self._forward_part, self.attention)
        self.samples = backend.programs(self._sample)
        self._heads = backend.programs(self._head)  # for prompt logprobs; never captured

    @property
    def states(self) -> Attended:
        """Static buffers with the states of a step's tokens.

        They have room for the largest step.
        """
        return Attended(self._attended, self._residual, None if self._inputs is None else self._inputs[:, -1])

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
    def compile(self, programs: Iterable[Program[Any]], threads: int) -> None:
        """Build the kernels of ``programs``, many at a time."""
        building = self.backend.compiling(threads)
        if building is None:
            return
        with building:
            for program in dict.fromkeys(programs):
                match program.kind:
                    case _ if program.draft:
                        continue  # the draft model's executor builds its kernels
                    case "forward":
                        self._use("tokens", program.adapted)
                        self._forward(program.size, self._kinds)
                    case "sampler" if program.size:
                        self._sample(program)
                    case "encoder" if self.encoder is not None:
                        self.encoder.compile(program)
            self.sampler.compile(self._logits)

    def build_function(self, function: str, layer: int | None) -> str:
        """Compile a function of the backend, unless it is there; see :meth:`LayerFunctions.build`.

        Return its name in the code, or nothing where no layer is a function.
        """
        if self.decoder.functions is None:
            return ""
        if function == "draw":
            self.sampler.compile(self._logits)
            return function
        return self.decoder.functions.build(function, layer)

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

    def is_captured(self, program: Program[Bucket]) -> bool:
        """Whether graphs run ``program``."""
        return all(part in self.forwards for part in self._parts_of(program))

    @in_inference_mode
    def capture(self, program: Program[Any]) -> None:
        """Capture ``program`` as graphs, if there are none.

        Its kernels must have run before.
        """
        match program.kind:
            case "forward":
                self._capture_forward(program)
            case "sampler" if program not in self.samples:
                self._capture_sampler(program)
            case "encoder" if self.encoder is not None and program not in self.encoder.programs:
                self.encoder.programs.capture(program)

    def _capture_forward(self, program: Program[Bucket]) -> None:
        """Capture all parts as graphs, or none."""
        parts = self._parts_of(program)
        try:
            for part in parts:
                self.forwards.capture(part)
        except BaseException:
            for part in parts:
                self.forwards.forget(part)
            raise

    def _capture_sampler(self, program: Program[int]) -> None:
        """Capture a graph, and run it on padding."""
        self.samples.capture(program)
        self.buffers.clear()
        self.sampler.clear()
        if self.adapters is not None:
            self.adapters.describe(0, "sampled", np.empty(0, np.int32))
        self.samples.run(program)

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

    def _parts_of(self, program: Program[Bucket]) -> list[Part]:
        if not self.backend.facts.pads_context:
            program = program._replace(size=program.size.without_context())
        return [Part(program, layers) for layers in self._parts]

    def _forward_part(self, part: Part) -> Attended:
        self._use("tokens", part.program.adapted)
        return self._forward(part.program.size, part.layers)

    def _use(self, step: AdapterStep, adapted: bool) -> None:
        """Tell linear layers the kind of their next rows.

        ``adapted``: some rows have adapters.
        """
        if self.adapters is not None:
            self.adapters.use(step if adapted else None)

    def _forward(self, bucket: Bucket, layers: Sequence[int], tap: Tap | None = None) -> Attended:
        """Run ``layers`` of a step.

        They begin with its tokens, or with the states that earlier layers left. Return the states of the tokens; they
        are complete only after the part with the last layer.
        """
        decoder, inputs, begins = self.decoder, self.buffers.inputs(bucket), layers[0] == 0
        tokens = inputs.tokens.shape[0]
        residual, normed, out = self._first_tokens(tokens)
        if begins and decoder.turns is not None and inputs.places is not None:
            decoder.turns.turn(inputs.places)
        before = self._begin(inputs, residual) if begins else normed
        attend, keep = self.attention.attend(inputs, out), self.features.keep if self.features else None
        own, deep = None if self._inputs is None else self._inputs[:tokens], self._adder(inputs)
        after = decoder.layers(
            residual, attend, layers, given=before, inputs=own, eager=tap is not None, tap=tap or keep, deep=deep
        )
        last = None if own is None else own[:, -1]
        if layers[-1] == self._layers[-1]:
            found = Attended(after, residual, last)
            if self.features is not None and tap is None:
                self._store(self.features, found)
            return found
        normed.copy_(after)
        return Attended(out, residual, last)

    def _store(self, features: Features, states: Attended) -> None:
        """Store the ``features`` of a step; its ``states`` stay as they are, for the rows that sample."""
        features.store(len(states.out), lambda: self.decoder.finish(states.map(torch.clone)))

    def _adder(self, inputs: StepInputs) -> Deep | None:
        """Return the adder of deep embeddings; None for a step without images.

        Decoding rows have no image. Only a host looks at the tokens: a graph serves all steps.
        """
        if self._deep is None or inputs.width:
            return None
        if self.backend.facts.on_host and not bool((inputs.tokens < -1).any()):
            return None
        return self._deep.adder(inputs.tokens)

    def _views(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the static buffers of the first ``tokens`` tokens: the residual stream, its norm, and attention."""
        return self._residual[:tokens], self._normed[:tokens], self._attended[:tokens]

    def _begin(self, inputs: StepInputs, residual: Tensor) -> Tensor | None:
        """Fill ``residual`` [tokens, hidden] with the input of the residual stream.

        Return the first layer's input, None if it is the norm of ``residual``.
        """
        weights, scale = self.decoder.weights, self.decoder.spec.embedding.scale
        table, last_token = weights.embedding, self.sampler.last_token
        self.backend.embed(
            inputs, last_token, table, residual, scale=scale, positions=weights.positions, images=self._images,
            types=weights.types,
        )  # fmt: skip
        if self.adapters is not None:
            self.adapters.embed(inputs, last_token, residual)
        if weights.inputs is not None and self._inputs is not None and self.decoder.spec.inputs is not None:
            own = self._inputs[: len(residual)]
            rows, scale = own.flatten(1), self.decoder.spec.inputs.table.scale
            self.backend.embed(inputs, last_token, weights.inputs.table, rows, scale=scale)
            weights.inputs(residual, rows)
        return None

    def _sample(self, program: Program[int]) -> Tensor:
        """Draw, and return the logits that were drawn from."""
        assert program.level is not None, f"{program} draws nothing"
        logits = self._head(program)
        self.sampler.sample(program.level, logits)
        return logits

    def _head(self, program: Program[int]) -> Tensor:
        """Return the logits of the first ``program.size`` sampled tokens."""
        hidden = self._hidden(program.size, adapted=program.adapted)
        return self.decoder.weights.head(hidden, out=self._first_logits(program.size))

    def _hidden(self, size: int, tap: Tap | None = None, *, adapted: bool = False) -> Tensor:
        """Return the hidden states of the first ``size`` sampled tokens."""
        self._use("sampled", adapted)
        index, functions = self.buffers.first_sampled(size), self.decoder.functions
        if functions is not None and tap is None:
            return functions.take(self._states.out, self._states.residual, index)
        sampled = self._states.map(lambda states: self.backend.take_rows(states, index))
        return self.decoder.finish(sampled, eager=tap is not None, tap=tap)


def _by_row(rows: np.ndarray, states: np.ndarray) -> dict[int, np.ndarray]:
    """Return the ``states`` [n, hidden] of each row, in the order of its tokens; ``rows`` [n] ascend."""
    if not len(rows):
        return {}
    ends = [*((rows[1:] != rows[:-1]).nonzero()[0] + 1).tolist(), len(rows)]
    return {int(rows[begin]): states[begin:end] for begin, end in pairwise((0, *ends))}


def attention_layers(decoder: Decoder, cache: KVCache) -> list[AttentionLayer]:
    """Return the input of the attention of each layer that has keys."""
    caches = zip(cache.group_of_layer, cache.layers, strict=True)
    turns = decoder.turns
    ropes = decoder.ropes if turns is None else [turns.rows] * len(decoder.ropes)
    parts = ropes, decoder.alibi, decoder.growth, decoder.weights.layers
    each = zip((layer.attention for layer in decoder.spec.layers), *parts, strict=True)
    keyed = ((spec, *others) for spec, *others in each if isinstance(spec, AttentionSpec))
    layers = ((*next(caches), *of) for of in keyed)
    return [
        AttentionLayer(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.scale,
            window=spec.window,
            cache=layer_cache,
            dtype=decoder.dtype,
            rope=rope,
            qk_norm=weights.attention.qk_norm,
            alibi=alibi,
            kv_scales=spec.kv.scales,
            causal=spec.causal,
            growth=growth,
            sinks=weights.attention.sinks,
            distances=decoder.distances,
            still=spec.head_dim - spec.rope_dim,
            group=group,
            by_token=turns is not None,
            own=spec.source is None,
        )
        for group, layer_cache, spec, rope, alibi, growth, weights in layers
    ]


def layer_parts(decoder: Decoder, attention: Sequence[AttentionLayer]) -> list[LayerParts]:
    """Return the parts of each layer, for a backend that runs layers as functions."""
    found = []
    for layer, each in zip(decoder.weights.layers, attention, strict=True):
        mlp = layer.mlp if isinstance(layer.mlp, DenseMlp) else None
        found.append(
            LayerParts(
                attention=each,
                input_norm=layer.input_norm,
                post_norm=layer.post_norm,
                qkv=layer.attention.qkv,
                o=layer.attention.o,
                gate_up=None if mlp is None else mlp.gate_up,
                down=None if mlp is None else mlp.down,
                routed=None if isinstance(layer.mlp, DenseMlp) else _routed_parts(layer.mlp),
                o_norm=layer.attention_out_norm,
                down_norm=layer.mlp_out_norm,
                whole_qk_norm=layer.attention.whole_qk_norm,
                parallel=layer.parallel,
            )
        )
    return found


def _routed_parts(block: MoeMlp) -> RoutedParts:
    """Return the parts of a block of experts."""
    shared = block.shared
    parts = None if shared is None else SharedParts(shared.block.gate_up, shared.block.down, shared.gate)
    return RoutedParts(block.router, block.experts, parts)
