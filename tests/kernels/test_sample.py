"""CUDA's sampler in Triton's interpreter: the host's tokens, counts and log-probabilities, on tiny vocabularies.

Order keys, deficits and random integers are the host's bit for bit; its exp and log may differ in the last bits, so
tokens are compared where the float64 reference says that rounding cannot decide.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as changed

from preheat.backends.cpu.backend import CpuBackend
from preheat.backends.cuda.sampling import shared as sample
from preheat.backends.cuda.sampling.sampler import CudaSampler, Cut, DeviceCounts
from preheat.core import Level, SamplingParams, StructuredOutputsParams
from preheat.execution import logit_stages
from preheat.execution.logit_stages import sampling_input
from preheat.ops.logprobs import token_logprobs
from preheat.ops.philox import gumbel_at
from preheat.ops.sampler import HostSampler
from preheat.ops.sampling import Penalties, allowed, words_of
from tests.cpu.sampling_reference import Row, answer, edited, fill, gumbel, philox_words
from tests.cpu.test_logprobs import assert_close
from tests.cpu.test_sampler import a_row
from tests.cpu.test_sampler_invariance import KINDS
from tests.device_sampling import (
    keyed_by_row,
    logits_of,
    logprobs_on,
    prepared,
    sample_on,
    told_like_the_likeliest,
    told_on,
)

SMALL = Cut(chunk=32, group=4)
VOCAB = 90
WITHOUT_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # an example takes long


def rows_of_all_kinds(seed: int = 7, vocab: int = VOCAB) -> list[Row]:
    rng = np.random.default_rng(seed)
    return [
        Row(
            logits=(rng.standard_normal(vocab) * 2.5).astype(np.float32),
            params=SamplingParams(**kind),  # type: ignore[arg-type]
            prompt=rng.integers(0, vocab, 20).tolist(),
            output=rng.integers(0, vocab, int(rng.integers(0, 20))).tolist(),
            stop_ids=[3, 4],
            seed=int(rng.integers(0, 2**63)),
            choice=int(rng.integers(0, 3)),
        )
        for kind in KINDS
    ]


def sample_on_host(rows: list[Row], duplicates: bool = False) -> list[int]:
    sampler = HostSampler(len(rows), len(rows[0].logits), handle_topk_duplicates=duplicates)
    batch = sampling_input(fill(rows), np.arange(len(rows)))
    return sampler.sample(torch.from_numpy(np.stack([row.logits for row in rows])), batch).tolist()


@triton.jit
def noise_kernel(settings, words, of_groups, of_tokens, N: tl.constexpr):
    group = tl.arange(0, N)
    four = group[:, None] * 4 + tl.arange(0, 4)[None, :]
    w0, w1, w2, w3 = sample.random_words(settings, 1, group)
    tl.store(words + group * 4, w0.to(tl.int32, bitcast=True))
    tl.store(words + group * 4 + 1, w1.to(tl.int32, bitcast=True))
    tl.store(words + group * 4 + 2, w2.to(tl.int32, bitcast=True))
    tl.store(words + group * 4 + 3, w3.to(tl.int32, bitcast=True))
    tl.store(of_groups + four, sample.noise_of_groups(settings, 1, group))
    tokens = tl.arange(0, 4 * N)
    tl.store(of_tokens + tokens, sample.noise_of_tokens(settings, 1, tokens))


@pytest.mark.parametrize("key", [(0, 0, 0), (2**64 - 1, 2**31 - 1, 127), (0x0123456789ABCDEF, 17, 2)])
def test_random_integers_equal_the_integers_of_the_host(key: tuple[int, int, int]) -> None:
    """The integers are of the second row of a step.

    Noise of whole groups and of single tokens has the same bits.
    """
    seed, position, choice = key
    row = np.zeros(2, sample.ROW)
    row["seed"][1], row["position"][1], row["choice"][1] = seed, position, choice
    words = torch.from_numpy(np.concatenate((np.zeros(sample.HEADER, np.int32), row.view(np.int32))))
    n = 64
    bits, groups, tokens = torch.empty(4 * n, dtype=torch.int32), torch.empty(4 * n), torch.empty(4 * n)
    noise_kernel[1,](words, bits, groups, tokens, n)
    right = [philox_words((i, position, choice, 0), (seed & sample_mask, seed >> 32)) for i in range(n)]
    assert bits.numpy().view(np.uint32).tolist() == [word for four in right for word in four]
    assert torch.equal(groups, tokens)
    host = gumbel_at(*(np.full(4 * n, x, t) for x, t in zip(key, (np.uint64, np.int64, np.int64), strict=True)),
                     np.arange(4 * n))  # fmt: skip
    assert np.abs(groups.numpy() - host).max() < 4e-6
    assert float(groups[9]) == pytest.approx(gumbel(seed, position, choice, 9), abs=4e-6)


sample_mask = 0xFFFFFFFF


@triton.jit
def ln_kernel(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, sample.ln(tl.load(x + at)))


def test_logarithm() -> None:
    """The relative error is at most two units in the last place, also next to 1.

    The noise of winners comes from there.
    """
    steps = np.concatenate((np.arange(30_000), 2**23 - 1 - np.arange(30_000), np.arange(2**22 - 5000, 2**22)))
    x = ((steps + 0.5) * 2.0**-23).astype(np.float32)[: 2**16]
    x = np.concatenate((x, np.linspace(1, 17, 2**16 - len(x), dtype=np.float32)))
    y = torch.empty(len(x))
    ln_kernel[1,](torch.from_numpy(x), y, len(x))
    right = np.log(x.astype(np.float64))
    error = np.abs(y.numpy() - right)
    assert (error <= 2.5e-7 * np.abs(right)).all()


@given(data=st.data(), vocab=st.integers(2, 24), cut=st.sampled_from([Cut(8, 4), SMALL]), duplicates=st.booleans())
@settings(max_examples=5, deadline=None, phases=WITHOUT_SHRINKING)
def test_equals_the_reference(data: st.DataObject, vocab: int, cut: Cut, duplicates: bool) -> None:
    """All parameters over all of their ranges, with many ties."""
    rows = [row for row in data.draw(st.lists(a_row(vocab), min_size=3, max_size=5)) if max(edited(row)) > -np.inf]
    expected = [(row, answer(row, duplicates)) for row in rows]
    clear = [(row, right.token) for row, right in expected if right.clear]
    assume(clear)
    assert sample_on([row for row, _ in clear], duplicates=duplicates, cut=cut) == [token for _, token in clear]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_host(dtype: torch.dtype) -> None:
    """All kinds of rows over several chunks; bfloat16 has equal logits in plenty."""
    rows = rows_of_all_kinds()
    for row in rows:
        row.logits = torch.from_numpy(row.logits).to(dtype).float().numpy()
    assert sample_on(rows, dtype=dtype, cut=SMALL) == sample_on_host(rows)


@pytest.mark.parametrize("duplicates", [False, True])
def test_a_list_that_overflows(duplicates: bool) -> None:
    """All tokens are looked at if the k best may include more tokens than a chunk holds.

    So are their ids if logits are equal.
    """
    logits = np.where(np.arange(VOCAB) % 7 == 0, 0.5, 1.5).astype(np.float32)
    rows = [
        Row(logits, SamplingParams(top_k=k, top_p=p), seed=k) for k, p in ((2, 1.0), (50, 0.3), (50, 1.0), (89, 1.0))
    ]
    assert sample_on(rows, duplicates=duplicates, cut=SMALL) == sample_on_host(rows, duplicates)


def differing(rows: list[Row]) -> int:
    """Return how many rows get another token in another place, alone, cut in another way or at a higher level."""
    whole = sample_on(rows, cut=SMALL)
    turned = sample_on(rows[2:] + rows[:2], level=Level.FULL, cut=SMALL)
    alone = [sample_on([row], cut=Cut(64, 8))[0] for row in rows]
    return sum(len({whole[i], turned[i - 2], alone[i]}) > 1 for i in range(len(rows)))


def test_a_row_depends_on_itself_alone() -> None:
    assert differing(rows_of_all_kinds(1)[::2]) == 0


def test_noise_keyed_by_the_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: noise keyed by the row."""
    keyed_by_row(monkeypatch)
    assert differing(rows_of_all_kinds(1)[1:4]) > 0


