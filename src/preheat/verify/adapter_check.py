"""The check at boot for adapters.

A context has the same logits with its adapter in every slot and every batch. The context is computed alone and beside
other rows, in any adapter slot, and in a slot that held another adapter. A context without an adapter has the same
logits beside rows with adapters. The adapters are random, the same at every boot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from preheat.errors import CheckFailed, NotInvariant
from preheat.lora.random import random_adapter
from preheat.schedule.slots import NO_ADAPTER
from preheat.verify.check_runner import CheckRunner, Row

LONGEST = 37
"""Tokens of the context, at most."""


class _Beside(NamedTuple):
    """A row of the same step, and its adapter slot."""

    row: Row
    adapter_slot: int


class AdapterCheck:
    """Compares the context's logits with the first run of the process, see :meth:`first`."""

    def __init__(self, runner: CheckRunner) -> None:
        adapter_slots = runner.executor.adapters
        assert adapter_slots is not None, "there are no adapter slots"
        self._runner, self._adapter_slots, limits = runner, adapter_slots, runner.plan.limits
        length = max(min(LONGEST, limits.max_model_len - 1, limits.max_num_batched_tokens // 2), 1)
        while length > 1 and not runner.bucket_of([Row(0, length)]):
            length //= 2
        self._tokens = np.random.default_rng(2).integers(runner.vocab_size, size=length, dtype=np.int32)
        self._adapters = [random_adapter(adapter_slots, number) for number in range(2)]
        self._expected: list[Tensor] = []

    def first(self) -> Tensor:
        """Return the context's logits alone, with each adapter and without.

        They are fp32 [3, vocab] on the host. The first call computes them. The adapter of a small rank is loaded first,
        into an empty slot.
        """
        if not self._expected:
            for number in (1, 0):
                self._load(0, number)
                self._expected.insert(0, self._logits(0))
            self._expected.append(self._logits(NO_ADAPTER))
            self._runner.executor.clear_adapter(0)
        return torch.stack(self._expected)

    def run(self) -> int:
        """Compare and return how often.

        Raises NotInvariant, and CheckFailed if an adapter changes nothing.
        """
        first, second, base = self.first()
        if any(torch.equal(one, other) for one, other in ((first, second), (first, base), (second, base))):
            raise CheckFailed("adapters: a context has the same logits with different adapters, or without one")
        count = 0
        try:
            for way, expected, logits in self._ways(first, second, base):
                if not torch.equal(logits.view(torch.int32), expected.view(torch.int32)):
                    gap = (logits - expected).abs().max().item()
                    raise NotInvariant(f"adapters: a context has other logits {way} than alone, by up to {gap:.3g}")
                count += 1
        finally:
            for adapter_slot in range(self._adapter_slots.count):
                self._runner.executor.clear_adapter(adapter_slot)
        return count

    def _ways(self, first: Tensor, second: Tensor, base: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the name of each way, its expected logits and its logits."""
        last = self._adapter_slots.count - 1
        self._load(0, 1)
        self._load(last, 0)
        yield "in another adapter slot", first, self._logits(last)
        yield "with its last token alone", first, self._decoded(last)
        for company in self._companies(last):
            for before in (False, True):
                yield "beside rows of adapters and of none", first, self._logits(last, company, before=before)
                yield (
                    "without an adapter beside rows of adapters",
                    base,
                    self._logits(NO_ADAPTER, company, before=before),
                )
        yield "without an adapter, with its last token alone", base, self._decoded(NO_ADAPTER)
        self._load(last, 1)
        yield "in a slot that another adapter had", second, self._logits(last)
        self._load(last, 0)
        yield "after it was loaded again", first, self._logits(last)

    def _companies(self, last: int) -> Iterator[list[_Beside]]:
        """Yield other rows for the same step.

        They have the same adapter, another one if there is a slot for it, and none.
        """
        mixes, length = self._runner.plan.policy.mixed_steps, len(self._tokens)
        some = [Row(9, 1), Row(0, 17), Row(0, 3)] if mixes else [Row(0, 17), Row(0, 3)]
        for adapter_slots in ([last, 0, NO_ADAPTER], [last] * 3):
            company = [_Beside(*each) for each in zip(some, adapter_slots, strict=False)]
            while company and not self._runner.bucket_of([Row(0, length), *(each.row for each in company)]):
                company.pop()
            if company:
                yield company

    def _load(self, adapter_slot: int, number: int) -> None:
        self._runner.executor.load_adapters([(adapter_slot, self._adapters[number])])

    def _logits(self, adapter_slot: int, company: Sequence[_Beside] = (), *, before: bool = False) -> Tensor:
        """Return the logits of the context in one step.

        The adapter is in ``adapter_slot``.
        """
        runner = self._runner
        with runner.neighbours([each.row for each in company]) as others, runner.sequence(self._tokens) as slot:
            runner.slots.adapter[slot] = adapter_slot
            runner.slots.adapter[others] = [each.adapter_slot for each in company]
            return runner.step(slot, before=others) if before else runner.step(slot, behind=others)

    def _decoded(self, adapter_slot: int) -> Tensor:
        """Return the logits of the context, computed in two steps.

        The last token has a step of its own.
        """
        runner, length = self._runner, len(self._tokens)
        with runner.sequence(self._tokens) as slot:
            runner.slots.adapter[slot] = adapter_slot
            if length > 1:
                runner.lengthen(slot, length - 1)
                runner.step(slot)
            runner.lengthen(slot, length)
            return runner.step(slot)
