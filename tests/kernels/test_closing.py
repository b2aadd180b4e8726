"""The last steps of a block in one launch have the bits of the steps one after the other."""

import pytest
import torch

from preheat.backends.base.layers import Closing
from preheat.backends.cuda.matmul.moe.route import arrange, combine
from preheat.backends.cuda.pointwise import closing
from preheat.backends.cuda.pointwise.closing import BlockNorm, Unsummed
from preheat.ops.proof import noise
from preheat.ops.values import Routing
from tests.closings import one_by_one, steps_of

EXPERTS, SIZE = 5, 80


def experts_rows(block):
    """Return rows of three slots for each of four tokens, arranged or not."""
    counts = torch.zeros(EXPERTS, dtype=torch.int32)
    arrangement = arrange(noise(4, EXPERTS, seed=9).bfloat16(), Routing(3, True, False), block, counts)
    return Unsummed(noise(arrangement.rows, SIZE, seed=8).bfloat16(), arrangement)


@pytest.mark.parametrize("block", [0, 1, 16])
@pytest.mark.parametrize("kind", ["rms", "rms_once", "rms_plus_one", "identity"])
def test_steps_in_one_launch_have_the_bits_of_the_steps(kind, block):
    """Rows of tokens, and of experts by slots and in blocks; counts of rows are zeros again."""
    for steps in steps_of(SIZE, kind):
        rows = noise(4, SIZE).bfloat16() if not block else experts_rows(block)
        given = rows if isinstance(rows, torch.Tensor) else experts_rows(block)
        residual, own = (noise(4, SIZE, seed=1).bfloat16() for _ in range(2))
        right = one_by_one(rows if isinstance(rows, torch.Tensor) else combine(*rows), residual, steps)
        found = steps.norms[0].close(given, own, steps)
        assert torch.equal(own, residual) and len(found) == len(right)
        assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True))
        assert block != 16 or not given.arrangement.counts.any()


def test_steps_in_another_order_give_other_bits():
    """Negative control: the row beside the block is added behind the last norm."""
    steps = next(each for each in steps_of(SIZE, "rms") if each.beside is not None and each.last is not None)
    rows, residual = noise(4, SIZE).bfloat16(), noise(4, SIZE, seed=1).bfloat16()
    moved = steps._replace(beside=None, beside_norm=None)
    right = steps.norms[0].close(rows, residual.clone(), steps)
    late = moved.norms[0].close(rows, residual + steps.beside, moved)
    assert not torch.equal(right[0], late[0])


def test_counts_are_zeros_after_an_error(monkeypatch):
    rows = experts_rows(16)
    assert rows.arrangement.counts.any()

    def fail(*_, **__):
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(closing, "_launch", fail)
    norm = BlockNorm(torch.ones(SIZE).bfloat16(), 1e-6)
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        norm.close(rows, torch.zeros(4, SIZE).bfloat16(), Closing((norm,)))
    assert not rows.arrangement.counts.any()
