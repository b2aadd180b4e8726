"""The race in two laps in Triton's interpreter: its bounds hold, and its tokens are right."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from preheat.backends.cuda.sampling import gumbel as sample_race
from preheat.backends.cuda.sampling import shared as sample
from preheat.backends.cuda.sampling.sampler import Cut
from preheat.core import SamplingParams
from preheat.ops.philox import MAX_SPREAD
from tests.cpu.sampling_reference import Row
from tests.device_sampling import race_plainly, sample_on

GROUPS = 2**12
CUTS = [Cut(8, 4), Cut(32, 4), Cut(64, 8)]
WITHOUT_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # an example takes long
BANS = float(-np.inf)
random_words = sample.random_words


@triton.jit
def bound_kernel(bits, value, scores, bounds, peak, temperature, furthest, N: tl.constexpr):
    group = tl.arange(0, N)
    at = group[:, None] * 4 + tl.arange(0, 4)[None, :]
    word, behind = tl.load(bits + at).to(tl.uint32, bitcast=True), peak - tl.load(value + at)
    deficit = sample.deficit_of(tl.load(value + at), peak, temperature)
    tl.store(scores + at, tl.where(deficit <= sample.SPREAD, sample.gumbel(word) - deficit, float("-inf")))
    tl.store(bounds + group, sample_race.score_at_most(sample_race.lags(word, behind, temperature, furthest)))


@given(
    seed=st.integers(0, 2**32),
    peak=st.floats(-1e5, 1e5, width=32),
    temperature=st.floats(2**-20, 100, width=32),
    rare=st.sampled_from([0, 9, 16, 23]),
)
@settings(max_examples=20, deadline=None, phases=WITHOUT_SHRINKING)
def test_no_score_exceeds_its_bound(seed: int, peak: float, temperature: float, rare: int) -> None:
    """Nor are the bounds far off.

    ``rare``: how many of the highest bits are set, as a winner's are.
    """
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, (GROUPS, 4), dtype=np.uint64)
    bits[::2] |= np.uint64((2**rare - 1) << (32 - rare))
    bits[:2] = [[0, 1, 511, 512], [2**32 - 1, 2**32 - 512, 2**32 - 513, 2**31]]
    behind = rng.uniform(0, MAX_SPREAD * temperature, (GROUPS, 4)) * rng.integers(0, 2, (GROUPS, 4))
    value = (np.float32(peak) - behind).astype(np.float32)
    words = torch.from_numpy(bits.astype(np.uint32).view(np.int32))
    scores, bounds = torch.empty(GROUPS, 4), torch.empty(GROUPS)
    furthest = MAX_SPREAD * temperature * (1 + 2.0**-20)
    bound_kernel[1,](words, torch.from_numpy(value), scores, bounds, peak, temperature, furthest, GROUPS)
    best = scores.max(dim=1).values
    assert bool((best <= bounds).all())
    usual = torch.from_numpy(((bits >> 9) >= 3 * 2**21).all(axis=1) & ((bits >> 9) < 2**23 - 32).all(axis=1))
    off = (bounds - best)[usual & (best > -torch.inf)]
    assert len(off) == 0 or 0 < float(off.max()) < 0.3


@triton.jit
def few_words(settings, row, group):
    """Return noise of few values, so that scores are equal in plenty."""
    w0, w1, w2, w3 = random_words(settings, row, group)
    return w0 & 0xE0000000, w1 & 0xE0000000, w2 & 0xE0000000, w3 & 0xE0000000


@triton.jit
def loose(bits, behind, temperature, furthest):
    """Return bounds that hold and say nothing."""
    return tl.min(tl.zeros_like(behind), axis=1)


@triton.jit
def wrong(lag):
    """Return bounds that do not hold."""
    return tl.zeros_like(lag) - 1000.0


@pytest.fixture(params=[False, True], ids=["all noise", "few values"])
def noise(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            patch.setattr(sample, "random_words", few_words)
        yield


def rows_of(seed: int, vocab: int, temperature: float, min_p: float, count: int = 3) -> list[Row]:
    """Return rows of logits with few values, some of them impossible.

    They draw from all tokens, or from the tokens that min_p keeps.
    """
    rng = np.random.default_rng(seed)
    params = SamplingParams(temperature=temperature, min_p=min_p)
    logits = rng.integers(-6, 7, (count, vocab)) / np.float32(4)
    logits[rng.random((count, vocab)) < 0.1] = BANS
    logits[:, rng.integers(vocab)] = 1.0
    return [Row(line.astype(np.float32), params, seed=seed + i) for i, line in enumerate(logits)]


@pytest.mark.usefixtures("noise")
@given(
    seed=st.integers(0, 2**40),
    vocab=st.integers(1, 150),
    temperature=st.sampled_from([0.01, 0.2, 0.6, 1.0, 30.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    cut=st.sampled_from(CUTS),
)
@settings(max_examples=8, deadline=None, phases=WITHOUT_SHRINKING)
def test_bounds_leave_out_no_winner(seed: int, vocab: int, temperature: float, min_p: float, cut: Cut) -> None:
    """The tokens are the same as in a race that scores every token."""
    rows = rows_of(seed, vocab, temperature, min_p)
    assert sample_on(rows, cut=cut) == race_plainly(rows)


@pytest.mark.parametrize(("name", "other", "same"), [("lags", loose, True), ("score_at_most", wrong, False)])
def test_bounds_matter_where_they_do_not_hold(
    monkeypatch: pytest.MonkeyPatch, name: str, other: object, same: bool
) -> None:
    """A loose bound only lets more be scored.

    Negative control: a bound that does not hold is seen.
    """
    rows = rows_of(5, 140, 1.0, 0.0, count=10)
    if not same:
        monkeypatch.setattr(sample_race, "lags", loose)  # so that only the first group is scored
    monkeypatch.setattr(sample_race, name, other)
    assert (sample_on(rows, cut=Cut(32, 4)) == race_plainly(rows)) is same
