"""The sampler of the CUDA backend on a GPU: the host's tokens, their distribution, and independence of rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from preheat.backends.cpu.backend import CpuBackend
from preheat.backends.cuda.sampling.sampler import CudaSampler, Cut
from preheat.core import Level, SamplingParams
from preheat.execution.logit_stages import sampling_input
from preheat.ops.logprobs import token_logprobs
from preheat.ops.sampler import HostSampler
from preheat.plan.sampler_settings import SAMPLER_SETTINGS
from tests.cpu.sampling_reference import Row, answer, fill
from tests.cpu.test_logprobs import assert_close
from tests.cpu.test_sampler_distribution import KINDS as DISTRIBUTIONS
from tests.cpu.test_sampler_distribution import a_row, exact, sigmas
from tests.cpu.test_sampler_invariance import KINDS
from tests.device_sampling import (
    keyed_by_row,
    logits_of,
    logprobs_on,
    prepared,
    race_plainly,
    sample_on,
    told_like_the_likeliest,
)

LARGE = 128_256
SETTINGS = [*KINDS, *({"temperature": 0.8, "top_p": p} for p in (0.1, 0.5)), {"top_k": 1500}, {"top_k": 5000}]


def rows_of(kinds: list[dict[str, object]], vocab: int = LARGE, spread: float = 2.5, seed: int = 7) -> list[Row]:
    """Return one row of each kind, with logits exact in bfloat16."""
    rng = np.random.default_rng(seed)
    return [
        Row(
            logits=torch.from_numpy((rng.standard_normal(vocab) * spread).astype(np.float32))
            .bfloat16()
            .float()
            .numpy(),
            params=SamplingParams(**kind),
            prompt=rng.integers(0, vocab, 20).tolist(),
            output=rng.integers(0, vocab, 10).tolist(),
            stop_ids=[3, 4],
            seed=int(rng.integers(0, 2**63)),
            choice=1,
        )
        for kind in kinds
    ]


def sample_on_host(rows: list[Row], duplicates: bool = False) -> list[int]:
    sampler = HostSampler(len(rows), len(rows[0].logits), handle_topk_duplicates=duplicates)
    batch = sampling_input(fill(rows), np.arange(len(rows)))
    return sampler.sample(torch.from_numpy(np.stack([row.logits for row in rows])), batch).tolist()


@pytest.mark.parametrize("duplicates", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.3, 1.3, 5.0])
def test_equals_the_host(spread: float, dtype: torch.dtype, duplicates: bool) -> None:
    """Equal over a real vocabulary, from flat to peaked."""
    rows = rows_of(SETTINGS, spread=spread)
    assert sample_on(rows, "cuda", duplicates=duplicates, dtype=dtype) == sample_on_host(rows, duplicates)


@pytest.mark.parametrize("temperature", [0.05, 0.6, 1.0, 20.0])
@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0])
def test_bounds_leave_out_no_winner(spread: float, temperature: float) -> None:
    """The tokens equal a race with a score for every token: bounds never leave out a winner."""
    settings = [{"temperature": temperature}, {"temperature": temperature, "min_p": 0.02}]
    some = rows_of(settings, spread=spread)
    rows = [replace(row, seed=seed) for seed in range(64) for row in some]
    assert sample_on(rows, "cuda") == race_plainly(rows, "cuda")


def test_every_setting_of_the_plan() -> None:
    rows = [replace(row, params=params) for params in SAMPLER_SETTINGS.values() for row in rows_of([{}], seed=3)]
    assert sample_on(rows, "cuda", dtype=torch.bfloat16) == sample_on_host(rows)


@pytest.mark.parametrize(
    "params", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 9, "top_p": 0.7, "min_p": 0.01}]
)
def test_reaches_the_survivors_and_no_other(params: dict[str, float]) -> None:
    """Many seeds of one row with many equal logits draw every survivor of the reference, and nothing else."""
    logits = (np.random.default_rng(5).integers(-6, 7, 40) / 2).astype(np.float32)
    row = Row(logits, SamplingParams(temperature=3.0, **params))
    rows = [replace(row, seed=seed) for seed in range(3000)]
    assert set(sample_on(rows, "cuda")) == set(answer(row).survivors)


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_distribution(kind: str) -> None:
    """Chi-square at 5 sigma against the exact probabilities."""
    row = a_row(kind)
    tokens = sample_on([replace(row, seed=seed) for seed in range(12_000)], "cuda")
    assert sigmas(np.bincount(tokens, minlength=len(row.logits)), exact(row)) < 5


def test_a_wrong_distribution_is_seen() -> None:
    """Negative control: a temperature off by a tenth."""
    row = a_row("plain")
    tokens = sample_on([replace(row, seed=seed) for seed in range(12_000)], "cuda")
    warmer = replace(row, params=SamplingParams(temperature=1.1))
    assert sigmas(np.bincount(tokens, minlength=len(row.logits)), exact(warmer)) > 5


def differing(rows: list[Row]) -> int:
    """Return how many rows get another token elsewhere in the step, alone, at level full or cut in another way."""
    whole = sample_on(rows, "cuda")
    order = np.random.default_rng(8).permutation(len(rows))
    turned = dict(zip(order.tolist(), sample_on([rows[i] for i in order], "cuda", dtype=torch.bfloat16), strict=True))
    cut = sample_on(rows, "cuda", cut=Cut(1024, 32))
    alone = [sample_on([row], "cuda")[0] for row in rows]
    lifted = [sample_on([row], "cuda", level=Level.FULL)[0] for row in rows]
    return sum(len({whole[i], turned[i], cut[i], alone[i], lifted[i]}) > 1 for i in range(len(rows)))


def test_a_row_depends_on_itself_alone() -> None:
    assert differing(rows_of(SETTINGS * 3, vocab=20_001)) == 0


def test_noise_keyed_by_the_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: noise keyed by the row."""
    keyed_by_row(monkeypatch)
    assert differing(rows_of(SETTINGS, vocab=20_001)) > 0