def test_levels_agree() -> None:
    """Greedy rows run at their own level and at a higher one."""
    rows = rows_of_all_kinds(2)[:1] * 2
    rows[1] = replace(rows[1], logits=rows[1].logits[::-1].copy())
    assert sample_on(rows, level=Level.GREEDY, cut=SMALL) == sample_on(rows, level=Level.FILTERED, cut=SMALL)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_bad_logits(params: dict[str, float]) -> None:
    nan, inf, low = np.nan, np.inf, -np.inf
    lines = [[nan, low, 1, low, nan], [1, inf, nan, -5, 2], [low] * 5, [nan] * 5, [low, nan, low, nan, nan]]
    rows = [Row(np.array(line, np.float32), SamplingParams(**params)) for line in lines]  # type: ignore[arg-type]
    assert sample_on(rows, cut=SMALL) == [2, 1, 0, 0, 0]
    banned = SamplingParams(min_tokens=1, **params)  # type: ignore[arg-type]
    line = np.array([3, low, 2, nan, low], np.float32)
    rows = [Row(line, banned, stop_ids=[0, 2, 999, -1, 2**40]), Row(line, banned, stop_ids=[0, 1, 2, 3, 4])]
    assert sample_on(rows, cut=SMALL) == [1, 0]


def test_a_ban_outweighs_a_bias() -> None:
    params = SamplingParams(temperature=0, min_tokens=1, logit_bias={2: 100.0, 1: 3.0})
    assert sample_on([Row(np.array([0, 1, 2, 3], np.float32), params, stop_ids=[2])], cut=SMALL) == [1]


