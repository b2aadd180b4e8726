"""The leader's executor: the other ranks run every step that it runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from preheat import __version__
from preheat.backends.base.backend import Backend
from preheat.backends.base.collective import Collective
from preheat.backends.base.layers import LayerRows
from preheat.backends.cold import Counted
from preheat.core import Image, StepResult, Swaps, Transfer
from preheat.errors import PreheatError, RankDied
from preheat.execution.build import Assembly, build, select_linear_kernels
from preheat.execution.executor import Executor
from preheat.execution.features import Features
from preheat.execution.input_batch import InputBatch, Packer
from preheat.execution.launched import LaunchedStep
from preheat.model.decoder import Attended, Tap
from preheat.model.loader import LoadedModel
from preheat.ops.digest import digests_in_place, keys
from preheat.parallel.executor import SharedExecutor
from preheat.parallel.groups import Pipe
from preheat.parallel.ranks import Ranks
from preheat.parallel.reports import Heard
from preheat.parallel.steps import StepWriter
from preheat.plan.plan import Plan
from preheat.plan.programs import Program
from preheat.schedule.adapters import Loads
from preheat.schedule.slots import Slots
from preheat.settings import Settings


@dataclass(slots=True)
class CheckedStep(LaunchedStep):
    """A step of several ranks.

    If one of them died meanwhile, ``check`` raises, and there is no result.
    """

    check: Callable[[], None]

    def result(self) -> StepResult:
        result = LaunchedStep.result(self)
        self.check()
        return result


class ParallelExecutor(SharedExecutor):
    """Rank 0's executor of a model shared by ``ranks``.

    ``slots`` has the block tables. If a call that the ranks have begun together raises an error, all ranks end: some
    may be inside an exchange that never completes.
    """

    def __init__(self, ranks: Ranks, slots: Slots, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.ranks, self._writer, self._seen = ranks, StepWriter(self.buffers, slots), LogitDigest()

    def _answer(self, batch: InputBatch, logits: Tensor | None) -> LaunchedStep:
        step = super()._answer(batch, logits)
        return CheckedStep(step.batch, step.sampler, step.prompt_logprobs, self.ranks.check_step)

    def launch(self, batch: InputBatch) -> LaunchedStep:
        with self._together("launch", self._writer.message(batch)):
            return super().launch(batch)

    def begin(self, batch: InputBatch) -> None:
        with self._together("begin", self._writer.message(batch)):
            super().begin(batch)

    def complete(self, batch: InputBatch) -> LaunchedStep:
        with self._together("complete"):
            return super().complete(batch)

    def forward(self, batch: InputBatch, *, eager: bool = False) -> Attended:
        with self._together("forward", self._writer.message(batch), eager):
            return super().forward(batch, eager=eager)

    def finish(self, attended: Attended, batch: InputBatch) -> StepResult:
        """Return the result of ``batch`` from the states ``attended``, on all ranks.

        Each rank continues from its own states, those of its last forward call, and so does this one. Other states of
        ``attended``, as random ones of warm-up, would lead the ranks to other experts: ranks that exchange for each
        expert would then wait for each other.
        """
        tokens = len(attended.out)
        with self._together("finish", self._writer.message(batch), tokens):
            return super().finish(self.states.map(lambda states: states[:tokens]), batch)

    def logits(self, batch: InputBatch, *, eager: bool = False, tap: Tap | None = None) -> Tensor:
        with self._together("logits", self._writer.message(batch), eager, tap is not None):
            logits = super().logits(batch, eager=eager, tap=tap)
        self._seen.add(logits)
        return logits

    def keep_features(self, features: Features) -> None:
        if features.are_hidden_states:
            self.ranks.tell("compute_features")
        super().keep_features(features)

    def load_adapters(self, loads: Loads) -> None:
        with self._together("load_adapters", [(slot, adapter.source) for slot, adapter in loads]):
            super().load_adapters(loads)

    def clear_adapter(self, slot: int) -> None:
        with self._together("clear_adapter", slot):
            super().clear_adapter(slot)

    def encode(self, images: Sequence[tuple[int, Image]]) -> None:
        with self._together("encode", list(images)):
            super().encode(images)

    def swap(self, swaps: Swaps) -> None:
        with self._together("swap", swaps):
            super().swap(swaps)

    def fill_block(self, block: int, byte: int) -> None:
        with self._together("fill_block", block, byte):
            super().fill_block(block, byte)

    @property
    def world(self) -> int:
        return self.ranks.world

    def keep_blocks(self, places: int) -> None:
        """See :class:`preheat.execution.offload.OtherRanks`."""
        self.ranks.tell("keep_blocks", places)

    def copy_block(self, transfer: Transfer, block: int, place: int) -> None:
        self.ranks.tell("copy_block", transfer, block, place)

    def read_place(self, place: int) -> list[bytes]:
        found: list[bytes] = self.ranks.call("read_place", place)
        return found

    def write_place(self, place: int, parts: list[bytes]) -> None:
        self.ranks.tell("write_place", place, parts)

    def compile(self, programs: Iterable[Program[Any]], threads: int, layers: Iterable[LayerRows] = ()) -> None:
        known = tuple(programs)
        with self._together("compile", known, threads, bool(layers)):
            super().compile(known, threads, layers)

    def prepare(self, batch: InputBatch) -> None:
        with self._together("prepare", self._writer.message(batch)):
            super().prepare(batch)

    def capture(self, program: Program[Any]) -> None:
        with self._together("capture", program):
            super().capture(program)

    def agree(self, plan: Plan) -> None:
        """Raise PreheatError unless all ranks agree.

        They must have the same plan, and equal bits of all logits so far.
        """
        mine = agreed(plan, self.backend, self._seen)
        for rank, theirs in enumerate(self.ranks.call("agree"), 1):
            if different := [name for name, value in mine.items() if theirs[name] != value]:
                said = "; ".join(f"{name}: {mine[name]} on rank 0, {theirs[name]} on rank {rank}" for name in different)
                raise PreheatError(f"The ranks do not agree, so the engine takes no requests: {said}")

    def cold_sources(self) -> Mapping[str, Counted]:
        """Return sources of the other ranks' cold events from now on."""
        self.ranks.call("watch")

        def source(name: str, heard: Heard) -> Counted:
            return Counted(name, lambda: heard.cold_events, lambda count: [heard.last_cold_event] * count)

        names = {f"rank {rank}": heard for rank, heard in enumerate(self.ranks.heard, 1)}
        return {name: source(name, heard) for name, heard in names.items()}

    def on_death(self, report: Callable[[PreheatError], None]) -> None:
        self.ranks.on_death(report)

    @contextmanager
    def _together(self, name: str, *args: Any) -> Iterator[None]:
        self.ranks.tell(name, *args)
        try:
            yield
        except RankDied:
            raise
        except BaseException as error:
            raise self.ranks.death(error) from error


