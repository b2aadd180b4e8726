"""Plant faults and look who sees them: ``python -m tools.planted_faults``.

Each of :mod:`tools.faults` is planted into a copy of the sources. The check at boot, the paths of ``preheat verify``
and the nearest test run on it, on a CPU. The command writes the controls' table of docs/determinism.md. The status is 1
if none of the three sees a fault, or ``preheat verify`` sees fewer than nine in ten. The dtype is float32: there the
order of a sum shows in more results than in bfloat16. The mode is ``eager``: the faults of operations are planted into
their code for torch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tools.fault_engines import options
from tools.faults import FAULTS, Fault

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "determinism.md"
BEGIN, END = "<!-- written by tools/planted_faults.py -->\n", "<!-- end of the planted faults -->"
TIMEOUT = 900

LOOK = """
import json
import os
from preheat.core import Ready
from preheat.settings import Settings
from preheat.plan import plan
from preheat.plan.step_items import SamplerItem
from preheat.startup import boot_engine
from preheat.verify.prompts import Size, make_prompts
from preheat.verify.verification import Verification
from preheat.verify import drive, verification
from preheat.warmup.record import Record

plan.KINDS = tuple(kind for kind in plan.KINDS if kind is not SamplerItem)
size = Size(prompts=12, runs=2, outputs=16, longest=400)
settings = Settings.load({"device": "cpu", "dtype": "float32", "max_num_seqs": 8, "skip_warmup": False,
                          "log_level": "error", "on_cold": "off", "block_size": 32, "execution_mode": "eager",
                          "kv_cache_memory_bytes": 1 << 27, **json.loads(os.environ["PLANTED_OPTIONS"])})
records = []

class Noting(drive.Engine):
    def __init__(self, *args):
        super().__init__(*args)
        records.append(Record.from_json(self.ready.record))

verification.Engine = Noting
prompts = lambda engine: make_prompts(size, engine.vocab_size, engine.ready.max_model_len)
found = {"boot": [], "verify": [], "error": ""}
try:
    for result in Verification(boot_engine, settings, prompts, size).results():
        if result.first:
            found["verify"].append(result.path)
except Exception as error:
    found["error"] = f"{type(error).__name__}"
if records:
    found["boot"] = [e.shape["name"] for e in records[0].entries if e.kind == "check" and e.outcome == "failed"]