def test_a_step_with_too_many_edits_is_refused() -> None:
    row = Row(np.zeros(8, np.float32), SamplingParams(min_tokens=1), stop_ids=list(range(5000)))
    with pytest.raises(ValueError, match="5000 biases and banned ids; 4096 fit"):
        prepared([row])


def test_counts_follow_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps count the tokens that they draw.

    Counting begins anew for another owner, and for an unexpected length.
    """
    row = Row(np.array([1, 9, 2], np.float32), SamplingParams(temperature=0, presence_penalty=0.5), [0, 2, 2], [2])
    sampler, batch = prepared([row], cut=SMALL)
    history = sampler.counts.history
    assert history.tolist() == [[1, 0, 3], [0, 0, 0]]
    logits = logits_of([row], torch.float32, "cpu")
    sampler.sample(batch.level, logits)
    assert history.tolist() == [[1, 2, 3], [0, 0, 0]]

    def follow(owner: int, tokens: list[int]) -> list[int]:
        one = np.ones(1, np.float32)
        zero = np.zeros(1, np.int64)
        sampler.counts.follow(
            Penalties(zero, zero, zero + owner, zero + 3, [np.array(tokens, np.int32)], one, one, one)
        )
        return history[0].tolist()

    assert follow(0, [0, 2, 2, 2, -1]) == [1, 2, 3]  # the step's own token, not known to the host yet
    assert follow(0, [0, 2, 2, 2, 1]) == [1, 2, 3]  # resumed: the host expects one more, and counts anew
    assert follow(8, [1, 1, 2, 0, 0]) == [4, 1, 1]
    with pytest.raises(ValueError, match="slot 0 cannot be counted"):
        follow(9, [1, 1, 2, -1])
    sampler.counts.forget()
    assert not history.any()
    assert follow(8, [1, 1, 2, 0, 0, 1]) == [4, 3, 1]


@pytest.mark.parametrize("plant", [None, "drafts", "final"])
def test_penalties_count_drafts_and_accepted_drafts(plant: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with drafts, right or wrong, and without draw the host's tokens.

    They do not if the drafts before a row are not counted, or if tokens drawn for draft rows are.
    """
    params = SamplingParams(temperature=0.9, presence_penalty=1.0, frequency_penalty=1.9, repetition_penalty=1.4)
    row = Row(np.random.default_rng(0).standard_normal(11).astype(np.float32), params, [1, 2, 2], [], seed=11)
    truth, chance, vocab = list[int](), random.Random(1), len(row.logits)
    for _ in range(64):
        truth.append(sample_on_host([replace(row, output=list(truth))])[0])
    if plant == "drafts":
        monkeypatch.setattr(Penalties, "drafts", property(lambda self: [each[:0] for each in self.tokens]))
    if plant == "final":
        monkeypatch.setattr(logit_stages, "_final", lambda slots, rows, position: np.ones(len(rows), bool))
    slots, sampler = fill([row]), CudaSampler(1, vocab, CpuBackend(), 5, cut=SMALL)
    found: list[int] = []
    while len(found) < 60 and found == truth[: len(found)]:
        count, begin = chance.choice([0, 0, 1, 3]), 3 + len(found)
        drafts = [(each + (chance.random() < 0.3)) % vocab for each in truth[len(found) :][:count]]
        slots.tokens[0, begin : begin + count + 1] = [*drafts, -1]
        slots.device_len[0] = begin + (count or 1)
        one = np.zeros(1 + count, np.int64)
        batch = sampling_input(slots, one, begin + np.arange(1 + count))
        sampler.describe(len(found) % 2, batch, one)
        sampler.sample(batch.level, logits_of([row] * (1 + count), torch.float32, "cpu", 4 - count))
        drawn = sampler.tokens[: 1 + count].tolist()
        kept = next((place for place, each in enumerate(drafts) if each != drawn[place]), count)
        found += drawn[: kept + 1]
        slots.tokens[0, begin : begin + kept + 1] = drawn[: kept + 1]
        slots.device_len[0] = begin + kept + 1
    assert (found == truth[: len(found)]) is (plant is None)


