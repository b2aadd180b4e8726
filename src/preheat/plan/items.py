"""The items of a plan, one class for each kind.

An item has a ``kind``, a ``name``, a ``program`` and a cost, and knows how warm-up runs it. A new kind is one class
here and one entry in `preheat.plan.plan.KINDS`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Literal, Protocol, Self

from preheat.core import Level, SamplingParams, Transfer
from preheat.limits import Limits
from preheat.plan import lines
from preheat.plan.buckets import Bucket, StepSize
from preheat.plan.cost import Cost, Costs
from preheat.plan.dispatcher import Dispatcher
from preheat.plan.functions import Function
from preheat.plan.options import PlanOptions
from preheat.plan.policy import Policy
from preheat.plan.programs import ENCODER_SIZES, Program
from preheat.plan.sampler_settings import (
    BRANCH_SETTINGS,
    GAUDI_SETTINGS,
    LEVEL_SETTINGS,
    POOLER_SETTINGS,
    SAMPLER_SETTINGS,
)

logger = logging.getLogger(__name__)

Stage = Literal["first", "after_cache", "last"]

SWAP_SIZES = (8, 16, 32, 64, 128, 256, 512)
"""Sizes of a compaction step in pairs of swapped blocks.

Every step is padded to one of them.
"""

MAX_DETERMINISM_TOKENS = 128


class NothingToRun(Exception):
    """Raised by an item that has no work within the limits.

    The message is the reason.
    """


class Plan(Protocol):
    """The parts of :class:`preheat.plan.plan.Plan` that items follow from."""

    @property
    def limits(self) -> Limits: ...

    @property
    def options(self) -> PlanOptions: ...

    @property
    def policy(self) -> Policy: ...

    @property
    def dispatcher(self) -> Dispatcher: ...

    @property
    def checks(self) -> tuple[str, ...]: ...

    @property
    def draft(self) -> Plan | None: ...

    @property
    def items(self) -> tuple[Item, ...]: ...

    @property
    def sampler_sizes(self) -> tuple[int, ...]: ...

    @property
    def verifies(self) -> bool: ...


class ItemRunner(Protocol):
    """The warm-up as items use it (:class:`preheat.warmup.run.WarmUp`)."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""

    def tell(self, line: str) -> None:
        """Log a line on an item that runs next or has run."""

    def first_run(self, program: Program[Bucket]) -> None:
        """Run a step of ``program`` for the first time.

        It runs all layers, or as few as the capture of its graph needs.
        """

    def forward(self, bucket: Bucket) -> None:
        """Run a step padded to ``bucket``."""

    def sample(self, program: Program[int], params: SamplingParams, times: int) -> None:
        """Sample the rows of ``program`` with ``params``, ``times`` times in a row."""

    def encode(self, images: int, cells: int = 0) -> None:
        """Encode ``images`` images at once; images of any size have ``cells``."""

    def swap(self, pairs: int) -> None:
        """Run the program that swaps ``pairs`` pairs of blocks.

        Blocks 0 and 1 change places.
        """

    def transfer(self, transfer: Transfer) -> None:
        """Copy the pad block to the host, or back."""

    def determinism_passes(self, run: Callable[[], None], count: int) -> None:
        """Call ``run`` ``count`` times with the log lines of the determinism warm-up.

        Log a failing pass too.
        """

    def build_function(self, function: Function) -> None:
        """Compile a function, or read its code.

        Raises NothingToRun for a function that another item has built.
        """

    def build_grammar(self, name: str) -> None:
        """Compile the grammar ``name`` and build the states on some paths through it.

        Raises NothingToRun if the engine has no grammars.
        """

    def run_check(self, name: str) -> None:
        """Run a cross-check.

        Raises NotInvariant if it fails and NothingToRun if it does not apply.
        """

    def pace(self, bucket: Bucket, *, draft: bool) -> None:
        """Time a step of ``bucket`` that has run before.

        With ``draft`` it is a step of the draft model's plan.
        """


