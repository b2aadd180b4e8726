import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from preheat.schedule.defrag import THRESHOLD, fragmentation, pad_pairs, padded_size, plan_swaps, swap_parts

masks = st.integers(2, 1400).flatmap(lambda size: arrays.arrays(bool, size))


def using(*ids, size=100):
    mask = np.zeros(size, bool)
    mask[list(ids)] = True
    return mask


def swap(contents, pairs):
    """Swap all pairs at once, as the device does it."""
    result = contents.copy()
    result[pairs[:, 0]], result[pairs[:, 1]] = contents[pairs[:, 1]], contents[pairs[:, 0]]
    return result


@pytest.mark.parametrize(("highest", "fires"), [(THRESHOLD + 1, False), (THRESHOLD + 2, True)])
def test_it_starts_strictly_above_the_threshold(highest, fires):
    assert bool(len(plan_swaps(using(highest)))) is fires


def test_highest_used_goes_to_lowest_free_until_they_meet():
    assert plan_swaps(using(1, 60, 61, 4), threshold=0).tolist() == [[61, 2], [60, 3]]
    assert plan_swaps(using(2, 5), threshold=0).tolist() == [[5, 1]]


def test_the_pad_block_is_never_a_target():
    assert plan_swaps(using(50), threshold=0).tolist() == [[50, 1]]


def test_nothing_in_use_is_nothing_to_do():
    assert plan_swaps(using()).shape == (0, 2)
    assert fragmentation(using()) == 0


def test_at_most_512_pairs_a_step_and_the_rest_on_the_next():
    mask = np.zeros(2001, bool)
    mask[1001:] = True
    assert len(plan_swaps(mask)) == 512
    steps = 0
    while len(pairs := plan_swaps(mask)):
        mask, steps = swap(mask, pairs), steps + 1
    assert steps == 2
    assert mask[1:1001].all()


@given(masks, st.integers(0, 64))
def test_swaps_are_a_permutation_that_compacts(mask, threshold):
    mask[0] = False
    pairs = plan_swaps(mask, threshold)
    before = fragmentation(mask)
    assert bool(len(pairs)) == (before > threshold)
    assert len(np.unique(pairs)) == pairs.size  # no id twice: any order gives the same
    assert (pairs >= 1).all() if len(pairs) else True
    after = swap(mask, pairs)
    assert after.sum() == mask.sum()
    assert fragmentation(after) <= before
    if 0 < len(pairs) < 512:
        assert fragmentation(after) == 0
    contents = np.arange(len(mask))
    assert np.array_equal(swap(swap(contents, pairs), pairs), contents)


def test_the_compaction_law_can_fail():
    """Control: pairs beyond the point where they meet would scatter the blocks again."""
    mask = using(1, 2, 40)
    wrong = np.array([[40, 3], [2, 41]])
    assert fragmentation(swap(mask, wrong)) > 0


@pytest.mark.parametrize(("pairs", "size"), [(0, 8), (1, 8), (8, 8), (9, 16), (129, 256), (512, 512)])
def test_sizes(pairs, size):
    assert padded_size(pairs) == size
    padded = pad_pairs(np.ones((pairs, 2), np.int32))
    assert padded.shape == (size, 2)
    assert (padded[pairs:] == 0).all()


def test_too_many_pairs_for_one_step():
    with pytest.raises(ValueError, match="513 pairs"):
        padded_size(513)


def test_swaps_without_graphs_come_in_parts_without_padding():
    pairs = np.arange(40, dtype=np.int32).reshape(20, 2)
    parts = swap_parts(np.concatenate([pairs, pairs[:3]]), 32, padded=False)
    assert [len(part) for part in parts] == [8, 8, 4]
    assert np.concatenate(parts).tolist() == pairs.tolist()
    assert [part.tolist() for part in swap_parts(pairs, 32, padded=True)] == [pad_pairs(pairs, 32).tolist()]