def test_long_sequences_are_counted_in_parts() -> None:
    counts = DeviceCounts(2, 5, CpuBackend())
    tokens = np.random.default_rng(0).integers(0, 5, 300_000).astype(np.int32)
    one = np.ones(1, np.float32)
    for owner in (1, 2):
        counts.follow(
            Penalties(
                np.zeros(1, np.int64), np.array([1]), np.array([owner]), np.array([5000]), [tokens], one, one, one
            )
        )
        assert counts.history[1].tolist() == (2 * np.bincount(tokens[5000:]) + 1).tolist()
    assert not counts.history[0].any()


def test_many_sequences_are_counted_together() -> None:
    """Each sequence is counted in its own slot, whatever was there before.

    Other slots are left alone.
    """
    slots, lengths, prompts = np.array([5, 0, 4]), [4097, 1, 20], np.array([4096, 1, 3])
    tokens = [np.random.default_rng(n).integers(0, 7, n).astype(np.int32) for n in lengths]
    counts, one = DeviceCounts(6, 7, CpuBackend()), np.ones(3, np.float32)
    counts.history.fill_(9)
    counts.follow(Penalties(np.arange(3), slots, slots + 1, prompts, tokens, one, one, one))
    for slot, all_of_it, prompt in zip(slots, tokens, prompts, strict=True):
        seen, drawn = (np.bincount(part, minlength=7) for part in np.split(all_of_it, [prompt]))
        assert counts.history[slot].tolist() == (2 * drawn + (seen > 0)).tolist()
    assert (counts.history[[1, 2, 3, 6]] == 9).all()


