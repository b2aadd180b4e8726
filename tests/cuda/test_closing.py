"""On a GPU, the last steps of a block in one launch have the bits of the steps one after the other."""

from typing import cast

import pytest
import torch
from torch import Tensor

from preheat.backends.cuda.matmul.moe.route import arrange, combine
from preheat.backends.cuda.pointwise.closing import BlockNorm, Unsummed
from preheat.ops.proof import noise
from preheat.ops.values import Routing
from tests.closings import one_by_one, steps_of

TOKENS = 9


@pytest.mark.parametrize("block", [0, 1, 16])
@pytest.mark.parametrize("kind", ["rms", "rms_once", "rms_plus_one"])
@pytest.mark.parametrize("size", [48, 2048, 2816, 2880, 5120])
def test_steps_in_one_launch_have_the_bits_of_the_steps(size, kind, block):
    for steps in steps_of(size, kind, TOKENS, "cuda"):
        rows, own = noise(TOKENS, size).bfloat16().cuda(), noise(TOKENS, size, seed=1).bfloat16().cuda()
        given: Tensor | Unsummed = rows
        residual = own.clone()
        if block:
            counts = torch.zeros(32, dtype=torch.int32, device="cuda")
            logits = noise(TOKENS, 32, seed=9).bfloat16().cuda()
            arrangement = arrange(logits, Routing(4, True, False), block, counts)
            made = noise(arrangement.rows, size, seed=8).bfloat16().cuda()
            kept = arrangement._replace(counts=torch.zeros_like(counts))
            given, rows = Unsummed(made, arrangement), combine(made, kept)
        right = one_by_one(rows, residual, steps)
        found = cast(BlockNorm, steps.norms[0]).close(given, own, steps)
        assert torch.equal(own, residual)
        assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True))
