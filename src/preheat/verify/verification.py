"""``preheat verify``: the same prompts by every path that requests can take, compared at every position.

What is compared are digests of the logits, so that two runs are equal only if no bit of any of them differs.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from preheat.settings import Settings
from preheat.verify.compare import PathResult, Seen, Verdict, compare
from preheat.verify.drive import Boot, Engine, in_groups, trickling
from preheat.verify.prompts import Prompt, Size
from preheat.warmup.record import Proof, Record

DIGEST_BYTES = 16
GROUPS = (1, 2, 3, 5, 9, 17, 33, 65, 129, 256)
"""Requests that run together, over and over."""

Prompts = Callable[[Engine], list[Prompt]]
"""Makes the prompts, once there is an engine whose model and limits they must fit."""


@dataclass
class Verification:
    """Of the engine that ``boot`` makes of ``settings``. The first run is that of a fresh engine."""

    boot: Boot
    settings: Settings
    prompts: Prompts
    size: Size
    asked: list[Prompt] = field(default_factory=list, init=False)
    first: list[Seen] = field(default_factory=list, init=False)
    proof: Proof = field(default_factory=Proof, init=False)
    held: str = field(default="", init=False)

    def results(self) -> Iterator[PathResult]:
        """Path by path, as they come. Raises PreheatError where an engine fails."""
        yield from self._as_asked()
        gc.collect()  # two engines at once may not fit
        yield from self._tight()

    def verdict(self, results: list[PathResult]) -> Verdict:
        """The ``results``, and what stands for the first run."""
        bits = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for seen in self.first:
            bits.update(repr(seen.bits).encode())
        return Verdict(results, sum(len(seen.bits) for seen in self.first), bits.hexdigest(), self.proof, self.held)

    def _as_asked(self) -> Iterator[PathResult]:
        """Paths that one engine takes."""
        engine = Engine(self.boot, self.settings)
        self.proof, self.held = Record.from_json(engine.ready.record).proof, engine.ready.blocked_reason
        prompts = self.asked = self.prompts(engine)
        first = self.first = engine.run(prompts)
        hits = engine.stats.prefix_hits
        again = [engine.run(prompts) for _ in range(self.size.runs - 1)]
        hits = engine.stats.prefix_hits - hits
        yield compare("later runs", first, again, f"{hits:,} tokens from the prefix cache")
        engine.forget_prefixes()
        yield compare("prefix cache cold", first, [engine.run(prompts)])
        order = random.Random(1).sample(range(len(prompts)), len(prompts))
        seen = engine.run([prompts[number] for number in order], trickling(random.Random(2)))
        by_prompt = dict(zip(order, seen, strict=True))
        yield compare("shuffled arrivals", first, [[by_prompt[number] for number in range(len(prompts))]])
        engine.forget_prefixes()
        sizes = group_sizes(len(prompts))
        yield compare(f"batches of 1 to {max(sizes)}", first, [engine.run(prompts, in_groups(sizes))])

    def _tight(self) -> Iterator[PathResult]:
        """Another engine, with small steps and hardly any blocks: chunks, preemption, compaction all the time."""
        engine = Engine(self.boot, tight(self.settings, self.asked))
        seen, stats = engine.run(self.asked), engine.stats
        note = f"{stats.preemptions:,} preemptions, {stats.blocks_moved:,} blocks moved"
        yield compare("chunks, few blocks", self.first, [seen], note)


def group_sizes(count: int) -> list[int]:
    """`GROUPS`, over and over, until there are ``count`` requests."""
    sizes: list[int] = []
    for size in itertools.cycle(GROUPS):
        if sum(sizes) == count:
            return sizes
        sizes.append(min(size, count - sum(sizes)))
    raise AssertionError("a cycle never ends")


def tight(settings: Settings, prompts: Sequence[Prompt]) -> Settings:
    """``settings`` with room for the longest of ``prompts`` and its output, in blocks of another size."""
    longest = max(len(prompt.tokens) + (prompt.params.max_tokens or 0) for prompt in prompts)
    block_size = settings.block_size if settings.contiguous_pa else 32 if settings.block_size == 16 else 16
    seqs = min(settings.max_num_seqs, 40)
    return replace(
        settings,
        max_model_len=longest,
        block_size=block_size,
        num_gpu_blocks_override=-(-longest // block_size) + 1,
        max_num_seqs=seqs,
        max_num_batched_tokens=min(settings.max_num_batched_tokens, max(331, 2 * seqs)),
        enable_chunked_prefill=True,
        defrag_threshold=0,
        boot_check="off",
        require_invariance=False,
    )