@dataclass(frozen=True, slots=True)
class Item(ABC):
    """One thing that may run.

    ``estimate`` is its expected cost, zero if nothing was estimated. A ``fallback`` serves steps beyond the bucket
    sizes. Items of the first stage run before any step, and items of the last stage once graphs are captured.
    """

    KIND: ClassVar[str] = ""
    stage: ClassVar[Stage] = "after_cache"

    estimate: Cost = field(default=Cost(0.0, 0), kw_only=True)
    fallback: bool = field(default=False, kw_only=True)

    @classmethod
    @abstractmethod
    def of_plan(cls, plan: Plan) -> Iterable[Item]:
        """Return all items of this class, in the order in which they run."""

    @classmethod
    def run_kind(cls, items: Sequence[Self], run_one: Callable[[Item], None], warm: ItemRunner) -> int:
        """Run all items of one kind and return how many ran without an error.

        ``run_one`` runs an item, records and logs its outcome, and raises the item's error.
        """
        done = 0
        for item in items:
            with suppress(Exception):
                run_one(item)
                done += 1
        return done

    @property
    def kind(self) -> str:
        return self.KIND

    @property
    @abstractmethod
    def shape(self) -> dict[str, Any]:
        """The values that distinguish the item from others of its kind, for JSON."""

    @property
    def name(self) -> str:
        """Unique within a plan and the same on every boot.

        The key in records.
        """
        return f"({', '.join(map(str, [self.kind, *self.shape.values()]))})"

    @property
    def program(self) -> Program[Any] | None:
        """The program that the item runs.

        None if it only runs other items' programs again.
        """
        return None

    def cost(self, costs: Costs) -> Cost:
        """Return the expected cost of one run."""
        return Cost(0.0, 0)

    @abstractmethod
    def run(self, warm: ItemRunner) -> None: ...

    def log_line(self, number: int, total: int, free: int) -> str:
        """Return the log line before the item runs.

        It runs as ``number`` of ``total``, with ``free`` bytes of memory left.
        """
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return {
            "kind": self.kind,
            "name": self.name,
            "shape": self.shape,
            "stage": self.stage,
            "fallback": self.fallback,
            "estimated_seconds": round(self.estimate.seconds, 6),
            "estimated_bytes": self.estimate.bytes,
        }


@dataclass(frozen=True, slots=True)
class ForwardItem(Item):
    """The forward program of a bucket; its kind is the phase."""

    bucket: Bucket

    @classmethod
    def of_plan(cls, plan: Plan) -> Iterable[ForwardItem]:
        """Yield buckets phase by phase, largest first.

        A fallback is larger than any other bucket.
        """
        for phase in plan.dispatcher.phases.values():
            if phase.fallback:
                yield cls(phase.fallback, fallback=True)
            yield from (cls(bucket) for bucket in reversed(phase.buckets))

    @property
    def kind(self) -> str:
        return self.bucket.phase

    @property
    def shape(self) -> dict[str, Any]:
        return {**self.bucket.named_dims()}

    @property
    def program(self) -> Program[Bucket]:
        return Program("forward", self.bucket)

    def cost(self, costs: Costs) -> Cost:
        return costs.forward(self.name, self.bucket)

    def run(self, warm: ItemRunner) -> None:
        self.run_as(self.program, warm)

    def run_as(self, program: Program[Any], warm: ItemRunner) -> None:
        """Run ``program``, the item's own or its variant.

        A variant has adapters or is of the draft model.
        """
        warm.first_run(program)

    def log_line(self, number: int, total: int, free: int) -> str:
        return lines.running(self.bucket.phase, self.bucket, number, total, free)


