"""A rank's process: it loads its shard, then does what the leader tells it, message by message."""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
from functools import cached_property, partial
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from preheat.backends.base import Backend, Mode
from preheat.backends.registry import pick_backend
from preheat.core import Swaps
from preheat.errors import PreheatError, WireError
from preheat.execution.build import build, linear_rows, settle_linears
from preheat.execution.executor import Executor
from preheat.execution.silent import SilentSampler
from preheat.limits import Limits
from preheat.metrics import set_up_logging
from preheat.model.decoder import Attended
from preheat.model.loader import LoadedModel, load_model
from preheat.parallel.adapters import RankAdapters, Source
from preheat.parallel.channel import Receiver
from preheat.parallel.executor import SharedExecutor
from preheat.parallel.groups import Groups, world_size
from preheat.parallel.leader import LogitDigest, agreed
from preheat.parallel.shared import Board, remove_folder
from preheat.parallel.steps import StepMessage, StepReader
from preheat.plan.options import PlanOptions
from preheat.plan.plan import Plan, make_plan
from preheat.plan.programs import AdaptedProgram, ForwardProgram, Program, SamplerProgram
from preheat.schedule.slots import Slots
from preheat.settings import Settings
from preheat.utils.heartbeat import Heartbeat
from preheat.warmup.cold_sources import ColdSources

logger = logging.getLogger(__name__)

_STDIN = 0


class Worker:
    """One rank. Its public methods are what the leader may call; what they return is answered, unless it is None."""

    def __init__(self, settings: Settings, cache: Path | None, board: Board, folder: Path) -> None:
        self._settings, self._cache, self._board, self._folder = settings, cache, board, folder
        self._backend: Backend = pick_backend(settings.device, board.rank)
        self._backend.prepare(settings, cache)
        assert self._backend.sharing is not None  # the leader has checked it
        self._groups = Groups.join(settings, self._backend.sharing, folder, board.rank, board.check)
        self._draws = self._groups.collective if self._backend.facts.asynchronous else None
        self._model: LoadedModel = load_model(settings, self._backend, self._groups.collective, self._groups.stage)
        self._settled: object = None
        self._executor: Executor | None = None
        self._cold: ColdSources | None = None

    @property
    def memory(self) -> int:
        """Bytes that are free on this rank's device."""
        return self._backend.free_memory()

    def build(
        self, limits: Limits, options: PlanOptions, checks: tuple[str, ...], mode: Mode, num_blocks: int | None
    ) -> bool:
        """Make an executor, in place of the last one. The plan is this rank's own."""
        self._executor = None
        self._plan: Plan = make_plan(limits, options, checks=checks, on_miss=lambda *_: None)
        if (rows := linear_rows(self._plan)) != self._settled:
            self._settled = rows
            settle_linears(self._backend, self._model, self._plan)
        slots = Slots(limits.max_num_seqs, limits.max_model_len, limits.block_size)
        sampler = SilentSampler(limits.max_num_seqs, self._backend.device)
        _, self._executor = build(
            self._settings, self._backend, self._model, self._plan, slots,
            mode=mode, num_blocks=num_blocks, sampler=sampler,
            executor=partial(SharedExecutor, self._draws, self._groups.pipe),
        )  # fmt: skip
        self._reader, self._seen = StepReader(self._executor.buffers, slots), LogitDigest()
        return True

    def launch(self, message: StepMessage) -> None:
        self.begin(message)
        self.complete()

    def begin(self, message: StepMessage) -> None:
        self._begun = self._reader.batch(message)
        self._run.begin(self._begun)

    def complete(self) -> None:
        self._run.complete(self._begun)
        if self._cold is not None:
            for source, detail in self._cold.taken():
                self._board.cold(f"{source}: {detail}")

    def forward(self, message: StepMessage, eager: bool) -> None:
        self._run.forward(self._reader.batch(message), eager=eager)

    def finish(self, message: StepMessage, tokens: int) -> None:
        attended = Attended(*(states[:tokens] for states in self._run.states))
        self._run.finish(attended, self._reader.batch(message))

    def logits(self, message: StepMessage, eager: bool, tapped: bool) -> None:
        tap = (lambda layer, residual: None) if tapped else None
        self._seen.add(self._run.logits(self._reader.batch(message), eager=eager, tap=tap))

    def read_adapter(self, number: int, name: str, path: str, gone: list[int]) -> None:
        self._read.read(number, name, path, gone)

    def load_adapters(self, loads: list[tuple[int, Source]]) -> None:
        self._run.load_adapters([(place, self._read.adapter(source)) for place, source in loads])

    def clear_adapter(self, place: int) -> None:
        self._run.clear_adapter(place)

    def swap(self, swaps: Swaps) -> None:
        self._run.swap(swaps)

    def compile(self, programs: tuple[Program | None, ...], threads: int) -> None:
        self._run.compile(programs, threads)

    def prepare(self, message: StepMessage) -> None:
        self._run.prepare(self._reader.batch(message))

    def capture(self, program: ForwardProgram) -> None:
        self._run.capture(program)

    def capture_sampling(self, program: SamplerProgram | AdaptedProgram) -> None:
        self._run.capture_sampling(program)

    def agree(self) -> dict[str, object]:
        return agreed(self._plan, self._backend, self._seen)

    def watch(self) -> bool:
        """From now on what is cold is counted on the board."""
        self._cold = ColdSources(self._backend)
        self._cold.taken()
        return True

    @cached_property
    def _read(self) -> RankAdapters:
        return RankAdapters(self._model, self._folder, self._board.rank)

    @property
    def _run(self) -> Executor:
        assert self._executor is not None
        return self._executor


def serve(worker: Worker, receiver: Receiver, pipe: Connection) -> None:
    """Do what the leader says, until the process is ended."""
    while True:
        name, args = receiver.receive()
        answer = getattr(worker, name)(*args)
        if answer is not None:
            pipe.send_bytes(pickle.dumps(answer))


def main() -> None:
    """The process: the settings come by standard input, the rest by the command line."""
    folder, rank, descriptor = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    with open(_STDIN, "rb", buffering=0, closefd=False) as pipe:
        settings, cache = msgspec.json.decode(pipe.readline(), type=tuple[Settings, str | None])
    threading.Thread(target=_exit_with_leader, args=[folder], daemon=True, name="leader-exit").start()
    run(settings, None if cache is None else Path(cache), folder, rank, Connection(descriptor, readable=False))


def run(settings: Settings, cache: Path | None, folder: Path, rank: int, answers: Connection) -> None:
    """Be ``rank`` until this process ends: in the leader's ``folder``, answering by ``answers``."""
    set_up_logging(settings.log_level)
    board = Board(folder, rank, world_size(settings))
    receiver = Receiver(folder, board)
    Heartbeat(board.beat, lambda: True)
    try:
        worker = Worker(settings, cache, board, folder)
        answers.send_bytes(pickle.dumps(worker.memory))
        serve(worker, receiver, answers)
    except PreheatError as error:
        answers.send_bytes(pickle.dumps(WireError.of(error)))
        _fail(board, error)
    except BaseException as error:
        logger.exception("Rank %d failed", rank)
        _fail(board, error)


def _fail(board: Board, error: BaseException) -> None:
    board.fail(f"{type(error).__name__}: {error}")
    sys.stdout.flush()
    os._exit(1)


def _exit_with_leader(folder: Path) -> None:
    while os.read(_STDIN, 1):
        pass
    remove_folder(folder)
    os._exit(1)


if __name__ == "__main__":
    main()
