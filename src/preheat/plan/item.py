"""An item of a plan: one thing that may run.

An item has a ``kind``, a ``name``, a ``program`` and a cost, and knows how warm-up runs it. A new kind is one class
beside the classes of :mod:`preheat.plan.step_items`, and one entry in `preheat.plan.plan.KINDS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, Self

from preheat.core import SamplingParams, Transfer
from preheat.limits import Limits
from preheat.plan.buckets import Bucket
from preheat.plan.cost import Cost, Costs
from preheat.plan.dispatcher import Dispatcher
from preheat.plan.functions import Function
from preheat.plan.options import PlanOptions
from preheat.plan.policy import Policy
from preheat.plan.programs import Program

Stage = Literal["first", "after_cache", "last"]


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
    sizes. An item that ``repeats`` runs a program of another item, with other values: it runs in the first boot with
    its fingerprint alone. Items of the first stage run before any step, and items of the last stage once graphs are
    captured.
    """

    KIND: ClassVar[str] = ""
    stage: ClassVar[Stage] = "after_cache"

    estimate: Cost = field(default=Cost(0.0, 0), kw_only=True)
    fallback: bool = field(default=False, kw_only=True)
    repeats: bool = field(default=False, kw_only=True, compare=False)

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
class Dropped:
    """A candidate that will not run, with the reason."""

    bucket: Bucket
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        bucket = self.bucket
        return {"kind": bucket.phase, "name": str(bucket), "shape": bucket.named_dims(), "reason": self.reason}