@dataclass(frozen=True, slots=True)
class SamplerItem(Item):
    """``rows`` rows of logits, sampled with one of `SAMPLER_SETTINGS`.

    With ``batch_changed`` the rows are new.
    """

    KIND = "sampler"
    rows: int
    setting: str
    batch_changed: bool

    @classmethod
    def of_plan(cls, plan: Plan) -> Iterable[SamplerItem]:
        """Yield all settings for each size, `GAUDI_SETTINGS` first.

        Settings with a changed batch come before settings with an unchanged one. A sampler on the host runs the same
        code for any number of rows. It gets all settings for one row. Other sizes only size arrays and get one setting
        of each level.
        """
        for rows in () if plan.options.pools else plan.sampler_sizes:
            if plan.options.host_sampler and rows != 1:
                yield from (cls(rows, setting, batch_changed=True) for setting in LEVEL_SETTINGS.values())
                continue
            for settings in (GAUDI_SETTINGS, BRANCH_SETTINGS):
                yield from (cls(rows, setting, changed) for changed in (True, False) for setting in settings)

    @classmethod
    def run_kind(cls, items: Sequence[Self], run_one: Callable[[Item], None], warm: ItemRunner) -> int:
        logged = [(name, changed) for changed in (True, False) for name in GAUDI_SETTINGS]
        for line in lines.sampler_start(sorted({item.rows for item in items}), logged):
            warm.tell(line)
        done = Item.run_kind(items, run_one, warm)
        warm.tell("Sampler warmup completed successfully")
        return done

    @property
    def shape(self) -> dict[str, Any]:
        return {"rows": self.rows, "setting": self.setting, "batch_changed": self.batch_changed}

    @property
    def name(self) -> str:
        return f"(sampler, {self.rows}, {self.setting}, batch_changed={self.batch_changed})"

    @property
    def program(self) -> Program[int]:
        return Program("sampler", self.rows, Level.of(SAMPLER_SETTINGS[self.setting]))

    def cost(self, costs: Costs) -> Cost:
        return costs.sampling(self.name, self.rows, times=self._times)

    def run(self, warm: ItemRunner) -> None:
        warm.sample(self.program, SAMPLER_SETTINGS[self.setting], self._times)

    def run_as(self, program: Program[Any], warm: ItemRunner) -> None:
        """Run ``program`` once; see `ForwardItem.run_as`."""
        warm.sample(program, SAMPLER_SETTINGS[self.setting], 1)

    @property
    def _times(self) -> int:
        """Number of samplings: 2 for an unchanged batch.

        Only the second one finds the batch unchanged.
        """
        return 1 if self.batch_changed else 2


@dataclass(frozen=True, slots=True)
class PoolerItem(Item):
    """Pooling of the hidden states of ``rows`` tokens, for an engine that pools.

    It runs once for the last tokens of ``rows`` prompts, and once for one prompt's tokens in their order.
    """

    KIND = "pooler"
    rows: int

    @classmethod
    def of_plan(cls, plan: Plan) -> Iterable[PoolerItem]:
        return map(cls, plan.sampler_sizes if plan.options.pools else ())

    @property
    def shape(self) -> dict[str, Any]:
        return {"rows": self.rows}

    @property
    def program(self) -> Program[int]:
        return Program("sampler", self.rows, Level.GREEDY)

    def cost(self, costs: Costs) -> Cost:
        return costs.sampling(self.name, self.rows, times=1)

    def run(self, warm: ItemRunner) -> None:
        for params in POOLER_SETTINGS:
            warm.sample(self.program, params, 1)


@dataclass(frozen=True, slots=True)
class EncoderItem(Item):
    """The program that encodes ``images`` images, or one image of any size that pads to ``cells``.

    Only models that see images have any.
    """

    KIND = "encoder"
    images: int
    cells: int = 0

    @classmethod
    def of_plan(cls, plan: Plan) -> Iterable[EncoderItem]:
        """Return items largest first; the largest needs the most memory."""
        if plan.limits.rungs:
            return (cls(1, cells) for cells in reversed(plan.limits.rungs))
        return (cls(images) for images in ENCODER_SIZES if images <= plan.limits.max_images)

    @property
    def shape(self) -> dict[str, Any]:
        return {"cells": self.cells} if self.cells else {"images": self.images}

    @property
    def program(self) -> Program[int]:
        return Program("encoder", self.cells or self.images)

    def cost(self, costs: Costs) -> Cost:
        return costs.encoder(self.name, self.images, self.cells)

    def run(self, warm: ItemRunner) -> None:
        warm.encode(self.images, self.cells)


@dataclass(frozen=True, slots=True)
class AdapterItem(Item):
    """A forward or sampler program for steps in which some rows have adapters.

    The adapters' identity, slots and number are no part of a program.
    """

    KIND = "lora"
    item: ForwardItem | SamplerItem

    @classmethod
    def of_plan(cls, plan: Plan) -> Iterable[AdapterItem]:
        """Yield each forward program, then each sampler program that has rows, once."""
        if not plan.options.enable_lora:
            return
        yield from (cls(item, fallback=item.fallback) for item in ForwardItem.of_plan(plan))
        programs = {item.program: item for item in SamplerItem.of_plan(plan) if item.rows}
        yield from map(cls, programs.values())

    @property
    def shape(self) -> dict[str, Any]:
        return {"of": self.item.kind, **self.item.shape}

    @property
    def program(self) -> Program[Any]:
        return self.item.program._replace(adapted=True)

    def cost(self, costs: Costs) -> Cost:
        known = costs.measured.get(self.name)
        return self.item.cost(costs) if known is None else Cost(known, 0)

    def run(self, warm: ItemRunner) -> None:
        self.item.run_as(self.program, warm)


