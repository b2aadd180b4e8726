"""The cross-check at boot.

The logits of a few contexts must have the same bits by every path. All paths are compared with the first run of the
process, before anything is warm. They run last in the warm-up, through the packer and the executor that serve, on
blocks that go back to the pool.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from preheat.backends.base.facts import Facts
from preheat.errors import CheckFailed, NotInvariant
from preheat.grammar.service import Grammars
from preheat.plan.buckets import Bucket
from preheat.plan.item import NothingToRun
from preheat.verify import context_paths as paths
from preheat.verify.adapter_check import AdapterCheck
from preheat.verify.check_runner import CheckRunner, Row
from preheat.verify.context_paths import ContextPath, large_steps
from preheat.verify.draws import check_drafted_draws, check_draws
from preheat.verify.given_back import check_given_back
from preheat.verify.grammar import GrammarCheck
from preheat.verify.image_check import ImageCheck
from preheat.verify.key_check import check_keys
from preheat.verify.logprob_check import check_logprobs
from preheat.verify.names import context_lengths, long_context
from preheat.verify.pool_check import check_pooled, check_whole_texts
from preheat.verify.window_check import check_windows
from preheat.warmup.record import Record

DIGEST_BYTES = 16

SIMULATED = "simulated-"
"""The prefix of a fake device's digest.

