"""A rank's process.

It loads its shard, then obeys the leader's messages one by one.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import select
import threading
from functools import cached_property, partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from preheat.backends.base.backend import Backend
from preheat.backends.base.facts import Mode
from preheat.backends.registry import pick_backend, rest, wake
from preheat.backends.rendezvous import Rendezvous
from preheat.core import Image, Swaps, Transfer
from preheat.errors import PreheatError, WireError
from preheat.execution.build import Assembly, build, layer_rows, select_linear_kernels
from preheat.execution.contents import Contents
from preheat.execution.executor import Executor
from preheat.execution.features import FeaturesElsewhere
from preheat.execution.offload import HostBlocks
from preheat.execution.silent import SilentSampler
from preheat.execution.sleep import sleepable_weights
from preheat.execution.weight_transfer import Transfers
from preheat.limits import Limits
from preheat.model.loader import LoadedModel, load_model
from preheat.parallel.adapters import RankAdapters, Source
from preheat.parallel.channel import Receiver
from preheat.parallel.contents import RankContents
from preheat.parallel.executor import SharedExecutor
from preheat.parallel.groups import Groups
from preheat.parallel.leader import LogitDigest, agreed
from preheat.parallel.ranks import Orders
from preheat.parallel.reports import Reporter
from preheat.parallel.sites import Site
from preheat.parallel.steps import StepMessage, StepReader
from preheat.parallel.transfers import RankTransfers
from preheat.parallel.wire import Door
from preheat.plan.options import PlanOptions
from preheat.plan.plan import Plan, make_plan
from preheat.plan.programs import Program
from preheat.schedule.slots import Slots
from preheat.utils.heartbeat import Heartbeat
from preheat.utils.log import leave, set_up_logging
from preheat.warmup.cold_sources import ColdSources

logger = logging.getLogger(__name__)


class Worker:
    """One rank's side of the leader's calls.

    The leader calls the public methods; a result that is not None is answered.
    """

    def __init__(self, orders: Orders, rendezvous: Rendezvous, reporter: Reporter) -> None:
        settings = self._settings = orders.settings
        self._reporter, self._rank = reporter, rendezvous.rank
        self._backend: Backend = pick_backend(settings.device, orders.device)
        self._backend.prepare(settings, orders.mode, orders.cache)
        assert self._backend.sharing is not None  # the leader has checked it
        self._groups = Groups.join(settings, self._backend.sharing, rendezvous, _nothing)
        self._draws = self._groups.everyone if self._backend.facts.asynchronous else None
        with sleepable_weights(settings, self._backend):
            self._model: LoadedModel = load_model(settings, self._backend, self._groups.collective, self._groups.stage)
        self._executor: Executor | None = None
        self._cold: ColdSources | None = None

    @property
    def memory(self) -> int:
        """Free bytes on this rank's device."""
        return self._backend.free_memory()

    def build(
        self, limits: Limits, options: PlanOptions, checks: tuple[str, ...], mode: Mode, num_blocks: int | None
    ) -> bool:
        """Make an executor, in place of the last one."""
        self._executor = None
        gc.collect()  # its parts refer to each other
        self._make_plan(limits, options, checks)
        slots = Slots(limits.max_num_seqs, limits.max_model_len, limits.block_size)
        sampler = SilentSampler(limits.max_num_seqs, self._backend.device)
        _, self._executor = build(
            self._settings, self._backend, self._model, self._plan, slots,
            how=Assembly(mode, num_blocks=num_blocks), sampler=sampler,
            executor=partial(SharedExecutor, self._draws, self._groups.pipe),
        )  # fmt: skip
        self._reader, self._seen = StepReader(self._executor.buffers, slots), LogitDigest()
        mine = Contents(self._settings, self._backend, self._model, self._executor, self._groups.collective)
        assert self._groups.everyone is not None, "there are several ranks"
        self._contents = RankContents(self._groups.everyone, self._backend.device, mine, self._transfers.take)
        return True

    def _make_plan(self, limits: Limits, options: PlanOptions, checks: tuple[str, ...]) -> None:
        """Make the rank's own plan, equal to the leader's."""
        self._plan: Plan = make_plan(limits, options, checks=checks, on_miss=lambda *_: None)

    def select_kernels(self, limits: Limits, options: PlanOptions, checks: tuple[str, ...]) -> None:
        """Choose and prove the kernels of linear layers for a plan."""
        self._make_plan(limits, options, checks)
        select_linear_kernels(self._backend, self._model, self._plan)

    def compute_features(self) -> None:
        self._run.features = FeaturesElsewhere()

    def launch(self, message: StepMessage) -> None:
        self.begin(message)
        self.complete()

    def begin(self, message: StepMessage) -> None:
        self._begun = self._reader.batch(message)
        self._run.begin(self._begun)

    def complete(self) -> None:
        self._run.complete(self._begun)
        if self._cold is not None:
            for source, detail in self._cold.new_events():
                self._reporter.cold(f"{source}: {detail}")

    def forward(self, message: StepMessage, eager: bool) -> None:
        self._run.forward(self._reader.batch(message), eager=eager)

    def finish(self, message: StepMessage, tokens: int) -> None:
        attended = self._run.states.map(lambda states: states[:tokens])
        self._run.finish(attended, self._reader.batch(message))

    def logits(self, message: StepMessage, eager: bool, tapped: bool) -> None:
        tap = (lambda layer, residual: None) if tapped else None
        self._seen.add(self._run.logits(self._reader.batch(message), eager=eager, tap=tap))

    def read_adapter(self, number: int, name: str, path: str, gone: list[int]) -> None:
        self._read.read(number, name, path, gone)

    def load_adapters(self, loads: list[tuple[int, Source]]) -> None:
        self._run.load_adapters([(slot, self._read.adapter(source)) for slot, source in loads])

    def clear_adapter(self, slot: int) -> None:
        self._run.clear_adapter(slot)

    def encode(self, images: list[tuple[int, Image]]) -> None:
        self._run.encode(images)

    def swap(self, swaps: Swaps) -> None:
        self._run.swap(swaps)

    def fill_block(self, block: int, byte: int) -> None:
        self._run.fill_block(block, byte)

    def transfer(self, number: int, name: str, *args: Any) -> None:
        self._transfers.begin(number, name, *args)

    def change(self, name: str, *args: Any) -> object:
        """Change weights or memory; return True, or the error. Cold events meanwhile delay no request."""
        try:
            self._contents.change(name, *args)
        except PreheatError as error:
            return WireError.of(error)
        finally:
            if self._cold is not None:
                self._cold.forget()
        return True

    def keep_blocks(self, places: int) -> None:
        self._host = HostBlocks(self._backend, [self._run.cache], places)

    def copy_block(self, transfer: Transfer, block: int, place: int) -> None:
        self._host.copy(transfer, block, place)

    def read_place(self, place: int) -> bytes:
        self._backend.synchronize()
        return self._host.view(place).tobytes()

    def write_place(self, place: int, parts: list[bytes]) -> None:
        """Take this rank's part of ``parts``, which begin with rank 1's."""
        self._backend.synchronize()  # an earlier copy may read the place
        view = self._host.view(place)
        view[:] = np.frombuffer(parts[self._rank - 1], np.uint8).reshape(view.shape)

    def compile(self, programs: tuple[Program[Any], ...], threads: int, layers: bool) -> None:
        """Compile ``programs``, and the kernels that all ``layers`` may run or are proven by."""
        self._run.compile(programs, threads, layer_rows(self._model, self._plan) if layers else ())

    def prepare(self, message: StepMessage) -> None:
        self._run.prepare(self._reader.batch(message))

    def capture(self, program: Program[Any]) -> None:
        self._run.capture(program)

    def agree(self) -> dict[str, object]:
        return agreed(self._plan, self._backend, self._seen)

    def watch(self) -> bool:
        """Report cold events from now on: the boot has ended."""
        self._cold = ColdSources(self._backend)
        rest(self._settings.device)
        return True

    @cached_property
    def _read(self) -> RankAdapters:
        return RankAdapters(self._model, self._reporter.outcome)

    @cached_property
    def _transfers(self) -> RankTransfers:
        transfers = Transfers(self._settings, self._backend, self._model, rank=self._rank)
        return RankTransfers(transfers, self._reporter.outcome)

    @property
    def _run(self) -> Executor:
        assert self._executor is not None
        return self._executor