@dataclass(frozen=True, slots=True)
class SwapItem(Item):
    """A padded size of the defragmenter.

    Source: the warm-up of vLLM on Gaudi, which swaps blocks 0 and 1 at each size. An even number of swaps leaves the
    cache unchanged.
    """

    KIND = "swap"
    pairs: int

    @classmethod
    def of_plan(cls, plan: Plan) -> Iterable[SwapItem]:
        """Return the sizes that the blocks can need.

        Each block in use is swapped with a free one.
        """
        most = max(1, (plan.limits.num_blocks - 1) // 2)
        return (cls(pairs) for below, pairs in pairwise((0, *SWAP_SIZES)) if below < most and plan.policy.compacts)

    @classmethod
    def run_kind(cls, items: Sequence[Self], run_one: Callable[[Item], None], warm: ItemRunner) -> int:
        """Run all sizes, and the first one again after an odd number of swaps."""
        sizes = [item.pairs for item in items]
        warm.tell(f"Warming up defragmenter with thresholds: {sizes}")
        if warm.num_blocks < 2:
            logger.warning("Skipping defragmenter warmup, insufficient blocks (%d)", warm.num_blocks)
            return 0
        done = Item.run_kind(items, run_one, warm)
        if done % 2:
            warm.swap(sizes[0])
        warm.tell("Defragmenter warmup completed successfully")
        return done

    @property
    def shape(self) -> dict[str, Any]:
        return {"size": self.pairs}

    @property
    def program(self) -> Program[int]:
        return Program("swap", self.pairs)

    def cost(self, costs: Costs) -> Cost:
        return costs.swap(self.name, self.pairs)

    def run(self, warm: ItemRunner) -> None:
        warm.swap(self.pairs)


@dataclass(frozen=True, slots=True)
class TransferItem(Item):
    """A copy of a cache block to the host, or back.

    Exists only with ``kv_offloading_size``.
    """

    KIND = "offload"
    transfer: Transfer

    @classmethod
    def of_plan(cls, plan: Plan) -> Iterable[TransferItem]:
        """Return the copy to the host, then the copy back."""
        transfers: tuple[Transfer, ...] = ("store", "load") if plan.options.kv_offloading_size else ()
        return map(cls, transfers)

    @property
    def shape(self) -> dict[str, Any]:
        return {"transfer": self.transfer}

    @property
    def program(self) -> Program[Transfer]:
        return Program("offload", self.transfer)

    def run(self, warm: ItemRunner) -> None:
        warm.transfer(self.transfer)


@dataclass(frozen=True, slots=True)
class DraftItem(Item):
    """A forward or sampler item of the draft model's plan."""

    KIND, stage = "draft", "last"
    item: ForwardItem | SamplerItem

    @classmethod
    def of_plan(cls, plan: Plan) -> Iterable[DraftItem]:
        """Return the forward and sampler items of the draft model's plan, in its order."""
        items = plan.draft.items if plan.draft else ()
        return (cls(item) for item in items if isinstance(item, ForwardItem | SamplerItem))

    @property
    def shape(self) -> dict[str, Any]:
        return {"of": self.item.kind, **self.item.shape}

    @property
    def program(self) -> Program[Any]:
        return self.item.program._replace(draft=True)

    def run(self, warm: ItemRunner) -> None:
        self.item.run_as(self.program, warm)


@dataclass(frozen=True, slots=True)
class PaceItem(Item):
    """A decode or verify step, timed after its first run.

    The times decide how many tokens are drafted.
    """

    KIND, stage = "pace", "last"
    bucket: Bucket
    draft: bool

    @classmethod
    def of_plan(cls, plan: Plan) -> Iterable[PaceItem]:
        """Yield buckets of each phase with about doubling rows, and the largest."""
        if not (plan.options.measures_drafts and plan.verifies):
            return
        for phase in ("decode", "verify"):
            buckets = plan.dispatcher.phases[phase].buckets
            for width in sorted({bucket.longest for bucket in buckets}):
                rows = [bucket for bucket in buckets if bucket.longest == width]
                yield from (cls(bucket, draft=False) for bucket in _doubling(rows))
        if plan.draft:
            yield from (cls(bucket, draft=True) for bucket in _doubling(plan.draft.dispatcher.phases["decode"].buckets))

    @property
    def shape(self) -> dict[str, Any]:
        return {"of": f"draft {self.bucket.phase}" if self.draft else self.bucket.phase, **self.bucket.named_dims()}

    def cost(self, costs: Costs) -> Cost:
        return costs.forward(self.name, self.bucket)

    def run(self, warm: ItemRunner) -> None:
        warm.pace(self.bucket, draft=self.draft)


def _doubling(buckets: Iterable[Bucket]) -> list[Bucket]:
    """Return buckets with about doubling rows, and the largest.

    Each has at least twice the rows of the one before. The buckets differ in rows alone.
    """
    ordered = sorted(buckets, key=lambda bucket: bucket.rows)
    chosen: list[Bucket] = []
    for bucket in ordered:
        if not chosen or bucket.rows >= 2 * chosen[-1].rows:
            chosen.append(bucket)
    return list(dict.fromkeys((*chosen, ordered[-1])))


@dataclass(frozen=True, slots=True)
class FunctionItem(Item):
    """A compiled function of layers. It is compiled, or read from the cache folder, before any step runs it."""

    KIND, stage = "function", "first"
    function: Function

    @classmethod
    def of_plan(cls, plan: Plan) -> Iterable[FunctionItem]:
        return map(cls, plan.options.functions)

    @classmethod
    def run_kind(cls, items: Sequence[Self], run_one: Callable[[Item], None], warm: ItemRunner) -> int:
        """Run all items. An error ends the boot, because no step runs without its functions."""
        for item in items:
            run_one(item)
        return len(items)

    @property
    def shape(self) -> dict[str, Any]:
        return {"name": str(self.function)}

    def cost(self, costs: Costs) -> Cost:
        return costs.function(self.name)

    def run(self, warm: ItemRunner) -> None:
        warm.build_function(self.function)


@dataclass(frozen=True, slots=True)
class GrammarItem(Item):
    """A grammar known before the first request.

    A state's first mask is slower than later ones, so states are built too.
    """

    KIND = "grammar"
    grammar: str

    @classmethod
    def of_plan(cls, plan: Plan) -> Iterable[GrammarItem]:
        return map(cls, plan.options.grammars)

    @property
    def shape(self) -> dict[str, Any]:
        return {"name": self.grammar}

    def cost(self, costs: Costs) -> Cost:
        return costs.grammar(self.name)

    def run(self, warm: ItemRunner) -> None:
        warm.build_grammar(self.grammar)


@dataclass(frozen=True, slots=True)
class DeterminismItem(Item):
    """A pass of the determinism warm-up, which runs ``bucket`` again."""

    KIND, stage = "determinism", "last"
    number: int
    bucket: Bucket

    @classmethod
    def of_plan(cls, plan: Plan) -> Iterable[DeterminismItem]:
        """Return passes over a decode step of a usual batch size.

        The result is empty without batch invariance.
        """
        rows = min(plan.limits.max_rows, MAX_DETERMINISM_TOKENS)
        bucket = plan.dispatcher.peek(StepSize("decode", rows, rows, longest=1, blocks=rows))
        passes = plan.options.determinism_warmup_iterations if plan.options.batch_invariant else 0
        return (cls(number + 1, bucket) for number in range(passes))

    @classmethod
    def run_kind(cls, items: Sequence[Self], run_one: Callable[[Item], None], warm: ItemRunner) -> int:
        passes = iter(items)
        warm.determinism_passes(lambda: run_one(next(passes)), len(items))
        return len(items)

    @property
    def shape(self) -> dict[str, Any]:
        return {"size": self.number}

    def cost(self, costs: Costs) -> Cost:
        return costs.forward(str(self.bucket), self.bucket)

    def run(self, warm: ItemRunner) -> None:
        warm.forward(self.bucket)


@dataclass(frozen=True, slots=True)
class CheckItem(Item):
    """A cross-check at boot, by its name in :mod:`preheat.verify.names`."""

    KIND, stage = "check", "last"
    check: str

    @classmethod
    def of_plan(cls, plan: Plan) -> Iterable[CheckItem]:
        return map(cls, plan.checks)

    @property
    def shape(self) -> dict[str, Any]:
        return {"name": self.check}

    def cost(self, costs: Costs) -> Cost:
        return costs.check(self.name)

    def run(self, warm: ItemRunner) -> None:
        warm.run_check(self.check)


@dataclass(frozen=True, slots=True)
class Dropped:
    """A candidate that will not run, with the reason."""

    bucket: Bucket
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        bucket = self.bucket
        return {"kind": bucket.phase, "name": str(bucket), "shape": bucket.named_dims(), "reason": self.reason}
