"""The executor of a device that runs asynchronously: two programs a step, over static buffers, back to back.

``forward(shape)`` computes hidden states and the cache's new keys and values, ``sample(size, level)`` draws tokens. The
device keeps the tokens that it drew, so that the next step may be launched before anyone has seen them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from preheat.batch.buffers import Inputs, StepBuffers
from preheat.batch.flat import FlatBatch
from preheat.batch.sampling import Level
from preheat.core import StepResult, Swaps
from preheat.execute.device_sampler import DeviceSampler
from preheat.execute.kv_cache import KVCache
from preheat.execute.programs import Programs
from preheat.model.decoder import Attention, Decoder
from preheat.ops.cuda.attention import Workspace, decode_attention, prefill_attention
from preheat.ops.cuda.embedding import embed, take_rows
from preheat.ops.cuda.rotary import rope_and_write
from preheat.plan.shape import Shape
from preheat.schedule.defrag import pad_pairs


class SampleKey(NamedTuple):
    """The program that draws for ``size`` rows."""

    size: int
    level: Level


class DeviceExecutor:
    """Runs steps of one model on one device, whose current stream it uses."""

    def __init__(self, decoder: Decoder, cache: KVCache, sampler: DeviceSampler, buffers: StepBuffers) -> None:
        self.decoder, self.cache, self.sampler, self.buffers = decoder, cache, sampler, buffers
        spec, limits = decoder.spec, buffers.limits
        device = decoder.weights.embedding.device
        tokens, rows = max(limits.max_num_batched_tokens, limits.max_num_seqs), limits.max_num_seqs
        self._hidden = torch.zeros(tokens, spec.hidden_size, dtype=decoder.dtype, device=device)
        self._logits = torch.zeros(rows, spec.vocab_size, dtype=decoder.dtype, device=device)
        self._workspace = Workspace(rows, buffers.max_splits, spec.num_heads, spec.head_dim, device)
        self._rope = decoder.rope.squeeze(2)
        self._scale = spec.head_dim**-0.5
        pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.forwards = Programs[Shape](self._forward, pool)
        self.samples = Programs[SampleKey](self._sample, pool)

    def execute(self, batch: FlatBatch) -> StepResult:
        """Run a step and wait for it."""
        return self.launch(batch).result()

    @torch.inference_mode()
    def launch(self, batch: FlatBatch) -> Running:
        """Start a step behind all that was started before."""
        self.forward(batch)
        return self._draw(batch)

    @torch.inference_mode()
    def forward(self, batch: FlatBatch, *, eager: bool = False) -> Tensor:
        """Hidden states [T, hidden], in a buffer of which the next step writes over; keys and values are in the cache."""
        self.buffers.send(batch.turn, batch.pieces)
        self.forwards.run(batch.shape, eager=eager)
        return self._hidden[: batch.shape.tokens]

    @torch.inference_mode()
    def finish(self, hidden: Tensor, batch: FlatBatch) -> StepResult:
        """What the rows of ``batch`` want to know of ``hidden`` [T, hidden]."""
        self.buffers.send(batch.turn, batch.pieces)
        self._hidden[: len(hidden)].copy_(hidden)
        return self._draw(batch).result()

    @torch.inference_mode()
    def logits(self, batch: FlatBatch, *, eager: bool = False) -> Tensor:
        """fp32 [sampling rows, vocab] of a step, computed by the programs that serve, or operation by operation."""
        self.forward(batch, eager=eager)
        self._draw(batch, eager=eager).result()
        return self._logits[: len(batch.sampled_rows)].float()

    @torch.inference_mode()
    def swap(self, swaps: Swaps) -> None:
        """Exchange the contents of blocks, in the padded size that is one program."""
        pairs = torch.from_numpy(pad_pairs(swaps.pairs, swaps.size)).to(torch.int64)
        self.cache.swap(pairs.to(self.cache.data.device))

    @torch.inference_mode()
    def capture(self, shape: Shape) -> None:
        """Make a graph of the forward program of ``shape``, which has run before."""
        self.forwards.capture(shape)

    @torch.inference_mode()
    def capture_sampling(self, size: int, level: Level) -> None:
        """Make a graph, if there is none, of the program that draws for ``size`` rows."""
        key = SampleKey(size, level)
        if key not in self.samples:
            self.samples.capture(key)

    def _draw(self, batch: FlatBatch, *, eager: bool = False) -> Running:
        """Draw for the sampling rows, and compute the logprobs that somebody wants."""
        level = Level(batch.sampling.level)
        size = batch.sampling_size
        if size:
            self.sampler.send(batch)
            self.samples.run(SampleKey(size, level), eager=eager)
        return self.sampler.collect(batch)

    def _forward(self, shape: Shape) -> None:
        inputs = self.buffers.inputs(shape)
        residual = embed(inputs.tokens, inputs.slots, self.sampler.last_token, self.decoder.weights.embedding)
        hidden = self.decoder.layers(residual, None, self._attention(inputs))
        self._hidden[: shape.tokens].copy_(hidden)

    def _sample(self, key: SampleKey) -> None:
        rows = take_rows(self._hidden, self.buffers.sampled[: key.size])
        logits = self._logits[: key.size]
        self.decoder.weights.head(rows, out=logits)
        self.sampler.launch(key.level, logits, key.size)

    def _attention(self, inputs: Inputs) -> Attention:
        """What the decoder calls in each layer: norm and turn, write the step's keys and values, then attend."""
        spec, buffers, cache = self.decoder.spec, self.buffers, self.cache
        table, slots, positions = buffers.table, inputs.slots, inputs.positions
        where = (table, slots, positions)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            weights, window, kv = self.decoder.weights.layers[layer], spec.layer_windows[layer], cache.layers[layer]
            rope_and_write(qkv, self._rope, *where[1:], table, kv, spec.num_heads, spec.num_kv_heads, weights.qk_norm)
            out = qkv.new_empty(len(qkv), spec.q_size)
            query, index = qkv[:, : spec.num_heads], buffers.windows.index(window)
            if len(inputs.tiles):
                prefill_attention(query, kv, *where, inputs.tiles, inputs.num_tiles, out, self._scale, window)
            splits, count = inputs.splits[index], inputs.num_splits(index)
            decode_attention(query, kv, *where, splits, count, out, self._workspace, self._scale, window)
            return out

        return attend
