"""The compiled kernels of products: ``python -m tools.oracles.ptx --write FILE | --against FILE``.

No GPU is needed. A cell is a row of a shipped table, a reference configuration, or a kind of layer of
:mod:`tools.oracles.layers`. It holds, for each kernel of a call compiled for sm_90: digests of the stream of arithmetic
instructions in order and of the layouts of each product's operands; bytes of shared memory; instructions that spill
registers; and the number of instructions. The first four decide the bits and nearly the speed: one of another value is
a difference. The number of all instructions is only printed, because addresses may be computed in another way
(``--strict`` compares it).

Kernels that compute no product (norms, sums of ranks, routing) are left out.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from typing import Any

import torch
import triton

from tools.oracles import files
from tools.oracles.card import Launch, Seen, card, watched
from tools.oracles.layers import Card, rows_of_tables, traces

ARITHMETIC = re.compile(
    r"(?:@!?%p\d+ )?("
    r"(?:wgmma|mma|fma|mul\.f|add\.f|add\.rn|mul\.rn|cvt\.rn|ex2|div|rcp|neg\.f|sub\.f|max|min)[.\w:]*"
    r")\s"
)
INSTRUCTION = re.compile(r"(?:@!?%p\d+ )?([a-z][a-z0-9_]*(?:\.[a-z0-9_:]+)+)\s")
SPILLS = re.compile(r"\b(?:STL|LDL)\b")
DOTS = ("tt.dot ", "warp_group_dot ", "warpgroup_mma ")


def program(launch: Launch) -> str:
    """Return the compared facts of a kernel in a line.

    The result is empty if it computes no product.
    """
    found = launch.compiled()
    ptx, text = found.asm["ptx"].partition(".section")[0], found.asm["ttgir"]
    layouts = _layouts(text)
    if not layouts:
        return ""
    lines = [line.strip() for line in ptx.splitlines()]
    stream = [match[1] for line in lines if (match := ARITHMETIC.match(line))]
    total = sum(INSTRUCTION.match(line) is not None for line in lines)
    spills = len(SPILLS.findall(found.asm.get("sass", "")))
    return (
        f"arithmetic {len(stream)} {_digest(stream)} dots {len(layouts)} {_digest(layouts)} "
        f"shared {found.metadata.shared} spills {spills} of {total}"
    )


def _layouts(text: str) -> list[str]:
    """Return the types of the operands of each product, with their layouts in full."""
    named = dict(re.findall(r"^(#\w+) = (.*)$", text, re.M))
    found = []
    for line in text.splitlines():
        if any(dot in line for dot in DOTS):
            types = re.sub(r" loc\(.*", "", line.partition(" : ")[2])
            found.append(re.sub(r"#\w+", lambda match: named.get(match[0], match[0]), types))
    return found


def _digest(parts: list[str]) -> str:
    return sha256("\n".join(parts).encode()).hexdigest()[:16]


class Programs:
    """The compared facts of each launch; equal programs are compiled once."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def of(self, seen: Seen) -> list[str]:
        """Return the lines of the launched products, in order."""
        lines = [self._of(launch) for launch in seen.launches]
        return [line for line in lines if line]

    def _of(self, launch: Launch) -> str:
        if launch.key not in self._known:
            self._known[launch.key] = program(launch)
            print(f"{len(self._known):,} {launch.name}", file=sys.stderr, flush=True)
        return self._known[launch.key]


def found(only: str) -> dict[str, list[str]]:
    """Return the lines by cell; an interrupt ends it.

    Triton caches compiled kernels, so a second run is quick.
    """
    programs, cells = Programs(), dict[str, list[str]]()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with card(), suppress(KeyboardInterrupt):
        for name, seen in _all(lambda name: re.search(only, name) is not None):
            cells[name] = programs.of(seen)
    return cells


def _all(wanted: Callable[[str], bool]) -> Iterator[tuple[str, Seen]]:
    for name, call in rows_of_tables():
        if wanted(name):
            seen = Seen()
            with watched(seen):
                call()
            yield name, seen
    yield from traces(Card(), lambda name: wanted(name) and not name.endswith("unused"))


def _without_total(cell: Any) -> Any:
    return [re.sub(r" of \d+$", "", line) for line in cell]


def main() -> int:
    parser = files.parser(__doc__)
    parser.add_argument("--strict", action="store_true", help="compare the number of instructions, too")
    args = parser.parse_args()
    of = {"torch": torch.__version__.partition("+")[0], "triton": triton.__version__}
    return files.finish(args, of, lambda: found(args.only), None if args.strict else _without_total)


if __name__ == "__main__":
    files.end(main())
