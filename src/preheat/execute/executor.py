"""The executor: one Batch in, one StepResult out. It keeps nothing of a request between steps but the cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from preheat.batch.pack import Batch, PromptRow
from preheat.core import StepResult, Swaps, TokenLogprobs
from preheat.execute.kv_cache import KVCache
from preheat.execute.logprobs import token_logprobs
from preheat.execute.sampler import Sampler
from preheat.model.decoder import Attention, Decoder
from preheat.schedule.defrag import pad_pairs
from preheat.schedule.slots import NO_LOGPROBS


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

    def launch(self, batch: Batch) -> Done:
        """Run a step, which on a CPU is done when this returns; errors are raised here."""
        return Done(self.execute(batch))

    def execute(self, batch: Batch) -> StepResult:
        """Forward, logits of the sampling rows, one token for each of them."""
        return self.finish(self.forward(batch), batch)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Hidden states [T, hidden]; keys and values are in the cache."""
        return self.decoder.forward(batch.tokens, batch.positions, self._attention(batch))

    @torch.inference_mode()
    def finish(self, hidden: Tensor, batch: Batch) -> StepResult:
        """What the rows of ``batch`` want to know of ``hidden`` [T, hidden]."""
        result = self._sample(hidden.index_select(0, batch.sampled), batch)
        for row in batch.prompt_rows:
            result.prompt_logprobs[row.row] = self._prompt_logprobs(hidden, row)
        return result

    @torch.inference_mode()
    def swap(self, swaps: Swaps) -> None:
        """Exchange the contents of blocks, in the padded size that is one program."""
        pairs = pad_pairs(swaps.pairs, swaps.size)
        self.cache.swap(torch.from_numpy(pairs).to(torch.int64))

    def _sample(self, hidden: Tensor, batch: Batch) -> StepResult:
        """One token for each sampling row, from ``hidden`` [sampling_size, hidden], of which the last rows may pad."""
        rows = len(batch.sampled_rows)
        if not rows:
            return StepResult(tokens=np.empty(0, np.int64))
        logits = self.decoder.logits(hidden)[:rows]
        wanted = np.flatnonzero(batch.logprobs != NO_LOGPROBS)
        raw = logits[torch.from_numpy(wanted)] if len(wanted) else None
        result = StepResult(tokens=self.sampler.sample(logits, batch.sampling).numpy())
        if raw is not None:
            entries = token_logprobs(raw, result.tokens[wanted], batch.logprobs[wanted])
            result.logprobs = dict(zip(batch.sampled_rows[wanted].tolist(), entries, strict=True))
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

    def _prompt_logprobs(self, hidden: Tensor, row: PromptRow) -> list[TokenLogprobs]:
        """One entry for each successor, from the hidden state [tokens, hidden] of the token before it."""
        entries: list[TokenLogprobs] = []
        for before, part in row.parts:
            logits = self.decoder.logits(hidden.index_select(0, before))[: len(part)]
            entries += token_logprobs(logits, part, np.full(len(part), row.alternatives))
        return entries