It is then never taken for a real device's.
"""


Which = Literal["usual", "shortest", "long"]
"""Contexts: all but the long one, the shortest of these, the long one."""


class BootCheck:
    """Runs the plan's checks against the logits that :meth:`begin` computes once."""

    def __init__(
        self, runner: CheckRunner, record: Record, facts: Facts, grammars: Grammars | str = "structured outputs are off"
    ) -> None:
        self.runner, self._record, self._grammars = runner, record, grammars
        self._facts = facts
        rng = np.random.default_rng(0)
        self._contexts = [
            rng.integers(runner.vocab_size, size=length, dtype=np.int32) for length in self._lengths(facts)
        ]
        if "long context" in runner.plan.checks and (length := long_context(runner.plan.limits, facts)):
            self._long = [rng.integers(runner.vocab_size, size=length, dtype=np.int32)]
        else:
            self._long = []
        self._running = ""
        self._images = ImageCheck(runner) if {"images", "embeds"} & set(runner.plan.checks) else None
        self._adapters = AdapterCheck(runner) if "adapters" in runner.plan.checks else None

    def _lengths(self, facts: Facts) -> list[int]:
        """Return the lengths of the contexts.

        Each is halved until there is a bucket for it.
        """
        found = []
        for wanted in context_lengths(self.runner.plan.limits, facts):
            length = wanted
            while length > 1 and not all(map(self.runner.bucket_of, ([Row(0, length)], [Row(length - 1, 1)]))):
                length //= 2
            found.append(length)
        return list(dict.fromkeys(found))

    @cached_property
    def _expected(self) -> list[tuple[Tensor, Bucket | None]]:
        """Each context's logits, alone in one step, and the step's bucket.

        Their digest goes into the record.
        """
        found, bits = [], hashlib.blake2b(digest_size=DIGEST_BYTES)
        for tokens in [*self._contexts, *self._long]:
            (logits,) = large_steps(self.runner, tokens)
            found.append((logits, self.runner.bucket))
            bits.update(logits.numpy().tobytes())
        if self._images is not None:
            bits.update(self._images.first().numpy().tobytes())
        if self._adapters is not None:
            bits.update(self._adapters.first().numpy().tobytes())
        self._record.proof.digest = SIMULATED * self._facts.simulated + bits.hexdigest()
        return found

    def begin(self) -> None:
        """Compute the expected logits; call it before anything else has run.

        A check that computes them itself cannot see a first run that differs.
        """
        _ = self._expected

    def run(self, name: str) -> None:
        """Run one check of :data:`CHECKS`.

        Raises NotInvariant, with path, bucket and layer, for the first logits that differ. Raises CheckFailed for
        logits that are not finite or draws that break the contract. Raises NothingToRun if no context can take the
        path.
        """
        self._running = name
        self._record.proof.compared += CHECKS[name](self) or 0

    def check_grammars(self) -> None:
        """Check grammars. Raises NothingToRun if there are none."""
        if isinstance(self._grammars, str):
            raise NothingToRun(self._grammars)
        GrammarCheck(self.runner, self._grammars).run()

    def check_images(self) -> int:
        """Check images, or prompts that are embeddings: an engine has one of them."""
        assert self._images is not None, "the plan has no such check"
        return self._images.run()

    def check_adapters(self) -> int:
        """Check adapters, see :class:`AdapterCheck`."""
        assert self._adapters is not None, "the plan has no such check"
        return self._adapters.run()

    def check_pooled(self) -> int:
        """Check the pooling of every context and return how many ways were compared."""
        return sum(check_pooled(self.runner, tokens) for tokens in self._contexts)

    def check_whole_texts(self) -> int:
        """Check the states of all tokens of every context and return how many ways were compared."""
        return sum(check_whole_texts(self.runner, tokens) for tokens in self._contexts)

    def compare(self, path: ContextPath, which: Which) -> int:
        """Compare the contexts' logits by ``path`` with the expected ones and return how often."""
        count, reason = 0, "no context within the limits takes this path"
        contexts = zip([*self._contexts, *self._long], self._expected, strict=True)
        usual = len(self._contexts)
        places = {"usual": (0, usual), "shortest": (usual - 1, usual), "long": (usual, usual + 1)}
        for tokens, (expected, bucket) in islice(contexts, *places[which]):
            try:
                count += self._compare(path, tokens, expected, bucket)
            except NothingToRun as error:
                reason = str(error)
        if not count:
            raise NothingToRun(reason)
        return count

    def check_finite(self) -> None:
        """Raise CheckFailed, naming the first layer, if logits are not finite."""
        for tokens, (logits, bucket) in zip([*self._contexts, *self._long], self._expected, strict=True):
            if not logits.isfinite().all():
                count = f"{int((~logits.isfinite()).sum()):,} of {len(logits):,} logits"
                where = f"after {len(tokens)} tokens in {bucket}"
                raise CheckFailed(f"finite: {count} are not finite {where}; {self._not_finite(tokens)}")

    def _not_finite(self, tokens: np.ndarray) -> str:
        """Return the first output that is not finite.

        ``tokens`` run again, operation by operation.
        """
        runner = self.runner
        runner.eager = True
        try:
            for _ in large_steps(runner, tokens):
                for number, residual in enumerate(runner.layers):
                    if not residual.isfinite().all():
                        return f"the first layer with an output that is not finite is layer {number}"
            return f"the outputs of all {len(runner.layers)} layers are finite, but the logits are not"
        finally:
            runner.eager = False

    def _compare(self, path: ContextPath, tokens: np.ndarray, expected: Tensor, usual: Bucket | None) -> int:
        """Compare one context's logits with the ``expected`` ones and return how often."""
        count = 0
        with closing(path(self.runner, tokens)) as ways:
            for logits in ways:
                if not same_bits(logits, expected):
                    break
                count += 1
            else:
                return count
        # The path is closed, so its slots are free for finding the layer.
        found = f"{len(tokens)} tokens in {self.runner.bucket} give other logits than alone in {usual}"
        gap = (logits - expected).abs().max().item()
        raise NotInvariant(f"{self._running}: {found}, by up to {gap:.3g}; {self._where(path, tokens, count)}")

    def _where(self, path: ContextPath, tokens: np.ndarray, way: int) -> str:
        """Return the first layer that differs when both run again, operation by operation."""
        runner = self.runner
        runner.eager = True
        try:
            (right,) = large_steps(runner, tokens)
            layers = runner.layers
            wrong = next(islice(path(runner, tokens), way, None))
            for number, (one, other) in enumerate(zip(layers, runner.layers, strict=True)):
                if not same_bits(one, other):
                    return f"the first layer that differs is layer {number}"
            if not same_bits(right, wrong):
                return f"all {len(layers)} layers agree, but the logits differ"
            return "run again, operation by operation, both agree: the difference is in the program"
        except NothingToRun as error:
            return f"the layer is unknown: {error}"
        finally:
            runner.eager = False


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of floats are equal bit for bit.

    NaN and the sign of zero are included.
    """
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@dataclass(frozen=True)
class OfContexts:
    """A check that computes ``which`` contexts by a ``path`` and then calls ``more``."""

    path: ContextPath
    which: Which = "usual"
    more: Callable[[CheckRunner], object] = lambda runner: None

    def __call__(self, check: BootCheck) -> int:
        """Run the check and return how often logits were compared."""
        count = check.compare(self.path, self.which)
        self.more(check.runner)
        return count


CHECKS: Mapping[str, Callable[[BootCheck], int | None]] = {
    "finite": BootCheck.check_finite,
    "later run": OfContexts(paths.alone),
    "co-batched": OfContexts(paths.beside),
    "next bucket": OfContexts(paths.next_bucket),
    "every bucket": OfContexts(paths.every_bucket),
    "chunked": OfContexts(paths.chunks),
    "prefix hit": OfContexts(paths.prefix_hit, more=lambda runner: check_keys(runner.slots.block_size)),
    "offloaded": OfContexts(paths.offloaded),
    "decode": OfContexts(paths.decode),
    "poisoned": OfContexts(paths.poisoned),
    "states": OfContexts(paths.states),
    "resumed": OfContexts(paths.resumed),
    "fp8 cache": OfContexts(paths.fp8_cache),
    "long context": OfContexts(paths.long_context, "long"),
    "full step": OfContexts(paths.full_step, "shortest"),
    "drafts": OfContexts(paths.drafts, more=check_drafted_draws),
    "sampler": lambda check: check_draws(check.runner),
    "logprobs": lambda check: check_logprobs(check.runner),
    "pooled": BootCheck.check_pooled,
    "whole texts": BootCheck.check_whole_texts,
    "embeds": BootCheck.check_images,
    "images": BootCheck.check_images,
    "adapters": BootCheck.check_adapters,
    "grammar": BootCheck.check_grammars,
    "compaction": OfContexts(paths.compaction),
    "windows": lambda check: check_windows(check.runner),
    "given back": lambda check: check_given_back(check.runner),
    "eager": OfContexts(paths.eager),
}
"""The function of each check of :data:`preheat.verify.names.CHECKS`; some return how often they compared."""