print("FOUND " + json.dumps(found))
"""


BOOT = "its check at boot"
"""Stands for a path of verify: the verdict includes the check at boot of its engine."""

NOTE = """\
`preheat verify` boots an engine, so the check at boot is part of its verdict. In float32: rounding to bfloat16 hides
most changes of an order."""

CRASHES = {"NameError", "SyntaxError", "IndentationError", "ImportError", "ModuleNotFoundError", "AttributeError"}
"""Errors of code that cannot run at all: whatever is planted, such code is not the fault."""

LEAST = 0.9
"""The share of faults that verify must see."""


class Seen(NamedTuple):
    """The checks that saw a fault.

    They are the checks at boot, the paths of verify, and whether the nearest test saw it.
    """

    boot: list[str]
    verify: list[str]
    test: bool

    @property
    def by_verify(self) -> list[str]:
        """The paths of ``preheat verify`` that saw it, its check at boot included."""
        return self.verify or [BOOT] * bool(self.boot)


def plant(fault: Fault | None) -> Path:
    """Copy the sources and tests, and plant ``fault`` unless it is None.

    Returns the folder. Raises AssertionError if the sources no longer have the place.
    """
    folder = Path(tempfile.mkdtemp(prefix="planted-"))
    for name in ("src", "tests", "tools", "docs", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for edit in fault.edits if fault else ():
        path = folder / "src" / "preheat" / edit.path
        text = path.read_text()
        assert text.count(edit.old) == 1, (
            f"{fault and fault.name}: {edit.path} has {text.count(edit.old)} of {edit.old!r}"
        )
        path.write_text(text.replace(edit.old, edit.new))
    return folder


def look(fault: Fault | None, engine: str) -> Seen:
    """Run the check at boot, verify and the nearest test over ``fault``, on ``engine``."""
    folder = plant(fault)
    try:
        environment = os.environ | {"PYTHONPATH": str(folder / "src"), "PREHEAT_CACHE_ROOT": str(folder / "cache")}
        environment |= {"XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        environment["PLANTED_OPTIONS"] = json.dumps(options(engine, folder / "model"))

        def run(*command: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True,
                timeout=TIMEOUT, check=False,
            )  # fmt: skip

        done = run("-c", LOOK)
        lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
        if not lines:
            raise SystemExit(f"{fault and fault.name}: the engine's process says nothing: {done.stderr[-500:]}")
        found = json.loads(lines[-1].removeprefix("FOUND "))
        test = fault.test if fault else "tests/cpu/test_boot_special_contexts.py::test_all_is_well"
        tested = run("-m", "pytest", "-q", "-n", "0", "-x", "-p", "no:cacheprovider", test)
        error = [found["error"]] if found.get("error") else []
        if tested.returncode not in (0, 1) or set(error) & CRASHES:
            raise SystemExit(f"{fault and fault.name}: only a crash: {error}, {tested.stdout[-500:]}")
        return Seen(found["boot"], found["verify"] + error, tested.returncode == 1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def table(faults: list[Fault], seen: list[Seen]) -> str:
    """Return the text of the table."""
    lines = [
        "| Planted | Engine | Check at boot | `preheat verify` | Nearest test |",
        "| --- | --- | --- | --- | --- |",
    ]
    for fault, who in zip(faults, seen, strict=True):
        place = fault.test.replace("::", ", ").removeprefix("tests/")
        test = f"`{place}`" if who.test else f"no (`{place}`)"
        found = f"{_short(who.boot)} | {_short(who.by_verify)} | {test}"
        lines.append(f"| {fault.name} | {fault.engine} | {found} |")
    boot, verify, test = (sum(map(bool, column)) for column in zip(*map(_who, seen), strict=True))
    counts = f"the check at boot sees {boot}, `preheat verify` {verify}, the nearest test {test}"
    lines += ["", f"Of {len(faults)} faults {counts}. {NOTE}"]
    missed = [fault for fault, who in zip(faults, seen, strict=True) if not who.by_verify]
    lines += ["", "`preheat verify` does not see:", ""] if missed else []
    lines += [f"- {fault.name}: {fault.unseen or 'NO REASON IS KNOWN'}" for fault in missed]
    return "\n".join(lines) + "\n"


def _who(seen: Seen) -> tuple[list[str], list[str], bool]:
    return seen.boot, seen.by_verify, seen.test


def _short(names: list[str]) -> str:
    if not names:
        return "no"
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="faults whose name contains this; the page is left alone")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--known", type=Path, help="file of results by fault: known ones are taken, new ones added")
    args = parser.parse_args()
    known: dict[str, list[Any]] = json.loads(args.known.read_text()) if args.known and args.known.exists() else {}
    faults = [fault for fault in FAULTS if args.only is None or args.only in fault.name]

    def one(fault: Fault | None, engine: str) -> Seen:
        if fault is not None and fault.name in known:
            return Seen(*known[fault.name])
        seen = look(fault, engine)
        if fault is not None and args.known is not None:
            known[fault.name] = list(seen)
            args.known.write_text(json.dumps(known, indent=1) + "\n")
        print(f"{fault.name if fault else f'nothing planted ({engine})'}: {seen}", flush=True)
        return seen

    engines = sorted({fault.engine for fault in faults})
    with ThreadPoolExecutor(args.jobs) as pool:
        controls = [*pool.map(one, [None] * len(engines), engines)]
        seen = [*pool.map(one, faults, [fault.engine for fault in faults])]
    if any(any(control) for control in controls):
        print("with nothing planted something is seen, too: the table would mean nothing")
        return 1
    text = table(faults, seen)
    print(text)
    if args.only is None:
        page = PAGE.read_text()
        head, rest = page.split(BEGIN)
        PAGE.write_text(head + BEGIN + "\n" + text + "\n" + END + rest.split(END, 1)[1])
    enough = sum(bool(who.by_verify) for who in seen) >= LEAST * len(seen)
    return 0 if enough and all(any(who) for who in seen) else 1


if __name__ == "__main__":
    sys.exit(main())
