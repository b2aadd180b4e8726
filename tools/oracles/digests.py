"""The digests of many small models on a CPU: ``python -m tools.oracles.digests --write FILE | --against FILE``.

A cell is a model of :mod:`tools.oracles.models`, a dtype, a number of ranks, and adapters, or none, or all splits on
one rank. Its value is the digest that ``preheat verify --digest`` compares, or the reason why there is none. The digest
covers the logits of a few contexts in one large step, with random adapters too. The check at boot has compared decoding
with them.

An interrupt stores the values so far; ``--missing`` goes on from there.

A cell is booted in a process of its own, with one thread. The process is a fork, and so are its ranks, because
importing torch would take longer than the cell.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from hashlib import sha256
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NamedTuple

from tools.oracles import files
from tools.oracles.models import ASKED, FAMILIES, FORMATS, Weights, config

TIMEOUT = 300.0
MAIN = ("plain", "fp8", "awq")
"""The formats of every family; families of :data:`THOROUGH` have all formats."""

THOROUGH = ("LlamaForCausalLM", "Qwen2MoeForCausalLM")
OPTIONS: dict[str, Any] = {
    "device": "cpu", "load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": 4, "block_size": 16,
    "max_num_batched_tokens": 64, "max_model_len": 64, "num_threads": 1, "log_level": "error", "cache_dir": "off",
    "kv_cache_memory_bytes": 1 << 24, "boot_check": "quick", "skip_warmup": False, "determinism_warmup_iterations": 0,
}  # fmt: skip
_ADAPTERS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 64}
WITH: dict[str, dict[str, Any]] = {
    "plain": {},
    "adapters": _ADAPTERS,
    "divided adapters": _ADAPTERS | {"fully_sharded_loras": True},
    "splits": {"tp_invariant": True},
    "splits, adapters": _ADAPTERS | {"tp_invariant": True},
}
"""Further options of an engine.

On one rank a layer keeps all its splits: more of them meet than on several ranks.
"""


PRELOADED = (
    "numpy.ma",
    "preheat.backends.cpu.backend",
    "preheat.backends.cpu.sharing",
    "preheat.boot.engine",
    "preheat.startup",
)
"""Imported once for all cells."""

CHECKS = ("finite", "decode", "adapters", "images", "pooled")
"""The checks with a part in the digest, and one that decodes; :mod:`tools.planted_faults` runs all."""

INC = {"mode": "QUANTIZE", "scale_method": "unit_scale", "blocklist": {"types": [], "names": ["experts"]}}
"""INC's configuration: a rule that needs no measured ranges."""


class Cell(NamedTuple):
    """One engine."""

    family: str
    stored: str
    dtype: str
    ranks: int
    more: str

    def __str__(self) -> str:
        return f"{self.family}, {self.stored}, {self.dtype}, {self.ranks} ranks, {self.more}"

    @property
    def options(self) -> dict[str, Any]:
        own: dict[str, Any] = {} if self.family.endswith("LM") or "Generation" in self.family else {"runner": "pooling"}
        if self.ranks > 1:
            own["tensor_parallel_size"] = self.ranks
        return OPTIONS | WITH[self.more] | ASKED.get(self.stored, {}) | own | {"dtype": self.dtype}


def cells() -> Iterator[Cell]:
    """Yield all cells."""
    for family in FAMILIES:
        for stored in FORMATS if family in THOROUGH else MAIN:
            thorough = family in THOROUGH and stored in MAIN
            for dtype in ("float32", "bfloat16") if stored == "plain" or thorough else ("float32",):
                yield from (Cell(family, stored, dtype, *each) for each in _shared(thorough))


def _shared(thorough: bool) -> Iterator[tuple[int, str]]:
    """Yield ranks and further options.

    With adapters, the digest also covers logits without any.
    """
    yield from itertools.product((1, 2), ("plain", "adapters"))
    yield from [(1, "splits"), (1, "splits, adapters"), (4, "adapters")]
    if thorough:
        yield from [(4, "plain"), (2, "divided adapters"), (4, "divided adapters")]


