"""The decoder over the paged cache: prefill, chunks and decode give the reference's logits, with equal bits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from preheat.backends.cpu.backend import CpuBackend
from preheat.core import Request, SamplingParams, Schedule
from preheat.execution.buffers import StepBuffers
from preheat.execution.executor import Executor
from preheat.execution.input_batch import Packer
from preheat.execution.kv_cache import KVCache
from preheat.execution.layer_parts import attention_layers
from preheat.limits import Limits
from preheat.model.decoder import Attended, Decoder
from preheat.plan.options import PlanOptions
from preheat.plan.plan import make_plan
from preheat.schedule.slots import Slots
from tests.cpu.checkpoints import MODELS, save_checkpoint
from tests.cpu.test_model_families import error_at_each_position, open_decoder

BLOCK, LENGTHS = 16, (83, 1, 40)
WAYS = {
    "at once": [(83, 1, 40)],
    "chunks": [(30, 0, 7), (1, 1, 0), (13, 0, 20), (39, 0, 13)],
    "decode": [(70, 0, 35), *[(1, 0, 1)] * 5, (0, 1, 0), *[(1, 0, 0)] * 8],
}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sequences() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 199, length) for length in LENGTHS]


class Steps:
    """Three sequences over a cache; the sequences' blocks come in shuffled order."""

    def __init__(self, decoder: Decoder) -> None:
        self.slots = Slots(4, 96, BLOCK)
        blocks = iter(np.random.default_rng(0).permutation(18) + 1)
        for number, tokens in enumerate(sequences()):
            slot = self.slots.take(Request(number, tokens.tolist(), SamplingParams(), 0, 1), tokens)
            count = -(-len(tokens) // BLOCK)
            self.slots.set_blocks(slot, slice(count), [next(blocks) for _ in range(count)])
            self.slots.num_blocks[slot] = count
        limits = Limits(
            max_model_len=96,
            max_num_seqs=4,
            max_num_batched_tokens=128,
            max_num_prefill_seqs=None,
            block_size=BLOCK,
            num_blocks=19,
        )
        backend = CpuBackend()
        cache = KVCache(decoder.spec, limits.num_blocks, BLOCK, decoder.dtype, backend.device)
        attention = backend.attention(attention_layers(decoder, cache), limits, contiguous=False)
        buffers = StepBuffers(limits, attention, backend)
        vocab = decoder.spec.vocab_size
        sampler = backend.sampler(limits, vocab, max_logprobs=0, handle_topk_duplicates=False)
        self.packer = Packer(self.slots, make_plan(limits, PlanOptions()), buffers)
        self.executor = Executor(backend, decoder, cache, sampler, buffers)

    @torch.inference_mode()
    def run(self, extends: list[tuple[int, ...]]) -> list[Tensor]:
        """Return the logits of all tokens of all sequences.

        Step i computes ``extends[i][s]`` tokens of sequence s.
        """
        decoder, found = self.executor.decoder, list[list[Tensor]]([] for _ in LENGTHS)
        for step in extends:
            rows = sorted((s for s in range(len(LENGTHS)) if step[s]), key=lambda s: step[s] != 1)
            extend = np.array([step[s] for s in rows], np.int32)
            first = self.slots.cached_len[rows]
            schedule = Schedule(
                np.array(rows, np.int32), first, extend, np.minimum(extend, 1), int((extend == 1).sum())
            )
            batch = self.packer.pack(schedule)
            attended = self.executor.forward(batch)
            logits = decoder.weights.head(decoder.finish(attended)).float()[: schedule.tokens]
            for s, part in zip(rows, logits.split(extend.tolist()), strict=True):
                found[s].append(part)
                self.slots.cached_len[s] += len(part)
        return [torch.cat(parts) for parts in found]


FAMILIES = (
    "llama tied", "llama 3.1", "mistral with window", "qwen2 with windows", "qwen3", "phi4 mini", "starcoder2",
    "gpt bigcode with a key head each", "gpt bigcode with 48 heads", "gemma 3", "mpt", "mpt with six heads",
    "qwen2 moe with dense layers", "ministral 3", "olmo 3", "cohere 2",
)  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_prefill_chunks_and_decode_are_right_and_equal(name, tmp_path):
    reference = save_checkpoint(MODELS[name], tmp_path)
    decoder = open_decoder(tmp_path)
    right = [reference(torch.from_numpy(tokens)) for tokens in sequences()]
    first: list[Tensor] = []
    for way in WAYS.values():
        got = Steps(decoder).run(way)
        for mine, theirs in zip(got, right, strict=True):
            assert error_at_each_position(mine, theirs).max() <= 1e-5
        first = first or got
        assert all(torch.equal(a, b) for a, b in zip(got, first, strict=True))


@pytest.mark.parametrize(
    "name", ["mistral with window", "qwen3", "mpt with six heads", "gemma 3", "gpt bigcode", "qwen2 moe"]
)
def test_bfloat16_bits_depend_on_neither_chunks_nor_threads(name, tmp_path):
    save_checkpoint(MODELS[name], tmp_path)
    decoder, first = open_decoder(tmp_path, torch.bfloat16), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for way in WAYS.values():
            got = Steps(decoder).run(way)
            first = first or got
            assert all(torch.equal(a, b) for a, b in zip(got, first, strict=True))


def test_the_comparison_of_bits_can_fail(tmp_path):
    """Control: a decoder with one changed weight gives other bits."""
    save_checkpoint(MODELS["llama"], tmp_path)
    decoder = open_decoder(tmp_path, torch.bfloat16)
    before = Steps(decoder).run(WAYS["at once"])
    row = sequences()[0][0]
    decoder.weights.embedding[row, 0] *= 1.01
    after = Steps(decoder).run(WAYS["at once"])
    assert not torch.equal(before[0], after[0])


def taken(attended: Attended, tokens: Tensor) -> Attended:
    return attended.map(lambda states: states[tokens])


def test_tokens_that_go_on_alone_have_the_bits_that_they_have_among_all(tmp_path):
    """Behind the last attention, a few chosen tokens have the same bits as among all tokens."""
    save_checkpoint(MODELS["qwen3"], tmp_path)
    steps = Steps(open_decoder(tmp_path))
    decoder, slots = steps.executor.decoder, np.arange(len(LENGTHS), dtype=np.int32)
    extend = np.array(LENGTHS, np.int32)
    schedule = Schedule(slots, np.zeros_like(extend), extend, np.minimum(extend, 1), 0)
    with torch.inference_mode():
        attended = steps.executor.forward(steps.packer.pack(schedule))
        some = torch.tensor([7, 0, 30])
        alone = decoder.finish(taken(attended, some))
        assert torch.equal(alone, decoder.finish(taken(attended, torch.arange(len(attended.out))))[some])
        others = attended._replace(residual=attended.residual.flip(0))
        assert not torch.equal(alone, decoder.finish(taken(others, some)))
