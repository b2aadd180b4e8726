"""The digest of a row: the kernel gives the digest of the definition, for any length and place of the row."""

import numpy as np
import pytest
import torch

from preheat.ops.digest import keys, row_digests


def reference(row):
    """The definition, with Python's own integers."""
    total = 0
    for j, word in enumerate(row.view(np.uint32).tolist()):
        mixed = (j + 1) * 0x9E3779B97F4A7C15 % 2**64
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
        total += word * ((mixed ^ (mixed >> 31)) | 1)
    return total % 2**64


def rows_of(count, vocab):
    values = np.random.default_rng(vocab).standard_normal((count, vocab)).astype(np.float32)
    values[0, : vocab // 2] = -np.inf
    values[-1, -1] = np.nan
    return torch.from_numpy(values)


@pytest.mark.parametrize("vocab", [1, 7, 4096, 9001])
def test_the_host_follows_the_definition(vocab):
    rows = rows_of(3, vocab)
    assert row_digests(rows).numpy().view(np.uint64).tolist() == [reference(row) for row in rows.numpy()]


@pytest.mark.parametrize("vocab", [1, 4096, 4099])
def test_the_kernel_agrees_with_the_host(vocab):
    from preheat.backends.cuda.pointwise.digest import MANY, digest_rows

    wide = rows_of(5, vocab + 3)
    rows = wide[1:, :vocab]  # a part of a larger matrix
    assert torch.equal(digest_rows(rows), row_digests(rows.contiguous()))
    many = rows_of(MANY + 3, vocab)  # programs of several rows, and one that is not full
    assert torch.equal(digest_rows(many), row_digests(many))


def test_logits_of_16_bits_have_the_digests_of_their_fp32():
    from preheat.backends.cuda.pointwise.digest import add_digests

    for dtype in (torch.bfloat16, torch.float16):
        rows = rows_of(3, 9001).nan_to_num().to(dtype)
        digests, spent = torch.zeros(3, dtype=torch.int64), torch.full((5000,), 7)
        add_digests(rows, digests, spent)
        assert torch.equal(digests, row_digests(rows.float())) and not spent.any()
        rows.view(torch.int16)[1, 9000] ^= 1  # control
        assert not torch.equal(digests, row_digests(rows.float()))


def test_the_sampler_of_a_gpu_fetches_the_digests_of_a_step():
    from preheat.backends.cuda.sampling.sampler import CudaSampler
    from preheat.core import Level
    from preheat.ops.sampling import SamplingInput
    from tests.device_sampling import backend_of

    logits = rows_of(3, 5001).nan_to_num()
    sampler = CudaSampler(4, 5001, backend_of("cpu"), 4)
    sampler.compile(logits)
    for turn, rows, digested in ((0, 3, True), (1, 3, False), (0, 1, True), (1, 3, True), (0, 3, True), (0, 2, True)):
        sampler.describe(turn, SamplingInput(rows, None, None, None), np.arange(rows))
        sampler.sample(Level.GREEDY, logits[:rows])
        if digested:
            sampler.digest(turn, logits[:rows])
        sampler.fetch(turn, tokens=True, reports=False)
        tokens, _ = sampler.read(turn, rows, np.empty(0, np.int64), np.empty(0, np.int32))
        assert tokens.tolist() == logits[:rows].argmax(1).tolist()
        assert not digested or sampler.digests(turn, rows).tolist() == row_digests(logits[:rows]).tolist()


def test_one_bit_is_seen_everywhere():
    rows = rows_of(1, 300).nan_to_num().repeat(301, 1)
    words = rows.numpy().view(np.int32)
    words[np.arange(300), np.arange(300)] ^= 1
    assert len(set(row_digests(rows).tolist())) == 301


def test_a_swap_of_two_words_changes_the_digest():
    rows = rows_of(1, 64).nan_to_num().repeat(2, 1)
    rows[1, [3, 60]] = rows[1, [60, 3]]
    assert len(set(row_digests(rows).tolist())) == 2


def test_keys_are_odd_and_differ():
    found = keys(100_000)
    assert (found % np.uint64(2) == 1).all()
    assert len(np.unique(found)) == len(found)
