"""The digest of the logits of a rank's check at boot."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preheat.ops.digest import digests_in_place, keys, row_digests
from preheat.ops.proof import noise
from preheat.parallel.leader import LogitDigest


@given(st.integers(1, 5), st.integers(1, 70), st.sampled_from([torch.bfloat16, torch.float32]), st.integers(0, 9))
def test_digests_in_place_are_those_of_the_host(rows, size, dtype, seed):
    logits = (noise(rows, size, seed=seed) * 1e6).to(dtype)
    own_keys = torch.from_numpy(keys(size).view(np.int64))
    assert torch.equal(digests_in_place(logits, own_keys), row_digests(logits.float()))


def digest(*steps):
    found = LogitDigest()
    for step in steps:
        found.add(step)
    return found.hexdigest()


def test_ranks_agree_only_on_equal_rows_in_one_order():
    first, second = noise(3, 40).bfloat16(), noise(2, 40, seed=1).bfloat16()
    whole = digest(first, second)
    assert whole == digest(first[:1], first[1:], second) == digest(torch.cat((first, second)))
    changed = first.clone()
    changed.view(torch.int16)[1, 7] ^= 1
    others = (changed, second), (second, first), (first.flip(0), second), (first,), ()
    assert len({whole, *(digest(*each) for each in others)}) == 6


@pytest.mark.parametrize("sign", [0.0, -0.0])
def test_signed_zeros_differ(sign):
    assert (digest(torch.full((1, 8), sign)) == digest(torch.zeros(1, 8))) == (str(sign) == "0.0")
