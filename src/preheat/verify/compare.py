"""Runs of the same prompts, compared position by position.

They are compared with the first run; the results are a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import msgspec

from preheat.utils.contract import Contract
from preheat.warmup.record import Proof

PAGE = "{:<28}{:>9}{:>6}{:>12}  {}"


class Seen(NamedTuple):
    """A prompt's output: the ``bits`` to compare at each position, and a ``level``.

    The difference of levels says how far two positions are apart.
    """

    bits: Sequence[object]
    levels: Sequence[float]


class Divergence(msgspec.Struct):
    """The first difference of a run.

    It is at ``position`` of the output of ``prompt``, by ``gap``.
    """

    run: int
    prompt: int
    position: int
    gap: float

    def __str__(self) -> str:
        return f"run {self.run}, prompt {self.prompt}, output token {self.position}, apart by {self.gap:.3g}"


class PathResult(msgspec.Struct):
    """The result of a path.

    ``identical`` prompts had the first run's bits at every position of every run.
    """

    path: str
    prompts: int
    runs: int
    identical: int
    first: Divergence | None = None
    note: str = ""

    @property
    def share(self) -> str:
        """Identical prompts in percent; never rounded up to 100."""
        hundredths = self.identical * 10_000 // max(self.prompts, 1)
        return f"{hundredths / 100:.2f} %"

    def with_wrong(self, wrong: Sequence[Divergence]) -> Self:
        """Return the result with ``wrong`` prompts added, unless the runs differ already."""
        if wrong and self.first is None:
            self.identical -= len({each.prompt for each in wrong})
            self.first = wrong[0]
        return self


class Verdict(msgspec.Struct):
    """All results of a verification.

    ``digest`` covers the first run. ``blocked_reason`` is the failure of the check at boot. ``contract`` has the
    engine's parts.
    """

    paths: list[PathResult]
    positions: int = 0
    digest: str = ""
    proof: Proof | None = None
    blocked_reason: str = ""
    contract: Contract | None = None

    @property
    def ok(self) -> bool:
        return not self.blocked_reason and all(result.identical == result.prompts for result in self.paths)


def compare(path: str, first: Sequence[Seen], runs: Sequence[Sequence[Seen]], note: str = "") -> PathResult:
    """Compare ``runs`` with the ``first`` one, prompt by prompt."""
    found: list[Divergence] = []
    for number, run in enumerate(runs, 1):
        for prompt, (one, other) in enumerate(zip(first, run, strict=True)):
            where = _first_difference(one, other)
            if where is not None:
                found.append(Divergence(number, prompt, *where))
    bad = {divergence.prompt for divergence in found}
    return PathResult(path, len(first), len(runs), len(first) - len(bad), found[0] if found else None, note)


def _first_difference(one: Seen, other: Seen) -> tuple[int, float] | None:
    for position, (bits, others) in enumerate(zip(one.bits, other.bits, strict=False)):
        if bits != others:
            return position, abs(one.levels[position] - other.levels[position])
    shorter = min(len(one.bits), len(other.bits))
    return (shorter, float("inf")) if len(one.bits) != len(other.bits) else None


def header() -> str:
    """Return the first line of the table."""
    return PAGE.format("path", "prompts", "runs", "identical", "first divergence")


def line(result: PathResult) -> str:
    """Return the line of one path."""
    said = str(result.first) if result.first else result.note
    return PAGE.format(result.path, f"{result.prompts:,}", result.runs, result.share, said).rstrip()


def summary(verdict: Verdict) -> str:
    """Return the lines below the table."""
    check = verdict.blocked_reason or (verdict.proof and verdict.proof.digest) or "did not run"
    lines = [f"{verdict.positions:,} positions of the first run, digest {verdict.digest}", f"check at boot: {check}"]
    if (contract := verdict.contract) is not None:
        lines.append(f"contract {contract.id} of the engine, with the weights {contract.weights}")
    return "\n".join(lines)
