"""Rows in, tokens out, through the sampler of the CUDA backend: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from preheat.backends.base.backend import Backend
from preheat.backends.cpu.backend import CpuBackend
from preheat.backends.cuda.backend import CudaBackend
from preheat.backends.cuda.sampling.layout import SamplerLayout
from preheat.backends.cuda.sampling.sampler import CudaSampler, Cut, read_report
from preheat.backends.cuda.sampling.shared import FURTHEST, LOWEST, TEMPERATURE, id_of, order, real, value_of
from preheat.backends.cuda.sampling.source import race
from preheat.core import Level, TokenLogprobs, unmarked
from preheat.execution.logit_stages import sampling_input
from preheat.ops.sampling import SamplingInput
from tests.cpu.sampling_reference import Row, fill

DEFAULT = Cut()


def backend_of(device: str) -> Backend:
    """Return the backend for a sampler's memory: the GPU's, or the host's, whose kernels are then interpreted."""
    return CudaBackend() if device == "cuda" else CpuBackend()


def prepared(
    rows: list[Row],
    device: str = "cpu",
    duplicates: bool = False,
    cut: Cut = DEFAULT,
    spare: int = 1,
    masks: np.ndarray | None = None,
) -> tuple[CudaSampler, SamplingInput]:
    """Return a sampler with ``rows`` described as its next step, and room for ``spare`` more."""
    slots, n = fill(rows), len(rows)
    batch = sampling_input(slots, np.arange(n))
    masked = masks is not None
    sampler = CudaSampler(n, len(rows[0].logits), backend_of(device), n + spare, duplicates, cut=cut, masked=masked)
    if masks is not None:
        sampler.masks(0)[:n] = masks
        sampler.describe(0, batch, np.arange(n))
        return sampler, batch
    host = np.zeros(sampler.layout.words, np.int32)
    used = sampler.layout.pack(host, batch, np.arange(n))
    sampler.settings[:used] = torch.from_numpy(host[:used]).to(device)
    if batch.penalties:
        sampler.counts.follow(batch.penalties)
    return sampler, batch


def logits_of(rows: list[Row], dtype: torch.dtype, device: str, spare: int = 1) -> torch.Tensor:
    """Return logits [rows + spare, vocab]; padding is not a number."""
    logits = torch.from_numpy(np.stack([row.logits for row in rows])).to(device, dtype)
    return torch.cat([logits, torch.full((spare, logits.shape[1]), torch.nan, dtype=dtype, device=device)])


def sample_on(
    rows: list[Row],
    device: str = "cpu",
    level: Level | None = None,
    duplicates: bool = False,
    dtype: torch.dtype = torch.float32,
    cut: Cut = DEFAULT,
    masks: np.ndarray | None = None,
) -> list[int]:
    """Return the token of each row, at the rows' own level or at ``level``.

    A padding row is checked on the way. ``masks``, int32 [rows, words], are masks of the rows with a grammar.
    """
    sampler, batch = prepared(rows, device, duplicates, cut, masks=masks)
    sampler.sample(batch.level if level is None else level, logits_of(rows, dtype, device))
    finite = [bool(np.isfinite(row.logits.max())) for row in rows]
    assert (sampler.tokens >= 0).tolist() == [*finite, True], "rows that are not finite are marked, and no others"
    *tokens, pad = unmarked(sampler.tokens.cpu().numpy()).tolist()
    assert pad == 0
    assert sampler.last_token.tolist() == [*tokens, 0]
    return tokens


@triton.jit
def plain_kernel(settings, logits, tokens, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * VOCAB
    lead = tl.full((), LOWEST, tl.int64)
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        value = tl.load(logits + ids, mask=ids < VOCAB, other=float("-inf"))
        lead = tl.maximum(lead, tl.max(tl.where(ids < VOCAB, order(value, ids), LOWEST)))
    how = real(settings, row, TEMPERATURE), real(settings, row, FURTHEST)
    peak = value_of(lead)
    _, key = race(settings, row, logits, settings, 0, VOCAB, VOCAB, 1, LOWEST, peak, how[0], how[1], False)
    tl.store(tokens + row, id_of(key))


def race_plainly(rows: list[Row], device: str = "cpu") -> list[int]:
    """Return the token of each row by scoring every token.

    Rows have a temperature and neither top_k nor top_p.
    """
    sampler, _ = prepared(rows, device)
    logits, tokens = logits_of(rows, torch.float32, device), sampler.tokens
    plain_kernel[len(rows),](sampler.settings, logits, tokens, logits.shape[1], 1024, enable_fp_fusion=False)
    return tokens[:-1].tolist()


def logprobs_on(
    logits: torch.Tensor,
    tokens: np.ndarray,
    alternatives: np.ndarray,
    most: int = 20,
    cut: Cut = DEFAULT,
) -> list[TokenLogprobs]:
    """Return the device's reports of ``logits`` [rows, vocab] and ``tokens`` [rows]."""
    n, vocab = logits.shape
    sampler = CudaSampler(1, vocab, backend_of(logits.device.type), n, max_logprobs=most, cut=cut)
    live = torch.tensor([n], dtype=torch.int32, device=logits.device)
    sampler._launch_logprobs(live, logits, torch.from_numpy(tokens.astype(np.int32)).to(logits.device))
    ids, values = sampler.report_ids.cpu().numpy(), sampler.report_values.cpu().numpy()
    return read_report(ids, values, tokens, alternatives)


def told_on(logits: torch.Tensor, told: dict[int, list[int]] | None) -> list[TokenLogprobs]:
    """Return a greedy step's reports of its ``logits`` [rows, vocab].

    They have all alternatives, or by ``told`` only the given tokens of a row.
    """
    n, vocab = logits.shape
    sampler = CudaSampler(n, vocab, backend_of(logits.device.type), n, max_logprobs=min(vocab, 60), cut=DEFAULT)
    for step in (
        SamplingInput(n, None, None, None, logprob_ids={0: [0]}),
        SamplingInput(n, None, None, None, logprob_ids=told),
    ):
        sampler.describe(0, step, np.arange(n))  # the second says something else
    sampler.sample(Level.GREEDY, logits)
    sampler.report(logits)
    sampler.fetch(0, tokens=True, reports=True)
    return sampler.read(0, n, np.arange(n), np.full(n, 60))[1]


def told_like_the_likeliest(logits: torch.Tensor) -> None:
    """Assert that given tokens have their bits among the likeliest ones, alone and beside other rows."""
    usual = told_on(logits, None)
    order = [[token for token, _ in entry.top][::-3] for entry in usual]
    told = {row: ids for row, ids in enumerate(order) if row % 3 != 1}
    for row, (entry, free) in enumerate(zip(told_on(logits, told), usual, strict=True)):
        assert (entry.token, entry.logprob, entry.rank) == (free.token, free.logprob, free.rank)
        likely = dict(free.top)
        assert entry.top == (tuple((token, likely[token]) for token in order[row]) if row in told else free.top)
        if row in told:
            assert told_on(logits[row : row + 1], {0: order[row]}) == [entry]


def keyed_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant noise keyed by a row's place in the step."""
    pack = SamplerLayout.pack

    def by_place(self: SamplerLayout, host: np.ndarray, batch: SamplingInput, slots: np.ndarray) -> int:
        if batch.random:
            batch.random.seed = batch.random.rows.astype(np.uint64)
        return pack(self, host, batch, slots)

    monkeypatch.setattr(SamplerLayout, "pack", by_place)
