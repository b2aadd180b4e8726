"""The executor of a device that runs asynchronously: two programs a step, over static buffers, back to back.

``forward(shape)`` runs all tokens up to the last attention and writes the cache's new keys and values, ``sample(size,
level)`` takes those that are sampled through the rest and draws. The first may be cut into parts of a few layers, which
hand on what the next one begins with in static buffers. The device keeps the tokens that it drew, so that the next step
may be launched before anyone has seen them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from preheat.backends.cuda.attention import Workspace, decode_attention, prefill_attention
from preheat.backends.cuda.embedding import embed, take_rows
from preheat.backends.cuda.launch import compiling
from preheat.backends.cuda.rotary import rope_and_write
from preheat.backends.cuda.sampler import DeviceSampler, read_report
from preheat.core import StepResult, Swaps, TokenLogprobs
from preheat.execution.buffers import HOST_COPIES, Inputs, StepBuffers
from preheat.execution.flat import FlatBatch
from preheat.execution.graphs import Part, Programs
from preheat.execution.kv_cache import KVCache
from preheat.execution.sampling import SamplingBatch
from preheat.model.decoder import Attended, Attention, Decoder, Tap
from preheat.plan.buckets import Bucket
from preheat.plan.plan import Plan
from preheat.plan.programs import SamplerProgram
from preheat.schedule.defrag import pad_pairs

if TYPE_CHECKING:
    from preheat.backends.cuda.linear import CudaLinear
    from preheat.ops.top_k_top_p import SamplingMetadata

LogitWatch = Callable[[Tensor, FlatBatch], None]
"""As :data:`preheat.execution.executor.LogitWatch`."""


class Answer:
    """Where the answers of ``sampler`` go on the host: ``arrays`` are its tokens, report_ids and report_values."""

    def __init__(self, sampler: DeviceSampler) -> None:
        cuda = sampler.tokens.is_cuda
        self._from = sampler.tokens, sampler.report_ids, sampler.report_values
        self._to = [torch.zeros(each.shape, dtype=each.dtype, pin_memory=cuda) for each in self._from]
        self.arrays = [each.numpy() for each in self._to]
        self._there = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]

    def fetch(self, tokens: bool, reports: bool) -> None:
        """Have the device send what is wanted, of all rows; returns before it is there."""
        for wanted, source, target in zip((tokens, reports, reports), self._from, self._to, strict=True):
            if wanted:
                target.copy_(source, non_blocking=True)
        if self._there is not None:
            self._there.record()

    def wait(self) -> None:
        """Until what was fetched last, and all that was launched before, is there."""
        if self._there is not None:
            self._there.synchronize()


@dataclass(slots=True)
class Running:
    """A step on the device, whose ``answer`` may be waited for until another step uses it."""

    batch: FlatBatch
    answer: Answer
    prompt_logprobs: dict[int, list[TokenLogprobs]]

    def result(self) -> StepResult:
        """Wait for it."""
        self.answer.wait()
        batch, (tokens, ids, values) = self.batch, self.answer.arrays
        rows, reporting = batch.sampled_rows, batch.reporting
        result = StepResult(tokens[: len(rows)].copy(), prompt_logprobs=self.prompt_logprobs)
        if len(reporting):
            entries = read_report(ids[reporting], values[reporting], result.tokens[reporting], batch.alternatives)
            result.logprobs = dict(zip(rows[reporting].tolist(), entries, strict=True))
        return result


class DeviceExecutor:
    """Runs steps of one model on one device, whose current stream it uses. A graph holds ``layers_per_graph`` layers,
    or all.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        sampler: DeviceSampler,
        buffers: StepBuffers,
        layers_per_graph: int | None = None,
    ) -> None:
        self.decoder, self.cache, self.sampler, self.buffers = decoder, cache, sampler, buffers
        spec, limits = decoder.spec, buffers.limits
        self._device = device = decoder.weights.embedding.device
        tokens, rows = max(limits.max_num_batched_tokens, limits.max_num_seqs), limits.max_num_seqs
        self._residual = torch.zeros(tokens, spec.hidden_size, dtype=decoder.dtype, device=device)
        self._normed = torch.zeros_like(self._residual)
        self._attended = torch.zeros(tokens, spec.q_size, dtype=decoder.dtype, device=device)
        self._logits = torch.zeros(rows, spec.vocab_size, dtype=decoder.dtype, device=device)
        self._workspace = Workspace(rows * buffers.max_splits, tokens, spec.num_heads, spec.head_dim, device)
        self._scale = spec.head_dim**-0.5
        self._head_map = cast("CudaLinear", decoder.weights.head)
        self._layers = layers = range(len(decoder.weights.layers))
        step = layers_per_graph or len(layers)
        self._parts = [layers[first : first + step] for first in layers[::step]]
        self._kinds = sorted(spec.layer_windows.index(window) for window in set(spec.layer_windows))
        self._live, self._successors = (torch.zeros(n, dtype=torch.int32, device=device) for n in (1, rows))
        words, pin = sampler.input.words, device.type == "cuda"
        self._settings = [torch.zeros(words, dtype=torch.int32, pin_memory=pin) for _ in range(HOST_COPIES)]
        self._settings_arrays = [settings.numpy() for settings in self._settings]
        self._packed: list[tuple[SamplingBatch | None, int]] = [(None, 0)] * HOST_COPIES  # of each copy, and its words
        self._described: SamplingBatch | None = None  # what the device's copy says
        self._answers = [Answer(sampler) for _ in range(HOST_COPIES)]
        pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._watch: LogitWatch | None = None
        self.forwards = Programs[Part](lambda part: self._forward(*part), pool)
        self.samples = Programs[SamplerProgram](self._sample, pool)

    def watch_logits(self, watch: LogitWatch | None) -> None:
        """Let ``watch`` see the logits of every step from now on; None: nobody."""
        self._watch = watch

    def execute(self, batch: FlatBatch) -> StepResult:
        """Run a step and wait for it."""
        return self.launch(batch).result()

    @torch.inference_mode()
    def launch(self, batch: FlatBatch) -> Running:
        """Start a step behind all that was started before.

        A step in which prompt logprobs are wanted is waited for: they may be many.
        """
        self._run(batch)
        return self._draw(batch)

    @torch.inference_mode()
    def forward(self, batch: FlatBatch, *, eager: bool = False) -> Attended:
        """Where all T tokens stand, until the next step; keys and values are in the cache."""
        self._run(batch, eager=eager)
        return Attended(self._attended[: batch.shape.tokens], self._residual[: batch.shape.tokens])

    @torch.inference_mode()
    def finish(self, attended: Attended, batch: FlatBatch) -> StepResult:
        """What the rows of ``batch`` want to know of its T tokens."""
        self.buffers.send(batch.turn, batch.pieces)
        for static, given in zip((self._attended, self._residual), attended, strict=True):
            static[: len(given)].copy_(given)
        return self._draw(batch).result()

    @torch.inference_mode()
    def logits(self, batch: FlatBatch, *, eager: bool = False, tap: Tap | None = None) -> Tensor:
        """fp32 [sampling rows, vocab] of a step, computed by the programs that serve, or operation by operation.

        ``tap``, which needs the latter, is told of every layer.
        """
        if tap is None:
            self.forward(batch, eager=eager)
        else:
            self.buffers.send(batch.turn, batch.pieces)
            self._forward(batch.shape, self._layers, tap)
            self._hidden(batch.sampling_size, tap)
        self._draw(batch, eager=eager).result()
        return self._logits[: len(batch.sampled_rows)].float()

    @torch.inference_mode()
    def swap(self, swaps: Swaps) -> None:
        """Exchange the contents of blocks, in the padded size that is one program."""
        pairs = torch.from_numpy(pad_pairs(swaps.pairs, swaps.size)).to(torch.int64)
        self.cache.swap(pairs.to(self._device))

    @torch.inference_mode()
    def compile(self, plan: Plan, threads: int) -> None:
        """Build the kernels of a plan's programs, many at a time."""
        with compiling(threads):
            for program in dict.fromkeys(item.program for item in plan.items):
                if isinstance(program, Bucket):
                    self._forward(program, self._kinds)
                elif isinstance(program, SamplerProgram) and program.rows:
                    self._sample(program)
            self.sampler.launch_rest(self._logits)

    @torch.inference_mode()
    def prepare(self, batch: FlatBatch) -> None:
        """Run one layer of each kind of a step: all that its program launches is then in place for `capture`."""
        self.buffers.send(batch.turn, batch.pieces)
        self._forward(batch.shape, self._kinds)
        self._draw(batch).result()

    def is_captured(self, shape: Bucket) -> bool:
        """Whether graphs run the forward program of ``shape``."""
        return all(part in self.forwards for part in self._parts_of(shape))

    @torch.inference_mode()
    def capture(self, shape: Bucket) -> None:
        """Make graphs of the forward program of ``shape``, whose layers have run before: of all parts or of none."""
        parts = self._parts_of(shape)
        try:
            for part in parts:
                self.forwards.capture(part)
        except BaseException:
            for part in parts:
                self.forwards.forget(part)
            raise

    @torch.inference_mode()
    def capture_sampling(self, program: SamplerProgram) -> None:
        """Make a graph of ``program``, if there is none, and run it on padding."""
        if program not in self.samples:
            self.samples.capture(program)
            self.buffers.clear()
            self.sampler.settings.zero_()
            self._described = None
            self.samples.run(program)

    def _run(self, batch: FlatBatch, *, eager: bool = False) -> None:
        self.buffers.send(batch.turn, batch.pieces)
        for part in self._parts_of(batch.shape):
            self.forwards.run(part, eager=eager)

    def _draw(self, batch: FlatBatch, *, eager: bool = False) -> Running:
        """Draw for the sampling rows, and compute the logprobs that somebody wants."""
        answer, sampler, size = self._answers[batch.turn], self.sampler, batch.sampling_size
        if len(batch.sampled_rows):
            if batch.sampling.penalties:
                sampler.counts.follow(batch.sampling.penalties)
            self._describe(batch)
            self.samples.run(SamplerProgram(size, batch.sampling.level), eager=eager)
            if self._watch is not None:
                self._watch(self._logits[: len(batch.sampled_rows)].float(), batch)
            if len(batch.reporting):
                sampler.launch_logprobs(sampler.settings, self._logits, sampler.tokens, size)
        answer.fetch(tokens=len(batch.sampled_rows) > 0, reports=len(batch.reporting) > 0)
        return Running(batch, answer, self._prompt_logprobs(batch))

    def _describe(self, batch: FlatBatch) -> None:
        """Let the sampler know of the step's rows. What it was told already is neither written nor sent again."""
        host, packed = self._settings_arrays[batch.turn], self._packed[batch.turn]
        before, used = packed
        if before is not batch.sampling:
            if before is not None and batch.sampling.continues(before):
                self.sampler.input.advance(host, cast("SamplingMetadata", batch.sampling.random))
            else:
                used = self.sampler.input.pack(host, batch.sampling, batch.sampled_slots)
            self._packed[batch.turn] = batch.sampling, used
        if self._described is not batch.sampling:
            self.sampler.settings[:used].copy_(self._settings[batch.turn][:used], non_blocking=True)
            self._described = batch.sampling

    def _prompt_logprobs(self, batch: FlatBatch) -> dict[int, list[TokenLogprobs]]:
        """For each row one entry for each successor, from the hidden state of the token before it."""
        found: dict[int, list[TokenLogprobs]] = {}
        for part in batch.prompt_parts:
            size, count = len(part.before), len(part.successors)
            self.buffers.sampled[:size].copy_(torch.from_numpy(part.before))
            self._successors[:count].copy_(torch.from_numpy(part.successors))
            self._live.fill_(count)
            self._head(size)
            self.sampler.launch_logprobs(self._live, self._logits, self._successors, size)
            ids, values = (x[:count].cpu().numpy() for x in (self.sampler.report_ids, self.sampler.report_values))
            entries = read_report(ids, values, part.successors, np.full(count, part.alternatives))
            found.setdefault(part.row, []).extend(entries)
        return found

    def _parts_of(self, shape: Bucket) -> list[Part]:
        return [Part(shape, layers) for layers in self._parts]

    def _forward(self, shape: Bucket, layers: Sequence[int], tap: Tap | None = None) -> None:
        """Run ``layers`` of a step: from its tokens, or from where the layers before them left it."""
        decoder, inputs, begins = self.decoder, self.buffers.inputs(shape), layers[0] == 0
        residual, normed = self._residual[: shape.tokens], self._normed[: shape.tokens]
        if begins:
            embed(inputs.tokens, inputs.slots, self.sampler.last_token, decoder.weights.embedding, residual)
        attention, before = self._attention(inputs), None if begins else normed
        after = decoder.layers(residual, None, attention, layers, normed=before, eager=tap is not None, tap=tap)
        if layers[-1] != self._layers[-1]:
            normed.copy_(after)

    def _sample(self, program: SamplerProgram) -> None:
        self._head(program.rows)
        self.sampler.launch(program.level, self._logits, program.rows)

    def _head(self, size: int) -> None:
        """Logits of the first ``size`` sampled tokens."""
        self._head_map(self._hidden(size), out=self._logits[:size])

    def _hidden(self, size: int, tap: Tap | None = None) -> Tensor:
        """Hidden states of the first ``size`` sampled tokens."""
        index = self.buffers.sampled[:size]
        sampled = Attended(take_rows(self._attended, index), take_rows(self._residual, index))
        return self.decoder.finish(sampled, eager=tap is not None, tap=tap)

    def _attention(self, inputs: Inputs) -> Attention:
        """What the decoder calls in each layer: norm and turn, write the step's keys and values, then attend."""
        spec, buffers, cache, rope = self.decoder.spec, self.buffers, self.cache, self.decoder.rope
        heads, kv_heads, layers = spec.num_heads, spec.num_kv_heads, self.decoder.weights.layers
        slots, positions, table = inputs.slots, inputs.positions, buffers.table.rows

        def attend(layer: int, qkv: Tensor) -> Tensor:
            window, kv, norm = spec.layer_windows[layer], cache.layers[layer], layers[layer].qk_norm
            weight = None if norm is None else norm.weight
            rope_and_write(qkv, rope, slots, positions, table, kv, heads, kv_heads, weight, spec.rms_norm_eps)
            out, query = self._attended[: len(qkv)], qkv[:, :heads]
            if len(inputs.tiles):
                prefill_attention(
                    query, kv, table, slots, positions, inputs.tiles, inputs.num_tiles, out, self._scale, window
                )
            index = buffers.windows.index(window)
            splits, count = inputs.splits[index], inputs.num_splits(index)
            decode_attention(
                query,
                kv,
                table,
                slots,
                positions,
                splits,
                count,
                out,
                self._workspace,
                self._scale,
                window,
                rows=0 if len(inputs.tiles) else inputs.rows,
            )
            return out

        return attend