def serve(worker: Worker, receiver: Receiver, reporter: Reporter) -> None:
    """Obey the leader, until the process is ended."""
    while True:
        name, args = receiver.receive()
        answer = getattr(worker, name)(*args)
        if answer is not None:
            reporter.answer(answer)


def run(rank: int, line: Connection, door: Door | None, *, asleep: bool = False) -> None:
    """Be ``rank`` until this process ends.

    ``line`` leads to the leader. There is a ``door`` if the ranks are on several nodes. ``asleep``: nobody has woken
    the rank's device.
    """
    try:
        orders: Orders = pickle.loads(line.recv_bytes())
    except (EOFError, ConnectionError):  # the leader has exited
        os._exit(1)
    set_up_logging(orders.settings)
    threading.Thread(target=_exit_with_leader, args=[line, orders.site], daemon=True, name="leader-exit").start()
    reporter, receiver = Reporter(line), orders.site.receiver(rank, line)
    Heartbeat(reporter.beat, lambda: True)
    try:
        rendezvous = orders.site.rendezvous(rank, door, _nothing)
        if door is not None:
            door.close()
        if asleep:
            wake(orders.settings.device, orders.device)
        worker = Worker(orders, rendezvous, reporter)
        reporter.answer(worker.memory)
        serve(worker, receiver, reporter)
    except PreheatError as error:
        reporter.answer(WireError.of(error))
        _fail(reporter, error)
    except BaseException as error:
        if _left(line):
            os._exit(1)  # a rank fails when its leader exits
        logger.exception("Rank %d failed", rank)
        _fail(reporter, error)


def _nothing() -> None:
    """Do nothing.

    A rank need not ask whether the engine is over, because its process ends then.
    """


def _fail(reporter: Reporter, error: BaseException) -> None:
    reporter.fail(f"{type(error).__name__}: {error}")
    leave(1)


def _left(line: Connection) -> bool:
    """Return whether the leader has closed its end of the line."""
    ends = select.poll()
    ends.register(line, select.POLLRDHUP)
    return bool(ends.poll(0))


def _exit_with_leader(line: Connection, site: Site) -> None:
    ends = select.poll()
    ends.register(line, select.POLLRDHUP)
    ends.poll()
    site.close()
    os._exit(1)
