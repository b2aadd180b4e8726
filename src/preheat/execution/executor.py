"""The executor: one Batch in, one StepResult out. It keeps nothing of a request between steps but the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from preheat.backends.cpu.logprobs import token_logprobs
from preheat.backends.cpu.sampler import Sampler
from preheat.core import StepResult, Swaps, TokenLogprobs
from preheat.execution.kv_cache import KVCache
from preheat.execution.pack import Batch, PromptRow
from preheat.model.decoder import Attended, Attention, Decoder, Tap
from preheat.schedule.defrag import pad_pairs
from preheat.schedule.slots import NO_LOGPROBS

LogitWatch = Callable[[Tensor, Batch], None]
"""``watch(logits, batch)``: look at the fp32 logits [sampling rows, vocab] of a step before anything is drawn from
them. It must neither change nor keep them, nor wait for the device."""


@dataclass(frozen=True, slots=True)
class Done:
    """A step that was computed when it was launched."""

    value: StepResult

    def result(self) -> StepResult:
        return self.value


class Executor:
    """Runs steps of one model on one device."""

    def __init__(self, decoder: Decoder, cache: KVCache, sampler: Sampler) -> None:
        self.decoder, self.cache, self.sampler = decoder, cache, sampler
        spec = decoder.spec
        self._scale, self._windows = spec.head_dim**-0.5, spec.layer_windows
        self._heads, self._head_dim = spec.num_heads, spec.head_dim
        self._watch: LogitWatch | None = None

    def watch_logits(self, watch: LogitWatch | None) -> None:
        """Let ``watch`` see the logits of every step from now on; None: nobody."""
        self._watch = watch

    def launch(self, batch: Batch) -> Done:
        """Run a step, which on a CPU is done when this returns; errors are raised here."""
        return Done(self.execute(batch))

    def execute(self, batch: Batch) -> StepResult:
        """Forward, logits of the sampling rows, one token for each of them."""
        return self.finish(self.forward(batch), batch)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Attended:
        """Where all T tokens stand; keys and values are in the cache."""
        return self.decoder.forward(batch.tokens, batch.positions, self._attention(batch))

    @torch.inference_mode()
    def logits(self, batch: Batch, *, eager: bool = False, tap: Tap | None = None) -> Tensor:
        """Logits of the sampling rows of ``batch``, fp32 [sampling rows, vocab], by the program that serves it; keys
        and values are in the cache. ``eager`` runs operation by operation in its place; ``tap``, which needs that, is
        told of every layer.
        """
        decoder = self.decoder
        attended = decoder.forward(batch.tokens, batch.positions, self._attention(batch), eager=eager, tap=tap)
        hidden = decoder.finish(attended.take(batch.sampled), eager=eager, tap=tap)
        return decoder.logits(hidden)[: len(batch.sampled_rows)]

    @torch.inference_mode()
    def finish(self, attended: Attended, batch: Batch) -> StepResult:
        """What the rows of ``batch`` want to know of its T tokens."""
        result = self._sample(attended, batch)
        for row in batch.prompt_rows:
            result.prompt_logprobs[row.row] = self._prompt_logprobs(attended, row)
        return result

    @torch.inference_mode()
    def swap(self, swaps: Swaps) -> None:
        """Exchange the contents of blocks, in the padded size that is one program."""
        pairs = pad_pairs(swaps.pairs, swaps.size)
        self.cache.swap(torch.from_numpy(pairs).to(torch.int64))

    def _sample(self, attended: Attended, batch: Batch) -> StepResult:
        """One token for each sampling row; sampling_size of them are computed, of which the last may pad."""
        rows = len(batch.sampled_rows)
        if not rows:
            return StepResult(tokens=np.empty(0, np.int64))
        logits = self._logits(attended, batch.sampled)[:rows]
        if self._watch is not None:
            self._watch(logits, batch)
        wanted = np.flatnonzero(batch.logprobs != NO_LOGPROBS)
        raw = logits[torch.from_numpy(wanted)] if len(wanted) else None
        result = StepResult(tokens=self.sampler.sample(logits, batch.sampling).numpy())
        if raw is not None:
            entries = token_logprobs(raw, result.tokens[wanted], batch.logprobs[wanted])
            result.logprobs = dict(zip(wanted.tolist(), entries, strict=True))
        return result

    def _attention(self, batch: Batch) -> Attention:
        """What the decoder calls in each layer: write the step's keys and values, then attend."""
        cache, groups_of, windows = self.cache, batch.attention, self._windows
        heads, dim, scale = self._heads, self._head_dim, self._scale

        def attend(layer: int, qkv: Tensor) -> Tensor:
            cache.write(layer, batch.kv_rows, qkv[:, heads:])
            groups = groups_of[windows[layer]]
            if len(groups) == 1 and len(groups[0].targets) == len(qkv):  # every token attends, in order
                return groups[0](qkv[:, :heads], cache.layers[layer], scale).reshape(len(qkv), heads * dim)
            out = qkv.new_zeros(len(qkv), heads, dim)
            for group in groups:
                out.index_copy_(0, group.targets, group(qkv[:, :heads], cache.layers[layer], scale))
            return out.view(len(qkv), heads * dim)

        return attend

    def _logits(self, attended: Attended, tokens: Tensor) -> Tensor:
        return self.decoder.logits(self.decoder.finish(attended.take(tokens)))

    def _prompt_logprobs(self, attended: Attended, row: PromptRow) -> list[TokenLogprobs]:
        """One entry for each successor, from the token before it."""
        entries: list[TokenLogprobs] = []
        for before, part in row.parts:
            logits = self._logits(attended, before)[: len(part)]
            entries += token_logprobs(logits, part, np.full(len(part), row.alternatives))
        return entries
