"""The cross-check at boot: the logits of a few contexts, come at by every path, must have one set of bits.

What all paths are compared with is the first run of the process, before anything is warm. They run last in the warm-up,
through the packer and the executor that serve, on blocks of the pool that are given back.
"""

from __future__ import annotations

import hashlib
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
    """Runs the checks of the plan. What they compare with is computed once, by :meth:`begin`."""

    def __init__(self, lab: CheckRunner, record: Record, facts: Facts) -> None:
        self._lab, self._record = lab, record
        rng = np.random.default_rng(0)
        self._contexts = [rng.integers(lab.vocab_size, size=length, dtype=np.int32) for length in self._lengths(facts)]

    def _lengths(self, facts: Facts) -> list[int]:
        """Of the contexts; one for which there is no shape is halved, until there is."""
        found = []
        for asked in context_lengths(self._lab.plan.limits, facts):
            length = asked
            while length > 1 and not all(map(self._lab.shape_of, ([Row(0, length)], [Row(length - 1, 1)]))):
                length //= 2
            found.append(length)
        return list(dict.fromkeys(found))

    @cached_property
    def _expected(self) -> list[tuple[Tensor, Bucket | None]]:
        """Each context's logits, alone in one step, and the shape of that; their digest goes into the record."""
        found = []
        for tokens in self._contexts:
            (logits,) = alone(self._lab, tokens)
            found.append((logits, self._lab.shape))
        bits = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for logits, _ in found:
            bits.update(logits.numpy().tobytes())
        self._record.proof.digest = bits.hexdigest()
        return found

    def begin(self) -> None:
        """Compute it. To be called when nothing has run yet; the checks would do it else, too late to see a first run
        that differs.
        """
        _ = self._expected

    def run(self, name: str) -> None:
        """One check. Raises NotInvariant, with path, shape and layer, for the first logits that differ, NothingToRun
        where no context can take the path.
        """
        count = 0
        for tokens, (expected, usual) in zip(self._contexts, self._expected, strict=True):
            for way, logits in enumerate(ways := PATHS[name](self._lab, tokens)):
                count += 1
                if not same_bits(logits, expected):
                    found = f"{len(tokens)} tokens in {self._lab.shape} give other logits than alone in {usual}"
                    gap = (logits - expected).abs().max().item()
                    ways.close()  # its rows make room for those that look for the layer
                    raise NotInvariant(f"{name}: {found}, by up to {gap:.3g}; {self._where(name, tokens, way)}")
        if not count:
            raise NothingToRun("no context within the limits takes this path")
        self._record.proof.compared += count

    def _where(self, name: str, tokens: np.ndarray, way: int) -> str:
        """The first layer that differs when both are run again, operation by operation."""
        lab = self._lab
        lab.eager = True
        try:
            (right,) = alone(lab, tokens)
            layers = lab.layers
            wrong = next(islice(PATHS[name](lab, tokens), way, None))
            for number, (one, other) in enumerate(zip(layers, lab.layers, strict=True)):
                if not same_bits(one, other):
                    return f"the first layer that differs is layer {number}"
            if not same_bits(right, wrong):
                return f"all {len(layers)} layers agree, what follows them differs"
            return "run again, operation by operation, both agree: what differs is in the program"
        finally:
            lab.eager = False


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of floats are equal bit for bit, NaN and the sign of zero included."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
