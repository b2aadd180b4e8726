"""Compile every kernel for every card: ``python -m tools.compile_matrix [--target 8.6] [--write]``.

No GPU is needed. Each configuration of the rules is compiled to machine code in a child of its own, as many at once as
there are cores. A configuration
that does not compile, does not fit the card's shared memory, spills more than is recorded, multiplies by another
instruction or in another order of inputs, or waits for the launch ahead below 9.0 is a fault, and the status is 1.
``--write`` stores the counts in ``tools/compiled/matrix.json``, and ``python -m tools.gen_cards_doc`` writes them into
docs/cards.md. All targets together take ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import triton

from preheat.backends.cuda.device.card import CARDS, Card, text
from tools.compiled.facts import Child, Facts, faults, summary
from tools.compiled.launches import launches, sample
from tools.oracles.card import Launch
from tools.oracles.card import card as simulated

RECORD = Path(__file__).with_name("compiled") / "matrix.json"


def recorded() -> dict[str, Any]:
    """Return the stored counts: the version of Triton, and a summary of each target."""
    found: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {"triton": "", "targets": {}}
    return found


class Kept:
    """Facts of earlier runs in a file of ``folder``, so that a run may go on where another one ended."""

    def __init__(self, folder: Path | None, card: Card) -> None:
        self._path = None if folder is None else folder / f"{card.version}.jsonl"
        lines = self._path.read_text().splitlines() if self._path is not None and self._path.exists() else []
        self._known: dict[str, Facts] = dict(json.loads(line) for line in lines)
        self._card = card

    def facts(self, launches: Iterable[Launch], processes: int) -> Iterator[Facts]:
        """Yield the facts of ``launches`` in order, those whose source and arguments are unknown by children.

        So many children run at once.
        """
        begun = deque[tuple[str, Child | None]]()
        for launch in launches:
            key = sha256(f"{triton.__version__} {launch.kernel.cache_key} {launch.key}".encode()).hexdigest()
            begun.append((key, None if key in self._known else Child(launch, self._card.capability)))
            while sum(child is not None for _, child in begun) >= processes:
                yield self._ended(*begun.popleft())
        while begun:
            yield self._ended(*begun.popleft())

    def _ended(self, key: str, child: Child | None) -> Facts:
        """Return the facts of a launch, and keep those of a child."""
        if child is not None:
            self._known[key] = child.facts()
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a") as file:
                    file.write(json.dumps([key, self._known[key]]) + "\n")
        return self._known[key]


def compiled(
    card: Card, only: str, kept: Kept, known: dict[str, int], *, some: bool, processes: int
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Compile the configurations for ``card``; return their facts and the faults, by name.

    ``some``: only the largest one of each kernel and form of weights.
    """
    results, wrong, start = {}, {}, time.monotonic()
    with simulated(card.capability):
        made = launches(card, only)
        made = sample(made) if some else made
        print(f"{card.version}: {len(made)} configurations", flush=True)
        found = kept.facts(made.values(), processes)
        for number, (name, each) in enumerate(zip(made, found, strict=True), 1):
            results[name] = each
            if said := faults(card, results[name], known.get(name, 0)):
                wrong[name] = said
                print(f"{card.version} {name}: {'; '.join(said)}", flush=True)
            if number % 50 == 0:
                print(f"{card.version}: {number} after {time.monotonic() - start:.0f} s", flush=True)
    return results, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", action="append", choices=[each.version for each in CARDS.values()])
    parser.add_argument("--only", default="", help="a regular expression that names of layers match")
    parser.add_argument("--sample", action="store_true", help="the largest configuration of each kernel and form alone")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="keep the facts, and go on where a run ended")
    parser.add_argument("--write", action="store_true", help="store the counts and the spills")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="compilations at once, by default cores")
    args = parser.parse_args()
    if args.only and args.write:
        parser.error("--write stores whole targets: leave --only out")
    stored, failed = recorded(), 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"], os.environ["TRITON_ALWAYS_COMPILE"] = folder, "1"
        for card in CARDS.values():
            if args.target and text(card.capability) not in args.target:
                continue
            known = {} if args.write else stored["targets"].get(card.version, {}).get("spills", {})
            kept = Kept(args.keep, card)
            results, wrong = compiled(card, args.only, kept, known, some=args.sample, processes=args.processes)
            if args.write:
                wrong = {name: said for name, said in wrong.items() if not all("spilled" in each for each in said)}
                stored["triton"] = triton.__version__
                stored["targets"][card.version] = summary(results, wrong) | {"sample": args.sample}
                RECORD.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
            failed += len(wrong)
            print(f"{card.version}: {len(results)} configurations, {len(wrong)} with faults", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