@given(data=st.data(), vocab=st.integers(1, 30))
@settings(max_examples=5, deadline=None, phases=WITHOUT_SHRINKING)
def test_logprobs(data: st.DataObject, vocab: int) -> None:
    value = st.integers(-8, 8).map(float) | st.just(-0.0) | st.just(-np.inf) | st.floats(-50, 50, width=32)
    lines = st.lists(st.lists(value, min_size=vocab, max_size=vocab), min_size=2, max_size=2)
    logits = torch.tensor(data.draw(lines), dtype=torch.float32)
    tokens = np.array(data.draw(st.lists(st.integers(0, vocab - 1), min_size=2, max_size=2)))
    wanted = np.array([0, 9])
    right = token_logprobs(logits, tokens, wanted)
    for got in logprobs_on(logits, tokens, wanted * 0, most=0, cut=Cut(8, 4)):
        assert got.top == ()  # --max-logprobs 0
    for got, expected in zip(logprobs_on(logits, tokens, wanted, most=9, cut=Cut(8, 4)), right, strict=True):
        assert_close(got, expected)


def test_logprobs_of_told_tokens() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 3
    logits[2, 5:9] = torch.tensor([-torch.inf, torch.nan, torch.inf, -0.0])
    told_like_the_likeliest(logits)
    far = told_on(logits, {0: list(range(50))})[0].top
    assert [token for token, _ in far] == list(range(50))
    assert np.allclose([value for _, value in far], logits[0].log_softmax(-1), rtol=1e-5, atol=1e-5)


def test_the_settings_words_are_all_read() -> None:
    """Every word of a row's record has a name that a kernel loads it by."""
    names = {name for name in sample.ROW.names or () if not hasattr(sample, name.upper())}
    assert names == set()
    assert sample.ROW.itemsize == 4 * (len(sample.ROW) + 1)  # the seed takes two words


def masked_rows() -> tuple[list[Row], np.ndarray]:
    """Return rows of every kind twice, once with a grammar, and masks.

    A mask allows few tokens, a single one, or nearly all.
    """
    rows, chance = rows_of_all_kinds()[::2], np.random.default_rng(5)
    grammar = StructuredOutputsParams(regex="a")
    held = [replace(row, params=changed(row.params, structured_outputs=grammar)) for row in rows]
    rows = [each for pair in zip(rows, held, strict=True) for each in pair]
    share = chance.choice([0.02, 0.1, 0.9], (len(rows), 1))
    bits = chance.random((len(rows), 32 * words_of(VOCAB))) < share
    bits[:, VOCAB // 2] = True
    return rows, np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def test_masks() -> None:
    """The tokens are the host's, and the mask allows them.

    Rows without a grammar draw the same tokens as without masks.
    """
    rows, masks = masked_rows()
    found = sample_on(rows, cut=SMALL, masks=masks)
    sampler = HostSampler(len(rows), VOCAB)
    batch = sampling_input(fill(rows), np.arange(len(rows)))
    right = sampler.sample(torch.from_numpy(np.stack([row.logits for row in rows])), batch, masks).tolist()
    assert found == right
    assert all(allowed(masks[place], VOCAB)[found[place]] for place in range(1, len(rows), 2))
    assert found[::2] == sample_on(rows[::2], cut=SMALL)
    assert found[1::2] != found[::2]


def test_a_mask_and_a_bias_and_nothing_possible() -> None:
    """A bias brings no masked token back.

    If no logit is finite, the lowest allowed token is drawn.
    """
    grammar, logits = StructuredOutputsParams(regex="a"), np.full(VOCAB, -np.inf, np.float32)
    mask = np.zeros((1, words_of(VOCAB)), np.int32)
    mask[0, 1] = 0b1100
    for bias in (None, {3: 100.0}):
        params = SamplingParams(temperature=0, logit_bias=bias, structured_outputs=grammar)
        row = Row(logits, params)
        host = HostSampler(1, VOCAB).sample(
            torch.from_numpy(logits[None]), sampling_input(fill([row]), np.arange(1)), mask
        )
        assert sample_on([row], cut=SMALL, masks=mask) == host.tolist() == [34]
    params = SamplingParams(temperature=0, logit_bias={3: 100.0}, structured_outputs=grammar)
    row = Row(np.zeros(VOCAB, np.float32), params)
    host = HostSampler(1, VOCAB).sample(
        torch.from_numpy(row.logits[None]), sampling_input(fill([row]), np.arange(1)), mask
    )
    assert sample_on([row], cut=SMALL, masks=mask) == host.tolist() == [34]
