"""``preheat verify``: the same prompts by every path.

These are the paths that requests can take. Outputs are compared at every position. Digests of the logits are compared,
so two runs are equal only if not a single bit differs.
"""

from __future__ import annotations

import gc
import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from preheat.configs.speculation import WITHOUT
from preheat.pooling.encoders import SPARE
from preheat.settings import Settings
from preheat.utils.contract import Contract
from preheat.verify.boot import SIMULATED
from preheat.verify.compare import PathResult, Seen, Verdict
from preheat.verify.drive import Boot, Engine, Prompts
from preheat.verify.paths import PathRunner
from preheat.verify.prompts import Prompt, Size
from preheat.warmup.record import Proof, Record

DIGEST_BYTES = 16

AGAIN: dict[str, Any] = {
    "boot_check": "off", "require_invariance": False, "kv_events_config": None, "role": None,
    "kv_transfer_config": None,
}  # fmt: skip
"""Settings of a further engine.

It does not check itself again, nor publish events or send blocks at the same place.
"""


@dataclass
class Verification:
    """The verification of the engine that ``boot`` makes from ``settings``.

    The first run is a fresh engine's.
    """

    boot: Boot
    settings: Settings
    prompts: Prompts
    size: Size
    proof: Proof = field(default_factory=Proof, init=False)
    blocked_reason: str = field(default="", init=False)
    contract: Contract | None = field(default=None, init=False)
    simulated: bool = field(default=False, init=False)
    encodes: bool = field(default=False, init=False)
    longest: int = field(default=sys.maxsize, init=False)

    def __post_init__(self) -> None:
        self.paths = PathRunner(self.size, self.prompts)

    @property
    def first(self) -> list[Seen]:
        """The first run of the texts."""
        return self.paths.sets["texts"].first

    def results(self) -> Iterator[PathResult]:
        """Yield each path's result as soon as it is known.

        Raises PreheatError if an engine fails.
        """
        yield from self._as_asked()
        gc.collect()  # two engines at once may not fit into memory
        few = tight(self.settings, self.paths.for_few_blocks, whole=self.encodes, most=self.longest)
        yield from self.paths.on(Engine(self.boot, few), "tight")
        if self.settings.speculation is not None:
            gc.collect()
            yield from self.paths.on(Engine(self.boot, without_drafts(self.settings)), "without drafts")

    def verdict(self, results: list[PathResult]) -> Verdict:
        """Return the ``results`` together with the digest of the first run."""
        bits = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for seen in self.first:
            bits.update(repr(seen.bits).encode())
        positions = sum(len(seen.bits) for seen in self.first)
        return Verdict(
            results, positions, SIMULATED * self.simulated + bits.hexdigest(), self.proof, self.blocked_reason,
            self.contract,
        )  # fmt: skip

    def _as_asked(self) -> Iterator[PathResult]:
        """Yield the paths of an engine with the given settings."""
        engine = Engine(self.boot, self.settings)
        self.encodes, self.longest = engine.encodes, engine.ready.max_model_len
        record = Record.from_json(engine.ready.record)
        self.proof, self.simulated, self.blocked_reason = record.proof, record.simulated, engine.ready.blocked_reason
        self.contract = engine.ready.contract
        yield from self.paths.on(engine, "asked")


def without_drafts(settings: Settings) -> Settings:
    """Return ``settings`` of an engine in which nothing drafts."""
    return replace(settings, **WITHOUT, **AGAIN)


def tight(settings: Settings, prompts: Sequence[Prompt], *, whole: bool = False, most: int = sys.maxsize) -> Settings:
    """Return ``settings`` with just enough blocks, of another size.

    They hold the longest of ``prompts`` and its output, or its longest chunk: ``most`` tokens. ``whole``: a step holds
    it, too.
    """
    longest = min(max(len(prompt.tokens) + (prompt.params.max_tokens or 0) for prompt in prompts), most)
    block_size = 32 if settings.block_size == 16 else 16
    if settings.contiguous_pa and settings.block_size:
        block_size = settings.block_size  # blocks of another size cannot be read in place
    seqs = min(settings.max_num_seqs or 40, 40)
    tokens = max(331, 2 * seqs, whole * longest)
    return replace(
        settings,
        max_model_len=longest,
        block_size=block_size,
        num_gpu_blocks_override=-(-(longest + SPARE * whole) // block_size) + 1,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens if whole else min(settings.max_num_batched_tokens or tokens, tokens),
        enable_chunked_prefill=True,
        defrag_threshold=0,
        **AGAIN,
    )
