"""Items of the programs of a step: forward passes, samplers, encoders and their variants."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar, Self

from preheat.core import Level
from preheat.plan import lines
from preheat.plan.buckets import Bucket
from preheat.plan.cost import Cost, Costs
from preheat.plan.item import Item, ItemRunner, Plan
from preheat.plan.programs import ENCODER_SIZES, Program
from preheat.plan.sampler_settings import (
    BRANCH_SETTINGS,
    GAUDI_SETTINGS,
    LEVEL_SETTINGS,
    POOLER_SETTINGS,
    SAMPLER_SETTINGS,
)


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
        of each level. Elsewhere a size and a level are one program. There all settings for the fewest and the most rows
        are no repetition: operations of torch may differ by size. Of other sizes it is one setting of each level.
        """
        sizes = () if plan.options.pools else plan.sampler_sizes
        some = [rows for rows in sizes if rows]
        whole = {min(some), max(some)} if some else set[int]()
        for rows in sizes:
            if plan.options.host_sampler and rows != 1:
                yield from (cls(rows, setting, batch_changed=True) for setting in LEVEL_SETTINGS.values())
                continue
            for settings, changed in product((GAUDI_SETTINGS, BRANCH_SETTINGS), (True, False)):
                for setting in settings:
                    first = changed and setting in LEVEL_SETTINGS.values()
                    yield cls(rows, setting, changed, repeats=rows not in whole and not first)

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
class _VariantItem(Item):
    """Another program of a forward or sampler item: the one with this ``flag``."""

    flag: ClassVar[str]
    item: ForwardItem | SamplerItem

    @property
    def shape(self) -> dict[str, Any]:
        return {"of": self.item.kind, **self.item.shape}

    @property
    def program(self) -> Program[Any]:
        flags: dict[str, Any] = {self.flag: True}
        return self.item.program._replace(**flags)

    def run(self, warm: ItemRunner) -> None:
        self.item.run_as(self.program, warm)


@dataclass(frozen=True, slots=True)
class AdapterItem(_VariantItem):
    """A forward or sampler program for steps in which some rows have adapters.

    The adapters' identity, slots and number are no part of a program.
    """

    KIND, flag = "lora", "adapted"

    @classmethod
    def of_plan(cls, plan: Plan) -> Iterable[AdapterItem]:
        """Yield each forward program, then each sampler program that has rows, once."""
        if not plan.options.enable_lora:
            return
        yield from (cls(item, fallback=item.fallback) for item in ForwardItem.of_plan(plan))
        programs = {item.program: item for item in SamplerItem.of_plan(plan) if item.rows}
        yield from map(cls, programs.values())

    def cost(self, costs: Costs) -> Cost:
        known = costs.measured.get(self.name)
        return self.item.cost(costs) if known is None else Cost(known, 0)


@dataclass(frozen=True, slots=True)
class DraftItem(_VariantItem):
    """A forward or sampler item of the draft model's plan."""

    KIND, stage, flag = "draft", "last", "draft"

    @classmethod
    def of_plan(cls, plan: Plan) -> Iterable[DraftItem]:
        """Return the forward and sampler items of the draft model's plan, in its order."""
        items = plan.draft.items if plan.draft else ()
        return (cls(item, repeats=item.repeats) for item in items if isinstance(item, ForwardItem | SamplerItem))
