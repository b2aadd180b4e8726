"""The cross-check at boot: the logits of a few contexts must have the same bits by every path.

All paths are compared with the first run of the process, before anything is warm. They run last in the warm-up,
through the packer and the executor that serve, on blocks that go back to the pool.
"""

from __future__ import annotations

import hashlib
from contextlib import closing
from functools import cached_property
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from preheat.backends.base import Facts
from preheat.errors import NotInvariant
from preheat.plan.buckets import Bucket
from preheat.plan.items import NothingToRun
from preheat.verify.check_runner import CheckRunner, Row
from preheat.verify.names import context_lengths
from preheat.verify.paths import PATHS, alone
from preheat.warmup.record import Record

DIGEST_BYTES = 16


class BootCheck:
    """Runs the plan's checks. What they compare with is computed once, by :meth:`begin`."""

    def __init__(self, runner: CheckRunner, record: Record, facts: Facts) -> None:
        self._runner, self._record = runner, record
        rng = np.random.default_rng(0)
        self._contexts = [
            rng.integers(runner.vocab_size, size=length, dtype=np.int32) for length in self._lengths(facts)
        ]

    def _lengths(self, facts: Facts) -> list[int]:
        """The lengths of the contexts, each halved until there is a bucket for it."""
        found = []
        for wanted in context_lengths(self._runner.plan.limits, facts):
            length = wanted
            while length > 1 and not all(map(self._runner.bucket_of, ([Row(0, length)], [Row(length - 1, 1)]))):
                length //= 2
            found.append(length)
        return list(dict.fromkeys(found))

    @cached_property
    def _expected(self) -> list[tuple[Tensor, Bucket | None]]:
        """Each context's logits, alone in one step, and that step's bucket; their digest goes into the record."""
        found, bits = [], hashlib.blake2b(digest_size=DIGEST_BYTES)
        for tokens in self._contexts:
            (logits,) = alone(self._runner, tokens)
            found.append((logits, self._runner.bucket))
            bits.update(logits.numpy().tobytes())
        self._record.proof.digest = bits.hexdigest()
        return found

    def begin(self) -> None:
        """Compute what the checks compare with. Call it before anything has run: a check that computes it itself cannot
        see a first run that differs.
        """
        _ = self._expected

    def run(self, name: str) -> None:
        """Run one check. Raises NotInvariant, with path, bucket and layer, for the first logits that differ, and
        NothingToRun if no context can take the path.
        """
        count, reason = 0, "no context within the limits takes this path"
        for tokens, (expected, usual) in zip(self._contexts, self._expected, strict=True):
            try:
                count += self._compare(name, tokens, expected, usual)
            except NothingToRun as error:
                reason = str(error)
        if not count:
            raise NothingToRun(reason)
        self._record.proof.compared += count

    def _compare(self, name: str, tokens: np.ndarray, expected: Tensor, usual: Bucket | None) -> int:
        """Compare one context's logits with the ``expected`` ones; how often that was possible."""
        count = 0
        with closing(PATHS[name](self._runner, tokens)) as ways:
            for logits in ways:
                if not same_bits(logits, expected):
                    break
                count += 1
            else:
                return count
        # The path is closed, so its slots are free for finding the layer.
        found = f"{len(tokens)} tokens in {self._runner.bucket} give other logits than alone in {usual}"
        gap = (logits - expected).abs().max().item()
        raise NotInvariant(f"{name}: {found}, by up to {gap:.3g}; {self._where(name, tokens, count)}")

    def _where(self, name: str, tokens: np.ndarray, way: int) -> str:
        """The first layer that differs when both are run again, operation by operation."""
        runner = self._runner
        runner.eager = True
        try:
            (right,) = alone(runner, tokens)
            layers = runner.layers
            wrong = next(islice(PATHS[name](runner, tokens), way, None))
            for number, (one, other) in enumerate(zip(layers, runner.layers, strict=True)):
                if not same_bits(one, other):
                    return f"the first layer that differs is layer {number}"
            if not same_bits(right, wrong):
                return f"all {len(layers)} layers agree, what follows them differs"
            return "run again, operation by operation, both agree: what differs is in the program"
        except NothingToRun as error:
            return f"the layer is unknown: {error}"
        finally:
            runner.eager = False


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of floats are equal bit for bit, NaN and the sign of zero included."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
