"""The search for kernels that are fastest together."""

import random
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.backends.cuda.matmul.together import LEAST_GAIN, fastest_together


def costs(layers, kernels, seed, *, of_pairs):
    """Return the time of choices: each kernel's own, and what two neighbors cost each other."""
    drawn = random.Random(seed)
    own = [[drawn.uniform(10, 20) for _ in range(kernels)] for _ in range(layers)]
    both = {place: drawn.uniform(0, of_pairs) for place in product(range(layers - 1), range(kernels), range(kernels))}

    def time(choices):
        pairs = pairwise(choices)
        return sum(row[choice] for row, choice in zip(own, choices, strict=True)) + sum(
            both[place, *pair] for place, pair in enumerate(pairs)
        )

    return own, time


@given(st.integers(2, 4), st.integers(1, 4), st.integers(0, 99), st.sampled_from([0.0, 3.0]))
def test_no_change_of_one_layer_makes_the_found_kernels_faster(layers, kernels, seed, of_pairs):
    own, time = costs(layers, kernels, seed, of_pairs=of_pairs)
    options = [range(kernels)] * layers
    alone = [min(options[0], key=row.__getitem__) for row in own]
    found = fastest_together(options, [alone, [0] * layers], lambda choices, _: time(choices))
    assert time(found) <= min(time(alone), time([0] * layers))
    for layer, choice in product(range(layers), range(kernels)):
        changed = [*found[:layer], choice, *found[layer + 1 :]]
        assert time(changed) >= time(found) * (1 - 1.01 * LEAST_GAIN)


def test_the_fastest_alone_are_not_the_fastest_together():
    """A kernel that takes longer alone, and lets its neighbor begin, is found."""
    alone = {"closed": 10.0, "open": 10.6}

    def time(choices, _):
        return sum(alone[choice] for choice in choices) - choices.count("open") * 1.1

    assert fastest_together([["closed", "open"]] * 3, [["closed"] * 3], time) == ["open"] * 3


@pytest.mark.parametrize("gain", [0.001, 0.01])
def test_a_gain_within_the_noise_changes_nothing(gain):
    time = {"known": 100.0, "new": 100.0 * (1 - gain)}
    found = fastest_together([["known", "new"]], [["known"]], lambda choices, _: time[choices[0]])
    assert found == ["known" if gain == 0.001 else "new"]