def fingerprint() -> dict[str, Any]:
    """Return everything that the bits depend on besides the code."""
    import numpy
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = " ".join(sorted((said.get("flags") or said.get("Features", "")).split()))
    return {
        "torch": torch.__version__, "numpy": numpy.__version__,
        "python": ".".join(map(str, sys.version_info[:2])), "processor": said.get("model name", ""),
        "instructions": torch.backends.cpu.get_cpu_capability(), "flags": sha256(flags.encode()).hexdigest()[:16],
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ one cell


def digest(cell: Cell, folder: Path) -> str:
    """Boot ``cell`` and return its digest.

    Returns the reason if there is none. ``folder`` is for its model.
    """
    import preheat.boot.engine
    from preheat.core import Ready
    from preheat.errors import PreheatError
    from preheat.model import dummy_tensors
    from preheat.plan import plan
    from preheat.plan.repeat_items import CheckItem
    from preheat.settings import Settings
    from preheat.startup import boot_engine
    from preheat.transport import InlineTransport
    from preheat.warmup.record import Record

    dummy_tensors.DummyTensors.fill = Weights(cell.stored).fill
    plan.KINDS = (first_program(), CheckItem)  # nothing else has a part in the digest
    names = preheat.boot.engine.check_names
    preheat.boot.engine.check_names = lambda *args, **more: tuple(
        name for name in names(*args, **more) if name in CHECKS
    )
    (folder / "config.json").write_text(json.dumps(config(cell.family, cell.stored)))
    options = cell.options | {"model": str(folder)}
    if cell.stored == "inc":
        (folder / "inc.json").write_text(json.dumps(INC))
        options["quant_config"] = str(folder / "inc.json")
    transport = InlineTransport()
    try:
        loop = boot_engine(Settings.load(options, {}), transport)
    except PreheatError as error:
        if error.__cause__ is not None and not isinstance(error.__cause__, PreheatError):
            raise
        return f"refused: {error}".replace(str(folder), "")[:200]
    ready = next(message for message in transport.receive() if isinstance(message, Ready))
    if cell.ranks > 1:
        loop.executor.ranks.close()
    return Record.from_json(ready.record).proof.digest + (f"; {ready.blocked_reason}" if ready.blocked_reason else "")


def first_program() -> type:
    """Return an item class for one program alone.

    A plan needs some, and the checks run the programs they need.
    """
    from preheat.plan.step_items import ForwardItem

    class First(ForwardItem):
        @classmethod
        def of_plan(cls, plan: Any) -> list[Any]:
            return list(ForwardItem.of_plan(plan))[:1]

    return First


class Forked(subprocess.Popen):
    """A rank that is a fork of this process, in place of :class:`preheat.parallel.ranks.Child`."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.args, self.returncode, self._waitpid_lock = ["rank"], None, threading.Lock()
        self.stdin = self.stdout = self.stderr = None
        self._child_created = True
        self.pid = os.fork()
        if not self.pid:
            try:
                run()
            finally:
                os._exit(1)

    @property
    def reason(self) -> str:
        return ""

    def leave(self) -> None:
        self.kill()
        self.wait()


def forked_rank(rank: int) -> Any:
    """Start a rank as a fork, in place of a new interpreter."""
    from preheat.parallel import ranks, worker

    ours, theirs = Pipe()

    def run() -> None:
        ours.close()
        worker.run(rank, theirs, None)

    child = Forked(run)
    theirs.close()
    return ranks.Started(child, ours, None, device=rank)


def in_a_fork(cell: Cell) -> tuple[int, Connection]:
    """Fork a process that boots ``cell``.

    Returns its id and the connection for its result.
    """
    ours, theirs = Pipe(duplex=False)
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
        sys.stderr.flush()
        with tempfile.TemporaryDirectory() as folder:
            try:
                theirs.send(digest(cell, Path(folder)))
            except BaseException as error:
                theirs.send(f"crashed: {type(error).__name__}: {error}"[:200])
    finally:
        os._exit(0)


def found(jobs: int, only: str, known: Collection[str] = ()) -> dict[str, str]:
    """Return the value of every cell with a matching name.

    ``known`` cells are left out. An interrupt ends it. Cells with few ranks run first.
    """
    import torch

    from preheat.parallel import ranks

    for name in PRELOADED:
        importlib.import_module(name)
    torch.set_num_threads(1)
    ranks._child = forked_rank
    every = {str(cell): cell for cell in cells()}
    waiting = [every[name] for name in files.chosen(list(every), only) if name not in known]
    waiting.sort(key=lambda cell: (cell.ranks, cell.more == "plain"))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    running: dict[Connection, tuple[int, Cell]] = {}
    values: dict[str, str] = {}
    with suppress(KeyboardInterrupt):
        while waiting or running:
            while waiting and len(running) < jobs:
                cell = waiting.pop(0)
                pid, line = in_a_fork(cell)
                running[line] = pid, cell
            for line in wait(list(running), TIMEOUT) or list(running):
                pid, cell = running.pop(line)
                values[str(cell)] = _said(line)
                end_group(pid)
                print(f"{cell}: {values[str(cell)]}", file=sys.stderr, flush=True)
    for pid, _ in running.values():
        end_group(pid)
    return values


def _said(line: Connection) -> str:
    """Return the result of a cell's process."""
    try:
        return line.recv() if line.poll() else "crashed: it took too long"
    except EOFError:
        return "crashed: its process ended"


def end_group(pid: int) -> None:
    """End a cell's process and the ranks that it started."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    os.waitpid(pid, 0)


def main() -> int:
    args = files.parser(__doc__)
    args.add_argument("--jobs", type=int, default=1, help="how many cells at once")
    args.add_argument("--missing", action="store_true", help="take the cells that the file of --write lacks")
    given = args.parse_args()
    known = files.cells_in(given.write) if given.missing else ()
    return files.finish(given, fingerprint(), lambda: found(given.jobs, given.only, known))


if __name__ == "__main__":
    files.end(main())
