"""The compiled function that draws: the tokens of the reference sampler, for any logits and settings."""

from __future__ import annotations

from ctypes import CFUNCTYPE, c_int64, c_void_p
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install llvmlite")
from llvmlite import ir

from preheat.backends.cpu.llvm import sampler, targets
from preheat.backends.cpu.llvm.best import Best
from preheat.backends.cpu.llvm.draw import Draw
from preheat.backends.cpu.llvm.emit import INT, LANES, LONG, POINTER, WORDS
from preheat.backends.cpu.llvm.machine import Code, compile_code
from preheat.backends.cpu.llvm.sampler import Draws
from preheat.backends.cpu.sampler import CpuSampler
from preheat.ops.digest import row_digests
from preheat.ops.order import best_ids
from preheat.ops.philox import _gumbel
from preheat.ops.sampler import HostSampler
from preheat.ops.sampling import Edits, SamplingInput
from preheat.ops.top_k_top_p import SamplingMetadata

ROWS = 32
VOCABULARIES = (2, 16, 63, 64, 65, 200, 1003)


@pytest.fixture(scope="module")
def draws() -> Draws:
    return Draws(ROWS, None)


def logits_of(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Return rows with and without ties, some with impossible tokens."""
    logits = rng.standard_normal((rows, vocab), np.float32) * rng.choice([0.1, 1.0, 8.0], (rows, 1)).astype(np.float32)
    tied = rng.random(rows) < 0.5
    logits[tied] = np.round(logits[tied])
    logits[rng.random((rows, vocab)) < rng.choice([0.0, 0.3], (rows, 1))] = -np.inf
    logits[:, rng.integers(vocab)] = 0.0  # some token is possible
    return logits


def settings_of(rng: np.random.Generator, rows: int) -> SamplingMetadata:
    """Return settings of some of ``rows`` rows, half of them with top_k or top_p."""
    some = np.flatnonzero(rng.random(rows) < 0.8)
    count = len(some)
    return SamplingMetadata(
        rows=some,
        temperature=rng.uniform(0.05, 3, count).astype(np.float32),
        top_p=np.where(rng.random(count) < 0.7, 1, rng.random(count)).astype(np.float32),
        top_k=np.where(rng.random(count) < 0.7, 0, rng.integers(1, 300, count)).astype(np.int32),
        min_p=(rng.random(count) * rng.choice([0.0, 0.3], count)).astype(np.float32),
        seed=rng.integers(0, 2**64, count, dtype=np.uint64),
        position=rng.integers(0, 4000, count).astype(np.int32),
        choice=rng.integers(0, 5, count).astype(np.int32),
    )


def differing(draws: Draws, examples: int, seed: int, duplicates: bool = False) -> int:
    """Return the number of tokens that differ from the reference sampler's."""
    found, rng = 0, np.random.default_rng(seed)
    for _ in range(examples):
        rows, vocab = int(rng.integers(1, ROWS + 1)), int(rng.choice(VOCABULARIES))
        logits, how = logits_of(rng, rows, vocab), settings_of(rng, rows)
        step = SamplingInput(rows, how if len(how) else None, None, None)
        drawn = draws(logits, step)
        assert drawn is not None
        expected = HostSampler(rows, vocab, duplicates).sample(torch.from_numpy(logits), step).numpy()
        found += int((drawn != expected).sum())
    return found


def test_ten_thousand_rows_have_the_tokens_of_the_reference_sampler(draws):
    assert differing(draws, 700, seed=0) == 0  # 16 rows at the mean


@given(st.integers(0, 2**32))
@settings(deadline=None)
def test_any_seed_has_the_tokens_of_the_reference_sampler(seed):
    assert differing(_ONE, 2, seed) == 0


_ONE = Draws(ROWS, None)


def test_positions_advance_from_step_to_step(draws):
    rng = np.random.default_rng(1)
    logits, how = np.zeros((4, 500), np.float32), settings_of(rng, 4)
    for steps in range(5):
        step = SamplingInput(4, how.later(steps), None, None)
        drawn = draws(logits, step)
        assert drawn is not None
        assert drawn.tolist() == HostSampler(4, 500).sample(torch.from_numpy(logits), step).tolist()
    greedy = draws(logits, SamplingInput(4, None, None, None))
    assert greedy is not None and greedy.tolist() == [0] * 4


def test_all_noise_has_the_bits_of_the_reference():
    """Each of the 2**23 uniform numbers."""
    module = ir.Module("noise")
    module.triple = targets.here().triple
    e = Draw(module, "noise", [POINTER, LONG])
    with e.loop(0, e.args[1]) as at:
        place = e.at(e.args[0], e.mul(at, LANES))
        e.store(e.gumbel(e.b.load(place, typ=WORDS, align=4)), place)
    e.close()
    code = Code(compile_code(str(module), None)[0])
    bits = np.arange(2**23, dtype=np.uint32) << 9
    found = bits.copy()
    CFUNCTYPE(None, c_void_p, c_int64)(code.address("noise"))(found.ctypes.data, len(bits) // LANES)
    assert np.array_equal(found.view(np.float32), _gumbel(bits))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_without_a_finite_maximum_is_left_to_the_reference_and_marked(draws, value):
    logits = np.zeros((3, 70), np.float32)
    logits[1] = value
    step = SamplingInput(3, None, None, None)
    assert draws(logits, step) is None
    sampler = CpuSampler(3, 70, False, draw=draws)
    sampler.describe(0, step, np.arange(3))
    sampler.sample(step.level, torch.from_numpy(logits))
    tokens = sampler.read(0, 3, np.empty(0, np.int64), np.empty(0, np.int32))[0]
    assert tokens[0] == tokens[2] == 0 and tokens[1] < 0


def test_duplicates_of_the_last_token_of_top_k_are_kept_if_asked_for():
    assert differing(Draws(ROWS, None, duplicates=True), 50, seed=3, duplicates=True) == 0
    assert differing(Draws(ROWS, None), 50, seed=3, duplicates=True) > 0


def test_rows_with_edits_are_left_to_the_reference(draws):
    logits = np.zeros((2, 70), np.float32)
    assert draws(logits, SamplingInput(2, None, None, Edits.of([(0, 3, 1.0)]))) is None


@pytest.fixture(autouse=True)
def written_anew():
    """Faults are planted where functions are written."""
    sampler.source.cache_clear()
    yield
    sampler.source.cache_clear()


def test_a_tie_that_goes_to_a_higher_id_is_seen(monkeypatch):
    right = Draw.better

    def late(e: Draw, score, ids, best, best_ids):
        more = e.b.fcmp_ordered(">=", score, e.get(best))
        e.set(best_ids, e.b.select(more, ids, e.get(best_ids)))
        right(e, score, ids, best, best_ids)

    monkeypatch.setattr(Draw, "better", late)
    assert differing(Draws(ROWS, None), 20, seed=0) > 0


def other_orders(draws: Draws) -> int:
    """Return how many lines have other best tokens than the reference finds, or another order."""
    found, rng = 0, np.random.default_rng(4)
    for vocab in VOCABULARIES * 10:
        line = logits_of(rng, 1, vocab)[0]
        line[rng.random(vocab) < 0.1] = -0.0
        for width in {1, min(5, vocab), min(128, vocab), vocab}:
            found += draws.best_ids(line, width).tolist() != best_ids(line, width).tolist()
    return found


def test_the_best_tokens_are_the_reference_s(draws):
    assert other_orders(draws) == 0
    assert draws.best_ids(np.full(70, -np.inf, np.float32), 5).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("fault", ["key", "number"])
def test_other_best_tokens_are_seen(fault, monkeypatch):
    right = getattr(Best, fault)
    if fault == "key":  # equal tokens are in falling order
        monkeypatch.setattr(Best, "key", lambda e, logit, id: right(e, logit, e.b.xor(id, e.i(255))))
    else:  # negative numbers rise the wrong way
        monkeypatch.setattr(Best, "number", lambda e, rising: right(e, e.b.or_(rising, ir.Constant(INT, 1 << 31))))
    assert other_orders(Draws(ROWS, None)) > 0


def test_noise_of_another_key_is_seen(monkeypatch):
    monkeypatch.setattr("preheat.backends.cpu.llvm.draw._KEY_STEPS", (0x9E3779B9, 0xBB67AE87))
    assert differing(Draws(ROWS, None), 20, seed=0) > 0


@pytest.mark.parametrize("vocab", [1, 15, 16, 1003])
def test_digests_are_the_digests_of_the_definition(draws, vocab):
    wide = torch.from_numpy(np.random.default_rng(vocab).standard_normal((5, vocab + 3)).astype(np.float32))
    wide[1, 0], wide[2, vocab - 1], wide[3, 0] = float("nan"), float("-inf"), -0.0
    rows = wide[1:, :vocab]  # a part of a larger matrix
    assert torch.equal(draws.row_digests(rows), row_digests(rows.contiguous()))
    found = draws.row_digests(rows).tolist()
    for at in {0, vocab // 2, vocab - 1}:  # control: one bit of one word
        rows.view(torch.int32)[2, at] ^= 1
        changed = draws.row_digests(rows).tolist()
        assert [one == other for one, other in zip(found, changed, strict=True)] == [True, True, False, True]
        rows.view(torch.int32)[2, at] ^= 1
    with pytest.raises(ValueError, match="expected float32 logits in contiguous rows"):
        draws.row_digests(rows.double())


@pytest.mark.parametrize("vocab", [1, 63, 1003])
def test_a_draw_gives_the_digests_of_its_rows(draws, vocab):
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal((5, vocab)).astype(np.float32)
    for rows, random in ((5, False), (5, True), (1, False), (2, True)):  # of few rows the keys are computed
        given, some = logits[:rows], settings_of(rng, rows) if random else None
        step = SamplingInput(rows, some, None, None)
        wanted = replace(step, digested=True)

        def digests(given=given, wanted=wanted):
            draws(given, wanted)
            return list(draws.digests(torch.from_numpy(given)))[: len(given)]

        assert digests() == row_digests(torch.from_numpy(given)).tolist()
        assert draws(given, wanted).tolist() == draws(given, step).tolist()
        before = digests()
        given.view(np.int32)[rows - 1, vocab - 1] ^= 1  # control: one bit of the last word
        after = digests()
        assert [one == other for one, other in zip(before, after, strict=True)] == [True] * (rows - 1) + [False]
    assert draws(given, replace(wanted, edits=Edits.of([(0, 0, 1.0)]))) is None  # the reference draws
    assert draws.digests(torch.from_numpy(given)).tolist() == after