@pytest.mark.parametrize("level", list(Level))
def test_a_graph_draws_the_same(level: Level) -> None:
    """Capture with one step's settings, replay with the settings of another step with fewer rows."""
    kinds = [{"temperature": 0.0}] if level is Level.GREEDY else SETTINGS[1:8] if level is Level.FILTERED else SETTINGS
    rows = rows_of(kinds * 2, vocab=20_001)
    sampler, _ = prepared(rows, "cuda")
    logits = logits_of(rows, torch.bfloat16, "cuda")
    sampler.sample(level, logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.sample(level, logits)
    fewer = rows[::-1][: len(rows) - 1]
    other, _ = prepared(fewer, "cuda", spare=2)
    assert other.settings.shape == sampler.settings.shape
    sampler.settings.copy_(other.settings)
    sampler.counts.history[: len(fewer)].copy_(other.counts.history[: len(fewer)])
    logits[: len(fewer)].copy_(logits_of(fewer, torch.bfloat16, "cuda")[:-1])
    graph.replay()
    assert sampler.tokens.tolist() == [*sample_on(fewer, "cuda"), 0, 0]


def test_penalties_over_steps() -> None:
    """The device counts the tokens of forty steps like the host, though the host never sees the tokens."""
    params = SamplingParams(temperature=0.9, presence_penalty=0.4, frequency_penalty=0.9, repetition_penalty=1.4)
    row = Row(np.random.default_rng(0).standard_normal(50).astype(np.float32), params, [1, 2, 2], [], seed=11)
    right = replace(row, output=[])
    sampler, _ = prepared([row], "cuda")
    for step in range(40):
        slots = fill([replace(row, output=[-1] * step)])
        batch = sampling_input(slots, np.arange(1))
        host = np.zeros(sampler.layout.words, np.int32)
        used = sampler.layout.pack(host, batch, np.arange(1))
        sampler.settings[:used] = torch.from_numpy(host[:used])
        if step:
            sampler.counts.follow(batch.penalties)
        sampler.sample(batch.level, logits_of([row], torch.float32, "cuda"))
        right.output.append(sample_on_host([right])[0])
        assert int(sampler.tokens[0]) == right.output[-1]
    counts = sampler.counts.history[0].cpu().numpy()
    assert (counts >> 1).tolist() == np.bincount(right.output, minlength=50).tolist()
    sampler.counts.forget()
    assert not sampler.counts.history.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs(dtype: torch.dtype) -> None:
    """Equal to the host's, with many ties, and equal bits alone and with other rows in the batch."""
    logits = (torch.randn(9, LARGE, generator=torch.Generator().manual_seed(0)) * 2.5).to(dtype)
    logits[3] = -torch.inf
    logits[4, :9000] = 3.0
    tokens, wanted = np.arange(9) * 11_000, np.array([0, 20, 5, 3, 20, 1, 2, 3, 4])
    got = logprobs_on(logits.cuda(), tokens, wanted)
    for entry, right in zip(got, token_logprobs(logits.float(), tokens, wanted), strict=True):
        assert_close(entry, right)
    alone = [logprobs_on(logits[i : i + 1].cuda(), tokens[i : i + 1], wanted[i : i + 1])[0] for i in range(9)]
    assert alone == got


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_of_told_tokens(dtype: torch.dtype) -> None:
    logits = (torch.randn(9, LARGE, generator=torch.Generator().manual_seed(0)) * 2.5).to(dtype).cuda()
    logits[3] = -torch.inf
    logits[4, :9000] = 3.0
    told_like_the_likeliest(logits)


def test_a_vocabulary_beyond_the_masses_is_refused() -> None:
    with pytest.raises(ValueError, match="the sampler takes up to 262144 tokens"):
        CudaSampler(1, 300_000, CpuBackend(), 1)


def test_bans_reach_the_edge_of_the_vocabulary() -> None:
    row = Row(np.arange(5000, dtype=np.float32), SamplingParams(temperature=0, min_tokens=1), stop_ids=[4999, 5000, -1])
    assert sample_on([row], "cuda") == [4998]