def build_parallel(  # noqa: PLR0917 - as build, with the ranks before, and what :class:`SharedExecutor` exchanges by
    ranks: Ranks,
    draws: Collective | None,
    pipe: Pipe | None,
    settings: Settings,
    backend: Backend,
    model: LoadedModel,
    plan: Plan,
    slots: Slots,
    *,
    how: Assembly,
) -> tuple[Packer, Executor]:
    """Build as :func:`preheat.execution.build.build`, on all ranks at once."""
    ranks.tell("build", plan.limits, plan.options, plan.checks, how.mode, how.num_blocks)
    executor = partial(ParallelExecutor, ranks, slots, draws, pipe)
    built = build(settings, backend, model, plan, slots, how=how, executor=executor)
    ranks.answers()
    return built


def select_parallel(ranks: Ranks, backend: Backend, model: LoadedModel, plan: Plan) -> None:
    """Choose and prove the kernels of linear layers on all ranks at once."""
    ranks.tell("select_kernels", plan.limits, plan.options, plan.checks)
    select_linear_kernels(backend, model, plan)


class LogitDigest:
    """A digest of all logits of a rank's check at boot: of digests of rows, which stay on the device until the end."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._keys = torch.empty(0, dtype=torch.int64)

    def add(self, logits: Tensor) -> None:
        """Add the rows of ``logits`` [rows, vocab], in their order.

        A device that computes int64 in int32 gives shorter digests, which are equal for equal rows, too.
        """
        if self._keys.device != logits.device or len(self._keys) != logits.shape[1]:
            self._keys = torch.from_numpy(keys(logits.shape[1]).view(np.int64)).to(logits.device)
        self._rows.append(digests_in_place(logits, self._keys))

    def hexdigest(self) -> str:
        """Return the digest, and drop the keys."""
        self._keys = torch.empty(0, dtype=torch.int64)
        found = torch.cat(self._rows) if self._rows else self._keys
        return hashlib.blake2b(found.cpu().numpy().tobytes(), digest_size=16).hexdigest()


def agreed(plan: Plan, backend: Backend, seen: LogitDigest) -> dict[str, object]:
    """Return the values that all ranks must have in common."""
    items = "\n".join(item.name for item in plan.items)
    return {
        "plan": hashlib.blake2b(items.encode(), digest_size=16).hexdigest(),
        "device": backend.fingerprint,
        "preheat": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "logits": seen.hexdigest(),
    }
