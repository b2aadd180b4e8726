"""``preheat verify``: the same prompts by every path that requests can take, compared at every position.

Digests of the logits are compared, so two runs are equal only if not a single bit differs.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from preheat.errors import CheckFailed
from preheat.plan.items import NothingToRun
from preheat.settings import Settings
from preheat.utils.speculation import WITHOUT
from preheat.verify.adapter_paths import AdapterPaths, names_of
from preheat.verify.boot import SIMULATED
from preheat.verify.cache_paths import answers_as_prompts, given_up, moved, nearly_equal
from preheat.verify.compare import Divergence, PathResult, Seen, Verdict, compare
from preheat.verify.drive import Boot, Engine, in_groups, trickling
from preheat.verify.features import Features
from preheat.verify.image_paths import ImagePaths
from preheat.verify.prompts import Prompt, Size, as_pooled
from preheat.verify.served_path import served
from preheat.verify.window_check import check_windows
from preheat.warmup.record import Proof, Record

DIGEST_BYTES = 16
GROUPS = (1, 2, 3, 5, 9, 17, 33, 65, 129, 256)
"""How many requests run together, repeated as needed."""

AGAIN: dict[str, Any] = {"boot_check": "off", "require_invariance": False, "kv_events_config": None}
"""What an engine beside the one that was asked for does not do: check itself again, and publish at the same place."""

Prompts = Callable[[Engine], list[Prompt]]
"""Makes prompts that fit the model and the limits of an engine."""


@dataclass
class Verification:
    """Verifies the engine that ``boot`` makes from ``settings``. The first run is that of a fresh engine."""

    boot: Boot
    settings: Settings
    prompts: Prompts
    size: Size
    asked: list[Prompt] = field(default_factory=list, init=False)
    first: list[Seen] = field(default_factory=list, init=False)
    proof: Proof = field(default_factory=Proof, init=False)
    blocked_reason: str = field(default="", init=False)
    simulated: bool = field(default=False, init=False)
    features: Features | None = field(default=None, init=False)
    drafts: tuple[int, int] = field(default=(0, 0), init=False)  # of the first run, and those accepted
    images: ImagePaths | None = field(default=None, init=False)
    adapters: AdapterPaths | None = field(default=None, init=False)

    def results(self) -> Iterator[PathResult]:
        """Each path's result as soon as it is known. Raises PreheatError if an engine fails."""
        yield from self._as_asked()
        gc.collect()  # two engines at once may not fit into memory
        yield from self._tight()
        if self.settings.speculation is not None:
            gc.collect()
            yield from self._without_drafts()

    def verdict(self, results: list[PathResult]) -> Verdict:
        """The ``results`` together with the digest of the first run."""
        bits = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for seen in self.first:
            bits.update(repr(seen.bits).encode())
        positions = sum(len(seen.bits) for seen in self.first)
        return Verdict(
            results, positions, SIMULATED * self.simulated + bits.hexdigest(), self.proof, self.blocked_reason
        )

    def _as_asked(self) -> Iterator[PathResult]:
        """The paths of an engine with the given settings."""
        engine = Engine(self.boot, self.settings)
        record = Record.from_json(engine.ready.record)
        self.proof, self.simulated, self.blocked_reason = record.proof, record.simulated, engine.ready.blocked_reason
        prompts = self.asked = as_pooled(self.prompts(engine)) if engine.pools else self.prompts(engine)
        first = self.first = engine.run(prompts)
        hits = engine.stats.prefix_hits
        self.drafts = engine.stats.draft_tokens, engine.stats.accepted_tokens
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
        if engine.pools:
            return
        yield answers_as_prompts("answers as prompts", engine, prompts, first)
        yield served(engine, self.size.outputs)
        yield from self._windows(engine)
        self.features = Features(self.size.outputs, max(len(prompt.tokens) for prompt in prompts))
        yield from self.features.as_asked(engine)
        self.images = ImagePaths.of(engine, self.size.outputs)
        yield from self.images.as_asked(engine)
        self.adapters = AdapterPaths.of(engine, self.size.outputs)
        yield from self.adapters.as_asked(engine)
        more = nearly_equal(engine, names_of(engine)), given_up(engine), moved(engine)
        yield from (found for found in more if found is not None)

    def _windows(self, engine: Engine) -> Iterator[PathResult]:
        """The model's sliding windows, if it has some that a sequence can be longer than."""
        try:
            with engine.unwatched() as runner:
                count = check_windows(runner)
        except NothingToRun:
            return
        except CheckFailed as error:
            yield PathResult("windows", 1, 1, 0, Divergence(1, 0, 0, float("inf")), str(error))
        else:
            yield PathResult("windows", count, 1, count)

    def _offloaded(self, engine: Engine) -> PathResult:
        """What was evicted meanwhile comes back from the host."""
        before = engine.stats.external_hits
        seen = engine.run(self.asked)
        note = f"{engine.stats.external_hits - before:,} tokens from the host"
        return compare("offloaded blocks", self.first, [seen], note)

    def _without_drafts(self) -> Iterator[PathResult]:
        """An engine in which nothing drafts: what was drafted must not have changed a bit."""
        drafted = f"{self.drafts[1]:,} of {self.drafts[0]:,} drafts were accepted"
        engine = Engine(self.boot, replace(self.settings, **WITHOUT, **AGAIN))
        yield compare("without speculation", self.first, [engine.run(self.asked)], drafted)
        if self.features is not None:
            yield from self.features.without_drafts(engine)

    def _tight(self) -> Iterator[PathResult]:
        """An engine with small steps and few blocks, so that chunks, preemption and compaction are frequent."""
        pictured = self.images.prompts if self.images else []
        adapted = self.adapters.prompts if self.adapters else []
        engine = Engine(self.boot, tight(self.settings, [*self.asked, *pictured, *adapted]))
        seen, stats = engine.run(self.asked), engine.stats
        note = f"{stats.preemptions:,} preemptions, {stats.blocks_moved:,} blocks moved"
        yield compare("chunks, few blocks", self.first, [seen], note)
        if self.settings.kv_offloading_size:
            yield self._offloaded(engine)
        for paths in (self.features, self.images, self.adapters):
            if paths is not None:
                yield from paths.tight(engine)


def group_sizes(count: int) -> list[int]:
    """`GROUPS`, repeated until there are ``count`` requests."""
    sizes: list[int] = []
    for size in itertools.cycle(GROUPS):
        if sum(sizes) == count:
            return sizes
        sizes.append(min(size, count - sum(sizes)))
    raise AssertionError("a cycle never ends")


def tight(settings: Settings, prompts: Sequence[Prompt]) -> Settings:
    """``settings`` with just enough blocks, of another size, for the longest of ``prompts`` and its output."""
    longest = max(len(prompt.tokens) + (prompt.params.max_tokens or 0) for prompt in prompts)
    block_size = 32 if settings.block_size == 16 else 16
    if settings.contiguous_pa and settings.block_size:
        block_size = settings.block_size  # blocks of another size cannot be read in place
    seqs = min(settings.max_num_seqs or 40, 40)
    tokens = max(331, 2 * seqs)
    return replace(
        settings,
        max_model_len=longest,
        block_size=block_size,
        num_gpu_blocks_override=-(-longest // block_size) + 1,
        max_num_seqs=seqs,
        max_num_batched_tokens=min(settings.max_num_batched_tokens or tokens, tokens),
        enable_chunked_prefill=True,
        defrag_threshold=0,
        **AGAIN,
    )
